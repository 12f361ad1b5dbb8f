"""Promise 2 within a worker: a request's ids do not depend on what runs beside it, on chunks or on blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from shared.sampling import SamplingParams
from tests.fidelity.driver import BACKENDS, Served, serve
from tests.model_factory import VOCAB_SIZE, tiny_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral-window": ("mistral", {"sliding_window": 40}),
    "qwen3": ("qwen3", {}),
}
# The reference is torch's, whose sums depend on shapes in their last bits; a cache in bfloat16 would magnify them.
SERVED = [(backend, "float32") for backend in BACKENDS] + [("cpu", "bfloat16")] * ("cpu" in BACKENDS)
REQUESTS = 32
MAX_TOKENS = 10


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, config = MODELS[request.param]
    return tiny_model(kind, tmp_path_factory.mktemp(request.param), **config)


@pytest.fixture(scope="module", params=SERVED, ids="-".join)
def served(request: pytest.FixtureRequest, path: Path) -> Served:
    return serve(path, *request.param)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of 1 to 150 ids; greedy, plainly sampled and filtered requests by turns."""
    draw = random.Random(5)
    lengths = [1, 2, 15, 16, 17, 63, 64, 65, *(draw.randint(1, 150) for _ in range(REQUESTS - 8))]
    prompts = [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {}, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}]
    return prompts, [SamplingParams(max_tokens=MAX_TOKENS, seed=i, **kinds[i % 3]) for i in range(REQUESTS)]


@pytest.fixture(scope="module")
def alone(served: Served) -> list[list[int]]:
    """The ids of each request when it runs by itself, its prompt at once, its blocks in order."""
    return [served.driver().generate([prompt], params)[0] for prompt, params in zip(*requests(), strict=True)]


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1 << 20])
def test_in_a_batch_of_32_in_chunks_over_permuted_blocks(served: Served, alone: list[list[int]], chunk: int) -> None:
    assert served.driver(seed=chunk).generate(*requests(), chunk) == alone


def test_the_ids_are_worth_comparing(alone: list[list[int]]) -> None:
    """Not one loop of the same few ids, and other seeds give other ids."""
    prompts, params = requests()
    assert len({tuple(ids) for ids in alone}) == REQUESTS
    assert sum(len(set(ids)) for ids in alone) > REQUESTS * MAX_TOKENS / 2
    assert {p.seed for p in params} == set(range(len(prompts)))
