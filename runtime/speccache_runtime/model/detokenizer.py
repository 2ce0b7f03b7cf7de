"""Tokens to text bit by bit, so that what has been shown is always the beginning of the text of all tokens.

A character may be spread over several tokens, and a token may hold the end of one and the beginning of the next. Tokens
that stand for bytes are therefore joined as bytes, and a character is shown with its last byte. Any other token is a
word, whose text may depend on the token before it (the blank of a text's first word is often left out).

`tokenizers` has a DecodeStream too. It shows nothing more once a byte is no text and drops what is incomplete at the
end, so it is not used.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

BROKEN = "\N{REPLACEMENT CHARACTER}"

MAX_CONTEXT_TOKENS = 16
"""Prompt tokens looked at: more than the bytes of one character, with room for special tokens among them."""

_SPELT_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _alphabet() -> dict[str, int]:
    """Letter → byte. Bytes that can be printed are spelt as themselves, the others by letters from U+0100 on."""
    letters = sorted(ByteLevel.alphabet())
    printed = {letter: ord(letter) for letter in letters if ord(letter) < 256}
    others = (byte for byte in range(256) if byte not in printed.values())
    return {letter: printed[letter] if letter in printed else next(others) for letter in letters}


_ALPHABET = _alphabet()


def _mark_each_byte(error: UnicodeError) -> tuple[str, int]:
    """As byte fallback does it; byte-level decoding marks a character's beginning once, like Python's "replace"."""
    assert isinstance(error, UnicodeDecodeError)
    return BROKEN * (error.end - error.start), error.end


codecs.register_error("speccache-each-byte", _mark_each_byte)


class Vocabulary:
    """What single tokens stand for. Every method may be called from any thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        decoder = b"" if backend.decoder is None else backend.decoder.__getstate__()
        self._byte_level = b'"ByteLevel"' in decoder
        self._byte_fallback = b'"ByteFallback"' in decoder
        self._hidden = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
        self.on_broken_bytes = "speccache-each-byte" if self._byte_fallback else "replace"
        """How `bytes.decode` is to handle bytes that are no character."""

    def name(self, token: int) -> str | None:
        """A token as the vocabulary has it; None for what is never shown: special tokens, ids that are no token."""
        name = self._backend.id_to_token(token)
        return None if name in self._hidden else name

    def bytes_of(self, name: str) -> bytes | None:
        """The bytes that a token stands for, None when it is a word."""
        if self._byte_level:
            try:
                return bytes(map(_ALPHABET.__getitem__, name))
            except KeyError:
                return name.encode()  # An added token is spelt as it is.
        spelt = _SPELT_BYTE.fullmatch(name) if self._byte_fallback else None
        return None if spelt is None else bytes.fromhex(spelt[1])

    def word(self, token: int, before: int | None) -> str:
        """Text of a token that is a word, behind another token or at the beginning of a text."""
        context = [] if before is None else [before]
        skipped = len(self._backend.decode(context))
        text: str = self._backend.decode([*context, token])
        return text[skipped:]


class Detokenizer:
    """The text of one request. Not thread-safe. A token costs the same however long the text is."""

    def __init__(self, vocabulary: Vocabulary, after: Sequence[int] = ()) -> None:
        """`after`: the prompt's tokens, or its last few. Their text is not shown."""
        self._vocabulary = vocabulary
        self._bytes = codecs.getincrementaldecoder("utf-8")(vocabulary.on_broken_bytes)
        self._last: int | None = None
        self.push(after[-MAX_CONTEXT_TOKENS:])

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain after these tokens; may be empty."""
        return "".join(map(self._push, ids))

    def flush(self) -> str:
        """What is still held back: replacement characters for the bytes of an incomplete character."""
        return self._bytes.decode(b"", final=True)

    def _push(self, token: int) -> str:
        name = self._vocabulary.name(token)
        if name is None:
            return ""
        before, self._last = self._last, token
        part = self._vocabulary.bytes_of(name)
        return self.flush() + self._vocabulary.word(token, before) if part is None else self._bytes.decode(part)
