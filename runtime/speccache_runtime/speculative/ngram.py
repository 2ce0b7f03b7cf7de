"""Proposals without a model: text that went on in some way before often goes on so again."""

from __future__ import annotations

from collections.abc import Sequence

from speccache_runtime.cache.keys import pack_tokens

LONGEST = 4
"""Tokens of the longest end of a text that is looked for. Longer ones are found less often and say hardly more."""

_WIDTH = 4
"""Bytes of a packed token."""


class PromptLookup:
    """Looks in one request's own tokens for the longest end of them that was there before, and copies what followed.

    Of several places of the same length the last one counts. What is copied may run on into the copy itself, so that a
    text that repeats itself goes on repeating itself. Keeps the tokens packed, 4 bytes each.
    """

    def __init__(self) -> None:
        self._packed = bytearray()

    def propose(self, tokens: Sequence[int], most: int) -> tuple[int, ...]:
        """At most `most` tokens; none if the last token is a new one. `tokens` have only been added to since the last
        call."""
        known = len(self._packed) // _WIDTH
        self._packed += pack_tokens(tokens[known:])
        for length in range(min(LONGEST, len(tokens) - 1), 0, -1):
            found = self._last_before(length)
            if found is not None:
                return _copy(tokens, found + length, most)
        return ()

    def _last_before(self, length: int) -> int | None:
        """Where the last `length` tokens were the last time before, as the number of the first of them."""
        end = self._packed[-length * _WIDTH :]
        upto = len(self._packed) - _WIDTH
        while (at := self._packed.rfind(end, 0, upto)) >= 0:
            if at % _WIDTH == 0:
                return at // _WIDTH
            upto = at + len(end) - 1
        return None


def _copy(tokens: Sequence[int], start: int, most: int) -> tuple[int, ...]:
    copied: list[int] = []
    for at in range(start, start + most):
        copied.append(tokens[at] if at < len(tokens) else copied[at - len(tokens)])
    return tuple(copied)
