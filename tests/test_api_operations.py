"""What an operator sees: health, models, tokenize, keys, limits, metrics."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.api.chat import ChatRequest
from services.api.completions import CompletionRequest
from services.api.metrics import ALIASES
from services.api.unbuilt import NEUTRAL
from shared.api_config import ApiConfig
from shared.config import EngineConfig
from tests.api_server import LONGEST, NAME, ApiServer, api_server, byte_ids, message

pytestmark = pytest.mark.asyncio(loop_scope="module")
DOCUMENT = Path(__file__).parent.parent / "docs" / "api.md"
LABELS = f'{{engine="0",model_name="{NAME}"}}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    async with api_server(tmp_path_factory.mktemp("api")) as api:
        yield api


@pytest_asyncio.fixture(loop_scope="module")
async def api(server: ApiServer) -> AsyncIterator[ApiServer]:
    yield server
    server.scheduler.set(allowed=1 << 30)
    await server.survives()


async def health(api: ApiServer, status: int, timeout: float = 20) -> httpx.Response:
    """The first /health of this status."""
    async with asyncio.timeout(timeout):
        while (reply := await api.http.get("/health")).status_code != status:
            await asyncio.sleep(0.02)
    return reply


async def test_health_is_an_empty_200(api: ApiServer) -> None:
    reply = await api.http.get("/health")
    assert (reply.status_code, reply.content) == (200, b"")


async def test_a_stalled_step_loop_is_unhealthy(api: ApiServer) -> None:
    api.scheduler.set(stalled=31.0)
    reply = await health(api, 503)
    assert "worker group 0 owes a step's result for 31 s" in reply.json()["error"]["message"]
    api.scheduler.set(stalled=29.0)
    await health(api, 200)
    api.scheduler.set(stalled=0.0)


async def test_version_load_and_models(api: ApiServer) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", (await api.http.get("/version")).json()["version"])
    assert (await api.http.get("/load")).json() == {"server_load": 0}
    models = (await api.http.get("/v1/models")).json()
    assert models["object"] == "list"
    assert [model["id"] for model in models["data"]] == [NAME, "alias"]
    assert models["data"][0]["max_model_len"] == LONGEST
    assert (await api.http.get("/v1/models/alias")).json() == models["data"][1]
    assert [model.id async for model in api.openai.models.list()] == [NAME, "alias"]
    assert (await api.openai.models.retrieve(NAME)).id == NAME


async def test_load_counts_requests_in_work(api: ApiServer) -> None:
    api.scheduler.set(allowed=1)
    running = [asyncio.create_task(api.complete(prompt="x")) for _ in range(3)]
    await api.scheduler.until(lambda: len(api.scheduler.running) == 3)
    assert (await api.http.get("/load")).json() == {"server_load": 3}
    api.scheduler.set(allowed=1 << 30)
    await asyncio.gather(*running)


@pytest.mark.parametrize("prefix", ["", "/v1"])
async def test_tokenize_and_detokenize(api: ApiServer, prefix: str) -> None:
    body = {"model": NAME, "prompt": "你好 x", "return_token_strs": True}
    reply = (await api.http.post(f"{prefix}/tokenize", json=body)).json()
    assert reply["tokens"] == byte_ids("你好 x")
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == LONGEST
    assert reply["token_strs"] == list("你好 x")
    back = await api.http.post(f"{prefix}/detokenize", json={"model": NAME, "tokens": reply["tokens"]})
    assert back.json() == {"prompt": "你好 x"}
    chat = (await api.http.post(f"{prefix}/tokenize", json={"messages": [message("hi")]})).json()
    assert bytes(chat["tokens"]) == b'[{"role":"user","content":"hi"}]'
    assert chat["token_strs"] is None
    assert (await api.http.post(f"{prefix}/tokenize", json={"prompt": ""})).json()["count"] == 0


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (b"abc-123", True),
        (b"x" * 128, True),
        (b"x" * 129, False),
        (b"x" * 1_000_000, False),
        (b"", False),
        (b"a b", False),
        (b"\xc3\xa4", False),
    ],
    ids=lambda value: str(value)[:12],
)
async def test_request_ids(api: ApiServer, given: bytes, kept: bool) -> None:
    for path in ("/health", "/nothing"):
        reply = await api.http.get(path, headers=[(b"X-Request-Id", given)])
        answered = reply.headers["x-request-id"]
        if kept:
            assert answered == given.decode()
        else:
            assert re.fullmatch(r"[0-9a-f]{32}", answered)


async def test_every_field_and_flag_is_documented() -> None:
    text = DOCUMENT.read_text()
    fields = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *NEUTRAL}
    assert [name for name in sorted(fields) if f"`{name}`" not in text] == []
    named = {word.replace("-", "_") for word in re.findall(r"`--([a-z-]+)", text)}
    assert named <= {*ApiConfig.__struct_fields__, *EngineConfig.__struct_fields__}


REQUIRED = """
    num_requests_running num_requests_waiting num_requests_swapped gpu_cache_usage_perc cpu_cache_usage_perc
    kv_cache_usage_perc kv_offload_cpu_cache_usage_perc prefix_cache_hit_rate generation_throughput_tokens_per_sec
    num_preemptions_total prefix_cache_queries_total prefix_cache_hits_total prompt_tokens_total
    generation_tokens_total time_to_first_token_seconds_count inter_token_latency_seconds_count
    time_per_output_token_seconds_count request_time_per_output_token_seconds_count e2e_request_latency_seconds_count
    request_prompt_tokens_sum request_generation_tokens_sum request_params_n_count request_params_max_tokens_count
