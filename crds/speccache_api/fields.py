"""Types of single fields: what the text must look like, in the schema and in Python from the same pattern."""

from __future__ import annotations

import ipaddress
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_before_validator_function

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

_PERCENT = re.compile(r"(100|[0-9]{1,2})%")
_COUNT = "give a number of pods from 0 to 1000, or a percentage such as 50%"


def _count_or_percent(value: Any) -> int | str:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1000:
        return value
    if isinstance(value, str) and _PERCENT.fullmatch(value):
        return value
    raise ValueError(f"{_COUNT}, found {value!r}")


CountOrPercent = Annotated[
    int | str,
    BeforeValidator(_count_or_percent),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "pattern": f"^{_PERCENT.pattern}$",
            "x-kubernetes-validations": [
                {"rule": "type(self) != int || (self >= 0 && self <= 1000)", "message": _COUNT},
            ],
        }
    ),
]
"""A number of pods, or a share of them: `1` or `50%`."""

LABEL_VALUE_PATTERN = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
LABEL_KEY_PATTERN = rf"^({_NAME}([.]{_NAME})*/)?[A-Za-z0-9]([-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?$"
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
CIDR_PATTERN = (
    rf"^({_OCTET}(\.{_OCTET}){{3}}/(3[0-2]|[12]?[0-9])|[0-9A-Fa-f:]{{2,39}}/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))$"
)
_NO_CIDR = "give a range of addresses such as 10.0.0.0/8 or fd00::/8"


def _cidr(value: Any) -> str:
    try:
        if not isinstance(value, str) or re.fullmatch(CIDR_PATTERN, value) is None:
            raise ValueError
        ipaddress.ip_network(value, strict=False)
    except ValueError:
        raise ValueError(f"{_NO_CIDR}, found {value!r}") from None
    return value


Cidr = Annotated[
    str,
    BeforeValidator(_cidr),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": 43,
            "pattern": CIDR_PATTERN,
            "x-kubernetes-validations": [{"rule": "isCIDR(self)", "message": _NO_CIDR}],
        }
    ),
]
"""A range of IP addresses."""


class _Text:
    """A text that must match `pattern`, with one message in both places. The message teaches and does not repeat what
    was found: endpoints are pasted with passwords in them, and messages go into conditions and logs.
    """

    def __init__(self, pattern: str, wanted: str, *, longest: int) -> None:
        self._pattern, self._wanted, self._longest = pattern, wanted, longest

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        rule = {"rule": f"self.matches(r'{self._pattern}')", "message": self._wanted}
        return {"type": "string", "maxLength": self._longest, "x-kubernetes-validations": [rule]}

    def _check(self, value: Any) -> str:
        if not isinstance(value, str) or len(value) > self._longest or re.fullmatch(self._pattern, value) is None:
            raise ValueError(self._wanted)
        return value


_NO_BUCKET = (
    "a bucket's name has 3 to 63 characters: lower-case letters, digits, - and single dots, with a letter or digit at"
    " both ends, and is no IP address; give the name alone, without s3:// or a path"
)
_BUCKET_PART = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_PORT = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"

LabelValue = Annotated[str, Field(max_length=63, pattern=LABEL_VALUE_PATTERN)]
ModelUri = Annotated[str, Field(max_length=512, pattern=MODEL_URI_PATTERN)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=OBJECT_NAME_PATTERN)]
ServedName = Annotated[str, Field(min_length=1, max_length=128, pattern=SERVED_NAME_PATTERN)]
Fraction = Annotated[str, Field(max_length=6, pattern=r"^0\.[0-9]{1,4}$")]
Ratio = Annotated[str, Field(max_length=7, pattern=r"^[0-9]{1,3}(\.[0-9]{1,3})?$")]
BucketName = Annotated[str, _Text(r"^[a-z0-9][-.a-z0-9]{1,61}[a-z0-9]$", _NO_BUCKET, longest=63)]
BucketPrefix = Annotated[
    str,
    _Text(
        rf"^({_BUCKET_PART}(/{_BUCKET_PART})*)?$",
        "give path parts joined by single slashes, with none at either end, such as team/chat; a part has letters,"
        " digits, _, - and ., and does not begin with - or .",
        longest=128,
    ),
]
Endpoint = Annotated[
    str,
    _Text(
        rf"^https?://({_SUBDOMAIN}|\[[0-9A-Fa-f:]{{2,39}}\])(:{_PORT})?$",
        "give https://HOST or http://HOST, with :PORT if need be and nothing else: credentials belong into"
        " credentialsSecret, the path into bucket and prefix",
        longest=300,
    ),
]
Region = Annotated[
    str, _Text(r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}$", "give the region's name, such as eu-central-1", longest=63)
]
