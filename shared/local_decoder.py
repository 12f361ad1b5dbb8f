"""Decoding in the process that needs the text: a step's round trip to a tokenizer costs more than the decoding."""

from __future__ import annotations

from functools import partial

from shared.byte_decoder import ByteDecoder
from shared.messages import GetVocabulary, Vocabulary
from shared.tokenizer_pool import Answer, TokenizerPool


class LocalDecoder:
    """The decoder of the model served, as soon as a tokenizer has told its vocabulary.

    `decoder` stays None where ids can only be decoded by asking.
    """

    def __init__(self, pool: TokenizerPool) -> None:
        self.decoder: ByteDecoder | None = None
        self._pool = pool
        self._model: str | None = None
        self._known = False
        self._asked = False

    def serve(self, model: str) -> None:
        """The path of the model served; ids of another one are not decoded with what is known."""
        if model != self._model:
            self._model, self._known, self.decoder = model, False, None
            self.ask()

    def ask(self) -> None:
        """Asks a tokenizer unless all is known; again after a refusal, so to be called now and then."""
        if self._model is not None and not self._known and not self._asked:
            self._asked = True
            self._pool.call(GetVocabulary(0, self._model), partial(self._answered, self._model))

    def _answered(self, model: str, answer: Answer) -> None:
        self._asked = False
        if isinstance(answer, Vocabulary) and model == self._model:
            self._known = True
            self.decoder = ByteDecoder(answer.pieces, answer.special, strip=answer.strip) if answer.pieces else None