"""


async def test_every_metric_is_there(api: ApiServer) -> None:
    await api.complete(prompt="x")
    reply = await api.http.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = await api.metrics()
    for name in REQUIRED.split():
        assert f"vllm:{name}{LABELS}" in found or f'vllm:{name}{{model_name="{NAME}",engine="0"}}' in found, name
    assert any(key.startswith("vllm:cache_config_info{") and 'block_size="16"' in key for key in found)
    assert not any("_created" in key for key in found)
    for name, alias in ALIASES.items():
        buckets = {key.replace(name, alias): value for key, value in found.items() if key.startswith(name)}
        assert len(buckets) == 22
        assert buckets.items() <= found.items()


async def test_the_engines_figures(api: ApiServer) -> None:
    found = await api.metrics()

    def value(name: str) -> float:
        return next(value for key, value in found.items() if key.startswith(name + "{"))

    assert value("vllm:gpu_cache_usage_perc") == value("vllm:kv_cache_usage_perc") == 0.25
    assert value("vllm:prefix_cache_hit_rate") == 0.25
    assert value("vllm:num_preemptions_total") == 3
    assert value("vllm:prefix_cache_hits_total") == 10
    assert found["pagebus:ready"] == 1


def change(before: dict[str, float], after: dict[str, float], name: str, **labels: str) -> float:
    """How much a series has grown."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]

    def total(samples: dict[str, float]) -> float:
        keys = (key for key in samples if key.split("{")[0] == name and all(w in key for w in wanted))
        return sum(samples[key] for key in keys)

    return total(after) - total(before)


