"""Every message on the bus, on one page.

All messages are msgpack arrays with a tag, decoded straight into these structs. A new field goes last and has a
default, so that neighbours of two versions understand each other. Token ids of prompts travel as packed little-endian
int32 (`pack_ids`), a step's few new ids as plain ints.

    api ──Encode, Decode, GetVocabulary──▶ tokenizer ──Encoded, Decoded, Vocabulary, CallFailed──▶ api
    api ──Submit, Abort──▶ scheduler ──Deltas, Rejected, Directory, Stats──▶ api
    scheduler ──Assign, Plan, Reset──▶ worker ──Ready, Result, Failed──▶ scheduler
    everyone ──Hello, Heartbeat, Goodbye──▶ scheduler ──Welcome, Heartbeat, Unknown──▶ everyone
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from typing import Any

import msgspec

from shared.config import EngineConfig
from shared.model_info import ModelInfo
from shared.sampling import SamplingParams

PROTOCOL = 1

HEARTBEAT_SECONDS = 1.0
DEAD_SECONDS = 3.0


def pack_ids(ids: Iterable[int]) -> bytes:
    """Token ids as little-endian int32 bytes."""
    packed = ids if isinstance(ids, array) else array("i", ids)
    if sys.byteorder == "big":
        packed = array("i", packed)
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """The inverse of `pack_ids`: an array of int32."""
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


class Message(msgspec.Struct, array_like=True, gc=False, tag=True, forbid_unknown_fields=False):
    """Base of all messages; the tag is the class name."""


class Part(msgspec.Struct, array_like=True, gc=False):
    """Base of the structs that travel inside a message."""


# Membership: every process and the scheduler.


class Hello(Message):
    """The first message of a peer, and its answer to `Unknown`."""

    role: str  # "api", "tokenizer" or "worker"
    name: str  # "host:pid", for logs
    address: str = ""  # a tokenizer: where its ROUTER listens; "" while it loads, it is not in the Directory then
    loaded: str = ""  # a worker: the fingerprint of the engine it has loaded, or ""
    protocol: int = PROTOCOL
    instance: str = ""  # the uuid of this process start; also the socket identity


class Welcome(Message):
    """The scheduler's answer to `Hello`: which scheduler this is and what it serves."""

    epoch: int  # grows with every scheduler start; a new epoch means that all its state is gone
    engine: EngineConfig
    model: ModelInfo


class Heartbeat(Message):
    """Sent every `HEARTBEAT_SECONDS` both ways; a peer silent for `DEAD_SECONDS` is dead."""

    epoch: int


class Unknown(Message):
    """The scheduler does not know the sender (it restarted, or gave the sender up): say `Hello` again."""


class Goodbye(Message):
    """The sender leaves on purpose."""


# api and tokenizer: stateless calls. A call is answered by the message that repeats its number.


class EncodeText(Message):
    """Texts to token ids."""

    call: int
    texts: list[str]
    add_special_tokens: bool = True
    want_strings: bool = False


class EncodeChat(Message):
    """A conversation, rendered through the chat template, to token ids."""

    call: int
    messages: bytes  # JSON: the request's messages, normalised
    options: bytes = b"{}"  # JSON: ChatOptions of shared/chat.py
    want_strings: bool = False


class Encoded(Message):
    """The ids of each text of an Encode call."""

    call: int
    ids: list[bytes]  # packed, one per text
    strings: list[list[str]] = []


MID_TEXT = b"\0"  # the decode state of a text whose beginning is elsewhere, such as the output after a prompt


class DecodeItem(Part):
    """One sequence's new ids. `state` is what the tokenizer handed back for the ids before them.

    At first it is b"" where the ids begin a text, and MID_TEXT where they continue one: the space that sentencepiece
    puts before a text's first word is then kept.
    """

    state: bytes
    ids: list[int]
    skip_special_tokens: bool = True
    final: bool = False  # no more ids follow: give up what is held back


class Decode(Message):
    """Ids of many sequences to text."""

    call: int
    items: list[DecodeItem]


class DecodedItem(Part):
    """New text of a sequence, and the state to send with its next ids."""

    text: str
    state: bytes


class Decoded(Message):
    """Answer to `Decode`, item by item."""

    call: int
    items: list[DecodedItem]


class GetVocabulary(Message):
    """Asks for what it takes to decode without asking; fails where that model is not loaded."""

    call: int
    model: str  # ModelInfo.path


class Vocabulary(Message):
    """Answer to `GetVocabulary`: the arguments of a `ByteDecoder`; no pieces where only a tokenizer can decode."""

    call: int
    pieces: list[bytes]
    special: list[int] = []
    strip: bool = False


class CallFailed(Message):
    """A call that cannot be answered because of its input; `param` names the field at fault."""

    call: int
    message: str
    param: str = ""


# api and scheduler


class Request(Part):
    """One sequence to generate. The n samples of an API request are n of these, the later ones forks of the first."""

    id: int  # unique within the api process
    attempt: int  # grows with every resubmission
    prompt: bytes  # packed ids
    params: SamplingParams  # seed is set
    output: bytes = b""  # packed ids generated by earlier attempts
    fork_of: int = -1  # id of the sibling whose prompt blocks this one shares
    age: float = 0.0  # seconds since the client's request arrived
    cache_salt: str = ""
    priority: int = 0


