"""The bytes of one stored object: a 4096-byte header, then the payload.

A storage tier is shared, outlives processes and sometimes lies: files are cut, bits flip, another model's object lies
under our name. So an object carries its whole identity and a checksum, and nothing is believed before `check` has
compared both. The checksums find damage, not forgery: whoever may write to the volume may write a page.

Header, little-endian:

    offset  size  field
         0     8  magic "SPCCPAGE"
         8     2  layout version (`speccache_api.fingerprint`), u16
        10     1  half: 0 target, 1 draft
        11     1  number of successors, 0..4
        12     4  zero
        16     8  payload length in bytes, u64
        24    16  XXH3-128 of the payload, canonical (big-endian) form
        40    32  namespace digest
        72    32  page key
       104    16  successors: up to four token ids that follow the page and that its draft half depends on, u32 each
       120  3968  zero
      4088     8  XXH3-64 of bytes 0..4087, canonical form

The payload begins at 4096 so that direct reads of it stay aligned.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import xxhash

from speccache_api.fingerprint import LAYOUT_VERSION
from speccache_runtime.errors import StorageError

HEADER_SIZE = 4096
DIGEST_SIZE = 32
MAX_SUCCESSORS = 4

_MAGIC = b"SPCCPAGE"
_FIELDS = struct.Struct("<8sHBBIQ16s32s32s4I")
_HASHED = HEADER_SIZE - 8
_PADDING = bytes(_HASHED - _FIELDS.size)

Bytes = bytes | bytearray | memoryview
"""A C-contiguous run of bytes; a memoryview must have format B."""


class Half(enum.StrEnum):
    """Whose KV a page's bytes are."""

    TARGET = "target"
    DRAFT = "draft"


class CorruptReason(enum.StrEnum):
    """What was wrong with an object; the value is a metric label."""

    LENGTH = "length"
    """The object, or the payload length it declares, is not the expected one."""
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"
    """The header's own checksum does not match, or a field has a value that no writer makes."""
    HALF = "half"
    NAMESPACE = "namespace"
    KEY = "key"
    PAYLOAD = "payload"
    """The payload's checksum does not match."""


class Corrupt(StorageError):
    """A stored object is not what its name says; never shown to a client, it costs a miss."""

    def __init__(self, reason: CorruptReason) -> None:
        super().__init__(f"stored object is corrupt: {reason}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Identity:
    """What an object is: 32-byte namespace digest, half, 32-byte page key."""

    namespace: bytes
    half: Half
    key: bytes


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded header. `checksum` is the XXH3-128 of the payload."""

    identity: Identity
    successors: tuple[int, ...]
    payload_length: int
    checksum: bytes


_HALVES = (Half.TARGET, Half.DRAFT)


def check_successors(successors: tuple[int, ...]) -> None:
    """Raise ValueError for more than four successors, or one outside 0..2**32-1."""
    if len(successors) > MAX_SUCCESSORS or not all(0 <= token < 1 << 32 for token in successors):
        raise ValueError(f"at most {MAX_SUCCESSORS} successors, each an unsigned 32-bit token id, not {successors}")


def encode_header(identity: Identity, successors: tuple[int, ...], payload: Bytes) -> bytes:
    """Return the 4096-byte header for `payload`, which is read once for its checksum and must not change until written.

    Raises ValueError for digests that are not 32 bytes and for successors that `check_successors` refuses.
    """
    if len(identity.namespace) != DIGEST_SIZE or len(identity.key) != DIGEST_SIZE:
        raise ValueError(f"namespace and key must be {DIGEST_SIZE} bytes each")
    check_successors(successors)
    fields = _FIELDS.pack(
        _MAGIC,
        LAYOUT_VERSION,
        _HALVES.index(identity.half),
        len(successors),
        0,
        len(payload),
        xxhash.xxh3_128_digest(payload),
        identity.namespace,
        identity.key,
        *successors,
        *(0,) * (MAX_SUCCESSORS - len(successors)),
    )
    hashed = fields + _PADDING
    return hashed + xxhash.xxh3_64_digest(hashed)


def decode_header(header: Bytes) -> Header:
    """Return the fields of a header that some writer of this layout version made whole; raises Corrupt otherwise."""
    if len(header) != HEADER_SIZE:
        raise Corrupt(CorruptReason.LENGTH)
    magic, version, half, count, zero, length, checksum, namespace, key, *tokens = _FIELDS.unpack_from(header)
    if magic != _MAGIC:
        raise Corrupt(CorruptReason.MAGIC)
    if version != LAYOUT_VERSION:
        raise Corrupt(CorruptReason.VERSION)
    with memoryview(header) as view:
        if xxhash.xxh3_64_digest(view[:_HASHED]) != view[_HASHED:]:
            raise Corrupt(CorruptReason.HEADER)
        padded = view[_FIELDS.size : _HASHED] == _PADDING
    if half >= len(_HALVES) or count > MAX_SUCCESSORS or zero or any(tokens[count:]) or not padded:
        raise Corrupt(CorruptReason.HEADER)
    return Header(Identity(namespace, _HALVES[half], key), tuple(tokens[:count]), length, checksum)


def check(header: Bytes, expected: Identity, payload: Bytes) -> Header:
    """Return the decoded header if `header` and `payload` are whole and are the expected page's half.

    Reads the payload once. Raises Corrupt with the first reason found, cheapest first.
    """
    found = decode_header(header)
    if found.identity.half is not expected.half:
        raise Corrupt(CorruptReason.HALF)
    if found.identity.namespace != expected.namespace:
        raise Corrupt(CorruptReason.NAMESPACE)
    if found.identity.key != expected.key:
        raise Corrupt(CorruptReason.KEY)
    if found.payload_length != len(payload):
        raise Corrupt(CorruptReason.LENGTH)
    if found.checksum != xxhash.xxh3_128_digest(payload):
        raise Corrupt(CorruptReason.PAYLOAD)
    return found
