"""Short names for the columns, and conditions that the schema knows."""

from typing import Any

import pytest

from speccache_api import names
from speccache_api.crd import root_schema
from speccache_api.resource import SpecCacheDeployment
from speccache_api.status import CONDITION_TYPES, READY, summary

_TIERS: dict[str, Any] = {"device": {"tokens": 64}, "host": {"tokens": 64}}


def _summary(**spec: Any) -> dict[str, str]:
    return summary(
        SpecCacheDeployment.parse(
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "metadata": {"name": "chat"},
                "spec": {"model": {"uri": "builtin://tiny"}, "kvCache": _TIERS, **spec},
            }
        )
    )


@pytest.mark.parametrize(
    ("uri", "short"),
    [
        ("builtin://tiny", "tiny"),
        ("pvc://models/meta/llama-3.1-8b", "llama-3.1-8b"),
        ("pvc://models", "models"),
    ],
)
def test_short_name_of_a_model(uri: str, short: str) -> None:
    assert _summary(model={"uri": uri}) == {"model": short}


def test_draft_and_storage_when_in_use() -> None:
    draft = {"algorithm": "EAGLE3", "draftModel": {"uri": "pvc://models/head"}}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"persistentVolumeClaim": {"size": "1Gi"}}, "chat-kv"),
        ({"persistentVolumeClaim": {"claimName": "shared"}}, "shared"),
        ({"s3": {"bucket": "pages", "prefix": "chat"}}, "s3://pages/chat"),
    ]
    for storage, name in cases:
        kv_cache = {**_TIERS, "storage": storage}
        assert _summary(speculative=draft, kvCache=kv_cache) == {"model": "tiny", "draft": "head", "storage": name}


def test_condition_types_are_told_in_the_schema() -> None:
    status = root_schema()["properties"]["status"]["properties"]
    text = status["conditions"]["items"]["properties"]["type"]["description"]
    assert CONDITION_TYPES[0] == READY
    assert all(kind in text for kind in CONDITION_TYPES)
