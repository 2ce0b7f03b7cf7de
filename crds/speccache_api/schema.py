"""From pydantic's JSON schema to the *structural* schema that a CustomResourceDefinition needs.

Kubernetes knows a part of JSON schema and ignores or refuses the rest. This module translates exactly the keywords it
knows and fails on any other, so a new kind of field is a loud error at build time, not a field that is silently not
validated.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_COPIED = frozenset(
    {
        "type",
        "description",
        "default",
        "enum",
        "format",
        "pattern",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "minItems",
        "maxItems",
        "minProperties",
        "maxProperties",
        "required",
        "x-kubernetes-int-or-string",
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-validations",
    }
)
_DROPPED = frozenset({"title", "$defs"})
_ORDER = ("description", "type", "format", "default", "enum")


class UnknownKeyword(TypeError):
    """The model uses a JSON schema keyword that has no translation here."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of `model`, with every reference inlined. Raises UnknownKeyword."""
    raw = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(raw, raw.get("$defs", {}), model.__name__)


def _convert(node: Schema, definitions: dict[str, Schema], path: str) -> Schema:
    node = _without_null(_resolve(node, definitions), definitions)
    result: Schema = {}
    for key, value in node.items():
        if key in _DROPPED or (key == "default" and value is None):
            continue
        if key == "additionalProperties" and value is False:
            continue  # an unknown field is refused by strict field validation, which is kubectl's default
        if key == "properties":
            result[key] = {name: _convert(item, definitions, f"{path}.{name}") for name, item in value.items()}
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            result[key] = _convert(value, definitions, f"{path}.{key}")
        elif key in _COPIED:
            result[key] = " ".join(value.split()) if key == "description" else value
        elif key == "const":
            result["enum"] = [value]
        else:
            raise UnknownKeyword(f"{path}: no translation for {key}: {value!r}")
    if result.get("type") == "integer":
        result.setdefault("format", "int64")
    if result.get("type") == "array":
        result.setdefault("x-kubernetes-list-type", "atomic")
    return {key: result[key] for key in sorted(result, key=_rank)}


def _resolve(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """`node` with `$ref` replaced; what stands beside the reference (the field's own description) wins."""
    if "$ref" not in node:
        return node
    beside = {key: value for key, value in node.items() if key != "$ref"}
    return {**definitions[node["$ref"].removeprefix("#/$defs/")], **beside}


def _without_null(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """An optional T is T: absence is expressed by not being required."""
    options = [option for option in node.get("anyOf", []) if option.get("type") != "null"]
    if len(options) != 1:
        return node
    beside = {key: value for key, value in node.items() if key != "anyOf"}
    return {**_resolve(options[0], definitions), **beside}


def _rank(key: str) -> tuple[int, str]:
    return (_ORDER.index(key), "") if key in _ORDER else (len(_ORDER), key)
