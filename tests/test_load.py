"""Loading a real, tiny model into an engine that runs plans."""

from __future__ import annotations

import msgspec
import pytest

from services.worker.load import load
from services.worker.load import told as progress
from shared.config import EngineConfig
from shared.errors import StartupError
from shared.messages import Admit, Plan, pack_ids
from shared.model_info import read_model_info
from shared.sampling import SamplingParams
from tests.model_factory import tiny_model


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tiny_model("llama", tmp_path_factory.mktemp("model"))
    return EngineConfig(model=str(folder), backend="reference", num_gpu_blocks_override=200, threads=1)


def first_step() -> Plan:
    params = SamplingParams(seed=1, temperature=0.0)
    return Plan(
        epoch=1,
        step=1,
        release=[],
        copies=[],
        admit=[Admit(slot=0, tokens=pack_ids([5, 6, 7]), num_prompt=3, params=params)],
        slots=[0],
        starts=[0],
        counts=[3],
        samples=[1],
        blocks=[[0]],
    )


def test_a_loaded_engine_runs_plans_and_forgets_them(config: EngineConfig) -> None:
    said: list[str] = []
    model = read_model_info(config)
    engine = load(config, model, said.append)
    assert said == ["loading layer 1/2", "loading layer 2/2", "warming up"]
    assert (engine.num_blocks, engine.backend) == (200, "reference")
    assert engine.block_bytes > 0
    first = engine.run(first_step())
    engine.reset()
    again = engine.run(first_step())  # slot 0 is free again
    assert first.tokens == again.tokens
    assert 0 <= first.tokens[0] < model.vocab_size


def test_where_the_schedulers_path_does_not_exist_the_model_is_looked_up(config: EngineConfig) -> None:
    said: list[str] = []
    model = msgspec.structs.replace(read_model_info(config), path="/on/another/host")
    assert load(config, model, said.append).num_blocks == 200
    assert said[0] == f"fetching {config.model}"


def test_too_little_cache_is_known_before_any_weight_is_read(config: EngineConfig) -> None:
    said: list[str] = []
    small = msgspec.structs.replace(config, num_gpu_blocks_override=1)
    with pytest.raises(StartupError, match="--num-gpu-blocks-override"):
        load(small, read_model_info(small), said.append)
    assert said == []


def test_progress_is_said_ten_times_at_most() -> None:
    said: list[str] = []
    names = ["embed.weight", *(f"layers.{i}.{part}.weight" for i in range(95) for part in "qk"), "final_norm.weight"]
    assert [name for name, _ in progress(((name, None) for name in names), 95, said.append)] == names  # type: ignore[misc]
    assert len(said) == 10
    assert said[-1] == "loading layer 95/95"