async def test_each_request_is_counted_once_with_its_reason(api: ApiServer) -> None:
    before = await api.metrics()
    stopped = await asyncio.gather(*(api.complete(prompt="SAY:stop.") for _ in range(20)))
    streams = await asyncio.gather(*(api.chunks("/v1/completions", length_body()) for _ in range(10)))
    whole = await asyncio.gather(*(api.complete(prompt="go", max_tokens=7, n=2) for _ in range(10)))
    api.scheduler.set(allowed=5)
    await asyncio.gather(*(abandon(api) for _ in range(20)))
    await api.scheduler.until(lambda: not api.scheduler.running)
    api.scheduler.set(allowed=1 << 30)
    await asyncio.gather(*(api.complete(prompt="x", n=0) for _ in range(5)))
    after = await api.metrics()

    def grown(name: str, **labels: str) -> float:
        return change(before, after, name, **labels)

    usages = [reply.json()["usage"] for reply in (*stopped, *whole)] + [chunks[-1]["usage"] for chunks in streams]
    reasons = {r: grown("vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "abort", "error")}
    assert reasons == {"stop": 20, "length": 20, "abort": 20, "error": 0}
    assert grown("pagebus:requests_refused_total", reason="invalid") == 5
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_params_n"):
        assert grown(f"vllm:{name}_count") == 60
    aborted = 20 * 5  # they had five tokens each, as many as the scheduler was let give
    assert grown("vllm:prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages) + 20
    assert grown("vllm:generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages) + aborted
    assert grown("vllm:time_to_first_token_seconds_count") == 60
    assert grown("vllm:request_generation_tokens_sum") == grown("vllm:generation_tokens_total")
    assert grown("http_requests_total", handler="/v1/completions", status="2xx") == 60
    assert grown("http_requests_total", handler="/v1/completions", status="4xx") == 5


def length_body() -> dict[str, Any]:
    return {"prompt": "go", "max_tokens": 7, "stream_options": {"include_usage": True}}


async def abandon(api: ApiServer) -> None:
    """Leaves a stream at its fifth token."""
    async with api.http.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as response:
        async for line in response.aiter_lines():
            if '"text":"' in line and 'e"' in line:
                return


async def test_label_values_do_not_grow_with_what_clients_make_up(api: ApiServer) -> None:
    for index in range(5):
        await api.http.get(f"/made/up/{index}")
        await api.http.get(f"/v1/models/m{index}")
        await api.http.request(f"VERB{index}", "/health")
        await api.complete(prompt="x", model=f"m{index}")
    series = [key for key in await api.metrics() if key.startswith("http_requests_total") or "refused" in key]
    assert len(series) < 20
    assert not any("made" in key or "m1" in key or "VERB" in key for key in series)


async def test_too_many_at_once_is_a_429(tmp_path: Path) -> None:
    async with api_server(tmp_path, max_concurrent_requests=2) as api:
        api.scheduler.set(allowed=1)
        running = [asyncio.create_task(api.complete(prompt="x")) for _ in range(2)]
        await api.scheduler.until(lambda: len(api.scheduler.running) == 2)
        for reply in (await api.chat("x"), await api.http.post("/tokenize", json={"prompt": "x"})):
            assert reply.status_code == 429
            assert reply.headers["retry-after"] == "1"
            assert reply.json()["error"]["code"] == "rate_limit_exceeded"
        api.scheduler.set(allowed=1 << 30)
        assert [reply.status_code for reply in await asyncio.gather(*running)] == [200, 200]
        assert (await api.metrics())['pagebus:requests_refused_total{reason="busy"}'] == 2
        await api.survives()


async def test_keys(tmp_path: Path) -> None:
    async with api_server(tmp_path, api_key=["one", "two"]) as api, httpx.AsyncClient(base_url=api.url) as stranger:
        for path in ("/health", "/metrics"):
            assert (await stranger.get(path)).status_code == 200
        assert (await stranger.options("/v1/completions")).status_code == 405
        for key in ("", "Bearer", "Bearer three", "Basic one", "one", "Bearer one two"):
            headers = {"Authorization": key} if key else {}
            for path in ("/v1/models", "/load", "/nothing"):
                reply = await stranger.get(path, headers=headers)
                assert reply.status_code == 401
                assert reply.json()["error"]["code"] == "invalid_api_key"
                assert reply.headers["www-authenticate"] == "Bearer"
                assert reply.headers["x-request-id"]
        for key in ("Bearer one", "bearer two"):
            assert (await stranger.get("/v1/models", headers={"Authorization": key})).status_code == 200
        assert (await api.openai.models.retrieve(NAME)).id == NAME


async def test_before_and_after_the_first_readiness(tmp_path: Path) -> None:
    async with api_server(tmp_path, ready=False, max_parked_requests=2) as api:
        reply = await health(api, 503)
        while "loading the model" not in reply.json()["error"]["message"]:
            reply = await health(api, 503)
        for early in (await api.complete(prompt="x"), await api.http.get("/v1/models")):
            assert early.status_code == 503
            assert int(early.headers["retry-after"]) >= 1
            assert early.json()["error"]["code"] == "not_ready"
        api.scheduler.set(is_ready=True)
        await health(api, 200)
        # the engine goes away: what comes now waits for it, up to a bound
        api.scheduler.set(allowed=0, is_ready=False)
        await health(api, 503)
        waiting = [asyncio.create_task(api.complete(prompt="SAY:late.")) for _ in range(2)]
        await api.scheduler.until(lambda: len(api.scheduler.running) == 2)
        refused = await api.complete(prompt="x")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        api.scheduler.set(allowed=1 << 30, is_ready=True)
        assert [(await task).json()["choices"][0]["text"] for task in waiting] == ["late", "late"]


async def test_a_draining_server_takes_nothing_new_and_cuts_streams_in_the_end(tmp_path: Path) -> None:
    async with api_server(tmp_path) as api:
        api.scheduler.set(allowed=2)
        stream = asyncio.create_task(api.events("/v1/completions", {"prompt": "x", "max_tokens": 50}))
        whole = asyncio.create_task(api.complete(prompt="x", max_tokens=50))
        await api.scheduler.until(lambda: len(api.scheduler.running) == 2)
        await asyncio.sleep(0.6)  # by then the stream is open
        api.gateway.drain()
        assert (await api.http.get("/health")).status_code == 503
        assert (await api.complete(prompt="x")).status_code == 503
        api.gateway.close()
        *_, error, done = await stream
        assert "shutting down" in error
        assert done == "[DONE]"
        assert (await whole).status_code == 503
