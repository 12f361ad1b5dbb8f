"""A worker without a model: it keeps slots and a paged cache exactly as the plans tell, and proves every cached token.

The "KV" of a position is a hash of all tokens up to it, as a real one depends on all of them. Before a row attends to a
position, the hash found through the slot's block table is compared with that of the slot's own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.messages import Plan, Request, unpack_ids
from shared.sampling import SamplingParams

VOCAB = 6
EOS = 0


def prefix_hash(before: int, token: int) -> int:
    return hash((before, token))


def sample(params: SamplingParams, prefix: int) -> int:
    return hash((params.seed, prefix)) % VOCAB


@dataclass
class Slot:
    params: SamplingParams
    tokens: list[int]
    table: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    computed: int = 0

    def hash_at(self, position: int) -> int:
        while len(self.hashes) <= position:
            before = self.hashes[-1] if self.hashes else 0
            self.hashes.append(prefix_hash(before, self.tokens[len(self.hashes)]))
        return self.hashes[position]


class PagedModel:
    def __init__(self, num_blocks: int, block_size: int, max_num_seqs: int) -> None:
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.slots: dict[int, Slot] = {}

    def run(self, plan: Plan) -> list[int]:
        """Executes a plan and returns its sampled tokens."""
        for slot in plan.release:
            del self.slots[slot]
        assert not set(plan.copies[::2]) & set(plan.copies[1::2]), "a copy reads what another writes"
        for source, destination in zip(plan.copies[::2], plan.copies[1::2], strict=True):
            self.kv[destination] = list(self.kv[source])
        for admit in plan.admit:
            assert 0 <= admit.slot < self.max_num_seqs
            assert admit.slot not in self.slots, "a slot is taken twice"
            self.slots[admit.slot] = Slot(admit.params, list(unpack_ids(admit.tokens)))
        rows = list(zip(plan.slots, plan.starts, plan.counts, plan.samples, plan.blocks, strict=True))
        assert len({row[0] for row in rows}) == len(rows), "a slot has two rows"
        for number, start, count, _, blocks in rows:
            slot = self.slots[number]
            slot.table += blocks
            assert count >= 1
            assert start + count <= len(slot.tokens), "a token is computed before it is known"
            assert start == slot.computed or slot.computed == 0
            self._verify(slot, start)  # before any row of the step writes
        for number, start, count, _, _ in rows:
            self._write(self.slots[number], start, count)
        return [self._sample(*row[:3]) for row in rows if row[3] or self._verify(self.slots[row[0]], row[1] + row[2])]

    def _verify(self, slot: Slot, end: int) -> None:
        for position in range(end):
            found = self.kv[slot.table[position // self.block_size]][position % self.block_size]
            assert found == slot.hash_at(position), f"position {position} holds another content"

    def _write(self, slot: Slot, start: int, count: int) -> None:
        for position in range(start, start + count):
            self.kv[slot.table[position // self.block_size]][position % self.block_size] = slot.hash_at(position)
        slot.computed = start + count

    def _sample(self, number: int, start: int, count: int) -> int:
        slot = self.slots[number]
        self._verify(slot, start + count)
        assert start + count == len(slot.tokens), "sampled before the last token"
        token = sample(slot.params, slot.hash_at(len(slot.tokens) - 1))
        slot.tokens.append(token)
        return token


def generate_alone(request: Request, max_len: int) -> tuple[list[int], str, int]:
    """What the model writes for a request with nothing beside it: output ids, finish reason, stop token."""
    params = request.params
    prefix = 0
    prompt = unpack_ids(request.prompt)
    for token in prompt:
        prefix = prefix_hash(prefix, token)
    output: list[int] = []
    while True:
        token = sample(params, prefix)
        prefix = prefix_hash(prefix, token)
        output.append(token)
        if len(output) >= params.min_tokens:
            if token == EOS and not params.ignore_eos:
                return output, "stop", -1
            if token in params.stop_token_ids:
                return output, "stop", token
        if len(output) == params.max_tokens or len(prompt) + len(output) == max_len:
            return output, "length", -1
