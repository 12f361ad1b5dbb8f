"""The benchmark counts right: against a small server whose answers are known, and a real transformers model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import processes, serve
from bench.against import measure_transformers
from bench.client import BodyParser, Client, Outcome
from bench.workloads import SHAPES, Shot, workload
from tests.model_factory import VOCAB_SIZE, tiny_model


class Handler(BaseHTTPRequestHandler):
    """Answers each token of a completion with one event; prompts that begin with 666 are refused or broken off."""

    protocol_version = "HTTP/1.1"
    bodies: list[dict[str, Any]] = []

    def do_GET(self) -> None:
        self._answer(json.dumps({"data": [{"id": "the-model"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if body["prompt"][0] == 666:
            self._answer(b'{"error":{"message":"no such prompt"}}', "application/json", 400)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for i in range(body["max_tokens"]):
            last = i == body["max_tokens"] - 1
            self._event({"choices": [{"text": "x", "finish_reason": "length" if last else None}], "usage": None})
            if body["prompt"][0] == 667 and i == 2:
                self.close_connection = True
                return
        self._event({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _answer(self, body: bytes, kind: str, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    Handler.bodies = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
async def silent() -> AsyncIterator[str]:
    """The url of a server that accepts connections and never answers."""
    server = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def complete(url: str, prompt: list[int], count: int) -> Outcome:
    return asyncio.run(Client(url).complete(prompt, count))


def test_a_completion_is_counted_and_timed(url: str) -> None:
    outcome = complete(url, [1, 2, 3], 5)
    assert (outcome.error, outcome.tokens, len(outcome.arrivals), len(outcome.gaps)) == ("", 5, 5, 4)
    assert outcome.sent < outcome.arrivals[0] <= outcome.arrivals[-1] <= outcome.ended
    (body,) = Handler.bodies
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("the-model", [1, 2, 3], 5)
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0


def test_failures_are_told_apart(url: str) -> None:
    assert complete(url, [666], 5).error.startswith('status 400: {"error"')
    broken = complete(url, [667], 5)
    assert "broke off" in broken.error
    assert broken.tokens == 3
    assert "Connect" in asyncio.run(Client("http://127.0.0.1:1", "m").complete([1], 1)).error


RESPONSE = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'11\r\ndata: {"a":1}\n\nda\r\n17;x=y\r\nta: {"b":2}\r\n\r\n: ping\n\n\r\nf\r\ndata: [DONE]\n\n\n\r\n0\r\n\r\n'
)


@given(st.lists(st.integers(0, len(RESPONSE)), max_size=20))
@settings(max_examples=200, deadline=None)
def test_events_are_whole_however_the_bytes_arrive(cuts: list[int]) -> None:
    events: list[bytes] = []
    parser = BodyParser(events.append)
    edges = sorted(cuts)
    for start, end in zip([0, *edges], [*edges, len(RESPONSE)], strict=True):
        parser.feed(RESPONSE[start:end])
    assert (parser.status, parser.done) == (200, True)
    assert events == [b'{"a":1}', b'{"b":2}', b"[DONE]"]


def test_a_stream_that_ends_with_its_connection() -> None:
    events: list[bytes] = []
    parser = BodyParser(events.append)
    parser.feed(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: 1\n\nda")
    parser.feed(b"ta: 2\n\n")
    assert events == [b"1", b"2"]
    assert not parser.done


@pytest.mark.parametrize(
    ("name", "requests", "prompt", "output"), [("W1", 3, 128, 128), ("W2", 64, 256, 128), ("W3", 64, 1050, 64)]
)
def test_workloads_have_the_lengths_of_their_names(name: str, requests: int, prompt: int, output: int) -> None:
    shots = workload(name, 32000, 7).shots()
    assert {(len(shot.prompt), shot.output_tokens) for shot in shots} == {(prompt, output)}
    assert len(shots) == requests
    assert len({tuple(shot.prompt) for shot in shots}) == requests
    assert all(100 <= i < 32000 for shot in shots for i in shot.prompt)
    assert shots == workload(name, 32000, 7).shots()
    assert not {tuple(s.prompt[:16]) for s in shots} & {tuple(s.prompt[:16]) for s in workload(name, 32000, 8).shots()}


def test_the_shared_prompt_is_shared() -> None:
    assert len({tuple(shot.prompt[:1000]) for shot in workload("W3", 32000, 1).shots()}) == 1
    assert len({tuple(shot.prompt[:1001]) for shot in workload("W3", 32000, 1).shots()}) > 50


def test_a_workload_can_be_changed() -> None:
    changed = workload("W2", 512, 1, requests=2, input_tokens=5, output_tokens=None)
    assert [(len(shot.prompt), shot.output_tokens) for shot in changed.shots()] == [(5, 128)] * 2
    with pytest.raises(ValueError, match="vocabulary"):
        workload("W2", 100, 1)


def test_percentiles_are_nearest_rank() -> None:
    assert serve.percentiles([i / 1000 for i in range(1, 101)]) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert serve.percentiles([0.002]) == {"p50": 2.0, "p90": 2.0, "p99": 2.0}
    assert serve.percentiles([]) == {}


def stream(sent: float, arrivals: list[float]) -> Outcome:
    return Outcome(sent, arrivals, arrivals[-1], len(arrivals))


def test_a_run_is_summarised() -> None:
    report = serve.summarise([stream(0, [1, 2, 4]), stream(1, [2, 4]), Outcome(error="refused")])
    assert (report["completed"], report["failed"], report["first_error"]) == (2, 1, "refused")
    assert (report["output_tokens"], report["tokens_per_second"], report["requests_per_second"]) == (5, 1.25, 0.5)
    assert report["ttft_ms"]["p50"] == 1000
    assert report["itl_ms"] == {"p50": 2000, "p90": 2000, "p99": 2000}
    assert "long_prompts" not in report


def test_gaps_are_told_apart_by_the_long_prompts_beside_them() -> None:
    streams = [stream(0, [1, 2, 3, 10, 11]), stream(0, [1, 2, 3, 9, 10])]
    report = serve.summarise(streams, [stream(4, [8, 8.5])])["long_prompts"]
    assert report["ttft_ms"]["p50"] == 4000
    assert report["itl_ms_busy"]["p50"] == 6000
    assert report["itl_ms_quiet"] == {"p50": 1000, "p90": 1000, "p99": 1000}
    assert report["tokens_per_second_busy"] == round(2 * 2 / 13, 2)
    assert report["tokens_per_second_quiet"] == 2.0


def test_what_was_cut_off_counts_with_what_it_had_got() -> None:
    cut = Outcome(0, [1, 2], 6, 2, cut=True)
    waiting = Outcome(1, [], 6, 0, cut=True)
    report = serve.summarise([stream(0, [1, 2, 4]), cut, waiting, Outcome(cut=True)], [Outcome(2, [], 6, 0, cut=True)])
    assert (report["completed"], report["failed"], report["cut_off"]) == (1, 0, 4)
    assert (report["output_tokens"], report["requests_per_second"]) == (5, round(1 / 6, 3))
    assert report["ttft_ms"] == {"p50": 1000, "p90": 5000, "p99": 5000}, "one has waited for 5 s"
    assert report["long_prompts"]["ttft_ms"]["p50"] == 4000
    nothing = serve.summarise([waiting], [Outcome(2, [], 6, 0, cut=True)])
    assert "tokens_per_second_busy" not in nothing["long_prompts"], "no gap was seen"


def test_time_per_token_does_not_depend_on_how_text_is_cut() -> None:
    merged = Outcome(0, [1, 3], 3, 5)
    assert merged.token_seconds == 0.5
    assert serve.summarise([merged])["ms_per_token"] == {"p50": 500, "p90": 500, "p99": 500}
    assert Outcome(0, [1], 1, 1).token_seconds == 0


async def test_a_request_is_given_up_at_the_deadline_or_when_nothing_comes(silent: str) -> None:
    client = Client(silent, "m", stall=0.05)
    outcome = await client.complete([1], 3)
    assert (outcome.error, outcome.cut) == ("no byte for 0 s", False)
    client.stall, client.deadline = 60, time.perf_counter() + 0.05
    outcome = await client.complete([1], 3)
    assert (outcome.error, outcome.cut, outcome.tokens) == ("", True, 0)
    assert outcome.ended >= client.deadline
    late = await client.complete([1], 3)
    assert (late.cut, late.sent) == (True, 0), "after the deadline nothing is sent"


def test_the_command_prints_json(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--url", url, "--workload", "W3", "--requests", "6", "--concurrency", "3", "--output-tokens", "4"]
    assert serve.main([*argv, "--seed", "5"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["workload"], report["model"], report["seed"]) == ("W3", "the-model", 5)
    assert (report["completed"], report["output_tokens"]) == (6, 24)
    assert len(Handler.bodies) == 7, "one of them is the warm-up"


async def test_long_prompts_arrive_while_streams_go_on(url: str) -> None:
    from dataclasses import replace

    load = workload("W4", 32000, 1, concurrency=2, requests=2, output_tokens=3)
    load.shape = replace(load.shape, long_prompts=2, long_tokens=40, long_every=0.05)
    client = await asyncio.to_thread(Client, url)
    streams, long = await serve.drive(client, load)
    assert [len(outcome.arrivals) for outcome in long] == [16, 16]
    assert len(streams) > 2, "streams are begun anew until the long prompts are through"
    assert sum(len(body["prompt"]) == 40 for body in Handler.bodies) == 2


async def test_no_more_streams_at_once_than_asked_for() -> None:
    running = most = 0

    class Counting:
        async def complete(self, prompt: list[int], output_tokens: int) -> Outcome:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1
            return stream(0, [1.0])

    outcomes, _ = await serve.drive(Counting(), workload("W2", 32000, 1))  # type: ignore[arg-type]
    assert (len(outcomes), most) == (64, SHAPES["W2"].concurrency)


def test_no_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve.main(["--url", "http://127.0.0.1:1"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: http://127.0.0.1:1:")
    assert serve.main(["--url", "ftp://x"]) == 2


def test_processes_are_found_by_role_and_accounted_for() -> None:
    burn = "import sys\nfor i in range(3_000_000): pass\nprint('done', flush=True)\nsys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", burn, "-m", "services.worker", "--x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        assert processes.find()[process.pid] == "worker"
        used = processes.usage({process.pid: "worker"})["worker"]
        assert 0.01 < used.cpu < 10
        assert 1 << 20 < used.resident < 1 << 30
    finally:
        process.communicate()
    assert processes.usage({process.pid: "worker"}) == {}
    assert processes.parse("api:12,7") == {12: "api", 7: "server"}
    with pytest.raises(ValueError):
        processes.parse("api")


def test_transformers_is_measured(tmp_path: Path) -> None:
    path = tiny_model("llama", tmp_path / "model")
    shots = [Shot([i % VOCAB_SIZE for i in range(20)], 5), Shot([3, 4], 7)]
    report = measure_transformers(str(path), "float32", shots)
    assert (report["output_tokens"], report["requests"]) == (12, 2)
    assert report["tokens_per_second"] > 0
