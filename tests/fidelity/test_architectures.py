"""Each architecture against transformers in float32: logits at every position, and greedy tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shared.sampling import SamplingParams
from tests.fidelity.driver import BACKENDS, Served, all_logits, assert_close, assert_greedy, serve
from tests.model_factory import VOCAB_SIZE, tiny_model

WINDOW_EDGES = (63, 64, 65, 66, 200)
LENGTHS = (1, 2, 15, 16, 17, 100)
LONG = (10, 1500)

THETA = {"rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}

MODELS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "llama": ("llama", LENGTHS, {}),
    "llama-biases": ("llama", LENGTHS, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-tied": ("llama", LENGTHS, {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 24}),
    "llama-rope-llama3": ("llama", LONG, {"rope_parameters": {**THETA, **LLAMA3}}),
    "llama-rope-linear": ("llama", LONG, {"rope_parameters": {**THETA, "rope_type": "linear", "factor": 2.0}}),
    "llama-rope-yarn": ("llama", LONG, {"rope_parameters": {**THETA, **YARN}}),
    "mistral-window": ("mistral", WINDOW_EDGES, {"sliding_window": 64}),
    "mistral-no-window": ("mistral", LENGTHS, {"sliding_window": None}),
    "qwen2": ("qwen2", LENGTHS, {}),
    "qwen2-window": (
        "qwen2",
        WINDOW_EDGES,
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen2-window-off": ("qwen2", WINDOW_EDGES, {"sliding_window": 64, "use_sliding_window": False}),
    "qwen3": ("qwen3", LENGTHS, {}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """Name, path and transformers model of a tiny random model."""
    from transformers import AutoModelForCausalLM

    kind, _, config = MODELS[request.param]
    path = tiny_model(kind, tmp_path_factory.mktemp(request.param), **config)
    oracle = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    return request.param, path, oracle


@pytest.fixture(scope="module", params=BACKENDS)
def served(request: pytest.FixtureRequest, model: tuple[str, Path, Any]) -> Served:
    return serve(model[1], request.param)


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


@torch.inference_mode()
def oracle_logits(oracle: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([ids])).logits[0]
    return logits


def test_logits_equal_transformers_at_every_position(model: tuple[str, Path, Any], served: Served) -> None:
    name, _, oracle = model
    for ids in prompts_of(MODELS[name][1]):
        wanted = oracle_logits(oracle, ids)
        for chunk in (1 << 20, 37):
            assert_close(all_logits(served.executor, ids, chunk), wanted)


def test_greedy_tokens_equal_transformers(model: tuple[str, Path, Any], served: Served) -> None:
    name, _, oracle = model
    prompts = prompts_of(MODELS[name][1], seed=1)
    outputs = served.driver(seed=0).generate(prompts, SamplingParams(temperature=0.0, max_tokens=8), chunk=50)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(oracle_logits(oracle, prompt + output), prompt, output)
