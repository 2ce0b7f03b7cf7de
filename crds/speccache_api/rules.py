"""Rules between fields: each is written once, for the API server (CEL) and for Python, side by side.

The API server refuses a wrong resource before it is stored; `speccache-runtime serve -f` and the operator judge the
same resource in Python. A rule that lived in two files would soon say two things, so a `Rule` carries both forms and
one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of a model.

    `cel` is true for a right object, and so is `check` for the parsed model. `at` is the path (`.a.b`, below the model)
    of the field to blame. `found` and `found_cel` add what was found to the message, in both forms.
    """

    cel: str
    message: str
    check: Callable[[Any], bool]
    at: str = ""
    found: Callable[[Any], str] | None = None
    found_cel: str | None = None

    def text(self, model: Any) -> str:
        """The message for `model`, which breaks the rule."""
        return self.message if self.found is None else f"{self.message}; found {self.found(model)}"

    def schema(self) -> dict[str, Any]:
        """The entry of `x-kubernetes-validations`."""
        entry: dict[str, Any] = {"rule": self.cel, "message": self.message}
        if self.found_cel is not None:
            entry["messageExpression"] = f"{_cel_text(self.message + '; found ')} + {self.found_cel}"
        if self.at:
            entry["fieldPath"] = self.at
        return entry


@dataclass(frozen=True, slots=True)
class Transition:
    """A rule about a change: `cel` compares `self` with `oldSelf`. Only the API server sees both. `at` as in a Rule."""

    cel: str
    message: str
    at: str = ""

    def schema(self) -> dict[str, Any]:
        """The entry of `x-kubernetes-validations`."""
        entry = {"rule": self.cel, "message": self.message}
        return {**entry, "fieldPath": self.at} if self.at else entry


def exactly_one(*names: str) -> Rule:
    """The rule of a union: of the fields `names` (as users write them) exactly one is given."""

    def given(model: SpecModel) -> list[str]:
        return [name for name in names if model.given(name)]

    # Every wrong combination is spelled out: CEL cannot bound the cost of joining a list, but that of constants it can.
    wrong = [several for count in range(len(names), 1, -1) for several in combinations(names, count)]
    found = "".join(f"{' && '.join(f'has(self.{name})' for name in w)} ? '{' and '.join(w)}' : " for w in wrong)
    return Rule(
        cel=f"[{', '.join(f'has(self.{name})' for name in names)}].filter(g, g).size() == 1",
        message=f"give exactly one of {', '.join(names)}",
        check=lambda model: len(given(model)) == 1,
        found=lambda model: " and ".join(given(model)) or "none",
        found_cel=f"({found}'none')",
    )


class SpecModel(BaseModel):
    """Base of everything below `spec`: camelCase names, nothing unknown, nothing converted silently, immutable.

    Parsing alone does not check `RULES`; `broken_rules` does, and `SpecCacheDeployment.parse` calls both.
    """

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()
    TRANSITIONS: ClassVar[tuple[Transition, ...]] = ()

    def given(self, alias: str) -> bool:
        """True when the field that users call `alias` has a value."""
        return any(field.alias == alias and getattr(self, name) is not None for name, field in fields_of(self))

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core)
        entries = [rule.schema() for rule in cls.RULES] + [change.schema() for change in cls.TRANSITIONS]
        if entries:
            handler.resolve_ref_schema(schema)["x-kubernetes-validations"] = entries
        return schema


def fields_of(model: SpecModel) -> list[tuple[str, Any]]:
    """(attribute, pydantic field) pairs of a model."""
    return list(type(model).model_fields.items())


def broken_rules(model: SpecModel, path: str) -> Iterator[tuple[str, str]]:
    """(path of the field, message) for every rule that `model`, found at `path`, or a model inside it breaks."""
    for rule in model.RULES:
        if not rule.check(model):
            yield f"{path}{rule.at}", rule.text(model)
    for name, field in fields_of(model):
        value = getattr(model, name)
        if isinstance(value, SpecModel):
            yield from broken_rules(value, f"{path}.{field.alias}")
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, SpecModel):
                    yield from broken_rules(item, f"{path}.{field.alias}[{number}]")


def _cel_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
