"""The whole server on the real model: right text, the same text under any circumstances, nothing left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from services.worker.backends import native_unavailable
from tests.fidelity.oracle import greedy_ids, smollm2_oracle, smollm2_tokenizer
from tests.stack import Stack, serving, wait_until

MODEL = "SmolLM2-135M-Instruct"
QUESTIONS = [
    "Say hi.",
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three colours, and for each of them a fruit that has it. " * 3,
]
CHAT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
CONFIGURATIONS = {
    "default": (),
    "chunks-of-16-cache-off": ("--max-num-batched-tokens", "16", "--no-enable-prefix-caching"),
    "chunking-off-two-workers": ("--no-enable-chunked-prefill", "--workers", "2", "--api-replicas", "2"),
    "preempting-blocks-of-5": ("--num-gpu-blocks-override", "100", "--block-size", "5", "--max-model-len", "400"),
    "gguf-blocks-as-stored": ("--quantization", "gguf"),
}


def chat(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": 16, "temperature": 0, **fields}


def ask(stack: Stack, body: dict[str, Any], path: str = "/v1/chat/completions") -> dict[str, Any]:
    response = stack.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()  # type: ignore[no-any-return]


def text_of(reply: dict[str, Any]) -> str:
    return reply["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """The greedy answer of transformers in float32 to each question."""
    model, tokenizer = smollm2_oracle(), smollm2_tokenizer()
    answers = {}
    for question in QUESTIONS:
        ids = tokenizer.encode(CHAT.format(question)).ids
        answers[question] = tokenizer.decode(greedy_ids(model, ids, 16), skip_special_tokens=True)
    return answers


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    with serving("--max-model-len", "1024", "--dtype", "float32", *CONFIGURATIONS[request.param]) as running:
        running.name = request.param  # type: ignore[attr-defined]
        yield running


async def together(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    async with httpx.AsyncClient(base_url=url, timeout=180) as client:
        replies = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
    assert all(reply.status_code == 200 for reply in replies), [reply.text for reply in replies]
    return [reply.json() for reply in replies]


def test_greedy_text_equals_transformers_alone_in_a_batch_cold_and_warm(stack: Stack, expected: dict[str, str]) -> None:
    cold = [text_of(ask(stack, chat(question))) for question in QUESTIONS]
    assert cold == [expected[question] for question in QUESTIONS]
    batch = asyncio.run(together(stack.url, [chat(question) for question in QUESTIONS * 4]))
    assert [text_of(reply) for reply in batch] == cold * 4


def test_seeded_sampling_does_not_depend_on_company(stack: Stack) -> None:
    bodies = [chat(QUESTIONS[i % 4], temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=i) for i in range(12)]
    alone = [text_of(ask(stack, body)) for body in bodies[:3]]
    batch = [text_of(reply) for reply in asyncio.run(together(stack.url, bodies))]
    assert batch[:3] == alone
    assert len(set(batch)) > 6


def preempt(stack: Stack) -> None:
    """Outputs longer than those before, which admission could not foresee, alone and together."""
    long = [chat(f"{i} " + QUESTIONS[2], max_tokens=160, min_tokens=160) for i in range(6)]
    batch = [text_of(reply) for reply in asyncio.run(together(stack.url, long))]
    assert stack.metric("vllm:num_preemptions_total") > 0
    assert [text_of(ask(stack, body)) for body in long[::3]] == batch[::3]
    stack.wait_idle()


def test_preemption_changes_nothing(stack: Stack) -> None:
    if "preempting" not in stack.name:  # type: ignore[attr-defined]
        pytest.skip("the pool is too large for it")
    preempt(stack)


@pytest.mark.skipif(native_unavailable() is not None, reason="the reference's bits depend on the batch")
@pytest.mark.parametrize("quantization", ["int8", "int4", "w8a8"])
def test_quantised_weights_keep_a_request_s_bytes(quantization: str) -> None:
    """Cold and warm, alone, in a batch and preempted."""
    with serving("--quantization", quantization, *CONFIGURATIONS["preempting-blocks-of-5"]) as stack:
        bodies = [chat(question, temperature=i % 2, seed=5) for i, question in enumerate(QUESTIONS)]
        cold = [text_of(ask(stack, body)) for body in bodies]
        assert len(set(cold)) == len(QUESTIONS)
        assert [text_of(reply) for reply in asyncio.run(together(stack.url, bodies * 8))] == cold * 8
        preempt(stack)


@pytest.fixture(scope="module")
def one() -> Iterator[Stack]:
    with serving("--dtype", "float32", "--max-model-len", "1024") as running:
        yield running


def test_cached_tokens_are_reported_down_to_one_token(one: Stack) -> None:
    prompts = {n: list(range(1000 + n, 1000 + 2 * n)) for n in (15, 16, 17, 31, 32, 33, 64, 65)}
    for length, prompt in prompts.items():
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        replies = [ask(one, body, "/v1/completions") for _ in range(3)]
        assert len({reply["choices"][0]["text"] for reply in replies}) == 1
        cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies]
        assert cached == [0, length - 1, length - 1]


def test_n_samples_differ_and_repeat(one: Stack) -> None:
    body = chat("Tell me a story.", n=4, temperature=1.0, seed=7)
    first, second = ask(one, body), ask(one, body)
    texts = [choice["message"]["content"] for choice in first["choices"]]
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    assert texts == [choice["message"]["content"] for choice in second["choices"]]
    alone = [text_of(ask(one, {**body, "n": 1, "seed": 7 + i})) for i in range(4)]
    assert alone == texts


def test_the_openai_client_streams_and_counts(one: Stack) -> None:
    client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="not-needed")
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert "Paris" in (whole.choices[0].message.content or "")
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nope", messages=messages)


def test_stop_strings_inside_tokens(one: Stack) -> None:
    body = {"prompt": "1 2 3 4 5 6 7 8 9", "max_tokens": 40, "temperature": 0}
    whole = ask(one, body, "/v1/completions")["choices"][0]["text"]
    stop = whole[7:10]
    cut = ask(one, {**body, "stop": [stop]}, "/v1/completions")["choices"][0]
    assert cut["text"] == whole[: whole.index(stop)]
    assert cut["finish_reason"] == "stop"
    kept = ask(one, {**body, "stop": [stop], "include_stop_str_in_output": True}, "/v1/completions")["choices"][0]
    assert kept["text"] == whole[: whole.index(stop) + len(stop)]


def test_tokenize_and_back(one: Stack) -> None:
    text = "Hello 🌶 world }}"
    tokens = ask(one, {"prompt": text}, "/tokenize")
    assert tokens["count"] == len(tokens["tokens"])
    assert tokens["max_model_len"] == 1024
    assert ask(one, {"tokens": tokens["tokens"]}, "/v1/detokenize") == {"prompt": text}


def test_abandoned_streams_free_their_blocks(one: Stack) -> None:
    body = json.dumps(chat("Tell me everything.", max_tokens=900, ignore_eos=True, stream=True))
    for _ in range(3):
        clients = [httpx.Client(base_url=one.url, timeout=60) for _ in range(16)]
        for client in clients:
            with client.stream("POST", "/v1/chat/completions", content=body) as response:
                next(response.iter_lines())
            client.close()
    one.wait_idle()
    assert text_of(ask(one, chat("Say hi.")))


def test_health_is_503_while_the_only_worker_is_away_and_work_resumes(one: Stack) -> None:
    one.kill("worker")
    wait_until(lambda: one.http.get("/health").status_code == 503)
    assert text_of(ask(one, chat("Say hi.")))
    wait_until(lambda: one.http.get("/health").status_code == 200)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"\xff\xfe", 400, None),
        ({"messages": []}, 400, "messages"),
        ({"model": "nope", "messages": [{"role": "user", "content": "x"}]}, 404, "model"),
        (chat("x", temperature=-1), 400, "temperature"),
        (chat("x", top_p=0), 400, "top_p"),
        (chat("x", max_tokens="a"), 400, "max_tokens"),
        (chat("x", max_tokens=5000), 400, "max_tokens"),
        (chat("word " * 3000), 400, "messages"),
        (chat("x", stop=[""]), 400, "stop"),
        (chat("x", n=0), 400, "n"),
        (chat("x", logprobs=True), 400, "logprobs"),
    ],
    ids=str,
)
def test_bad_input_is_named_and_disturbs_nobody(one: Stack, body: Any, status: int, param: str | None) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    beside = chat("Count to ten.", stream=True)
    with one.http.stream("POST", "/v1/chat/completions", json=beside) as running:
        lines = running.iter_lines()
        next(lines)
        response = httpx.post(f"{one.url}/v1/chat/completions", content=content, timeout=60)
        assert response.status_code == status, response.text
        error = response.json()["error"]
        assert set(error) >= {"message", "type", "param", "code"}
        assert error["param"] == param
        assert [line for line in lines if line][-1] == "data: [DONE]"
    one.wait_idle()
    assert not any("Traceback" in line for line in one.lines), one.log()
