"""Quantities are whole bytes on the way in and the shortest exact text on the way out."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_api.quantity import format_bytes, parse_amount, parse_bytes, round_up


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1", 1),
        (1048576, 1048576),
        ("1Ki", 2**10),
        ("1k", 10**3),
        ("512Mi", 2**29),
        ("1.5Gi", 3 * 2**29),
        ("0.5Ki", 512),
        ("2G", 2 * 10**9),
        ("1Ti", 2**40),
        ("1Pi", 2**50),
        ("1Ei", 2**60),
        ("7E", 7 * 10**18),
        ("0.0001k", 1),  # a tenth of a byte is rounded up, as Kubernetes does
        ("1.000000001Gi", 2**30 + 2),
    ],
)
def test_text_to_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    "text",
    ["", "Gi", "-1Gi", "1 Gi", "1gi", "1GB", "1e9", "1.Gi", ".5Gi", "1Gi\n", "\u0661Gi", 1.5, True, None, -1, "100m"],
)
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


def test_the_remedy_for_thousandths() -> None:
    with pytest.raises(ValueError, match="write M or Mi for millions"):
        parse_bytes("100m")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0"), (1, "1"), (1000, "1000"), (1024, "1Ki"), (3 * 2**29, "1536Mi"), (2**40, "1Ti"), (2**60, "1Ei")],
)
def test_bytes_to_text(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_a_negative_size_is_a_bug_of_the_caller() -> None:
    with pytest.raises(ValueError, match="negative"):
        format_bytes(-1)


@given(st.integers(min_value=0, max_value=2**63))
def test_text_is_exact(size: int) -> None:
    assert parse_bytes(format_bytes(size)) == size


@given(st.integers(min_value=0, max_value=2**60), st.integers(min_value=1, max_value=2**40))
def test_rounding_up(size: int, unit: int) -> None:
    rounded = round_up(size, unit)
    assert rounded % unit == 0
    assert size <= rounded < size + unit


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("500m", Fraction(1, 2)),
        ("2", 2),
        ("1.5", Fraction(3, 2)),
        ("2Ki", 2048),
        ("0.5m", Fraction(1, 2000)),
        ("2e9", 2 * 10**9),
        ("1.5E3", 1500),
        ("1E", 10**18),
    ],
)
def test_amounts_of_any_resource(text: str, amount: Fraction | int) -> None:
    assert parse_amount(text) == amount


@pytest.mark.parametrize("text", ["", "two", "1x", "-1", "1mm"])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(ValueError, match="amount"):
        parse_amount(text)
