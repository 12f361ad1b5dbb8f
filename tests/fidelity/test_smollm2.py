"""The bundled SmolLM2-135M-Instruct against transformers in float32, both out of the GGUF file."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shared.sampling import SamplingParams
from tests.fidelity.driver import BACKENDS, Served, all_logits, assert_close, assert_greedy, serve
from tests.fidelity.oracle import smollm2_oracle
from tests.model_factory import smollm2

# <|im_start|>user\nTell me how a bus works, from the passenger's side and from the driver's.<|im_end|>\n
# <|im_start|>assistant\nA bus follows a route with fixed stops. The driver keeps to a timetable, opens the doors at
# each stop and watches the mirrors; the passengers wait, get on, pay 2.40 or show a ticket, and find a seat.
TEXT = """
1 4093 198 31530 549 638 253 1549 1806 28 429 260 16629 506 2103 284 429 260 8443 506 30 2 198
1 520 9531 198 49 1549 5558 253 7410 351 6450 12326 30 378 8443 8211 288 253 47720 28 10573 260 9160 418
971 2853 284 27593 260 18173 43 260 13913 5847 28 820 335 28 2290 216 34 30 36 32 355 1138 253 19574 28 284
1042 253 8952 30 216
"""
IDS = [int(id) for id in TEXT.split()]
PROMPTS = [(IDS * 3)[3 * i : 3 * i + n] for i, n in enumerate((1, 2, 15, 16, 17, 33, 78, 130))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, top_k=200, seed=7, max_tokens=5)


@pytest.fixture(scope="session")
def oracle() -> Any:
    return smollm2_oracle()


@pytest.fixture(scope="session", params=BACKENDS)
def served(request: pytest.FixtureRequest) -> Served:
    return serve(smollm2(), request.param)


@torch.inference_mode()
def oracle_logits(oracle: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([ids])).logits[0]
    return logits


def test_logits_equal_transformers(oracle: Any, served: Served) -> None:
    ids = PROMPTS[-1]
    assert_close(all_logits(served.executor, ids, chunk=40), oracle_logits(oracle, ids))


def test_a_batch_of_all_lengths(oracle: Any, served: Served) -> None:
    """Greedy ids equal transformers', and greedy and seeded ones are those of the request alone."""
    prompts = [*PROMPTS, *PROMPTS[:4]]
    params = [GREEDY] * len(PROMPTS) + [SEEDED] * 4
    outputs = served.driver(seed=1).generate(prompts, params, chunk=64)
    for prompt, output in zip(PROMPTS, outputs, strict=False):
        assert_greedy(oracle_logits(oracle, prompt + output), prompt, output)
    for i in (3, 6, len(PROMPTS) + 1, len(PROMPTS) + 3):
        assert served.driver().generate([prompts[i]], params[i]) == [outputs[i]]