class Submit(Message):
    """Requests in order of arrival."""

    requests: list[Request]


class Abort(Message):
    """These requests are no longer wanted. Idempotent; has no answer."""

    ids: list[int]


class Delta(Part):
    """New output ids of a request. Accepted only for the current attempt at `index == len(output)`."""

    id: int
    attempt: int
    index: int  # how many output ids came before these
    ids: list[int]
    finish: str = ""  # "", "stop", "length" or "error"
    stop_token: int = -1  # the stop token that ended it (not the EOS)
    cached: int = -1  # prompt tokens read from the prefix cache; set on the first delta of an attempt
    message: str = ""  # with "error": what to tell the client


class Deltas(Message):
    """A step's new ids for one api process."""

    epoch: int
    items: list[Delta]


class Rejected(Message):
    """A request that was not taken; `kind` is "overloaded" or "invalid"."""

    id: int
    attempt: int
    kind: str
    message: str


class Peer(Part):
    """A tokenizer that api processes may connect to."""

    instance: str
    address: str


class Directory(Message):
    """All live tokenizers; sent to every api whenever it changes."""

    tokenizers: list[Peer]


class GroupStats(Part):
    """State of one worker group (a data-parallel engine). Counters count since the scheduler started."""

    group: int
    ready: bool
    running: int
    waiting: int
    swapped: int
    num_blocks: int
    block_size: int
    kv_usage: float  # share of blocks referenced by requests, 0 to 1
    prefix_queries: int  # counter, tokens
    prefix_hits: int  # counter, tokens
    preemptions: int  # counter
    prompt_tokens: int  # counter, tokens computed or read from the cache
    generation_tokens: int  # counter
    steps: int  # counter
    stalled: float  # seconds since the oldest plan in flight was sent; 0 when idle
    step_tokens: int = 0  # counter, rows computed
    idle: float = 0.0  # counter, seconds the worker waited for a plan while there was work


class Stats(Message):
    """What the scheduler tells every api each heartbeat, for /health and /metrics."""

    epoch: int
    ready: bool  # at least one group and one tokenizer can serve
    reason: str  # why not ready, for people
    groups: list[GroupStats]
    parked: int  # requests waiting for any group
    tokenizers: int
    workers: int
    schedule_seconds: float = 0.0  # counter: CPU time spent in the scheduler core
    progress: str = ""  # what loading workers report, for people


# scheduler and worker


class Assign(Message):
    """A worker's place. A new group epoch voids all plans and slots of the one before."""

    group: int
    epoch: int
    rank: int
    world_size: int
    rendezvous: str = ""


class Progress(Message):
    """A loading worker's state, for people."""

    text: str


class Ready(Message):
    """A worker has loaded the model and can run plans of this group epoch."""

    epoch: int
    num_blocks: int
    block_bytes: int  # over all layers of this rank
    backend: str
    fingerprint: str
    device: str = ""


class Failed(Message):
    """A worker cannot serve this model; it will exit. `reason` is one line for the operator."""

    reason: str


class Admit(Part):
    """A request takes a slot, whole: first time, or again after preemption."""

    slot: int
    tokens: bytes  # packed: prompt and output so far
    num_prompt: int
    params: SamplingParams


class Plan(Message):
    """One step. Applied in order: release, copies, admit, then the rows.

    The rows are parallel lists, one entry per scheduled slot: `counts[i]` tokens of slot `slots[i]` are computed,
    starting at position `starts[i]`, after `blocks[i]` are appended to its block table; where `samples[i]` is 1 the
    last of them yields the next token, which the worker appends to the slot's tokens itself.
    """

    epoch: int
    step: int
    release: list[int]
    copies: list[int]  # source, destination, source, destination ...
    admit: list[Admit]
    slots: list[int]
    starts: list[int]
    counts: list[int]
    samples: list[int]
    blocks: list[list[int]]


class Result(Message):
    """What a plan sampled: one token for each entry of its rows with `samples` 1, in order."""

    epoch: int
    step: int
    tokens: list[int]
    seconds: float = 0.0  # time the step took in the worker
    idle: float = 0.0  # seconds between the end of the step before and the beginning of this one


class Reset(Message):
    """Clear all slots; plans of this group epoch follow."""

    epoch: int


AnyMessage = (
    Hello
    | Welcome
    | Heartbeat
    | Unknown
    | Goodbye
    | EncodeText
    | EncodeChat
    | Encoded
    | Decode
    | Decoded
    | GetVocabulary
    | Vocabulary
    | CallFailed
    | Submit
    | Abort
    | Deltas
    | Rejected
    | Directory
    | Stats
    | Assign
    | Progress
    | Ready
    | Failed
    | Plan
    | Result
    | Reset
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """A message's bytes."""
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> Any:
    """The message in `data`. Raises msgspec.DecodeError (a ValueError) when it is none."""
    return _decoder.decode(data)
