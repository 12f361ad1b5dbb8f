"""From accepted output ids to text in the hands of the consumer, for all running sequences at once.

Ids are decoded here where the vocabulary allows it, else by a tokenizer: sequences with new ids together, one message
per wake-up. A sequence has one decode out at a time; ids that come meanwhile go with the next. Stop strings are judged
on the decoded text, and end a sequence at the token that completed them, however its ids were batched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from shared.errors import RequestError
from shared.generation import Generation
from shared.journal import Entry
from shared.local_decoder import LocalDecoder
from shared.messages import Decode, Decoded, DecodedItem, DecodeItem
from shared.stops import StopMatcher
from shared.tokenizer_pool import Answer, TokenizerPool

SPLIT = 64  # items in a Decode below which it is not worth dividing among tokenizers


class Stream:
    """A sequence's way from its journal entry to its sample."""

    __slots__ = (
        "busy",
        "closed",
        "entry",
        "final",
        "generation",
        "index",
        "matcher",
        "min_tokens",
        "reported",
        "siblings",
    )

    def __init__(
        self, entry: Entry, generation: Generation, index: int, stops: list[str], siblings: list[Stream]
    ) -> None:
        self.entry = entry
        self.siblings = siblings  # all samples of the prompt
        self.generation = generation
        self.index = index
        include = entry.params.include_stop_str_in_output
        self.matcher = StopMatcher(stops, include=include) if stops else None
        self.min_tokens = entry.params.min_tokens if stops else 0
        self.busy = False  # a decode is out, or about to be sent
        self.final = False  # the decode that is out is the last one
        self.reported = 0  # output ids passed on with their text
        self.closed = False

    def next_item(self) -> DecodeItem | None:
        """What to decode next; None when there is nothing to."""
        taken = self.entry.next_ids(self.min_tokens)
        if taken is None:
            return None
        ids, self.final = taken
        entry = self.entry
        return DecodeItem(entry.state, ids, entry.params.skip_special_tokens, self.final)


