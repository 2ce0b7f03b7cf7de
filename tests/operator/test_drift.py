"""Ownership and drift: whose an object is, and whether it still says what was applied."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_api import names
from speccache_operator.decide.drift import ANNOTATION_PLAN_HASH, drifted, replanned, reset, stamped
from speccache_operator.decide.ownership import Owner, owner_of
from speccache_operator.kinds import Key

OBJECT: Any = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "a", "namespace": "b", "labels": {"x": "1"}},
    "spec": {"ports": [{"name": "http", "port": 1}], "list": [1, 2], "empty": {}, "text": "t", "flag": False},
}


def _change(path: str, value: Any) -> Any:
    changed = copy.deepcopy(stamped(OBJECT))
    at: Any = changed
    *parents, last = path.split(".")
    for parent in parents:
        at = at[int(parent) if parent.isdigit() else parent]
    if value is None:
        del at[last]
    else:
        at[int(last) if last.isdigit() else last] = value
    return changed


def test_a_stamp_does_not_change_by_stamping_again() -> None:
    assert stamped(stamped(OBJECT)) == stamped(OBJECT)
    assert ANNOTATION_PLAN_HASH not in OBJECT["metadata"].get("annotations", {})


def test_a_stamp_keeps_other_annotations() -> None:
    annotated = {**OBJECT, "metadata": {**OBJECT["metadata"], "annotations": {"a": "b"}}}
    assert stamped(annotated)["metadata"]["annotations"]["a"] == "b"


def test_another_plan_has_another_stamp() -> None:
    other = {**OBJECT, "spec": {**OBJECT["spec"], "text": "u"}}
    assert replanned(stamped(OBJECT), stamped(other))
    assert not replanned(stamped(OBJECT), stamped(OBJECT))
    assert replanned(OBJECT, stamped(OBJECT))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("status", {"a": 1}),
        ("spec.more", 1),
        ("metadata.uid", "u"),
        ("metadata.labels.y", "2"),
        ("spec.ports", [{"name": "other", "port": 2}, {"name": "http", "port": 1, "nodePort": 3}]),
        ("spec.empty", None),
    ],
)
def test_what_the_server_or_others_add_is_no_drift(path: str, value: Any) -> None:
    live = _change(path, value)
    if path == "spec.empty":
        live["spec"]["empty"] = None
    assert not drifted(live, stamped(OBJECT))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("spec.text", "u"),
        ("spec.flag", True),
        ("spec.flag", None),
        ("spec.list", [2, 1]),
        ("spec.list", [1, 2, 3]),
        ("spec.list", None),
        ("spec.ports", []),
        ("spec.ports.0.port", 9),
        ("metadata.labels", {}),
        ("metadata.labels.x", "2"),
    ],
)
def test_what_was_changed_or_removed_is_drift(path: str, value: Any) -> None:
    assert drifted(_change(path, value), stamped(OBJECT))


@pytest.mark.parametrize(
    ("live", "wanted"),
    [
        ({"limits": {"cpu": "1"}}, {"limits": {"cpu": "1000m"}, "requests": {}}),
        ({"requests": {"cpu": "100m", "memory": "3Gi"}}, {"requests": {"cpu": "0.1", "memory": "3072Mi"}}),
        ({"requests": {"storage": "1G"}}, {"requests": {"storage": "1000000000"}}),
        ({"requests": {"storage": "2e9"}}, {"requests": {"storage": "2G"}}),
    ],
)
def test_amounts_are_compared_and_not_their_spelling(live: Any, wanted: Any) -> None:
    assert not drifted({"resources": live}, {"resources": wanted})


@pytest.mark.parametrize("live", [{"limits": {"cpu": "2"}}, {"limits": {}}, {"limits": {"cpu": "many"}}, {}])
def test_another_amount_is_drift(live: Any) -> None:
    assert drifted({"resources": live}, {"resources": {"limits": {"cpu": "1000m"}}})


def test_a_selector_with_a_label_more_is_drift_and_is_reset() -> None:
    planned = stamped({**OBJECT, "spec": {**OBJECT["spec"], "selector": {"a": "1"}}})
    live = copy.deepcopy(planned)
    live["spec"]["selector"]["more"] = "x"  # type: ignore[index]
    assert drifted(live, planned)
    assert reset(live, planned) == {
        "spec": {"selector": {"a": "1", "more": None}, "ports": [{"name": "http", "port": 1}]},
    }


def test_only_services_need_a_reset() -> None:
    claim = {**OBJECT, "kind": "PersistentVolumeClaim"}
    assert reset(claim, claim) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(json_values)
def test_every_object_contains_itself(value: Any) -> None:
    assert not drifted({"x": value}, {"x": value})


MINE = {"kind": names.KIND, "name": "chat", "uid": "u-1", "controller": True}


@pytest.mark.parametrize(
    ("kind", "meta", "owner"),
    [
        ("Service", {"ownerReferences": [MINE]}, Owner.OURS),
        ("Service", {"ownerReferences": [{**MINE, "controller": False}]}, Owner.FOREIGN),
        ("Service", {}, Owner.FOREIGN),
        ("Service", {"labels": names.object_labels("chat")}, Owner.FOREIGN),
        ("Service", {"ownerReferences": [{**MINE, "uid": "u-0"}]}, Owner.LEAVING),
        ("Service", {"ownerReferences": [{**MINE, "uid": "u-0", "name": "other"}]}, Owner.FOREIGN),
        ("Service", {"ownerReferences": [{**MINE, "uid": "u-0", "kind": "Other"}]}, Owner.FOREIGN),
        ("Service", {"ownerReferences": [MINE], "deletionTimestamp": "2026"}, Owner.LEAVING),
        ("PersistentVolumeClaim", {"labels": names.object_labels("chat", names.COMPONENT_STORAGE)}, Owner.OURS),
        ("PersistentVolumeClaim", {"labels": names.object_labels("other", names.COMPONENT_STORAGE)}, Owner.FOREIGN),
        ("PersistentVolumeClaim", {"ownerReferences": [MINE]}, Owner.OURS),
        ("PersistentVolumeClaim", {}, Owner.FOREIGN),
    ],
)
def test_whose_an_object_is(kind: str, meta: dict[str, Any], owner: Owner) -> None:
    obj = {"apiVersion": "v1", "kind": kind, "metadata": {"name": "chat", **meta}}
    assert owner_of(obj, Key("demo", "chat"), "u-1") is owner
