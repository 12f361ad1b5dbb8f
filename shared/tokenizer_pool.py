"""Links to all tokenizers, and the calls that are out on them.

Calls are stateless, so one whose tokenizer is gone, or slow to answer, is simply made again on another; whichever
answer comes first counts. With no tokenizer alive, calls wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from shared.bus import Link
from shared.bus_async import AsyncDealer
from shared.errors import RequestError
from shared.messages import (
    CallFailed,
    Decode,
    Decoded,
    EncodeChat,
    Encoded,
    EncodeText,
    GetVocabulary,
    Message,
    Peer,
    Vocabulary,
)

log = logging.getLogger(__name__)

CREDITS = 32  # Encode calls out on one link at most, so that the others stay movable
PATIENCE_SECONDS = 10.0  # a call unanswered for this long is made again elsewhere
MAX_LOSSES = 5  # tokenizers that may die over one call before it is taken for the cause

CallMessage = EncodeText | EncodeChat | Decode | GetVocabulary
Answer = Encoded | Decoded | Vocabulary | RequestError


class Call:
    """One call until it is answered."""

    __slots__ = ("link", "losses", "message", "on_answer", "since")

    def __init__(self, message: CallMessage, on_answer: Callable[[Answer], None]) -> None:
        self.message = message
        self.on_answer = on_answer
        self.link: TokenizerLink | None = None
        self.since = 0.0  # when it was last sent, monotonic seconds
        self.losses = 0

    @property
    def urgent(self) -> bool:
        """Decodes pass Encodes and need no credit: running streams hang on them, and they are few."""
        return type(self.message) is Decode


class TokenizerLink:
    """One tokenizer: its socket and the calls it owes an answer, oldest first."""

    def __init__(self, peer: Peer, identity: bytes, pool: TokenizerPool) -> None:
        self.instance = peer.instance
        self.calls: dict[int, Call] = {}
        self.suspect = False  # has let a call wait too long and not answered anything since
        self.unlisted = 0.0  # since when the Directory does not name it; 0.0 while it does
        self.dealer = AsyncDealer(peer.address, identity, lambda events: pool.receive(self, events))

    @property
    def rank(self) -> tuple[bool, int]:
        """The least is the best to call."""
        return self.suspect or self.unlisted > 0, len(self.calls)


class TokenizerPool:
    """Spreads calls over the tokenizers of the Directory, least outstanding first.

    `on_batch` is called after each batch of answers and whenever the number of connected tokenizers changes.
    """

    def __init__(self, identity: bytes, on_batch: Callable[[], None]) -> None:
        self._identity = identity
        self._on_batch = on_batch
        self._links: dict[str, TokenizerLink] = {}
        self._calls: dict[int, Call] = {}  # all that are not answered
        self._urgent: deque[int] = deque()  # numbers of calls waiting for a link
        self._waiting: deque[int] = deque()
        self._next = 0

    @property
    def connected(self) -> int:
        """How many tokenizers can be called."""
        return sum(link.dealer.connected for link in self._links.values())

    def update(self, peers: list[Peer]) -> None:
        """Takes the scheduler's Directory. A link it does not name is left alone while there is no better one.

        A scheduler that has just started does not know all tokenizers yet; they serve on meanwhile.
        """
        named = {peer.instance: peer for peer in peers}
        for instance, link in self._links.items():
            link.unlisted = 0.0 if instance in named else (link.unlisted or time.monotonic())
        for instance, peer in named.items():
            if instance not in self._links:
                self._links[instance] = TokenizerLink(peer, self._identity, self)
        for link in self._links.values():
            if link.unlisted and self._better_than(link):
                self._recall(link)
        self._dispatch()
        self._on_batch()

    def call(self, message: CallMessage, on_answer: Callable[[Answer], None]) -> int:
        """Makes a call; sets its number and returns it. `on_answer` is called once, later, unless cancelled."""
        number = message.call = self._next
        self._next += 1
        call = Call(message, on_answer)
        self._calls[number] = call
        queue = self._urgent if call.urgent else self._waiting
        if queue or not self._send(number, call):
            queue.append(number)
        return number

    def cancel(self, number: int) -> None:
        """The answer is no longer wanted."""
        call = self._calls.get(number)
        if call is not None:
            self._settle(number, call)
            self._dispatch()

    def receive(self, link: TokenizerLink, events: list[Message | Link]) -> None:
        """A link's messages and changes, as they come."""
        for event in events:
            if isinstance(event, Encoded | Decoded | Vocabulary | CallFailed):
                link.suspect = False
                self._answer(event)
            elif event is Link.DOWN:
                self._lost(link)
        self._dispatch()
        self._on_batch()

    def tick(self, now: float) -> None:
        """Call about once a second: moves calls that wait too long, closes links that nobody names any more."""
        for link in list(self._links.values()):
            oldest = next(iter(link.calls.values()), None)
            if oldest is not None and now - oldest.since > PATIENCE_SECONDS:
                link.suspect = True
                if self._better_than(link):
                    log.warning(
                        "tokenizer %.8s has not answered for %.0f s; asking another", link.instance, PATIENCE_SECONDS
                    )
                    self._recall(link)
            gone = not link.dealer.connected or (now - link.unlisted > PATIENCE_SECONDS and not link.calls)
            if link.unlisted and gone:
                self._recall(link)
                self._links.pop(link.instance).dealer.close()
        self._dispatch()

    def close(self) -> None:
        """Closes all links; calls are never answered."""
        for link in self._links.values():
            link.dealer.close()
        self._links.clear()
        self._calls.clear()
        self._urgent.clear()
        self._waiting.clear()

    def _answer(self, message: Encoded | Decoded | Vocabulary | CallFailed) -> None:
        call = self._calls.get(message.call)
        if call is None:
            return  # cancelled, or answered twice after it had been moved
        self._settle(message.call, call)
        if isinstance(message, CallFailed):
            call.on_answer(RequestError(message.message, param=message.param or None))
        else:
            call.on_answer(message)

    def _settle(self, number: int, call: Call) -> None:
        del self._calls[number]
        if call.link is not None:
            call.link.calls.pop(number, None)

    def _lost(self, link: TokenizerLink) -> None:
        """The connection is gone and with it what was out on it."""
        if link.calls:
            log.warning("lost tokenizer %.8s with %d calls; asking another", link.instance, len(link.calls))
        for number, call in list(link.calls.items()):
            call.losses += 1
            if call.losses >= MAX_LOSSES:
                self._settle(number, call)
                call.on_answer(
                    RequestError(f"{MAX_LOSSES} tokenizers died over this input.", status=500, kind="server_error")
                )
        self._recall(link)

    def _recall(self, link: TokenizerLink) -> None:
        """Puts a link's calls back in front of the queues, in order."""
        for number, call in reversed(link.calls.items()):
            call.link = None
            (self._urgent if call.urgent else self._waiting).appendleft(number)
        link.calls.clear()

    def _dispatch(self) -> None:
        """Sends waiting calls while there is a link to take them."""
        for queue in (self._urgent, self._waiting):
            while queue:
                call = self._calls.get(queue[0])
                if call is not None and not self._send(queue[0], call):
                    break
                queue.popleft()

    def _send(self, number: int, call: Call) -> bool:
        link = self._best(CREDITS if not call.urgent else None)
        if link is None or not link.dealer.send(call.message):
            return False
        call.link = link
        call.since = time.monotonic()
        link.calls[number] = call
        return True

    def _best(self, credits: int | None) -> TokenizerLink | None:
        usable = [
            link
            for link in self._links.values()
            if link.dealer.connected and (credits is None or len(link.calls) < credits)
        ]
        return min(usable, key=lambda link: link.rank, default=None)

    def _better_than(self, link: TokenizerLink) -> bool:
        """Whether another tokenizer is in good standing."""
        return any(other is not link and other.dealer.connected and not other.rank[0] for other in self._links.values())
