# ruff: noqa: A005 - `speccache_api.resource` cannot be mistaken for the standard library's `resource`
"""The resource as Python sees it: parse once at the border, then trust it.

`SpecCacheDeployment.parse` judges by the same patterns and rules as the API server, so the operator (which may meet
objects stored under an older CRD) and `speccache-runtime serve -f` (which has no API server) refuse the same resources.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from speccache_api import names
from speccache_api.rules import Rule, Transition, broken_rules
from speccache_api.spec import Spec

__all__ = ["InvalidResource", "Metadata", "Spec", "SpecCacheDeployment"]

_NAME_PATTERN = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
_NAME_MESSAGE = (
    f"metadata.name must start with a letter, use only a-z, 0-9 and -, and have at most {names.MAX_NAME_LENGTH}"
    " characters: Services and pods are named after it"
)


_CLAIM_SIZE = "spec.kvCache.storage.persistentVolumeClaim.size"


def _has(path: str, root: str) -> str:
    """CEL: true when the optional fields of `path` are all there; `spec.kvCache` always is."""
    parts = path.split(".")
    return " && ".join(f"has({'.'.join([root, *parts[:end]])})" for end in range(3, len(parts) + 1))


class InvalidResource(ValueError):
    """The resource cannot be served. `problems` holds (field path, what is wrong and what to do), one per problem."""

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems: tuple[tuple[str, str], ...] = tuple(problems)
        super().__init__("\n".join(f"{path}: {text}" for path, text in self.problems))


class Metadata(BaseModel):
    """The part of `metadata` that SpecCache reads; the rest is Kubernetes' own and is left alone."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=253)]
    namespace: str = "default"
    uid: str = ""
    generation: int = 0


class SpecCacheDeployment(BaseModel):
    """One served model with its draft and its KV tiers."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    api_version: Literal["speccache.io/v1alpha1"] = Field(alias="apiVersion")
    kind: Literal["SpecCacheDeployment"]
    metadata: Metadata
    spec: Spec
    status: dict[str, Any] | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"self.metadata.name.size() <= {names.MAX_NAME_LENGTH}"
            f" && self.metadata.name.matches('{_NAME_PATTERN}')",
            message=_NAME_MESSAGE,
            check=lambda r: bool(
                len(r.metadata.name) <= names.MAX_NAME_LENGTH and re.fullmatch(_NAME_PATTERN, r.metadata.name)
            ),
        ),
        Rule(
            cel=f"!self.metadata.name.endsWith('{names.HEADLESS_SUFFIX}')",
            message=f"metadata.name must not end with {names.HEADLESS_SUFFIX}: so end the names of headless Services,"
            " and it would be that of another resource",
            check=lambda r: not r.metadata.name.endswith(names.HEADLESS_SUFFIX),
        ),
    )
    TRANSITIONS: ClassVar[tuple[Transition, ...]] = (
        Transition(
            cel=f"!({_has(_CLAIM_SIZE, 'self')}) || !({_has(_CLAIM_SIZE, 'oldSelf')})"
            f" || quantity(string(self.{_CLAIM_SIZE})).compareTo(quantity(string(oldSelf.{_CLAIM_SIZE}))) >= 0"
            " || (has(self.status) && has(self.status.conditions)"
            f" && self.status.conditions.exists(c, c.reason == '{names.CLAIM_CANNOT_GROW}'))",
            message="a claim can grow and never shrink; create another SpecCacheDeployment with a smaller claim",
            at=f".{_CLAIM_SIZE}",
        ),
    )
    """A size that the claim could not grow to may be taken back, which only the status tells."""

    @classmethod
    def parse(cls, obj: dict[str, Any]) -> SpecCacheDeployment:
        """The resource from its plain form (as YAML or the API server gives it), with defaults filled in.

        Raises InvalidResource, which lists every problem with its field. Rules between fields are judged only when each
        field is right by itself.
        """
        if not isinstance(obj, dict):
            raise InvalidResource([("(document)", f"give one object of kind {names.KIND}, found {_shown(obj)}")])
        nulls = [(path, _NULL) for path in _nulls(obj.get("spec"), "spec")]
        try:
            resource = cls.model_validate(obj)
        except ValidationError as error:
            known = dict(nulls)
            raise InvalidResource([*nulls, *(item for item in _problems(error) if item[0] not in known)]) from error
        if nulls:
            raise InvalidResource(nulls)
        problems = [
            ("metadata.name", rule.message.removeprefix("metadata.name "))
            for rule in cls.RULES
            if not rule.check(resource)
        ]
        problems += broken_rules(resource.spec, "spec")
        if problems:
            raise InvalidResource(problems)
        return resource

    @classmethod
    def from_yaml(cls, text: str) -> SpecCacheDeployment:
        """The resource in a YAML text with exactly one document. Raises InvalidResource, also for broken YAML."""
        try:
            documents = [document for document in yaml.safe_load_all(text) if document is not None]
        except yaml.YAMLError as error:
            raise InvalidResource([("(document)", f"not YAML: {error}")]) from error
        if len(documents) != 1:
            raise InvalidResource([("(document)", f"give exactly one {names.KIND}; found {len(documents)} documents")])
        return cls.parse(documents[0])

    @property
    def name(self) -> str:
        """`metadata.name`."""
        return self.metadata.name

    @property
    def namespace(self) -> str:
        """`metadata.namespace`; `default` when unset."""
        return self.metadata.namespace

    @property
    def served_name(self) -> str:
        """The model's name for clients, with the default filled in."""
        return self.spec.model.served_name or self.name


_NULL = "has no value (null); give one, or remove the field"


def _nulls(value: Any, path: str) -> Iterator[str]:
    """Paths of the nulls below `path`. The API server refuses them too, where it has no default to put there."""
    items: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        items = ((f"{path}.{key}", item) for key, item in value.items())
    elif isinstance(value, list):
        items = ((f"{path}[{number}]", item) for number, item in enumerate(value))
    for where, item in items:
        if item is None:
            yield where
        yield from _nulls(item, where)


_HINTS = {
    "missing": "is required",
    "extra_forbidden": "is not a field; check the spelling, or remove it",
    "string_pattern_mismatch": "does not match {pattern}",
    "literal_error": "must be one of {expected}",
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    "too_long": "must have at most {max_length} entries",
    "too_short": "must have at least {min_length} entries",
    "string_type": "must be text; put it in quotes",
    "int_type": "must be a whole number",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "value_error": "{error}",
}


def _problems(error: ValidationError) -> list[tuple[str, str]]:
    problems = []
    for item in error.errors(include_url=False):
        hint = _HINTS.get(item["type"])
        text = item["msg"] if hint is None else hint.format_map(item.get("ctx", {}))
        if item["type"] not in ("missing", "extra_forbidden", "value_error"):
            text += f"; found {_shown(item['input'])}"
        problems.append((_path(item["loc"]), text))
    return problems


def _path(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
