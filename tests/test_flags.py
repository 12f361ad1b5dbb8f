"""Flags: every source, its order, and one line for every mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config import EngineConfig
from shared.errors import EXIT_CONFIG
from shared.flags import flags_of, make_parser, option, parse, to_argv


def read(*argv: str, env: dict[str, str] | None = None) -> EngineConfig:
    return parse([EngineConfig], argv, prog="pagebus serve", env=env or {}, positional="model")[0]


def refused(capsys: pytest.CaptureFixture[str], *argv: str, env: dict[str, str] | None = None) -> str:
    with pytest.raises(SystemExit) as stop:
        read(*argv, env=env)
    assert stop.value.code == EXIT_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_command_line_wins_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("block-size: 8\nmax_num_seqs: 3\nmax-model-len: 100\nserved-model-name: [a, b]\n")
    env = {"PAGEBUS_MAX_NUM_SEQS": "4", "PAGEBUS_MAX_MODEL_LEN": "200", "PAGEBUS_CONFIG": str(file)}
    config = read("some/model", "--max-model-len", "300", env=env)
    assert (config.model, config.block_size, config.max_num_seqs, config.max_model_len) == ("some/model", 8, 4, 300)
    assert config.served_model_name == ["a", "b"]


def test_vllm_spellings() -> None:
    config = read(
        *"--model m --served-model-name a b --max-model-len 9 --max-num-seqs 2 --max-num-batched-tokens 64".split(),
        *"--block-size 4 --dtype float16 --seed 5 --gpu-memory-utilization 0.85 --no-enable-prefix-caching".split(),
        *"--enable-chunked-prefill --enforce-eager --kv-cache-memory-bytes 1000".split(),
    )
    assert config == EngineConfig(
        model="m", served_model_name=["a", "b"], max_model_len=9, max_num_seqs=2, max_num_batched_tokens=64,
        block_size=4, dtype="float16", seed=5, gpu_memory_utilization=0.85, enable_prefix_caching=False,
        enforce_eager=True, kv_cache_memory_bytes=1000,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-model-ln", "3"], ["unknown flag --max-model-ln", "did you mean --max-model-len?"]),
        (["--frobnicate"], ["unknown flag --frobnicate", "--help"]),
        (["--max-model-len"], ["--max-model-len", "expected one argument"]),
        (["--max-model-len", "0"], ["--max-model-len", ">= 1"]),
        (["--block-size", "0"], ["--block-size", ">= 1"]),
        (["--max-num-seqs", "many"], ["--max-num-seqs", "'many'", "int"]),
        (["--dtype", "int3"], ["--dtype", "'int3'"]),
        (["--gpu-memory-utilization", "1.5"], ["--gpu-memory-utilization", "<= 1"]),
        (["--gpu-memory-utilization", "0"], ["--gpu-memory-utilization", "> 0"]),
        (["--kv-cache-memory-bytes", "-1"], ["--kv-cache-memory-bytes", ">= 1"]),
        (["--config", "/nowhere/x.yaml"], ["/nowhere/x.yaml", "No such file"]),
    ],
)
def test_mistakes_on_the_command_line(capsys: pytest.CaptureFixture[str], argv: list[str], words: list[str]) -> None:
    line = refused(capsys, *argv)
    assert all(word in line for word in words), line


def test_mistakes_elsewhere_name_their_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "PAGEBUS_BLOCK_SIZE" in refused(capsys, env={"PAGEBUS_BLOCK_SIZE": "x"})
    file = tmp_path / "e.yaml"
    for content, word in [("blok_size: 3", "'block_size'"), ("a: [", "not YAML"), ("- 1", "keys and values")]:
        file.write_text(content)
        line = refused(capsys, "--config", str(file))
        assert str(file) in line
        assert word in line


def test_help_explains_every_flag_in_its_group() -> None:
    text = make_parser("p", [EngineConfig]).format_help()
    for flag in flags_of(EngineConfig):
        assert (flag.name in text) != flag.hidden
        assert flag.help
    for group in ("Model:", "Execution:", "KV cache:", "Scheduling:"):
        assert group in text


class Sample(msgspec.Struct, kw_only=True):
    word: Annotated[str, option("G", "a word")] = "x"
    words: Annotated[list[str], option("G", "words")] = []
    number: Annotated[int, option("G", "a number", ge=-10)] | None = None
    share: Annotated[float, option("G", "a share")] = 0.5
    on: Annotated[bool, option("G", "a switch")] = True


words = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1).filter(lambda w: w[0] not in "-")


@given(
    st.builds(
        Sample,
        word=words,
        words=st.lists(words.filter(lambda w: not w.isspace())),
        number=st.none() | st.integers(-10, 10**12),
        share=st.floats(0, 1),
        on=st.booleans(),
    )
)
def test_to_argv_is_the_inverse_of_parse(sample: Sample) -> None:
    assert parse([Sample], to_argv(sample), prog="p", env={}) == [sample]
