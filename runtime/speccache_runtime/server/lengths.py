"""How much text and how large a body can possibly fit a context, known without tokenising anything.

Tokenising takes about a second and a hundred megabytes per million characters, so text that cannot fit is refused by
its length.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

from speccache_runtime.core import Limits

ASSUMED_CHARACTERS = 256
"""Characters of one token where no bound can be proven. Text has three to five on average and the longest entries of
known vocabularies have 128, so what this refuses wrongly is a whole prompt of blanks or of unknown characters."""

MIN_BODY_BYTES = 2**20
"""Allowed besides the prompt, and so however small the context: other fields, message envelopes, blanks."""

MAX_BODY_BYTES = 16 * 2**20
"""Refused however large the context; a prompt of a million tokens fits."""

_ESCAPE_BYTES = 6
"""The longest way to write one unit of text in JSON, such as \\u0020."""

_COMPOSED_CHARACTERS = 4
"""Most characters that become one when Unicode is composed: no character is decomposed into more."""

_KEEPS_ALL_TEXT = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
_LEAVES_PIECES_OUT = ("Split", "Punctuation")
"""Pre-tokenizers: those that only cut, and those that do so unless they are told to remove."""


def characters_per_token(backend: Backend) -> int:
    """Most characters of text that one token can stand for.

    A true bound where every character ends up in some token: an entry of the vocabulary has at least as many characters
    as the text it stands for, because byte-level entries have one per byte. There is none where the tokenizer drops
    text (blanks around words, unknown characters) or takes a run of it as one token (unknown words, blanks beside a
    special token); then the larger of the longest entry and ASSUMED_CHARACTERS.
    """
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=1)
    shrinks = _normaliser_shrinks(_state(backend.normalizer))
    if shrinks is None or not _keeps_text(backend):
        return max(longest, ASSUMED_CHARACTERS)
    return longest * shrinks


def most_characters(max_context: int, per_token: int) -> int:
    """The longest text that may fit: a prompt has fewer tokens than the context, which needs room for a new one."""
    return (max_context - 1) * per_token


def body_limit(limits: Limits, per_token: int) -> int:
    """Bytes of the largest body worth reading: a prompt that fits, as token ids or as text in its longest spelling."""
    as_ids = limits.max_context * (len(str(limits.vocab_size)) + len(", "))
    as_text = most_characters(limits.max_context, per_token) * _ESCAPE_BYTES
    return min(MAX_BODY_BYTES, MIN_BODY_BYTES + max(as_ids, as_text))


def _keeps_text(backend: Backend) -> bool:
    return (
        backend.truncation is None
        and not any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        and _only_cuts(_state(backend.pre_tokenizer))
        and _knows_every_character(backend)
    )


def _knows_every_character(backend: Backend) -> bool:
    """Whether unknown characters are spelt in bytes or become a token each, instead of vanishing or being merged."""
    model = backend.model
    if type(model).__name__ != "BPE":
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    if model.byte_fallback:
        return all(model.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    in_bytes = any('"ByteLevel"' in json.dumps(_state(part)) for part in (backend.normalizer, backend.pre_tokenizer))
    return in_bytes and all(model.token_to_id(letter) is not None for letter in ByteLevel.alphabet())


def _only_cuts(part: dict[str, Any] | None) -> bool:
    if part is None:
        return True
    kind = part["type"]
    if kind == "Sequence":
        return all(map(_only_cuts, part["pretokenizers"]))
    return kind in _KEEPS_ALL_TEXT or (kind in _LEAVES_PIECES_OUT and part["behavior"] != "Removed")


def _normaliser_shrinks(part: dict[str, Any] | None) -> int | None:
    """How many characters may become one; None where any number may vanish, or nothing is known."""
    if part is None or part["type"] in ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"):
        return 1
    if part["type"] in ("NFC", "NFKC"):
        return _COMPOSED_CHARACTERS
    if part["type"] == "Replace" and "String" in part["pattern"] and part["content"]:
        return int(-(-len(part["pattern"]["String"]) // len(part["content"])))
    if part["type"] != "Sequence":
        return None
    product = 1
    for step in map(_normaliser_shrinks, part["normalizers"]):
        if step is None:
            return None
        product *= max(step, 1)
    return product


def _state(part: Any) -> dict[str, Any] | None:
    """A part of the tokenizer as tokenizer.json has it."""
    state: dict[str, Any] | None = None if part is None else json.loads(part.__getstate__())
    return state
