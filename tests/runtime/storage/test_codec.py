"""The codec alone: what is encoded comes back, and no damage gets through."""

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from speccache_runtime.cache.storage.codec import (
    HEADER_SIZE,
    MAX_SUCCESSORS,
    Corrupt,
    CorruptReason,
    Half,
    Identity,
    check,
    decode_header,
    encode_header,
)

digests = st.binary(min_size=32, max_size=32)
identities = st.builds(Identity, digests, st.sampled_from(Half), digests)
successor_runs = st.lists(st.integers(0, 2**32 - 1), max_size=MAX_SUCCESSORS).map(tuple)
payloads = st.binary(min_size=1, max_size=9000)

PAGE = Identity(bytes(range(32)), Half.DRAFT, bytes(range(100, 132)))
PAYLOAD = bytes(range(256)) * 20
HEADER = encode_header(PAGE, (17, 2**32 - 1), PAYLOAD)


def reason_of(header: bytes, expected: Identity, payload: bytes) -> CorruptReason:
    with pytest.raises(Corrupt) as caught:
        check(header, expected, payload)
    return caught.value.reason


@given(identities, successor_runs, payloads)
def test_round_trip(identity: Identity, successors: tuple[int, ...], payload: bytes) -> None:
    header = encode_header(identity, successors, payload)
    assert len(header) == HEADER_SIZE
    for form in (bytes, bytearray, memoryview):
        found = check(form(header), identity, form(payload))
        assert (found.identity, found.successors, found.payload_length) == (identity, successors, len(payload))


def test_layout_is_the_documented_one() -> None:
    """Byte positions are a promise to objects that other versions of this program have written."""
    assert HEADER[0:8] == b"SPCCPAGE"
    assert HEADER[8:16] == bytes([2, 0, 1, 2, 0, 0, 0, 0])
    assert HEADER[16:24] == len(PAYLOAD).to_bytes(8, "little")
    assert HEADER[24:40].hex() == "87cf83cc9a055cf4f875f2fa2e99df80"
    assert HEADER[40:72] == PAGE.namespace
    assert HEADER[72:104] == PAGE.key
    assert HEADER[104:120] == bytes([17, 0, 0, 0]) + b"\xff" * 4 + bytes(8)
    assert not any(HEADER[120:4088])
    assert any(HEADER[4088:])


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_any_changed_header_byte_is_found(flip: int) -> None:
    for position in range(HEADER_SIZE):
        damaged = bytearray(HEADER)
        damaged[position] ^= flip
        assert reason_of(damaged, PAGE, PAYLOAD) in (CorruptReason.MAGIC, CorruptReason.VERSION, CorruptReason.HEADER)


@settings(max_examples=300)
@given(payloads, st.data())
def test_any_changed_payload_byte_is_found(payload: bytes, data: st.DataObject) -> None:
    header = encode_header(PAGE, (), payload)
    damaged = bytearray(payload)
    damaged[data.draw(st.integers(0, len(payload) - 1))] ^= data.draw(st.integers(1, 255))
    assert reason_of(header, PAGE, damaged) is CorruptReason.PAYLOAD


@given(st.integers(0, 3 * HEADER_SIZE))
def test_any_other_header_length_is_found(length: int) -> None:
    if length != HEADER_SIZE:
        assert reason_of((HEADER * 3)[:length], PAGE, PAYLOAD) is CorruptReason.LENGTH


@given(st.integers(0, 3 * len(PAYLOAD)))
def test_any_other_payload_length_is_found(length: int) -> None:
    if length != len(PAYLOAD):
        assert reason_of(HEADER, PAGE, (PAYLOAD * 3)[:length]) is CorruptReason.LENGTH


@given(identities, identities, payloads)
def test_another_pages_object_is_found(stored: Identity, wanted: Identity, payload: bytes) -> None:
    header = encode_header(stored, (), payload)
    if stored != wanted:
        reasons = {CorruptReason.HALF, CorruptReason.NAMESPACE, CorruptReason.KEY}
        assert reason_of(header, wanted, payload) in reasons


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (Identity(PAGE.namespace, Half.TARGET, PAGE.key), CorruptReason.HALF),
        (Identity(bytes(32), PAGE.half, PAGE.key), CorruptReason.NAMESPACE),
        (Identity(PAGE.namespace, PAGE.half, bytes(32)), CorruptReason.KEY),
    ],
)
def test_the_reason_names_what_differs(wanted: Identity, reason: CorruptReason) -> None:
    assert reason_of(HEADER, wanted, PAYLOAD) is reason


@pytest.mark.parametrize(("position", "value"), [(10, 2), (11, 5), (12, 1), (112, 1), (120, 1), (4087, 1)])
def test_values_that_no_writer_makes_are_refused_under_a_right_checksum(position: int, value: int) -> None:
    """A later format that forgets to raise its version must not be half understood."""
    odd = bytearray(HEADER)
    odd[position] = value
    odd[4088:] = xxhash.xxh3_64_digest(bytes(odd[:4088]))
    with pytest.raises(Corrupt) as caught:
        decode_header(odd)
    assert caught.value.reason is CorruptReason.HEADER


@pytest.mark.parametrize("content", [bytes(HEADER_SIZE), b"\xff" * HEADER_SIZE, b"{}" * (HEADER_SIZE // 2)])
def test_what_is_no_header_at_all(content: bytes) -> None:
    assert reason_of(content, PAGE, PAYLOAD) is CorruptReason.MAGIC


@pytest.mark.parametrize(
    ("identity", "successors"),
    [
        (Identity(bytes(31), Half.TARGET, bytes(32)), ()),
        (Identity(bytes(32), Half.TARGET, bytes(33)), ()),
        (PAGE, (1, 2, 3, 4, 5)),
        (PAGE, (-1,)),
        (PAGE, (2**32,)),
    ],
)
def test_what_a_header_cannot_hold_is_refused(identity: Identity, successors: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"32 bytes|successors"):
        encode_header(identity, successors, PAYLOAD)
