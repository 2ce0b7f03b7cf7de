"""The CustomResourceDefinition that is checked in: up to date, structural, described, and bounded everywhere."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from speccache_api.crd import build_crd, root_schema, to_yaml
from speccache_api.resource import SpecCacheDeployment
from speccache_api.schema import UnknownKeyword, structural_schema
from speccache_api.spec import Spec

_ROOT = Path(__file__).parents[2]
_NAME = "speccachedeployments.speccache.io.yaml"


def _nodes(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in node:
            yield from _nodes(node[key], f"{path}[]")


def _fields(top: str) -> list[tuple[str, dict[str, Any]]]:
    return list(_nodes(root_schema()["properties"][top], top))


@pytest.mark.parametrize("folder", ["crds", "charts/speccache-crds/files"])
def test_the_file_is_up_to_date(folder: str) -> None:
    text = (_ROOT / folder / _NAME).read_text()
    assert text == to_yaml(build_crd()), f"run: python -m speccache_api.crd > {folder}/{_NAME}"
    assert yaml.safe_load(text) == build_crd()


def test_only_what_is_served_now_is_in_the_schema() -> None:
    spec = root_schema()["properties"]["spec"]["properties"]
    assert sorted(spec) == [
        "admin",
        "drain",
        "kvCache",
        "memory",
        "model",
        "networkPolicy",
        "parallelism",
        "podDisruptionBudget",
        "replicas",
        "resources",
        "speculative",
    ]
    assert sorted(spec["kvCache"]["properties"]) == [
        "device",
        "dtype",
        "host",
        "pageSize",
        "requireCacheSalt",
        "storage",
    ]


@pytest.mark.parametrize("top", ["spec", "status"])
def test_every_field_is_described(top: str) -> None:
    described = [(path, node.get("description", "")) for path, node in _fields(top) if not path.endswith("[]")]
    assert [path for path, text in described if len(text) < 15 or not text.endswith((".", "`."))] == []


def test_a_default_is_told_where_it_is_not_obvious() -> None:
    """`kubectl explain` shows no defaults, so the text must."""
    silent = [
        path
        for path, node in _fields("spec")
        if node.get("default") not in (None, {}) and "efault" not in node["description"]
    ]
    assert silent == []


@pytest.mark.parametrize("top", ["spec", "status"])
def test_everything_is_bounded_so_that_rules_stay_cheap(top: str) -> None:
    for path, node in _fields(top):
        if node.get("x-kubernetes-int-or-string"):
            assert "pattern" in node, path
        elif node["type"] == "string":
            assert {"maxLength", "enum", "format"} & node.keys(), path
        elif node["type"] == "array":
            assert {"maxItems", "x-kubernetes-list-type"} <= node.keys(), path
        elif node["type"] == "integer":
            assert {"minimum", "enum"} & node.keys(), path
        elif node["type"] != "boolean" and "properties" not in node:
            assert "maxProperties" in node, path


def test_every_rule_is_in_the_schema_with_a_message_that_has_a_remedy() -> None:
    rules = [rule for _, node in _fields("spec") for rule in node.get("x-kubernetes-validations", [])]
    assert len(rules) >= 20
    assert all(rule["rule"] and len(rule["message"]) > 25 for rule in rules)
    written = {rule.cel for model in _models(Spec) for rule in model.RULES}
    written |= {change.cel for model in _models(Spec) for change in model.TRANSITIONS}
    assert written <= {rule["rule"] for rule in rules}
    of_root = [*SpecCacheDeployment.RULES, *SpecCacheDeployment.TRANSITIONS]
    assert root_schema()["x-kubernetes-validations"] == [rule.schema() for rule in of_root]


def _models(model: Any) -> Iterator[Any]:
    yield model
    for field in model.model_fields.values():
        for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from _models(part)


def test_the_blamed_field_of_a_rule_exists() -> None:
    for path, node in _fields("spec"):
        for rule in node.get("x-kubernetes-validations", []):
            target = node
            for name in rule.get("fieldPath", "").split(".")[1:]:
                assert name in target["properties"], f"{path}: {rule['fieldPath']}"
                target = target["properties"][name]


class _WithUnion(BaseModel):
    field: int | str


class _WithAnything(BaseModel):
    field: dict[str, Any]


@pytest.mark.parametrize("model", [_WithUnion, _WithAnything])
def test_a_keyword_without_translation_is_an_error(model: type[BaseModel]) -> None:
    with pytest.raises(UnknownKeyword, match=r"\.field: no translation for"):
        structural_schema(model)
