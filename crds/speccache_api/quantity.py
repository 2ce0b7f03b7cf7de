"""Kubernetes quantities as whole numbers of bytes.

Sizes decide what a pod is killed for, so no float may touch them: text goes in, an int comes out, and an int is printed
in the largest unit that says it exactly.
"""

from __future__ import annotations

import re
from fractions import Fraction

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15, "E": 10**18}
_UNITS = {"": 1, **_BINARY, **_DECIMAL}

BYTES_PATTERN = r"^[0-9]{1,19}(\.[0-9]{1,9})?(Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?$"
"""What a memory or storage size may look like. No sign, no exponent, no `m`: a thousandth of a byte is a slip of the
pen.
"""

_PARTS = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?([A-Za-z]{0,2})")

_AMOUNT = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,9}))?(?:[eE]([+-]?[0-9]{1,2})|([A-Za-z]{0,2}))")
"""Of any resource; unlike sizes it may have an exponent or count in thousandths."""

_POWERS: tuple[int, ...] = tuple(10**digits for digits in range(10))

KIB, MIB, GIB = 2**10, 2**20, 2**30


def parse_bytes(value: str | int) -> int:
    """Bytes of a quantity such as `40Gi`, `1.5Gi`, `2G` or `1048576`; a broken byte is rounded up, as Kubernetes does.

    Raises ValueError with the remedy when the text is not a size.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError(f"give a size such as 512Mi or 40Gi, found {value!r}")
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"a size cannot be negative, found {value}")
        return value
    match = _PARTS.fullmatch(value)
    unit = _UNITS.get(match.group(3)) if match else None
    if match is None or unit is None:
        hint = "; 'm' means thousandths, write M or Mi for millions" if value.endswith("m") else ""
        raise ValueError(f"give a size such as 512Mi or 40Gi, found {value!r}{hint}")
    whole, fraction = match.group(1), match.group(2) or ""
    return -(-int(whole + fraction) * unit // _POWERS[len(fraction)])


def parse_amount(value: str) -> Fraction:
    """An amount of any resource as an exact number: `500m` is one half, `2Ki` is 2048, `2e9` what it says.

    Raises ValueError.
    """
    match = _AMOUNT.fullmatch(value)
    scale = _scale(match) if match else None
    if match is None or scale is None:
        raise ValueError(f"give an amount such as 500m, 2 or 4Gi, found {value!r}")
    whole, fraction = match.group(1), match.group(2) or ""
    return Fraction(int(whole + fraction), _POWERS[len(fraction)]) * scale


def _scale(amount: re.Match[str]) -> Fraction | None:
    """What the number before it is multiplied by; None for a unit that nobody knows."""
    exponent, unit = amount.group(3), amount.group(4)
    if exponent is not None:
        return Fraction(10) ** int(exponent)
    if unit == "m":
        return Fraction(1, 1000)
    return Fraction(_UNITS[unit]) if unit in _UNITS else None


def format_bytes(size: int) -> str:
    """`size` bytes in the largest binary unit that holds it exactly: 1610612736 → `1536Mi`, 1000 → `1000`."""
    if size < 0:
        raise ValueError(f"a size cannot be negative, found {size}")
    for suffix, unit in reversed(_BINARY.items()):
        if size and size % unit == 0:
            return f"{size // unit}{suffix}"
    return str(size)


def round_up(size: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below `size`."""
    return -(-size // unit) * unit
