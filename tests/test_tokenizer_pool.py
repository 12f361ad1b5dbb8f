"""Calls find their answers whatever happens to tokenizers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from shared.bus import new_identity
from shared.errors import RequestError
from shared.messages import Decode, DecodeItem, EncodeText
from shared.tokenizer_pool import CREDITS, MAX_LOSSES, PATIENCE_SECONDS, Answer, TokenizerPool
from tests.engine_fakes import TIMEOUT, FakeTokenizer

Make = Callable[[], FakeTokenizer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[FakeTokenizer] = []
    tmp_path.chmod(0o700)

    def one() -> FakeTokenizer:
        made.append(FakeTokenizer(f"ipc://{tmp_path}/t{len(made)}"))
        return made[-1]

    yield one
    for tokenizer in made:
        tokenizer.kill()


class Client:
    """A pool, and what it has been told."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.pool = TokenizerPool(new_identity(), self.changed.set)

    async def connect(self, *tokenizers: FakeTokenizer) -> None:
        self.pool.update([tokenizer.peer for tokenizer in tokenizers])
        await self.until(lambda: self.pool.connected == len(tokenizers))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not condition():
                await self.changed.wait()
                self.changed.clear()

    def call(self, message: EncodeText | Decode) -> asyncio.Future[Answer]:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.pool.call(message, lambda answer: future.done() or future.set_result(answer))
        return future

    def encode(self, text: str = "a") -> asyncio.Future[Answer]:
        return self.call(EncodeText(0, [text]))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    client = Client()
    yield client
    client.pool.close()


async def answer(future: asyncio.Future[Answer]) -> Answer:
    async with asyncio.timeout(TIMEOUT):
        return await future


def load(tokenizer: FakeTokenizer) -> int:
    return len(tokenizer.received(EncodeText))


async def test_a_call_is_answered(client: Client, make: Make) -> None:
    await client.connect(make())
    assert (await answer(client.encode("hi"))).ids == [b"h\0\0\0i\0\0\0"]
    decoded = await answer(client.call(Decode(0, [DecodeItem(b"", [104, 105])])))
    assert decoded.items[0].text == "hi"


async def test_bad_input_names_the_field(client: Client, make: Make) -> None:
    await client.connect(make())
    error = await answer(client.encode("bad"))
    assert isinstance(error, RequestError)
    assert (error.message, error.param, error.status) == ("no such text", "prompt", 400)


async def test_calls_wait_for_a_tokenizer(client: Client, make: Make) -> None:
    futures = [client.encode(text) for text in "abc"]
    await client.connect(make())
    assert [(await answer(future)).ids[0][:1] for future in futures] == [b"a", b"b", b"c"]


async def test_the_least_loaded_is_called(client: Client, make: Make) -> None:
    one, two, three = make(), make(), make()
    for tokenizer in (one, two, three):
        tokenizer.set(holding=True)
    await client.connect(one, two, three)
    futures = [client.encode() for _ in range(12)]
    for tokenizer in (one, two, three):
        await tokenizer.until(lambda t=tokenizer: load(t) == 4)
        tokenizer.set(holding=False)
    await asyncio.gather(*map(answer, futures))


async def test_credits_bound_encodes_and_decodes_pass_them(client: Client, make: Make) -> None:
    tokenizer = make()
    tokenizer.set(holding=True)
    await client.connect(tokenizer)
    encodes = [client.encode() for _ in range(CREDITS + 5)]
    decode = client.call(Decode(0, [DecodeItem(b"", [104])]))
    await tokenizer.until(lambda: bool(tokenizer.received(Decode)))
    assert load(tokenizer) == CREDITS
    tokenizer.set(holding=False)
    await asyncio.gather(*map(answer, encodes), answer(decode))
    assert load(tokenizer) == CREDITS + 5


