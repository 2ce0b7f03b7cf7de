"""Types of single fields: what the text must look like, in the schema and in Python from the same pattern."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema

from speccache_api.geometry import BUILTIN_NAMES
from speccache_api.quantity import BYTES_PATTERN, format_bytes, parse_amount, parse_bytes

MAX_SIZE = 2**50
"""One Pi. Larger sizes are slips (and would not fit into the 64-bit numbers of a node's memory)."""

_NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_SUBDOMAIN = rf"{_NAME}(\.{_NAME})*"
_SEGMENT = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
OBJECT_NAME_PATTERN = rf"^{_SUBDOMAIN}$"
MODEL_URI_PATTERN = rf"^(pvc://{_SUBDOMAIN}(/{_SEGMENT})*|builtin://({'|'.join(BUILTIN_NAMES)}))$"
SERVED_NAME_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$"
QUANTITY_PATTERN = r"^[0-9]{1,19}(\.[0-9]{1,9})?(m|Ki|Mi|Gi|Ti|Pi|Ei|k|M|G|T|P|E)?$"


def _size(value: Any) -> int:
    size = parse_bytes(value)
    if not 0 < size <= MAX_SIZE:
        raise ValueError(f"give a size above 0 and up to {format_bytes(MAX_SIZE)}, found {value}")
    return size


_ABOVE_ZERO = "give an amount above 0, such as 500m, 2 or 4Gi, or leave it out"


def _amount(value: Any) -> str:
    text = isinstance(value, (str, int)) and not isinstance(value, bool)
    if not text or re.fullmatch(QUANTITY_PATTERN, str(value)) is None:  # the API server goes by the same pattern
        raise ValueError(f"give an amount such as 500m, 2 or 4Gi, found {value!r}")
    if parse_amount(str(value)) <= 0:
        raise ValueError(_ABOVE_ZERO)
    return str(value)


Size = Annotated[
    int,
    BeforeValidator(_size),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": BYTES_PATTERN,
            "x-kubernetes-validations": [
                {
                    "rule": "quantity(string(self)).isGreaterThan(quantity('0'))"
                    f" && quantity(string(self)).compareTo(quantity('{format_bytes(MAX_SIZE)}')) <= 0",
                    "message": f"give a size above 0 and up to {format_bytes(MAX_SIZE)}, such as 40Gi",
                }
            ],
        }
    ),
]
"""Bytes, written as a quantity (`40Gi`, `1.5Gi`, `1048576`)."""

Amount = Annotated[
    str,
    BeforeValidator(_amount),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": QUANTITY_PATTERN,
            "x-kubernetes-validations": [
                {
                    "rule": "quantity(string(self)).isGreaterThan(quantity('0'))",
                    "message": _ABOVE_ZERO,
                }
            ],
        }
    ),
]
"""Any resource amount of a container (`500m`, `2`, `4Gi`), kept as text."""

ModelUri = Annotated[str, Field(max_length=512, pattern=MODEL_URI_PATTERN)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT_NAME_PATTERN)]
ServedName = Annotated[str, Field(min_length=1, max_length=128, pattern=SERVED_NAME_PATTERN)]
Fraction = Annotated[str, Field(max_length=6, pattern=r"^0\.[0-9]{1,4}$")]
Ratio = Annotated[str, Field(max_length=7, pattern=r"^[0-9]{1,3}(\.[0-9]{1,3})?$")]
