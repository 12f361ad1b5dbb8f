"""The workloads by which servers are compared: prompts of exact token counts, who sends them, and when.

W1  one stream, 128 tokens in, 128 out
W2  64 requests, 32 at once, 256 in, 128 out
W3  64 requests, 16 at once, one shared prompt of 1,000 tokens and 50 of their own in, 64 out
W4  8 streams of 256 tokens, begun anew as they end, while four prompts of 3,000 tokens arrive 3 s apart
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

FIRST_ID = 100  # lower ids are special tokens and single bytes in most vocabularies


@dataclass(frozen=True)
class Shape:
    """The numbers of a workload; lengths in tokens."""

    requests: int
    concurrency: int
    input_tokens: int  # of each prompt on its own
    output_tokens: int
    shared_tokens: int = 0  # of the beginning that all prompts share
    long_prompts: int = 0  # while they arrive, the other streams are begun anew
    long_tokens: int = 3000
    long_output: int = 16
    long_every: float = 3.0  # seconds


SHAPES = {
    "W1": Shape(requests=3, concurrency=1, input_tokens=128, output_tokens=128),
    "W2": Shape(requests=64, concurrency=32, input_tokens=256, output_tokens=128),
    "W3": Shape(requests=64, concurrency=16, input_tokens=50, output_tokens=64, shared_tokens=1000),
    "W4": Shape(requests=8, concurrency=8, input_tokens=64, output_tokens=256, long_prompts=4),
}


@dataclass(frozen=True)
class Shot:
    """One request."""

    prompt: list[int]
    output_tokens: int


@dataclass
class Workload:
    """Prompts drawn from a seed: the same seed gives the same ones, another none that a cache could know."""

    shape: Shape
    vocab_size: int
    seed: int
    _random: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.vocab_size <= FIRST_ID:
            raise ValueError(f"the vocabulary must have more than {FIRST_ID} ids, not {self.vocab_size}")
        self._random = random.Random(self.seed)
        self._shared = self._ids(self.shape.shared_tokens)

    def shots(self) -> list[Shot]:
        """The requests of the workload."""
        return [self.shot() for _ in range(self.shape.requests)]

    def shot(self) -> Shot:
        """One more request like the others."""
        return Shot(self._shared + self._ids(self.shape.input_tokens), self.shape.output_tokens)

    def long_shots(self) -> list[Shot]:
        """The long prompts that arrive meanwhile."""
        shape = self.shape
        return [Shot(self._ids(shape.long_tokens), shape.long_output) for _ in range(shape.long_prompts)]

    def _ids(self, count: int) -> list[int]:
        return [self._random.randrange(FIRST_ID, self.vocab_size) for _ in range(count)]


def workload(name: str, vocab_size: int, seed: int, **changes: int | None) -> Workload:
    """The workload of that name, with other numbers where `changes` gives some."""
    given = {key: value for key, value in changes.items() if value is not None}
    return Workload(replace(SHAPES[name], **given), vocab_size, seed)