async def test_a_killed_tokenizer_s_calls_are_made_again_on_another(client: Client, make: Make) -> None:
    one, two = make(), make()
    one.set(holding=True)
    two.set(holding=True)
    await client.connect(one, two)
    futures = [client.encode() for _ in range(10)]
    await one.until(lambda: load(one) == 5)
    one.kill()
    two.set(holding=False)
    await asyncio.gather(*map(answer, futures))
    assert load(two) == 10


async def test_with_all_killed_calls_wait_for_the_next_one(client: Client, make: Make) -> None:
    one = make()
    one.set(holding=True)
    await client.connect(one)
    future = client.encode()
    await one.until(lambda: load(one) == 1)
    one.kill()
    await client.until(lambda: client.pool.connected == 0)
    assert not future.done()
    two = make()
    client.pool.update([two.peer])
    await answer(future)


async def test_an_input_that_kills_every_tokenizer_is_refused(client: Client, make: Make) -> None:
    future = client.encode("poison")
    for _ in range(MAX_LOSSES):
        assert not future.done()
        tokenizer = make()
        tokenizer.set(holding=True)
        client.pool.update([tokenizer.peer])
        await tokenizer.until(lambda t=tokenizer: load(t) == 1)
        tokenizer.kill()
        await client.until(lambda: client.pool.connected == 0)
    error = await answer(future)
    assert isinstance(error, RequestError)
    assert error.status == 500


async def test_one_that_does_not_answer_is_passed_over_until_it_does(client: Client, make: Make) -> None:
    one, two = make(), make()
    one.set(holding=True)
    await client.connect(one)
    stuck = client.encode("x")
    await one.until(lambda: load(one) == 1)
    await client.connect(one, two)
    client.pool.tick(time.monotonic() + PATIENCE_SECONDS / 2)
    assert not stuck.done()
    client.pool.tick(time.monotonic() + PATIENCE_SECONDS + 1)
    await answer(stuck)
    for _ in range(3):
        await answer(client.encode())
    assert (load(one), load(two)) == (1, 4)
    one.set(holding=False)  # its late answer shows that it is well again
    two.set(holding=True)
    future = client.encode()
    await asyncio.gather(one.until(lambda: not one.held), two.until(lambda: load(two) == 5 or load(one) == 2))
    two.set(holding=False)
    await answer(future)


async def test_alone_it_is_waited_for(client: Client, make: Make) -> None:
    one = make()
    one.set(holding=True)
    await client.connect(one)
    future = client.encode()
    await one.until(lambda: load(one) == 1)
    client.pool.tick(time.monotonic() + PATIENCE_SECONDS + 1)
    one.set(holding=False)
    await answer(future)
    assert load(one) == 1


async def test_one_the_directory_no_longer_names_hands_its_calls_over(client: Client, make: Make) -> None:
    one, two = make(), make()
    one.set(holding=True)
    await client.connect(one)
    future = client.encode()
    await one.until(lambda: load(one) == 1)
    await client.connect(one, two)
    client.pool.update([two.peer])
    await answer(future)
    client.pool.tick(time.monotonic() + PATIENCE_SECONDS + 1)
    assert client.pool.connected == 1


async def test_an_empty_directory_of_a_new_scheduler_takes_nothing_away(client: Client, make: Make) -> None:
    one = make()
    await client.connect(one)
    client.pool.update([])
    await answer(client.encode())
    client.pool.update([one.peer])
    client.pool.tick(time.monotonic() + PATIENCE_SECONDS + 1)
    await answer(client.encode())


async def test_a_cancelled_call_gives_its_credit_back(client: Client, make: Make) -> None:
    one = make()
    one.set(holding=True)
    await client.connect(one)
    numbers = [client.pool.call(EncodeText(0, ["a"]), lambda _: pytest.fail("cancelled")) for _ in range(CREDITS + 2)]
    last = client.encode()
    for number in reversed(numbers):
        client.pool.cancel(number)
    await one.until(lambda: load(one) == CREDITS + 1)
    one.set(holding=False)
    await answer(last)
    client.pool.cancel(numbers[0])  # no longer there
