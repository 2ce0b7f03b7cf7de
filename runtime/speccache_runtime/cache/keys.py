"""Page keys: a SHA-256 chain over token ids.

The key of a page names the whole prefix that ends with it, and is also its storage key. It depends on token ids and
the request's salt alone, so it is the same with speculation on or off; what else makes bytes incompatible (model,
dtype, page size, layout) is in the storage namespace.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = bytes(32)
"""Where the chain of a request without a salt begins."""

_SALT_DOMAIN = b"speccache cache_salt\0"
"""Nothing else is hashed behind these bytes: pages are hashed behind 32 bytes of a key."""


def salted_root(salt: str | None) -> bytes:
    """Where the chain of a request with this salt begins: requests of different salts have no key in common. Beyond
    this digest nothing knows the salt."""
    return ROOT if salt is None else hashlib.sha256(_SALT_DOMAIN + salt.encode()).digest()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as unsigned 32-bit little-endian integers; raises struct.error for ids outside that range."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


def next_key(parent: bytes, packed_tokens: bytes) -> bytes:
    """Key of the page that holds `packed_tokens` and follows the page with key `parent` (a root for the first)."""
    return hashlib.sha256(parent + packed_tokens).digest()


@dataclass(frozen=True, slots=True)
class PageName:
    """A whole page of a prompt: its key, that of the page before it (the root for the first), its packed token ids, and
    its number, from 0."""

    key: bytes
    parent: bytes
    packed: bytes
    depth: int


class KeyChain:
    """Keys of the whole pages of a growing token list. Pages are never taken back."""

    def __init__(self, page_size: int, root: bytes = ROOT) -> None:
        self._root = root
        self._page_size = page_size
        self.keys: list[bytes] = []
        self.packed: list[bytes] = []

    def extend(self, tokens: Sequence[int], upto: int) -> None:
        """Adds keys until `upto` pages have one; `tokens` must hold at least that many whole pages."""
        size = self._page_size
        for page in range(len(self.keys), upto):
            packed = pack_tokens(tokens[page * size : (page + 1) * size])
            self.packed.append(packed)
            self.keys.append(next_key(self.keys[-1] if self.keys else self._root, packed))

    def page(self, number: int) -> PageName:
        """The page of that number, which must have a key."""
        parent = self.keys[number - 1] if number else self._root
        return PageName(self.keys[number], parent, self.packed[number], number)
