"""The engine's configuration: one struct, whose fields are the flags.

Each field is a command-line flag (`--max-model-len`), an environment variable (`PAGEBUS_MAX_MODEL_LEN`) and a key of
the YAML file given with `--config` (see `shared/flags.py`). Only the scheduler is given these; the other processes
receive the struct in `Welcome`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from shared.flags import option

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "reference", "cpu"]
Quantization = Literal["none", "int8", "int4", "w8a8", "gguf"]


class EngineConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the scheduler, and through it every process, is told to do. Sizes in tokens unless the name says bytes."""

    model: Annotated[
        str, option("Model", f"local folder, GGUF file or hub id; without one, the bundled {DEFAULT_MODEL_NAME}")
    ] = ""
    served_model_name: Annotated[
        list[str], option("Model", "names the API answers to, the first one in replies (default: the model as given)")
    ] = []
    revision: Annotated[str, option("Model", "branch, tag or commit of a hub model")] = ""
    dtype: Annotated[Dtype, option("Model", "of weights and KV cache; auto takes the checkpoint's own")] = "auto"
    quantization: Annotated[
        Quantization,
        option(
            "Model",
            "of the weights, made at load: int8 and int4 in groups of 32, w8a8 for activations too; gguf runs a GGUF"
            " file's Q4_0, Q4_1 and Q8_0 as stored; none holds all in --dtype",
        ),
    ] = "none"
    max_model_len: (
        Annotated[int, option("Model", "longest prompt and output together, in tokens (default: the model's)", ge=1)]
        | None
    ) = None
    seed: Annotated[
        int, option("Model", "makes requests without a seed of their own repeatable too; 0 draws one for each")
    ] = 0
    backend: Annotated[
        BackendName,
        option("Execution", "cpu: native kernels; reference: plain torch; auto: the fastest that runs here"),
    ] = "auto"
    enforce_eager: Annotated[bool, option("Execution", "run without captured graphs")] = False
    threads: Annotated[
        int, option("Execution", "compute threads per worker (default: the cores divided by the local workers)", ge=0)
    ] = 0
    step_deadline: Annotated[
        float, option("Execution", "seconds after which a worker that owes a step's result is given up", gt=0)
    ] = 120.0
    block_size: Annotated[int, option("KV cache", "tokens per KV block", ge=1, le=256)] = 16
    gpu_memory_utilization: (
        Annotated[
            float,
            option(
                "KV cache",
                "share of the device's memory for weights and KV cache"
                " (default 0.9; on a CPU, when not given, the cache takes 4 GiB at most)",
                gt=0,
                le=1,
            ),
        ]
        | None
    ) = None
    kv_cache_memory_bytes: (
        Annotated[int, option("KV cache", "bytes for the KV cache, instead of a share of the memory", ge=1)] | None
    ) = None
    num_gpu_blocks_override: Annotated[
        int, option("KV cache", "number of KV blocks, whatever the memory says; 0 is off", ge=0)
    ] = 0
    enable_prefix_caching: Annotated[bool, option("KV cache", "reuse the KV blocks of equal prompt beginnings")] = True
    max_num_seqs: Annotated[int, option("Scheduling", "requests running at once in a worker group", ge=1, le=65536)] = (
        256
    )
    max_num_batched_tokens: Annotated[int, option("Scheduling", "tokens computed in a step", ge=1)] = 2048
    enable_chunked_prefill: Annotated[
        bool, option("Scheduling", "split prompts over steps, so that running streams go on beside them")
    ] = True
    max_step_ms: Annotated[
        float,
        option("Scheduling", "longest step while streams run, in ms: sizes prompt chunks; 0 sizes by tokens", ge=0),
    ] = 100.0
    scheduling_policy: Annotated[Literal["fcfs"], option("Scheduling", "order of the waiting queue")] = "fcfs"
    max_waiting: Annotated[int, option("Scheduling", "requests waiting at most; more are refused with 503", ge=1)] = (
        4096
    )
    local_workers: Annotated[int, option("Scheduling", "workers sharing this machine", hidden=True, ge=1)] = 1

    @property
    def names(self) -> list[str]:
        """The names under which the model is served."""
        return self.served_model_name or [self.model or DEFAULT_MODEL_NAME]
