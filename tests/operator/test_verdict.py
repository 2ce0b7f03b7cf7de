"""Conditions after the outcome: what the API server made of a plan decides, not what was sent."""

import dataclasses
from typing import Any

import pytest

from speccache_operator.children.table import CHILDREN
from speccache_operator.decide import verdict
from speccache_operator.decide.conditions import Condition, Reason, earliest
from speccache_operator.decide.judge import judge
from speccache_operator.decide.plan import make_plan
from speccache_operator.decide.reasons import Weight
from speccache_operator.decide.steps import Hindrance, Outcome
from speccache_operator.kinds import CLAIM, DEPLOYMENT, POD_DISRUPTION_BUDGET, Kind, Ref
from speccache_operator.observe.observed import NodeCapacity, Observed

STORAGE = {"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "1Gi"}}}
DEPLOYED = Ref(DEPLOYMENT, "demo", "chat")


def _hindrance(kind: Kind, reason: Reason, text: str = "exceeded quota") -> Hindrance:
    child = next(child for child in CHILDREN if child.kind is kind)
    return Hindrance(child, Ref(kind, "demo", "chat"), reason, text)


@pytest.fixture
def said(raw: Any, image: Any, now: Any) -> Any:
    """Conditions by type of a resource in a state, after this outcome."""

    def run(observed: Observed, outcome: Outcome, **fields: Any) -> dict[str, Condition]:
        judged = judge(raw(**fields))
        plan = make_plan(judged, observed, image, now)
        return {c.type: c for c in verdict.conditions(judged, plan, outcome, observed, now)}

    return run


def test_an_apply_that_changed_nothing_is_no_rollout(said: Any, plan: Any, raw: Any, applied: Any) -> None:
    """A webhook writes another image, or the server rounds an amount: the object is as it was."""
    state = applied(plan(raw()))
    live = state.children[DEPLOYED]
    live["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/runtime:1"  # type: ignore[index]
    assert [step.obj["kind"] for step in plan(raw(), state).apply] == ["Deployment"]
    same = said(state, Outcome({DEPLOYED: live}))
    assert (same["Ready"].status, same["Progressing"].reason) == ("True", Reason.COMPLETE)
    changed = {**live, "metadata": {**live["metadata"], "generation": 2}}
    other = said(state, Outcome({DEPLOYED: changed}))
    assert (other["Ready"].status, other["Progressing"].reason) == ("False", Reason.ROLLING_OUT)


@pytest.mark.parametrize(
    ("kind", "nodes", "ready", "storage"),
    [
        (DEPLOYMENT, None, Reason.APPLY_REFUSED, Reason.CLAIM_PENDING),
        (DEPLOYMENT, (NodeCapacity("n", 2**30),), Reason.EXCEEDS_NODE_ALLOCATABLE, Reason.CLAIM_PENDING),
        (CLAIM, None, Reason.CLAIM_REFUSED, Reason.CLAIM_REFUSED),
    ],
)
def test_a_refusal_becomes_conditions(kind: Any, nodes: Any, ready: Reason, storage: Reason, said: Any) -> None:
    after = said(Observed(nodes=nodes), Outcome(hindrances=(_hindrance(kind, Reason.APPLY_REFUSED),)), **STORAGE)
    assert after["Ready"].reason is ready
    assert after["Ready"].status == "False"
    assert after["StorageReady"].reason is storage
    assert after["Progressing"].reason is after["ChildrenApplied"].reason is Reason.APPLY_REFUSED
    assert "exceeded quota" in after["Progressing"].message


def test_a_refusal_of_a_running_resource_is_its_readiness(said: Any, plan: Any, raw: Any, applied: Any) -> None:
    after = said(applied(plan(raw())), Outcome(hindrances=(_hindrance(DEPLOYMENT, Reason.APPLY_REFUSED),)))
    assert (after["Ready"].status, after["Ready"].reason) == ("False", Reason.APPLY_REFUSED)


@pytest.mark.parametrize("reason", [Reason.APPLY_REFUSED, Reason.KIND_NOT_SERVED])
def test_trouble_with_an_optional_child_is_told_and_pods_serve(
    reason: Reason, said: Any, plan: Any, raw: Any, applied: Any
) -> None:
    outcome = Outcome(hindrances=(_hindrance(POD_DISRUPTION_BUDGET, reason),))
    after = said(applied(plan(raw())), outcome)
    assert (after["ChildrenApplied"].status, after["ChildrenApplied"].reason) == ("False", reason)
    assert after["Ready"].status == "True"
    assert verdict.failed(outcome) is (reason is Reason.APPLY_REFUSED)


def test_a_kind_that_is_not_served_is_asked_for_again_slowly(raw: Any, image: Any, now: Any) -> None:
    plan = make_plan(judge(raw()), Observed(), image, now)
    missing = Outcome(hindrances=(_hindrance(POD_DISRUPTION_BUDGET, Reason.KIND_NOT_SERVED),))
    assert verdict.again_after(plan, missing) == verdict.KIND_RECHECK_SECONDS >= 60
    assert verdict.again_after(plan, Outcome()) is None


def test_of_several_hindrances_what_pods_need_is_the_reason_and_all_are_told(said: Any) -> None:
    found = (
        _hindrance(POD_DISRUPTION_BUDGET, Reason.KIND_NOT_SERVED, "no budgets"),
        _hindrance(DEPLOYMENT, Reason.APPLY_REFUSED, "no pods"),
    )
    applied = said(Observed(), Outcome(hindrances=found))["ChildrenApplied"]
    assert applied.reason is Reason.APPLY_REFUSED
    assert applied.message.startswith("no pods")
    assert "no budgets" in applied.message


def test_reasons_know_their_weight_and_their_order() -> None:
    pods = [Reason.OOM_KILLED, Reason.CRASH_LOOPING, Reason.IMAGE_PULL_FAILED, Reason.UNSCHEDULABLE]
    assert sorted(pods, key=lambda reason: reason.rank) == pods
    assert all(reason.weight is Weight.TROUBLE and not reason.quiet for reason in pods)
    assert Reason.STARTING.quiet
    assert Reason.SERVING.quiet
    assert f"{Reason.OOM_KILLED}" == Reason.OOM_KILLED.value == "OOMKilled"


def test_a_refusal_comes_before_an_open_answer_and_then_the_order_of_the_types() -> None:
    waits = Condition("ModelInspected", "Unknown", Reason.INSPECTION_RUNNING, "")
    large = Condition("MemorySized", "False", Reason.TIER_TOO_SMALL, "")
    lost = Condition("StorageReady", "False", Reason.CLAIM_LOST, "")
    assert earliest([waits, lost, large]) is large
    assert earliest([waits]) is waits
    assert earliest([]) is None


def test_an_unschedulable_pod_beside_serving_ones_is_told_with_the_way_out(
    said: Any, plan: Any, raw: Any, applied: Any, pod: Any
) -> None:
    waiting = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no memory"}]
    state = applied(plan(raw()), pods=(pod(phase="Pending", conditions=waiting),))
    live = {**state.children[DEPLOYED], "status": {"observedGeneration": 1, "replicas": 2, "readyReplicas": 1}}
    state = dataclasses.replace(state, children={**state.children, DEPLOYED: live})
    ready = said(state, Outcome())["Ready"]
    assert ready.reason is Reason.UNSCHEDULABLE
    assert "1 earlier pods serve" in ready.message
    assert "scale to 0 and back" in ready.message
