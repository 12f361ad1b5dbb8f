"""The engine's configuration: one struct, whose fields are the flags.

Each field is a command-line flag (`--max-model-len`), an environment variable (`PAGEBUS_MAX_MODEL_LEN`) and a key of the
YAML file given with `--config`; the command line wins over the environment, that over the file. Only the scheduler is
given these; the other processes receive the struct in `Welcome`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
BackendName = Literal["auto", "reference", "cpu"]


def flag(default: Any, group: str, text: str, **extra: Any) -> Any:
    """Placeholder to keep a field, its group and its help text on one line; see `FLAGS`."""
    FLAG_HELP.append((group, text, extra))
    return msgspec.field(default_factory=lambda: list(default)) if isinstance(default, list) else default


FLAG_HELP: list[tuple[str, str, dict[str, Any]]] = []


class EngineConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What the scheduler, and through it every process, is told to do. Sizes in tokens unless the name says bytes."""

    model: str = flag("", "Model", "local folder, GGUF file or hub id; the bundled SmolLM2-135M-Instruct when not given")
    served_model_name: list[str] = flag([], "Model", "names the API answers to, the first one in replies (default: the model as given)")
    revision: str = flag("", "Model", "branch, tag or commit of a hub model")
    dtype: Dtype = flag("auto", "Model", "weights and KV cache; auto takes the checkpoint's own")
    max_model_len: Annotated[int, Meta(ge=0)] = flag(0, "Model", "longest prompt and output together (default: the model's)")
    seed: int = flag(0, "Model", "seeds requests that bring none, together with their arrival; 0 draws one at random")
    backend: BackendName = flag("auto", "Execution", "cpu: native kernels; reference: plain torch; auto: the fastest that runs here")
    enforce_eager: bool = flag(False, "Execution", "run without captured graphs")
    threads: Annotated[int, Meta(ge=0)] = flag(0, "Execution", "compute threads per worker (default: the cores divided by the local workers)")
    step_deadline: Annotated[float, Meta(gt=0)] = flag(120.0, "Execution", "seconds after which a worker that owes a step's result is given up")
    block_size: Annotated[int, Meta(ge=1, le=256)] = flag(16, "KV cache", "tokens per KV block")
    gpu_memory_utilization: Annotated[float, Meta(gt=0, le=1)] | None = flag(None, "KV cache", "share of the device's memory for weights and KV cache (default 0.9; on a CPU the cache then takes 4 GiB at most)")
    kv_cache_memory_bytes: Annotated[int, Meta(ge=0)] = flag(0, "KV cache", "bytes for the KV cache, instead of a share of memory")
    num_gpu_blocks_override: Annotated[int, Meta(ge=0)] = flag(0, "KV cache", "number of KV blocks, whatever the memory says")
    enable_prefix_caching: bool = flag(True, "KV cache", "reuse the KV blocks of equal prompt beginnings")
    max_num_seqs: Annotated[int, Meta(ge=1, le=65536)] = flag(256, "Scheduling", "requests running at once in a worker group")
    max_num_batched_tokens: Annotated[int, Meta(ge=1)] = flag(2048, "Scheduling", "tokens computed in a step")
    enable_chunked_prefill: bool = flag(True, "Scheduling", "split prompts over steps, so that running streams go on beside them")
    scheduling_policy: Literal["fcfs"] = flag("fcfs", "Scheduling", "order of the waiting queue")
    max_waiting: Annotated[int, Meta(ge=1)] = flag(4096, "Scheduling", "requests waiting at most; more are refused with 503")
    local_workers: Annotated[int, Meta(ge=1)] = flag(1, "Scheduling", "workers sharing this machine; set by `pagebus serve --workers`", hidden=True)

    @property
    def names(self) -> list[str]:
        """The names under which the model is served."""
        return self.served_model_name or [self.model or DEFAULT_MODEL_NAME]


DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
