"""The engine as the api process sees it: encode, generate, decode, over whatever processes are alive."""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from shared.chat import ChatOptions
from shared.config import EngineConfig
from shared.generation import Generation, Sample, SampleDelta
from shared.messages import Stats
from shared.model_info import ModelInfo
from shared.sampling import SamplingParams

__all__ = ["Encoding", "EngineClient", "EngineState", "Generation", "Sample", "SampleDelta"]


class EngineState(msgspec.Struct):
    """What is known of the engine; updated in place as messages arrive."""

    ready: bool = False  # a request sent now would be served
    reason: str = "connecting to the scheduler"  # why not ready, for people; "" when ready
    engine: EngineConfig | None = None  # None until the first Welcome, then kept while the scheduler is away
    model: ModelInfo | None = None
    stats: Stats | None = None  # the scheduler's last; stale while it is away
    heard: float = 0.0  # time.monotonic() of the last Stats
    epoch: int = 0  # of the scheduler last heard
    tokenizers: int = 0  # connected links


class Encoding(msgspec.Struct):
    """Token ids of each text, and their strings where asked for."""

    ids: list[array[int]]
    strings: list[list[str]] = []


class EngineClient:
    """A client of one engine, used from one event loop.

    All methods raise RequestError: 400 for bad input (with `param`), 503 with `retry_after` where the engine has no
    room or has never been ready, 500 (kind "server_error") where it failed. A lost process is never an error.
    """

    def __init__(self, scheduler: str, *, name: str = "") -> None:
        """`scheduler`: `tcp://host:port` or `ipc:///dir`; `name`: for the scheduler's log (default host:pid)."""
        self.state = EngineState()

    async def start(self) -> None:
        """Starts connecting in the background; does not wait for the engine."""
        raise NotImplementedError

    async def wait_ready(self) -> None:
        """Returns once `state.ready`."""
        raise NotImplementedError

    async def encode(
        self, texts: list[str], *, add_special_tokens: bool = True, want_strings: bool = False
    ) -> Encoding:
        """Texts to token ids. Waits for a tokenizer if none is alive."""
        raise NotImplementedError

    async def encode_chat(
        self, messages: list[dict[str, Any]], options: ChatOptions, want_strings: bool = False
    ) -> Encoding:
        """A conversation to token ids: `Encoding.ids` holds one array."""
        raise NotImplementedError

    async def decode(self, ids: list[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        raise NotImplementedError

    def generate(self, prompt: array[int], params: SamplingParams, *, cache_salt: str = "") -> Generation:
        """Starts answering a prompt; returns at once.

        `params.seed` None: one is drawn; `params.max_tokens` None: what the context leaves. Raises RequestError (400)
        for an empty prompt, an id outside the vocabulary, or a prompt that leaves no room in the context; (503) before
        the first Welcome, or while the scheduler is away and enough requests are parked.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Says Goodbye and fails what is still running (503)."""
        raise NotImplementedError
