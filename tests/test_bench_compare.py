"""Engines side by side: the table's arithmetic on recorded results, and a real run of pagebus alone."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import checkpoint, compare, machine, peers, processes, tables
from bench.model import Model, read_model
from bench.peers import Setup, Unavailable
from bench.server import Server
from services.worker import loader
from services.worker.models import decoder_spec
from shared.gguf_file import GGUFFile
from shared.model_config import read_config
from tests.model_factory import VOCAB_SIZE, smollm2, tiny_model, to_gguf

RESULTS = Path(__file__).parent / "bench_results.json"


@pytest.fixture
def recorded() -> dict[str, Any]:
    """A run of four engines, one of them not installed."""
    run: dict[str, Any] = json.loads(RESULTS.read_text())
    return run


def cells(run: dict[str, Any], title: str) -> dict[str, tables.Cell | None]:
    metric = next(metric for metric in tables.METRICS if metric.title == title)
    return {name: tables.cell(metric, name, run["engines"]) for name in run["engines"]}


def test_ratios_say_how_many_times_better_pagebus_is(recorded: dict[str, Any]) -> None:
    slower = cells(recorded, "W1 ms per token")
    assert slower["pagebus"] == tables.Cell(10.0, None, False)
    assert slower["llama.cpp"] == tables.Cell(25.0, 2.5, False)
    assert cells(recorded, "W2 output tokens/s")["llama.cpp"] == tables.Cell(200.0, 2.0, False)
    assert slower["vllm"] is None


def test_a_batch_of_transformers_is_held_against_the_server(recorded: dict[str, Any]) -> None:
    batch = cells(recorded, "W2 output tokens/s, one batch")
    assert batch["transformers"] == tables.Cell(100.0, 4.0, False)
    assert batch["pagebus"] is None, "it has no such row of its own"


def test_values_have_the_unit_of_their_row(recorded: dict[str, Any]) -> None:
    assert cells(recorded, "W4 time to first token of these, s")["pagebus"] == tables.Cell(5.0, None, False)
    found = cells(recorded, "memory beyond weights and KV, MiB")
    assert found["pagebus"] == tables.Cell(300.0, None, False)
    assert found["transformers"] == tables.Cell(450.0, 1.5, False)
    assert found["llama.cpp"] is None


def test_a_value_of_a_workload_that_was_cut_off_is_marked(recorded: dict[str, Any]) -> None:
    found = cells(recorded, "W4 gap p99 beside long prompts, ms")["llama.cpp"]
    assert str(found) == "8,400\\* (80.0x)"
    assert "\\* Cut off after 240 s" in tables.comparison(recorded)


def test_the_table_has_a_column_for_each_engine_that_ran(recorded: dict[str, Any]) -> None:
    text = tables.comparison(recorded)
    head, rule, first, *_ = text.splitlines()
    assert [word.strip() for word in head.split("|")[2:-1]] == ["pagebus", "transformers", "llama.cpp"]
    assert len({len(head), len(rule), len(first)}) == 1
    assert [word.strip() for word in first.split("|")[1:-1]] == [
        "W1 ms per token",
        "10.0",
        "40.0 (4.00x)",
        "25.0 (2.50x)",
    ]
    assert "vllm is not in the table: vllm is not installed (--vllm-command)." in text
    assert "llama.cpp, W3: 2 requests failed: status 500." in text
    some = tables.comparison(recorded, ["W1"]).splitlines()[2:]
    assert [" ".join(line.split()) for line in some] == [" ".join(line.split()) for line in text.splitlines()[2:5]]


def test_without_pagebus_there_are_values_but_no_ratios(recorded: dict[str, Any]) -> None:
    del recorded["engines"]["pagebus"]
    assert str(cells(recorded, "W1 ms per token")["llama.cpp"]) == "25.0"


def test_the_floor_is_the_time_to_read_the_weights() -> None:
    results = {"workloads": {"W1": {"ms_per_token": {"p50": 20.0}}, "W2": {}}}
    compare.with_floor(results, token_bytes=100_000_000, bandwidth=10e9)
    assert results["workloads"]["W1"]["times_floor"] == 2.0
    skipped: dict[str, Any] = {"skipped": "not installed"}
    compare.with_floor(skipped, 1, 1.0)
    assert skipped == {"skipped": "not installed"}


def test_memory_beyond_the_cache_is_known_when_the_cache_was_written() -> None:
    engine = peers.Engine("x", [], weight_bytes=100, kv_bytes=1000, dtype="bfloat16")
    assert compare.memory(1500, engine, {"W1", "W2", "W3", "W4"})["beyond"] == 400
    assert "beyond" not in compare.memory(1500, engine, {"W1", "W2"})
    assert "beyond" not in compare.memory(1500, replace(engine, weight_bytes=0), {"W1", "W2", "W3", "W4"})


def test_sizes_are_read_from_the_files(tmp_path: Path) -> None:
    untied = read_model(str(tiny_model("llama", tmp_path / "untied", dtype="bfloat16", tie_word_embeddings=False)))
    tied = read_model(str(tiny_model("llama", tmp_path / "tied", dtype="bfloat16", tie_word_embeddings=True)))
    embedding = VOCAB_SIZE * 64 * 2
    assert (untied.dtype, untied.vocab_size, untied.name) == ("bfloat16", VOCAB_SIZE, "untied")
    assert untied.token_bytes == untied.weight_bytes - embedding
    assert tied.token_bytes == tied.weight_bytes == untied.token_bytes
    assert untied.kv_token_bytes == 2 * 2 * 2 * 16 * 2
    bundled = read_model(str(smollm2()))
    assert (bundled.dtype, bundled.kv_token_bytes) == ("Q4_1", 23040)
    assert 0.9 < bundled.token_bytes / smollm2().stat().st_size < 1


def setup(tmp_path: Path, gguf: bool = True) -> Setup:
    model = Model(tmp_path / "model", "model", "bfloat16", 512, 1000, 1000, 10)
    return Setup(model, Model(tmp_path / "m.gguf", "m", "bfloat16", 512, 1000, 1000, 10) if gguf else None, 2)


def program(path: Path, text: str = "#!/bin/sh\necho 'version: 0.6 (build 7, commit abc)'\n") -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return str(path)


def test_peers_get_the_same_weights_threads_and_context(tmp_path: Path) -> None:
    given = setup(tmp_path)
    ours = peers.pagebus(given, ["--seed", "3"], "int8")
    vllm = peers.vllm(given, f"{program(tmp_path / 'bin' / 'vllm')} serve {{model}} -q", dtype="float32")
    llama = peers.llama_cpp(given, program(tmp_path / "bin" / "llama-server"))
    assert ours.command[-4:] == ["--seed", "3", "--quantization", "int8"]
    assert (ours.name, ours.dtype, ours.weight_bytes) == ("pagebus int8", "int8", 0)
    assert (peers.pagebus(given).name, peers.pagebus(given).weight_bytes) == ("pagebus", 1000)
    assert "--threads 2 --kv-cache-memory-bytes 245760" in " ".join(ours.command)
    assert vllm.command[1:4] == ["serve", str(tmp_path / "model"), "-q"]
    assert "--dtype float32 --max-model-len 4096 --kv-cache-memory-bytes 491520" in " ".join(vllm.command)
    assert (vllm.weight_bytes, vllm.kv_bytes, vllm.dtype) == (2000, 491520, "float32")
    assert f"-m {tmp_path / 'm.gguf'} -a model -c 131072 -np 32 -cb -t 2 -tb 2" in " ".join(llama.command)
    assert (llama.version, llama.kv_bytes) == ("0.6 build 7", 1310720)
    for engine in (ours, vllm, llama):
        assert "{port}" in engine.command
        assert "port" not in engine.settings
        assert str(tmp_path) not in engine.settings, "results name no path of this machine"
        assert sys.executable not in engine.settings


def test_weights_that_are_not_held_as_they_are_stored_are_told(tmp_path: Path) -> None:
    given = setup(tmp_path)
    given = replace(given, model=replace(given.model, dtype="Q4_1"))
    unpacked, packed = peers.pagebus(given), peers.pagebus(given, ["--quantization", "gguf"])
    assert (unpacked.dtype, unpacked.weight_bytes) == ("Q4_1, unpacked", 0)
    assert (packed.dtype, packed.weight_bytes) == ("Q4_1", 0)


def test_what_is_not_installed_says_so(tmp_path: Path) -> None:
    given = setup(tmp_path, gguf=False)
    with pytest.raises(Unavailable, match="no-vllm is not installed"):
        peers.vllm(given, "no-vllm serve")
    with pytest.raises(Unavailable, match="no-llama is not installed"):
        peers.llama_cpp(given, "no-llama")
    with pytest.raises(Unavailable, match="--gguf"):
        peers.llama_cpp(given, program(tmp_path / "llama-server"))
    given.model.path.touch()
    with pytest.raises(Unavailable, match="folders"):
        peers.vllm(given, program(tmp_path / "vllm"))


HELPFUL = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_ended_with_all_its_processes() -> None:
    with Server([sys.executable, "-c", HELPFUL, "{port}"], limit=60) as server:
        pids = server.pids()
        assert len(pids) == 2
        assert server.ready > 0
        assert processes.proportional(pids) > 1 << 20
    deadline = time.monotonic() + 30
    while any(_runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_server_that_does_not_start_shows_its_log() -> None:
    with (
        pytest.raises(RuntimeError, match=r"(?s)ended with 3 .*no such model"),
        Server([sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]),
    ):
        pass
    with (
        pytest.raises(RuntimeError, match=r"not ready after 0 s"),
        Server([sys.executable, "-c", "import time; time.sleep(600)"], limit=0.2),
    ):
        pass


def test_the_machine_is_described_without_its_name() -> None:
    about = machine.description()
    assert about["cores"] >= 1
    assert about["memory_gib"] > 0
    assert "vendor_id" in about["processor"]
    name = subprocess.run(["hostname"], capture_output=True, text=True, check=False).stdout.strip()
    assert not name or name not in json.dumps(about)


def test_both_forms_of_a_checkpoint_hold_the_same_weights(tmp_path: Path) -> None:
    tokenizer = tiny_model("llama", tmp_path / "tokenizer")
    vocabulary = to_gguf(tokenizer, tmp_path / "tokenizer.gguf")
    folder, file = tmp_path / "random", tmp_path / "random.gguf"
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    checkpoint.random_folder(folder, small | {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 600}, tokenizer)
    checkpoint.write_gguf(folder, file, vocabulary)
    spec = decoder_spec(read_config(folder), 4096)
    assert replace(decoder_spec(read_config(file), 4096), norm_eps=spec.norm_eps) == spec
    stored = {name: values.copy() for name, values in loader.weights(folder, spec)}
    for name, values in loader.weights(file, spec):
        bits = values if values.dtype == stored[name].dtype else (values.view("uint32") >> 16).astype("uint16")
        assert (bits == stored[name]).all(), name
    with GGUFFile(file) as written, GGUFFile(vocabulary) as source:
        tokens = written.metadata["tokenizer.ggml.tokens"]
        assert tokens[:VOCAB_SIZE] == source.metadata["tokenizer.ggml.tokens"]
        assert len(set(tokens)) == len(tokens) == 600
        assert written.metadata["tokenizer.ggml.merges"] == source.metadata["tokenizer.ggml.merges"]


def test_pagebus_and_transformers_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model("llama", tmp_path / "model", dtype="bfloat16")
    results = tmp_path / "results" / "run.json"
    small = ["--requests", "3", "--concurrency", "2", "--input-tokens", "20", "--output-tokens", "6"]
    argv = ["--model", str(model), "--workloads", "W1", "W2", *small, "--max-model-len", "64", "--threads", "1"]
    more = ["--engines", "pagebus", "transformers", "llama.cpp", "--llama-server", "no-such", "--seed", "7"]
    assert compare.main([*argv, *more, "--json", str(results)]) == 0
    run = json.loads(results.read_text())
    ours, theirs = run["engines"]["pagebus"], run["engines"]["transformers"]
    assert (ours["workloads"]["W1"]["completed"], ours["workloads"]["W2"]["output_tokens"]) == (3, 18)
    assert (theirs["workloads"]["W1"]["completed"], theirs["workloads"]["W2"]["completed"]) == (3, 2)
    assert theirs["workloads"]["W2 batch"]["output_tokens"] == 18
    assert theirs["workloads"]["W1"]["times_floor"] > 0
    assert ours["memory"]["resident"] > theirs["memory"]["weights"] > 0
    assert run["engines"]["llama.cpp"] == {"skipped": "no-such is not installed (--llama-server)"}
    assert str(tmp_path) not in results.read_text()
    out = capsys.readouterr().out
    assert "W2 output tokens/s, one batch" in out
    assert "llama.cpp is not in the table" in out


def test_no_model_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert compare.main(["--model", str(tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
