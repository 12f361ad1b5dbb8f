"""What must survive any crash: for each running sequence its prompt, parameters, seed and the output so far.

The rules (no I/O here):
- Output ids are accepted only from the current attempt, at `index == len(output)`. What lies below is a duplicate; of
  ids that overlap, the part beyond is taken. A higher index means that ids were lost: the sequence is resubmitted.
- A resubmission has the next attempt number and carries the output, which the engine continues as if it had just
  computed it; sampling depends on (seed, output index) alone, so the continuation is the one that was lost.
- A finish travels in the delta of the last ids, never alone after them. So an unfinished entry is always one whose end
  has not been computed or whose last ids were lost too, and resubmitting it ends it at the same place.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterator
from enum import Enum, auto

import msgspec

from shared.messages import MID_TEXT, Delta, Request, pack_ids
from shared.sampling import SEED_MASK, SamplingParams


class Verdict(Enum):
    """What a delta turned out to be."""

    NEW = auto()  # ids, a finish, or both were taken
    OLD = auto()  # nothing that was not known
    GAP = auto()  # ids before it were lost: resubmit


class Entry:
    """The journal of one sequence. `prompt` is packed; `output` grows by accepted deltas only."""

    __slots__ = (
        "arrived",
        "attempt",
        "cache_salt",
        "cached",
        "decoded",
        "finish",
        "id",
        "leader",
        "message",
        "output",
        "params",
        "prompt",
        "state",
        "stop_token",
        "submitted",
    )

    def __init__(
        self, id: int, leader: int, prompt: bytes, params: SamplingParams, *, arrived: float, cache_salt: str = ""
    ) -> None:
        assert params.seed is not None
        assert params.max_tokens is not None
        self.id = id
        self.leader = leader  # id of the first sample of the same prompt; the samples' ids follow each other
        self.prompt = prompt
        self.params = params
        self.arrived = arrived  # monotonic seconds
        self.cache_salt = cache_salt
        self.output: array[int] = array("i")
        self.attempt = 0
        self.submitted = False  # some scheduler may know the current attempt
        self.finish = ""
        self.stop_token = -1
        self.message = ""
        self.cached = -1  # prompt tokens that the first attempt read from the prefix cache
        self.decoded = 0  # output ids taken for decoding
        self.state = MID_TEXT  # the tokenizer's, after the ids it has answered

    def accept(self, delta: Delta) -> Verdict:
        """Takes what is new in a delta."""
        if delta.attempt != self.attempt or self.finish:
            return Verdict.OLD
        overlap = len(self.output) - delta.index
        if overlap < 0:
            return Verdict.GAP
        if overlap > len(delta.ids) or (overlap == len(delta.ids) and not delta.finish):
            return Verdict.OLD
        self.output.extend(delta.ids[overlap:] if overlap else delta.ids)
        if self.cached < 0:
            self.cached = delta.cached
        if delta.finish:
            self.finish, self.stop_token, self.message = delta.finish, delta.stop_token, delta.message
        return Verdict.NEW

    def next_ids(self, boundary: int = 0) -> tuple[list[int], bool] | None:
        """Takes the ids to decode next, and whether they are the last; None when nothing is to be decoded.

        The token that ended the sequence has no text unless stop strings are to be included (as in vLLM). The first
        `boundary` ids are never taken together with later ones.
        """
        start = self.decoded
        if not self.finish and start >= boundary:
            self.decoded = len(self.output)
            return (self.output[start:].tolist(), False) if self.decoded > start else None
        silent = self.finish == "stop" and not self.params.include_stop_str_in_output
        text_end = max(len(self.output) - silent, start)
        end = min(text_end, boundary) if start < boundary else text_end
        final = self.finish != "" and end == text_end
        if end == start and not (final and self.state != MID_TEXT):
            return None
        self.decoded = end
        return self.output[start:end].tolist(), final

    def request(self, now: float, fork_of: int = -1) -> Request:
        """The sequence as it is submitted, at the current attempt."""
        return Request(
            id=self.id,
            attempt=self.attempt,
            prompt=self.prompt,
            params=self.params,
            output=pack_ids(self.output) if self.output else b"",
            fork_of=fork_of,
            age=now - self.arrived,
            cache_salt=self.cache_salt,
        )


class Journal:
    """The entries of one api process, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}
        self._next_id = 0
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def get(self, id: int) -> Entry | None:
        """The entry with this id, if it is still here."""
        return self._entries.get(id)

    def open(
        self, prompt: array[int], params: SamplingParams, *, now: float, engine_seed: int = 0, cache_salt: str = ""
    ) -> list[Entry]:
        """New entries, one per sample of a prompt. Sample i gets the seed (seed + i); `max_tokens` must be set."""
        seed = self._seed(params, engine_seed)
        leader = self._next_id
        packed = pack_ids(prompt)
        self._next_id += params.n
        self._arrivals += 1
        opened = []
        for sample in range(params.n):
            own = msgspec.structs.replace(params, n=1, seed=(seed + sample) & SEED_MASK)
            entry = Entry(leader + sample, leader, packed, own, arrived=now, cache_salt=cache_salt)
            self._entries[entry.id] = entry
            opened.append(entry)
        return opened

    def unfinished(self) -> list[Entry]:
        """The entries that still need an engine, in order of arrival."""
        return [entry for entry in self if not entry.finish]

    def renew(self, entry: Entry) -> None:
        """The attempt known to a scheduler is lost: the next submission is another and voids the deltas of this one."""
        if entry.submitted:
            entry.attempt += 1

    def submission(self, entry: Entry, now: float) -> Request:
        """What to send to the scheduler. The first sample still here is the one that the others fork."""
        entry.submitted = True
        forked = (id for id in range(entry.leader, entry.id) if id in self._entries)
        return entry.request(now, fork_of=next(forked, -1))

    def close(self, entry: Entry) -> None:
        """Forgets an entry."""
        self._entries.pop(entry.id, None)

    def _seed(self, params: SamplingParams, engine_seed: int) -> int:
        if params.seed is not None:
            return params.seed & SEED_MASK
        if engine_seed:
            digest = hashlib.blake2b(f"{engine_seed} {self._arrivals}".encode(), digest_size=8).digest()
            return int.from_bytes(digest, "little") & SEED_MASK
        return secrets.randbits(63)