class Detokenizer:
    """Decodes and passes on.

    `on_stop` is told of each sequence that has met a stop string while the engine still works on it, `on_end` of each
    whose sample is complete, `on_fail` of one that cannot go on.
    """

    def __init__(
        self,
        pool: TokenizerPool,
        local: LocalDecoder,
        on_stop: Callable[[Stream], None],
        on_end: Callable[[Stream], None],
        on_fail: Callable[[Stream, RequestError], None],
    ) -> None:
        self._pool = pool
        self._local = local
        self._on_stop = on_stop
        self._on_end = on_end
        self._on_fail = on_fail
        self._ready: list[Stream] = []  # with something to decode and no decode out

    def push(self, stream: Stream) -> None:
        """The stream's entry has changed."""
        if not stream.busy:
            stream.busy = True
            self._ready.append(stream)

    def flush(self) -> None:
        """Decodes what is there. Call once per wake-up, after all messages have been read."""
        while self._ready:
            self._flush()

    def _flush(self) -> None:
        ready, self._ready = self._ready, []
        batch: list[Stream] = []
        items: list[DecodeItem] = []
        for stream in ready:
            if stream.closed:
                continue
            item = stream.next_item()
            if item is not None:
                batch.append(stream)
                items.append(item)
            else:
                self._idle(stream)
        if self._local.decoder is not None:
            size = max(1, len(batch))
        else:
            size = max(SPLIT, -(-len(batch) // max(1, self._pool.connected)))
        for start in range(0, len(batch), size):
            self._call(batch[start : start + size], items[start : start + size])

    def _call(self, batch: list[Stream], items: list[DecodeItem]) -> None:
        self._ask(items, lambda answer: self._decoded(batch, items, answer))

    def _ask(self, items: list[DecodeItem], on_answer: Callable[[Answer], None]) -> None:
        """Calls back with Decoded or a RequestError: at once if that can be had here."""
        if self._local.decoder is None:
            self._pool.call(Decode(0, items), on_answer)
            return
        decode = self._local.decoder.decode
        try:
            answer: Answer = Decoded(0, [decode(item) for item in items])
        except ValueError as error:
            answer = RequestError(f"{error}.", param="tokens")
        on_answer(answer)

    def _idle(self, stream: Stream) -> None:
        """Nothing to decode: the stream waits for ids, or has ended on a token without text."""
        stream.busy = False
        if stream.entry.finish:
            self._finish(stream, "")

    def _decoded(self, batch: list[Stream], items: list[DecodeItem], answer: Answer) -> None:
        """The one loop over the texts of a step."""
        if isinstance(answer, RequestError):
            self._refused(batch, items, answer)
            return
        decoded = cast(Decoded, answer).items
        for stream, sent, item in zip(batch, items, decoded, strict=True):
            if stream.closed:
                continue
            entry, matcher = stream.entry, stream.matcher
            text = item.text
            if matcher is not None:
                text = matcher.feed(text, honour=entry.decoded > stream.min_tokens)
                if matcher.matched is not None:
                    self._locate(stream, sent, item, text)
                    continue
            entry.state = item.state
            if stream.final:
                self._finish(stream, text)
                continue
            stream.generation.grow(stream.index, text, sent.ids)
            stream.reported = entry.decoded
            stream.busy = False
            if entry.finish or len(entry.output) > stream.reported:
                self.push(stream)

    def _refused(self, batch: list[Stream], items: list[DecodeItem], error: RequestError) -> None:
        """One sequence's ids cannot be decoded; the others shall not suffer from it."""
        if len(batch) > 1:
            for stream, item in zip(batch, items, strict=True):
                self._call([stream], [item])
        elif not batch[0].closed:
            self._on_fail(batch[0], undecodable(error))

    def _finish(self, stream: Stream, text: str) -> None:
        """All ids have been decoded; `text` is the last of it."""
        entry, matcher = stream.entry, stream.matcher
        if matcher is not None:
            text += matcher.flush()
        stop_token = entry.stop_token if entry.stop_token >= 0 else None
        self._end(stream, text, len(entry.output), entry.finish, stop_token)

    def _locate(self, stream: Stream, sent: DecodeItem, item: DecodedItem, text: str) -> None:
        """A stop string was completed by one of the ids sent: find which, by decoding each beginning of them."""
        ids = sent.ids
        matcher = stream.matcher
        assert matcher is not None
        first = stream.entry.decoded - len(ids)
        matched, end = matcher.matched, matcher.end
        if not stream.entry.finish:
            stream.entry.finish = "stop"  # so that it is not resubmitted
            self._on_stop(stream)
        if len(ids) <= 1:
            self._end(stream, text, first + len(ids), "stop", matched)
            return

        def located(answer: Answer) -> None:
            if stream.closed:
                return
            if isinstance(answer, RequestError):
                self._on_fail(stream, undecodable(answer))
                return
            lengths = [len(part.text) for part in cast(Decoded, answer).items]
            count = next((k for k, length in enumerate(lengths, 1) if length >= end), len(ids))
            self._end(stream, text, first + count, "stop", matched)

        skip = sent.skip_special_tokens
        beginnings = [DecodeItem(sent.state, ids[:k], skip) for k in range(1, len(ids))]
        self._ask(beginnings, located)

    def _end(self, stream: Stream, text: str, count: int, reason: str, stop_reason: str | int | None) -> None:
        """The sequence has ended after `count` output ids."""
        stream.generation.grow(stream.index, text, stream.entry.output[stream.reported : count].tolist())
        stream.closed = True
        stream.generation.finish(stream.index, reason, stop_reason)
        self._on_end(stream)


def undecodable(error: RequestError) -> RequestError:
    """A tokenizer refused ids that the engine produced: nothing the client could change."""
    return RequestError(f"The output cannot be decoded: {error.message}", status=500, kind="server_error")
