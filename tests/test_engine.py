"""The engine client against small peers on real sockets: what a consumer sees while processes come and go."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop

from shared.chat import ChatOptions
from shared.config import EngineConfig
from shared.engine import EngineClient, Generation, SampleDelta
from shared.errors import RequestError
from shared.messages import (
    Abort,
    Decode,
    Delta,
    Deltas,
    Directory,
    EncodeText,
    Goodbye,
    Hello,
    Rejected,
    Request,
    Submit,
    Unknown,
)
from shared.sampling import SamplingParams
from tests.engine_fakes import EOS, MODEL, TIMEOUT, FakeScheduler, FakeTokenizer

TEXT = "Hello wörld, 你好 🌶 again and again."
IDS = list(TEXT.encode())


def fixed(ids: list[int]) -> Callable[[Request], list[int]]:
    """Every request gets these ids, cut at its max_tokens."""
    return lambda request: ids[: request.params.max_tokens]


def by_seed(request: Request) -> list[int]:
    """Each seed has its own text; the samples of a prompt differ in length too."""
    seed = request.params.seed or 0
    return [97 + (seed * 7 + i * i) % 26 for i in range(20 + seed % 5)][: request.params.max_tokens]


class Rig:
    """A client, its peers, and what is needed to replace them."""

    def __init__(self, folder: Path) -> None:
        folder.chmod(0o700)
        self.folder = folder
        self.address = f"ipc://{folder}"
        self.tokenizers: list[FakeTokenizer] = []
        self.scheduler: FakeScheduler
        self.schedulers: list[FakeScheduler] = []
        self.client = EngineClient(self.address, name="test")

    def tokenizer(self) -> FakeTokenizer:
        self.tokenizers.append(FakeTokenizer(f"ipc://{self.folder}/t{len(self.tokenizers)}"))
        return self.tokenizers[-1]

    def start_scheduler(self, answer: Callable[[Request], list[int]] = by_seed, **options: object) -> FakeScheduler:
        alive = [tokenizer for tokenizer in self.tokenizers if tokenizer._alive]
        self.scheduler = FakeScheduler(self.address, answer, alive, **options)  # type: ignore[arg-type]
        self.schedulers.append(self.scheduler)
        return self.scheduler

    async def start(self, answer: Callable[[Request], list[int]] = by_seed, **options: object) -> EngineClient:
        """One tokenizer, one scheduler, and a client that is ready."""
        self.tokenizer()
        self.start_scheduler(answer, **options)
        await self.client.start()
        async with asyncio.timeout(TIMEOUT):
            await self.client.wait_ready()
        return self.client

    async def close(self) -> None:
        await self.client.close()
        for peer in [*self.tokenizers, *self.schedulers]:
            peer.kill()

    def submitted(self) -> list[Request]:
        return [request for message in self.scheduler.received(Submit) for request in message.requests]  # type: ignore[attr-defined]

    def aborted(self) -> set[int]:
        return {id for message in self.scheduler.received(Abort) for id in message.ids}  # type: ignore[attr-defined]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    await rig.close()


def params(**values: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100, "seed": 1} | values))  # type: ignore[arg-type]


PROMPT = array("i", [1, 2, 3, 4])


async def deltas(generation: Generation) -> list[SampleDelta]:
    async with asyncio.timeout(TIMEOUT):
        return [delta async for batch in generation for delta in batch]


async def until_text(generation: Generation, length: int) -> None:
    """Reads deltas until sample 0 has so many characters."""
    async with asyncio.timeout(TIMEOUT):
        while len(generation.samples[0].text) < length:
            await anext(generation)


async def until(condition: Callable[[], bool]) -> None:
    """For states of the client that no event tells of."""
    async with asyncio.timeout(TIMEOUT):
        while not condition():
            await asyncio.sleep(0.001)


def expected(seed: int, **values: object) -> str:
    request = Request(0, 0, b"", params(seed=seed, **values))
    return bytes(by_seed(request)).decode()


# Plain use


async def test_encode_and_decode(rig: Rig) -> None:
    client = await rig.start()
    encoding = await client.encode(["hi", "é"], want_strings=True)
    assert [ids.tolist() for ids in encoding.ids] == [[104, 105], list("é".encode())]
    assert encoding.strings == [["h", "i"], ["é"]]
    chat = await client.encode_chat([{"role": "user", "content": "x"}], ChatOptions())
    assert bytes(chat.ids[0].tolist()).decode() == '[{"role":"user","content":"x"}]'
    assert await client.decode(IDS) == TEXT


async def test_bad_text_is_the_clients_fault(rig: Rig) -> None:
    client = await rig.start()
    with pytest.raises(RequestError, match="no such text") as caught:
        await client.encode(["bad"])
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    for call in (client.encode(["\ud83d"]), client.encode_chat([{"content": "\ud83d"}], ChatOptions())):
        with pytest.raises(RequestError, match="valid Unicode"):
            await call


async def test_a_stream_gives_the_text_in_order_and_ends(rig: Rig) -> None:
    client = await rig.start(fixed([*IDS, EOS]))
    generation = client.generate(PROMPT, params())
    got = await deltas(generation)
    assert "".join(delta.text for delta in got) == TEXT
    assert [id for delta in got for id in delta.ids] == [*IDS, EOS]
    assert "\ufffd" not in "".join(delta.text for delta in got)
    assert [delta.finish_reason for delta in got if delta.finish_reason] == ["stop"]
    assert got[-1].finish_reason == "stop"
    assert got[-1].stop_reason is None
    sample = generation.samples[0]
    assert (sample.text, sample.ids, sample.cached_tokens) == (TEXT, [*IDS, EOS], 3)


async def test_result_waits_for_the_end(rig: Rig) -> None:
    client = await rig.start(fixed(IDS))
    samples = await client.generate(PROMPT, params(max_tokens=5)).result()
    assert (samples[0].text, samples[0].finish_reason) == ("Hello", "length")


async def test_a_character_cut_by_the_limit_is_replaced_at_the_end(rig: Rig) -> None:
    client = await rig.start(fixed(list("🌶🌶".encode())))
    assert (await client.generate(PROMPT, params(max_tokens=6)).result())[0].text == "🌶\ufffd"


async def test_a_stop_token_is_named_and_has_no_text(rig: Rig) -> None:
    client = await rig.start(fixed([104, 105, 46]))
    sample = (await client.generate(PROMPT, params(stop_token_ids=[46])).result())[0]
    assert (sample.text, sample.ids, sample.finish_reason, sample.stop_reason) == ("hi", [104, 105, 46], "stop", 46)
    shown = client.generate(PROMPT, params(stop_token_ids=[46], include_stop_str_in_output=True))
    assert (await shown.result())[0].text == "hi."


async def test_samples_have_their_own_seeds_and_fork_the_first(rig: Rig) -> None:
    client = await rig.start()
    generation = client.generate(PROMPT, params(n=3, seed=5))
    got = await deltas(generation)
    for index in range(3):
        text = "".join(delta.text for delta in got if delta.index == index)
        assert text == generation.samples[index].text == expected(5 + index)
    assert sorted(delta.index for delta in got if delta.finish_reason) == [0, 1, 2]
    requests = rig.submitted()
    assert [request.params.seed for request in requests] == [5, 6, 7]
    assert [request.fork_of for request in requests] == [-1, requests[0].id, requests[0].id]
    assert len(rig.scheduler.received(Submit)) == 1


async def test_an_absent_max_tokens_is_what_the_context_leaves(rig: Rig) -> None:
    client = await rig.start()
    await client.generate(PROMPT, params(max_tokens=None)).result()
    assert rig.submitted()[0].params.max_tokens == MODEL.max_model_len - len(PROMPT)


async def test_the_engine_seed_makes_arrivals_repeat(rig: Rig) -> None:
    client = await rig.start(engine=EngineConfig(seed=3))
    await asyncio.gather(*(client.generate(PROMPT, params(seed=None)).result() for _ in "ab"))
    other = EngineClient(rig.address)
    await other.start()
    await other.wait_ready()
    await other.generate(PROMPT, params(seed=None)).result()
    await other.close()
    first, second, again = [request.params.seed for request in rig.submitted()]
    assert first == again != second


async def test_requests_of_one_turn_travel_together(rig: Rig) -> None:
    client = await rig.start()
    await asyncio.gather(*(client.generate(PROMPT, params(seed=seed)).result() for seed in range(8)))
    assert [len(message.requests) for message in rig.scheduler.received(Submit)] == [8]  # type: ignore[attr-defined]


async def test_one_decode_a_step_carries_all_streams(rig: Rig) -> None:
    client = await rig.start(allowed=0)
    results = [client.generate(PROMPT, params(seed=5 * seed)).result() for seed in range(16)]
    tasks = [asyncio.ensure_future(result) for result in results]
    await rig.scheduler.until(lambda: len(rig.scheduler.running) == 16)
    rig.scheduler.set(allowed=1)
    await rig.tokenizers[0].until(lambda: bool(rig.tokenizers[0].received(Decode)))
    assert [len(message.items) for message in rig.tokenizers[0].received(Decode)] == [16]  # type: ignore[attr-defined]
    rig.scheduler.set(allowed=1000)
    await asyncio.gather(*tasks)


async def test_with_the_vocabulary_a_step_is_one_message_and_none_goes_to_a_tokenizer(rig: Rig) -> None:
    rig.tokenizers.append(FakeTokenizer(f"ipc://{rig.folder}/open", open=True))
    rig.start_scheduler(allowed=0)
    await rig.client.start()
    await rig.client.wait_ready()
    await until(lambda: not rig.client._pool._calls)  # the vocabulary is here
    results = [rig.client.generate(PROMPT, params(seed=5 * seed)).result() for seed in range(16)]
    tasks = [asyncio.ensure_future(result) for result in results]
    await rig.scheduler.until(lambda: len(rig.scheduler.running) == 16)
    rig.scheduler.set(allowed=1000)
    samples = await asyncio.gather(*tasks)
    assert [sample.text for [sample] in samples] == [expected(5 * seed) for seed in range(16)]
    assert not rig.tokenizers[0].received(Decode)
    assert len(rig.scheduler.received(Submit)) == 1
    assert not rig.scheduler.received(Abort)


async def test_a_slow_reader_finds_everything_merged(rig: Rig) -> None:
    client = await rig.start()
    generation = client.generate(PROMPT, params(seed=3))
    last = client.generate(PROMPT, params(seed=3))
    await last.result()
    got = await deltas(generation)
    assert [(delta.text, delta.finish_reason) for delta in got] == [(expected(3), "length")]


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_runs_in_either_event_loop(tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def scenario() -> None:
        rig = Rig(tmp_path)
        client = await rig.start(allowed=7)
        generation = client.generate(PROMPT, params(seed=1, stop=["zz"]))
        await until_text(generation, 7)
        rig.scheduler.kill()
        rig.start_scheduler()
        await deltas(generation)
        assert generation.samples[0].text == expected(1)
        await rig.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(scenario())


# Stop strings


@pytest.mark.parametrize("chunk", [1, 3, 50])
async def test_a_stop_string_across_tokens_ends_the_stream_at_its_token(rig: Rig, chunk: int) -> None:
    client = await rig.start(fixed([*IDS, EOS]))
    rig.scheduler.set(chunk=chunk)
    generation = client.generate(PROMPT, params(stop=["xyz", "好 🌶"]))
    got = await deltas(generation)
    before = TEXT[: TEXT.index("好 🌶")]
    assert "".join(delta.text for delta in got) == before
    assert (got[-1].finish_reason, got[-1].stop_reason) == ("stop", "好 🌶")
    assert generation.samples[0].ids == list((before + "好 🌶").encode())


@pytest.mark.parametrize("chunk", [1, 50])
async def test_included_stop_strings_are_the_last_of_the_text(rig: Rig, chunk: int) -> None:
    client = await rig.start(fixed(list(b"Hello world again")))
    rig.scheduler.set(chunk=chunk)
    sample = (await client.generate(PROMPT, params(stop=["orl"], include_stop_str_in_output=True)).result())[0]
    assert (sample.text, len(sample.ids)) == ("Hello worl", 10)


@pytest.mark.parametrize("chunk", [1, 4, 50])
async def test_stop_strings_do_not_count_before_min_tokens(rig: Rig, chunk: int) -> None:
    client = await rig.start(fixed(list(b"ab ab ab ab")))
    rig.scheduler.set(chunk=chunk)
    sample = (await client.generate(PROMPT, params(stop=["ab"], min_tokens=5)).result())[0]
    assert (sample.text, len(sample.ids)) == ("ab ab ", 8)
    assert sample.finish_reason == "stop"
    spanning = (await client.generate(PROMPT, params(stop=["ab"], min_tokens=4)).result())[0]
    assert spanning.text == "ab "


async def test_a_stop_string_aborts_and_what_still_comes_is_dropped(rig: Rig) -> None:
    client = await rig.start(fixed([97] * 90), allowed=4)
    generation = client.generate(PROMPT, params(stop=["aaa"]))
    await generation.result()
    rig.scheduler.set(allowed=90)
    await rig.scheduler.until(lambda: rig.aborted() == {0} and not rig.scheduler.running)
    assert (generation.samples[0].text, generation.samples[0].ids) == ("", [97] * 3)


async def test_what_could_begin_a_stop_is_sent_at_the_end(rig: Rig) -> None:
    client = await rig.start(fixed(list(b"one <|im")))
    got = await deltas(client.generate(PROMPT, params(stop=["<|im_end|>"])))
    assert "".join(delta.text for delta in got) == "one <|im"
    assert got[-1].text.endswith("<|im")


# Leaving early


async def test_abort_frees_the_request_and_is_idempotent(rig: Rig) -> None:
    client = await rig.start(allowed=2)
    generation = client.generate(PROMPT, params(n=2))
    await until_text(generation, 1)
    generation.abort()
    generation.abort()
    assert generation.finished
    await rig.scheduler.until(lambda: not rig.scheduler.running and rig.aborted() == {0, 1})
    assert all(delta.finish_reason is None for delta in await deltas(generation))
    assert len(client._journal) == len(client._streams) == 0


async def test_abort_in_the_turn_of_its_birth_sends_nothing(rig: Rig) -> None:
    client = await rig.start()
    client.generate(PROMPT, params()).abort()
    await client.generate(PROMPT, params()).result()
    assert [request.id for request in rig.submitted()] == [1]


async def test_deltas_of_an_unknown_request_are_answered_by_an_abort(rig: Rig) -> None:
    client = await rig.start(allowed=0)
    generation = client.generate(PROMPT, params())
    await rig.scheduler.until(lambda: len(rig.scheduler.running) == 1)
    running = dict(rig.scheduler.running)
    generation.abort()
    await rig.scheduler.until(lambda: not rig.scheduler.running)
    rig.scheduler.set(running=running, allowed=5)
    await rig.scheduler.until(lambda: len(rig.scheduler.received(Abort)) > 1 and not rig.scheduler.running)


# Lost processes and lost messages


async def test_killed_tokenizers_are_not_noticed(rig: Rig) -> None:
    first, second = rig.tokenizer(), rig.tokenizer()
    client = await rig.start()  # with a third
    await until(lambda: client.state.tokenizers == 3)
    for tokenizer in rig.tokenizers:
        tokenizer.set(holding=True)
    generations = [client.generate(PROMPT, params(seed=seed)) for seed in range(6)]
    encodings = [asyncio.ensure_future(client.encode(["hi"])) for _ in range(6)]
    await asyncio.gather(*(t.until(lambda t=t: bool(t.received(EncodeText))) for t in rig.tokenizers))
    first.kill()
    second.kill()
    rig.tokenizers[2].set(holding=False)
    for seed, generation in enumerate(generations):
        assert "".join(delta.text for delta in await deltas(generation)) == expected(seed)
    for encoding in encodings:
        assert (await encoding).ids[0].tolist() == [104, 105]
    await until(lambda: client.state.tokenizers == 1)


async def test_streams_wait_for_the_next_tokenizer(rig: Rig) -> None:
    client = await rig.start(allowed=3)
    generation = client.generate(PROMPT, params(seed=9))
    await until_text(generation, 3)
    rig.tokenizers[0].kill()
    await until(lambda: client.state.reason == "no tokenizer is connected")
    rig.scheduler.set(allowed=100)
    await until(lambda: client._streams[0].entry.finish == "length")
    assert not generation.finished
    rig.scheduler.set(notice=Directory([rig.tokenizer().peer]))
    await deltas(generation)
    assert generation.samples[0].text == expected(9)
    assert client.state.ready


@pytest.mark.parametrize("stop", [[], ["zzz"]])
async def test_streams_go_on_with_a_new_scheduler(rig: Rig, stop: list[str]) -> None:
    client = await rig.start(allowed=7)
    generations = [client.generate(PROMPT, params(seed=seed, n=2, stop=stop)) for seed in (1, 10, 20)]
    for generation in generations:
        await until_text(generation, 7)
    rig.scheduler.kill()
    await until(lambda: not client.state.ready)
    assert "no answer from the scheduler" in client.state.reason
    parked = client.generate(PROMPT, params(seed=30))
    rig.start_scheduler()
    for seed, generation in zip((1, 10, 20), generations, strict=True):
        await deltas(generation)
        assert [sample.text for sample in generation.samples] == [expected(seed), expected(seed + 1)]
    assert (await parked.result())[0].text == expected(30)
    requests = rig.submitted()
    assert [request.attempt for request in requests] == [1] * 6 + [0]
    assert [request.id for request in requests] == list(range(7))
    assert len(rig.scheduler.received(Submit)) == 1


async def test_an_unknown_makes_it_say_hello_and_submit_again(rig: Rig) -> None:
    client = await rig.start(allowed=3)
    generation = client.generate(PROMPT, params(seed=4))
    await until_text(generation, 3)
    rig.scheduler.set(running={}, notice=Unknown())
    await rig.scheduler.until(lambda: len(rig.scheduler.received(Hello)) == 2)
    rig.scheduler.set(allowed=100)
    await deltas(generation)
    assert generation.samples[0].text == expected(4)


@pytest.mark.parametrize("stop", [[], ["zzz"]])
async def test_repeated_and_overlapping_deltas_count_once(rig: Rig, stop: list[str]) -> None:
    client = await rig.start(allowed=0)
    sent: dict[int, list[int]] = {}

    def repeat(items: list[Delta]) -> list[Delta]:
        out = list(items)
        for delta in items:
            seen = sent.setdefault(delta.id, [])
            seen += delta.ids
            out += [Delta(delta.id, delta.attempt, 0, list(seen)), delta]
        return out

    rig.scheduler.set(mangle=repeat, allowed=100)
    generation = client.generate(PROMPT, params(seed=6, stop=stop))
    await deltas(generation)
    assert (generation.samples[0].text, generation.samples[0].ids) == (expected(6), list(expected(6).encode()))


async def test_lost_deltas_lead_to_a_resubmission(rig: Rig) -> None:
    client = await rig.start(allowed=0)
    lost: list[Delta] = []

    def lose(items: list[Delta]) -> list[Delta]:
        if not lost and items[0].index == 5:
            lost.extend(items)
            return []
        return items

    rig.scheduler.set(mangle=lose, allowed=100)
    generation = client.generate(PROMPT, params(seed=6))
    await deltas(generation)
    assert lost
    assert generation.samples[0].text == expected(6)
    assert [(request.attempt, len(request.output) // 4) for request in rig.submitted()] == [(0, 0), (1, 5)]


async def test_deltas_of_another_epoch_are_ignored(rig: Rig) -> None:
    client = await rig.start(allowed=0)
    generation = client.generate(PROMPT, params(seed=2))
    await rig.scheduler.until(lambda: len(rig.scheduler.running) == 1)
    rig.scheduler.set(notice=Deltas(rig.scheduler.epoch - 1, [Delta(0, 0, 0, [122], "stop")]))
    rig.scheduler.set(allowed=100)
    await deltas(generation)
    assert generation.samples[0].text == expected(2)


# Refusals and failures


async def test_no_room_is_a_503_that_says_when_to_come_back(rig: Rig) -> None:
    client = await rig.start(allowed=0, engine=EngineConfig())
    rig.scheduler.set(limit=1)
    first = client.generate(PROMPT, params(seed=1))
    second = client.generate(PROMPT, params(seed=2, n=2))
    with pytest.raises(RequestError, match="full") as caught:
        await second.result()
    assert (caught.value.status, caught.value.kind) == (503, "server_error")
    assert caught.value.retry_after
    rig.scheduler.set(allowed=100)
    assert (await first.result())[0].text == expected(1)
    assert len(client._streams) == 0


async def test_after_a_recovery_no_room_means_wait(rig: Rig) -> None:
    client = await rig.start(allowed=3)
    generations = [client.generate(PROMPT, params(seed=seed)) for seed in (1, 2)]
    for generation in generations:
        await until_text(generation, 3)
    rig.scheduler.kill()
    rig.start_scheduler(allowed=0, limit=1)
    await rig.scheduler.until(lambda: len(rig.submitted()) == 2)
    rig.scheduler.set(limit=2)
    await rig.scheduler.until(lambda: len(rig.scheduler.running) == 2)
    rig.scheduler.set(allowed=100)
    for seed, generation in zip((1, 2), generations, strict=True):
        await deltas(generation)
        assert generation.samples[0].text == expected(seed)


async def test_an_invalid_request_fails_alone(rig: Rig) -> None:
    client = await rig.start(allowed=0)
    bad, good = client.generate(PROMPT, params()), client.generate(PROMPT, params())
    rig.scheduler.set(notice=Rejected(0, 0, "invalid", "cannot be served"))
    with pytest.raises(RequestError, match="cannot be served") as caught:
        await bad.result()
    assert caught.value.status == 400
    rig.scheduler.set(notice=Rejected(1, 9, "invalid", "of another attempt"), allowed=100)
    assert (await good.result())[0].text == expected(1)


async def test_what_came_before_a_failure_is_delivered_first(rig: Rig) -> None:
    client = await rig.start(allowed=2)
    generation = client.generate(PROMPT, params(n=2))
    other = client.generate(PROMPT, params(seed=8))
    await until_text(generation, 2)

    def fail(items: list[Delta]) -> list[Delta]:
        return [Delta(d.id, d.attempt, d.index, [], "error", message="three times") if d.id == 0 else d for d in items]

    rig.scheduler.set(mangle=fail, allowed=3)
    with pytest.raises(RequestError, match="three times") as caught:
        await deltas(generation)
    assert (caught.value.status, caught.value.kind) == (500, "server_error")
    assert generation.samples[0].text == expected(1)[:2]
    rig.scheduler.set(allowed=100)
    assert (await other.result())[0].text == expected(8)


async def test_ids_that_cannot_be_decoded_fail_only_their_own_request(rig: Rig) -> None:
    client = await rig.start(lambda request: [97, 299, 98] if request.params.seed == 1 else [97, 98])
    bad, good = (client.generate(PROMPT, params(seed=seed)) for seed in (1, 2))
    assert (await good.result())[0].text == "ab"
    with pytest.raises(RequestError, match="cannot be decoded") as caught:
        await bad.result()
    assert caught.value.status == 500


@pytest.mark.parametrize(
    ("prompt", "values", "param"),
    [
        ([], {}, "prompt"),
        ([300], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1] * MODEL.max_model_len, {}, "prompt"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"stop": [""]}, "stop"),
        ([1], {"stop": ["\ud83d"]}, "stop"),
    ],
)
async def test_bad_input_is_refused_before_it_is_sent(
    rig: Rig, prompt: list[int], values: dict[str, object], param: str
) -> None:
    client = await rig.start()
    with pytest.raises(RequestError) as caught:
        client.generate(array("i", prompt), params(**values))
    assert (caught.value.status, caught.value.param) == (400, param)
    if len(prompt) > 1:
        assert caught.value.code == "context_length_exceeded"
        assert "maximum context length" in caught.value.message


async def test_before_the_first_welcome_requests_are_refused(rig: Rig) -> None:
    await rig.client.start()
    with pytest.raises(RequestError) as caught:
        rig.client.generate(PROMPT, params())
    assert caught.value.status == 503
    assert not rig.client.state.ready


async def test_close_says_goodbye_and_fails_what_runs(rig: Rig) -> None:
    client = await rig.start(allowed=1)
    generation = client.generate(PROMPT, params())
    await until_text(generation, 1)
    await client.close()
    with pytest.raises(RequestError, match="shutting down"):
        await generation.result()
    await rig.scheduler.until(lambda: bool(rig.scheduler.received(Goodbye)) and not rig.scheduler.running)


async def test_a_cancelled_encode_leaves_no_trace(rig: Rig) -> None:
    client = await rig.start()
    await until(lambda: not client._pool._calls)  # the vocabulary's
    rig.tokenizers[0].set(holding=True)
    task = asyncio.ensure_future(client.encode(["a"]))
    await rig.tokenizers[0].until(lambda: bool(rig.tokenizers[0].received(EncodeText)))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not client._pool._calls
