"""Which executor runs here."""

from __future__ import annotations

import importlib.util
import logging

from services.worker.cores import usable_cores
from services.worker.executor import Executor
from services.worker.quantize import Formats
from services.worker.spec import DecoderSpec
from shared.config import EngineConfig
from shared.errors import StartupError
from shared.model_info import ModelInfo

NATIVE = "services.worker.native"

log = logging.getLogger(__name__)


def make_executor(spec: DecoderSpec, config: EngineConfig, info: ModelInfo, formats: Formats | None = None) -> Executor:
    """The executor of `config.backend`; "auto" takes the native one where it runs, else the reference.

    `formats`: of the weights that are quantised (loader.weight_formats).

    Raises StartupError where the backend asked for cannot run.
    """
    threads = compute_threads(config)
    if config.backend != "reference":
        reason = native_unavailable()
        if reason is None:
            return _native(spec, config, info, formats or {}, threads)
        if config.backend != "auto":
            raise StartupError(f"--backend {config.backend} cannot run here: {reason}; use --backend reference")
        log.warning("using the reference backend, which is slow: the native one cannot run here: %s", reason)
    return _reference(spec, config, info, formats or {}, threads)


def compute_threads(config: EngineConfig) -> int:
    """Threads of one worker: `--threads`, else this process's cores divided by the workers that share them."""
    return config.threads or max(1, usable_cores() // config.local_workers)


def native_unavailable() -> str | None:
    """Why the native executor cannot run here; None if it can."""
    if importlib.util.find_spec(NATIVE) is None:
        return "it is not installed"
    try:
        from services.worker import native
    except ImportError as error:
        return f"it cannot be imported ({error})"
    reason: str | None = native.unavailable()
    return reason


def _native(spec: DecoderSpec, config: EngineConfig, info: ModelInfo, formats: Formats, threads: int) -> Executor:
    from services.worker.native import NativeExecutor

    executor: Executor = NativeExecutor(spec, info.dtype, config.block_size, threads, formats=formats)
    return executor


def _reference(spec: DecoderSpec, config: EngineConfig, info: ModelInfo, formats: Formats, threads: int) -> Executor:
    import torch

    from services.worker.reference import ReferenceExecutor

    torch.set_num_threads(threads)
    return ReferenceExecutor(spec, info.dtype, config.block_size, formats=formats)
