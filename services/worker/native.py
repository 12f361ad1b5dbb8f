"""The native CPU backend: `csrc/cpu` runs a whole step of any `DecoderSpec` in one call."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from services.worker.executor import Logits, StepBatch, Weight
from services.worker.quantize import BLOCK_FORMATS, Formats
from services.worker.sampler import MASK64, Row
from services.worker.spec import DecoderSpec
from shared.errors import StartupError

_INT32_MAX = (1 << 31) - 1
FUSED = ("q", "o", "gate", "down")  # the first part of each matrix of a layer
ISA_VARIABLE = "PAGEBUS_CPU_ISA"  # forces one of `runnable_isas()`, for tests and for comparing


def unavailable() -> str | None:
    """Why the native executor cannot run here, in one line; None if it can."""
    try:
        from services.worker import _cpu
    except ImportError as error:
        return f"the native module was not built ({error})"
    if not _cpu.runnable_isas():
        return f"this CPU ({platform.machine()}) has neither AVX2 with FMA and F16C nor AVX-512"
    return None


def rounds_activations(isa: str, dtype: str) -> bool:
    """Whether a build rounds activations to bfloat16 where the weights are of `dtype`."""
    return isa == "avx512_bf16" and dtype == "bfloat16"


class NativeExecutor:
    """Implements `Executor` over `csrc/cpu`.

    `dtype` is that of weights and KV cache: "float32", "bfloat16" or "float16"; `formats` names the weights that are
    quantised instead. Activations (but those that meet w8 weights, or bfloat16 ones where `rounds_activations`), sums
    and logits are float32. A row's logits are the same bits whatever else the step holds, however the prompt was cut
    into chunks and whatever `threads` is. Raises StartupError for a spec it cannot run, and for missing or unknown
    weights.
    """

    backend = "cpu"

    def __init__(
        self,
        spec: DecoderSpec,
        dtype: Literal["float32", "bfloat16", "float16"],
        block_size: int,
        threads: int,
        isa: str | None = None,
        formats: Formats | None = None,
    ) -> None:
        from services.worker import _cpu

        if spec.activation != "silu":
            raise StartupError(f"the cpu backend has the activation silu only, not {spec.activation}")
        self.spec = spec
        self.dtype = dtype
        self._missing = dict(spec.weight_shapes())
        self._formats = formats or {}
        self._logits: Logits = np.empty((0, spec.vocab_size), np.float32)  # kept, as fresh pages are slow to write
        try:
            self._decoder = _cpu.Decoder(
                vocab_size=spec.vocab_size,
                hidden_size=spec.hidden_size,
                num_layers=spec.num_layers,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                intermediate_size=spec.intermediate_size,
                norm_eps=spec.norm_eps,
                inv_freq=list(spec.rope.inv_freq),
                attention_factor=spec.rope.attention_factor,
                windows=list(spec.windows),
                attention_scale=spec.attention_scale,
                attention_softcap=spec.attention_softcap,
                final_logit_softcap=spec.final_logit_softcap,
                tie_embeddings=spec.tie_embeddings,
                qkv_bias=spec.qkv_bias,
                o_bias=spec.o_bias,
                mlp_bias=spec.mlp_bias,
                qk_norm=spec.qk_norm,
                dtype=dtype,
                block_size=block_size,
                formats=[[self._format(f"layers.{i}.{part}") for part in FUSED] for i in range(spec.num_layers)],
                head_format=self._format("embed" if spec.tie_embeddings else "lm_head"),
                embed_format=self._format("embed"),
                isa=os.environ.get(ISA_VARIABLE, "") if isa is None else isa,
                threads=threads,
            )
        except ValueError as error:
            raise StartupError(str(error)) from None

    @property
    def isa(self) -> str:
        """The instruction set in use, one of `runnable_isas()`."""
        name: str = self._decoder.isa
        return name

    @property
    def arithmetic(self) -> str:
        """Names what the bits depend on: all builds of the kernels agree, but those that round activations."""
        return f"{self.backend} {self.isa}" if rounds_activations(self.isa, self.dtype) else self.backend

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Packs the weights as they come; each replaces its original, which the caller can drop at once."""
        for name, weight in weights:
            if name not in self._missing:
                raise StartupError(f"weight {name} is not one of the model's, or came twice")
            layer, part = _split(name)
            try:
                for first, array, dtype in self._parts(name, weight):
                    self._decoder.load(layer, part, array, dtype, weight.shape, first)
            except ValueError as error:
                raise StartupError(f"weight {name} has shape {weight.shape}: {error}") from None
            del self._missing[name], weight, array
        if self._missing:
            raise StartupError(
                f"the checkpoint lacks {len(self._missing)} weights, the first is {next(iter(self._missing))}"
            )

    def _format(self, name: str) -> str:
        return self._formats.get(f"{name}.weight", "dense")

    def _parts(self, name: str, weight: Weight) -> Iterator[tuple[int, Any, str]]:
        """First row, values and type of each part in which a weight goes to the decoder."""
        if isinstance(weight, np.ndarray):
            array, dtype = _bits(weight)
            yield 0, array, dtype
        elif name in self._formats and weight.kind in BLOCK_FORMATS:
            yield 0, np.ascontiguousarray(weight.rows), weight.kind
        else:
            for first, values in weight.pieces():
                yield first, values, "float32"

    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""
        size: int = self._decoder.block_bytes
        return size

    def weight_bytes(self) -> int:
        """Bytes of the packed matrices."""
        size: int = self._decoder.weight_bytes
        return size

    def allocate_kv(self, num_blocks: int) -> None:
        """Maps the KV cache, zeroed; the system backs each page when it is first written."""
        self._decoder.allocate_kv(num_blocks)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination), in order. Raises ValueError for a block that does not exist."""
        self._decoder.copy_blocks(np.array(pairs, dtype=np.int32).reshape(-1))

    def forward_and_sample(
        self, batch: StepBatch, rows: Sequence[Row | None], num_ids: int
    ) -> tuple[list[int], Logits]:
        """Runs one step and samples within it: logits stay in the cache, but for those of rows that keep them."""
        self._check_loaded()
        keeping = sum(1 for row in rows if row is not None and row.keep_logits)
        kept: Logits = np.empty((keeping, num_ids), np.float32)
        tokens: list[int] = self._decoder.forward_and_sample(*_arrays(batch), draws(rows), kept)
        return tokens, kept

    def forward(self, batch: StepBatch) -> Logits:
        """Runs one step; returns the logits [R, vocab]. Raises ValueError for a batch that is not one."""
        self._check_loaded()
        rows = len(batch.logit_rows)
        if len(self._logits) < rows:
            self._logits = np.empty((rows, self.spec.vocab_size), np.float32)
        logits = self._logits[:rows]
        self._decoder.forward(*_arrays(batch), logits)
        return logits

    def _check_loaded(self) -> None:
        if self._missing:
            raise ValueError("the weights are not loaded")


def _arrays(batch: StepBatch) -> tuple[Any, ...]:
    """The batch as the native module takes it."""
    b = batch
    return b.tokens, b.positions, b.query_start, b.context_lens, b.block_tables, b.logit_rows


def draws(rows: Sequence[Row | None]) -> list[tuple[Any, ...]]:
    """The rows that are not None as the native module takes them."""
    return [
        (
            r,
            row.params.temperature,
            min(row.params.top_k, _INT32_MAX),
            row.params.top_p,
            row.params.min_p,
            row.seed & MASK64,
            row.index,
            row.banned or [],
            row.keep_logits,
        )
        for r, row in enumerate(rows)
        if row is not None
    ]


def _split(name: str) -> tuple[int, str]:
    """ "layers.3.q.weight" to (3, "q.weight"); names outside the layers get -1."""
    if not name.startswith("layers."):
        return -1, name
    _, layer, part = name.split(".", 2)
    return int(layer), part


def _bits(weight: NDArray[Any]) -> tuple[Any, str]:
    """The values as the native module takes them, float32 or 16-bit integers, and what they are."""
    if weight.dtype == np.float32:
        return np.ascontiguousarray(weight), "float32"
    if weight.dtype in (np.float16, np.uint16):
        return np.ascontiguousarray(weight).view(np.uint16), "float16" if weight.dtype == np.float16 else "bfloat16"
    raise ValueError(f"weights are float32, float16 or bfloat16 (as uint16), not {weight.dtype}")
