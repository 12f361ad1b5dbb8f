"""The small interface every backend implements, and the batch it runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.worker.sampler import Row, sample
from services.worker.spec import DecoderSpec

Ints = NDArray[np.int32]
Logits = NDArray[np.float32]
Floats = NDArray[np.float32]


class Stored(Protocol):
    """A tensor that a GGUF file holds in blocks: `rows` [n, bytes] as they are, of type `kind` ("Q4_1", ...)."""

    kind: str
    rows: NDArray[np.uint8]
    shape: tuple[int, ...]

    def floats(self) -> Floats:
        """All of it, of `shape`."""

    def pieces(self) -> Iterator[tuple[int, Floats]]:
        """It in parts: the first row of each and its rows, which count until the next part is asked for."""


Weight = NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16] | Stored  # uint16: the bits of bfloat16s


@dataclass
class StepBatch:
    """The rows of one step, T in total, over S sequences; R of the rows need logits. All arrays int32.

    Sequence s owns rows query_start[s] to query_start[s + 1]; its last row is at position context_lens[s] - 1.

        positions:   0 ......... computed ......... context_len
                     |  in the KV cache  | this step's rows |
    """

    tokens: Ints  # [T]
    positions: Ints  # [T]
    query_start: Ints  # [S + 1]
    context_lens: Ints  # [S], tokens including this step's
    block_tables: Ints  # [S, max blocks], C-contiguous; entries past a sequence's blocks are arbitrary
    logit_rows: Ints  # [R], indexes into T


class Executor(Protocol):
    """Runs a `DecoderSpec` over a paged KV cache of `block_size` tokens per block. Sampling has a default, in numpy."""

    spec: DecoderSpec
    backend: str  # "reference", "cpu", ...
    arithmetic: str  # executors of the same spec and weights compute the same bits where this is the same

    def load(self, weights: Iterable[tuple[str, Weight]]) -> None:
        """Takes the weights by their canonical names, one at a time, converting to the executor's dtype."""

    def weight_bytes(self) -> int:
        """Bytes that the weights take, known before they are loaded."""

    def block_bytes(self) -> int:
        """Bytes of one KV block over all layers, keys and values."""

    def allocate_kv(self, num_blocks: int) -> None:
        """Makes the KV cache. Memory is touched as blocks are first written."""

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, destination), over all layers."""

    def forward(self, batch: StepBatch) -> Logits:
        """Writes the rows' keys and values, attends, and returns the logits [R, vocab], valid until the next call."""

    def forward_and_sample(
        self, batch: StepBatch, rows: Sequence[Row | None], num_ids: int
    ) -> tuple[list[int], Logits]:
        """Runs the step and samples each of the R rows from the ids below `num_ids`; None is a greedy row.

        Returns a token or INVALID per row, and the logits [K, num_ids] of the rows with `keep_logits`, valid until the
        next call.
        """
        logits = self.forward(batch)[:, :num_ids]
        kept = [r for r, row in enumerate(rows) if row is not None and row.keep_logits]
        return sample(logits, rows), logits[kept]
