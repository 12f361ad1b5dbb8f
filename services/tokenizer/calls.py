"""What each call of an api process is answered with. No I/O."""

from __future__ import annotations

import logging

import msgspec

from services.tokenizer.chat import ChatRenderer
from services.tokenizer.codec import Codec
from shared.byte_decoder import ByteDecoder, UnknownIdError
from shared.chat import ChatOptions
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
    Vocabulary,
    pack_ids,
)

log = logging.getLogger(__name__)

LONG = 16 << 10  # bytes of text from which encoding takes milliseconds

EncodeCall = EncodeText | EncodeChat


class Calls:
    """Answers calls with one codec. Encodes may be answered in several threads at once."""

    def __init__(self, codec: Codec) -> None:
        self._encoder = codec.encoder
        self._decoder = codec.decoder
        self._chat = ChatRenderer(codec.chat_templates, codec.special_tokens)
        self._options = msgspec.json.Decoder(ChatOptions)

    def decode(self, call: Decode) -> Message:
        """Decoded, or CallFailed where an item is at fault."""
        decode = self._decoder.decode
        try:
            return Decoded(call.call, [decode(item) for item in call.items])
        except UnknownIdError as error:
            return CallFailed(call.call, f"{error}.", "tokens")
        except ValueError as error:
            return CallFailed(call.call, f"{error}.")

    def vocabulary(self, call: GetVocabulary) -> Vocabulary:
        """The bytes of all tokens, for a caller that decodes by itself; none where that is not all there is to it."""
        decoder = self._decoder
        if isinstance(decoder, ByteDecoder):
            return Vocabulary(call.call, decoder.pieces, decoder.special, decoder.strip)
        return Vocabulary(call.call, [])

    def encode(self, call: EncodeCall) -> Message:
        """Encoded, or CallFailed where the input is at fault."""
        try:
            return self._encode_chat(call) if isinstance(call, EncodeChat) else self._encode_texts(call)
        except RequestError as error:
            return CallFailed(call.call, error.message, error.param or "")
        except Exception:  # whatever an input does to a tokenizer, its caller must not wait for ever
            log.exception("an encode call failed")
            return CallFailed(call.call, "The tokenizer failed on this input.")

    def is_long(self, call: EncodeCall) -> bool:
        """Whether answering takes long enough to hold up streams."""
        if isinstance(call, EncodeChat):
            return len(call.messages) > LONG or b'"chat_template":' in call.options
        return sum(map(len, call.texts)) > LONG

    def _encode_texts(self, call: EncodeText) -> Encoded:
        return self._encoded(call.call, self._encoder.encode(call.texts, call.add_special_tokens), call.want_strings)

    def _encode_chat(self, call: EncodeChat) -> Encoded:
        try:
            options = self._options.decode(call.options)
        except msgspec.MsgspecError as error:
            raise RequestError(f"The chat options are not valid: {error}") from None
        text = self._chat.render(call.messages, options)
        ids = self._encoder.encode([text], options.add_special_tokens)
        return self._encoded(call.call, ids, call.want_strings)

    def _encoded(self, call: int, ids: list[list[int]], want_strings: bool) -> Encoded:
        strings = [self._encoder.strings(each) for each in ids] if want_strings else []
        return Encoded(call, [pack_ids(each) for each in ids], strings)
