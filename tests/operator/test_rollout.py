"""Ready and Progressing: pods in all states, and the sentence that explains them."""

import dataclasses
from typing import Any

import pytest

from speccache_operator.decide.conditions import Reason
from speccache_operator.decide.pod_trouble import pod_trouble, worst_trouble
from speccache_operator.kinds import DEPLOYMENT, Ref

SET = Ref(DEPLOYMENT, "demo", "chat")


@pytest.fixture
def after(plan: Any, raw: Any, applied: Any) -> Any:
    """The plan for a resource whose Deployment has this status and these pods."""

    def run(status: dict[str, Any] | None = None, *pods: Any, fields: Any = None, ready: int = 1) -> Any:
        resource = raw(**(fields or {}))
        state = applied(plan(resource), ready=ready, pods=pods)
        state.children[SET]["status"].update(status or {})
        return plan(resource, state)

    return run


def test_all_ready_is_ready_and_complete(after: Any, condition: Any) -> None:
    done = after()
    assert (condition(done, "Ready").status, condition(done, "Ready").reason) == ("True", Reason.SERVING)
    assert (condition(done, "Progressing").status, condition(done, "Progressing").reason) == ("False", Reason.COMPLETE)


@pytest.mark.parametrize(
    ("status", "fields", "ready", "progressing"),
    [
        ({"readyReplicas": 0}, {}, Reason.PODS_MISSING, Reason.ROLLING_OUT),
        ({"observedGeneration": 0}, {}, Reason.PODS_MISSING, Reason.ROLLING_OUT),
        ({"updatedReplicas": 0}, {}, Reason.PODS_MISSING, Reason.ROLLING_OUT),
        (
            {"replicas": 1, "updatedReplicas": 1, "readyReplicas": 1},
            {"spec.replicas": 3},
            Reason.PODS_MISSING,
            Reason.SCALING,
        ),
        (
            {"replicas": 3, "updatedReplicas": 3, "readyReplicas": 3},
            {"spec.replicas": 0},
            Reason.SCALED_TO_ZERO,
            Reason.SCALING,
        ),
        ({"replicas": 0, "readyReplicas": 0}, {"spec.replicas": 0}, Reason.SCALED_TO_ZERO, Reason.COMPLETE),
        ({"replicas": 0, "updatedReplicas": 0, "readyReplicas": 0}, {}, Reason.PODS_MISSING, Reason.SCALING),
    ],
    ids=["starting", "not observed", "rolling out", "up", "down to 0", "at 0", "none"],
)
def test_on_the_way(
    status: dict[str, Any], fields: dict[str, Any], ready: Reason, progressing: Reason, after: Any, condition: Any
) -> None:
    state = after(status, fields=fields)
    assert (condition(state, "Ready").status, condition(state, "Ready").reason) == ("False", ready)
    assert condition(state, "Progressing").reason is progressing


def test_a_changed_plan_is_a_rollout_at_once(plan: Any, raw: Any, applied: Any, condition: Any) -> None:
    changed = plan(raw(**{"spec.kvCache.host": {"tokens": 640}}), applied(plan(raw())))
    assert condition(changed, "Progressing").reason is Reason.ROLLING_OUT
    assert condition(changed, "Ready").status == "False"


def test_a_loading_pod_is_named(after: Any, condition: Any, pod: Any) -> None:
    state = after({"readyReplicas": 0}, pod(state={"running": {}}))
    assert condition(state, "Ready").reason is Reason.STARTING
    assert "chat-0" in condition(state, "Ready").message


def test_a_rollout_with_pods_is_told_as_one(after: Any, condition: Any, pod: Any) -> None:
    state = after({"readyReplicas": 0, "updatedReplicas": 0}, pod(state={"running": {}}))
    assert condition(state, "Ready").reason is Reason.ROLLING_OUT


def _terminated(reason: str = "Error", code: int = 1, message: str = "") -> dict[str, Any]:
    return {"terminated": {"reason": reason, "exitCode": code, "message": message}}


def _waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"waiting": {"reason": reason, "message": message}}


UNSCHEDULED = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: memory"}]
TROUBLES: list[tuple[str, dict[str, Any], Reason, str]] = [
    ("killed now", {"state": _terminated("OOMKilled", 137)}, Reason.OOM_KILLED, "spec.memory.overhead"),
    (
        "killed before",
        {"state": _waiting("CrashLoopBackOff"), "lastState": _terminated("OOMKilled", 137)},
        Reason.OOM_KILLED,
        "spec.kvCache.host",
    ),
    ("killed, code 0", {"state": _terminated("OOMKilled", 0)}, Reason.OOM_KILLED, "memory"),
    (
        "crash",
        {"state": _waiting("CrashLoopBackOff", "back-off 5m"), "lastState": _terminated(message="draft too wide\n")},
        Reason.CRASH_LOOPING,
        "exit code 1: draft too wide",
    ),
    ("silent crash", {"state": _terminated(code=139)}, Reason.CRASH_LOOPING, "exit code 139: it said nothing"),
    ("pull", {"state": _waiting("ErrImagePull", "denied")}, Reason.IMAGE_PULL_FAILED, "runtime.image"),
    ("pull backs off", {"state": _waiting("ImagePullBackOff", "x")}, Reason.IMAGE_PULL_FAILED, "runtime:1"),
    ("never pull", {"state": _waiting("ErrImageNeverPull", "x")}, Reason.IMAGE_PULL_FAILED, "runtime:1"),
    ("config", {"state": _waiting("CreateContainerConfigError", "no key")}, Reason.CONTAINER_CONFIG_ERROR, "no key"),
    ("no place", {"phase": "Pending", "conditions": UNSCHEDULED}, Reason.UNSCHEDULABLE, "0/3 nodes: memory"),
    ("evicted", {"phase": "Failed"}, Reason.POD_FAILED, "chat-0"),
]


@pytest.mark.parametrize(("_", "state", "reason", "text"), TROUBLES, ids=[case[0] for case in TROUBLES])
def test_trouble_is_the_reason_and_comes_with_its_remedy(
    _: str, state: dict[str, Any], reason: Reason, text: str, after: Any, condition: Any, pod: Any
) -> None:
    found = condition(after({"readyReplicas": 0}, pod(**state)), "Ready")
    assert (found.status, found.reason) == ("False", reason)
    assert text in found.message


@pytest.mark.parametrize(
    "state",
    [
        {"ready": True, "lastState": _terminated("OOMKilled", 137), "state": {"running": {}}},
        {"state": {"running": {}}},
        {"state": _waiting("ContainerCreating")},
        {"state": _waiting("PodInitializing")},
        {"state": _terminated("Completed", 0)},
        {"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]},
        {"phase": "Pending"},
    ],
)
def test_what_is_no_trouble(state: dict[str, Any], pod: Any, now: Any) -> None:
    assert pod_trouble(pod(**state), now) is None


def test_a_pod_that_is_being_deleted_is_no_trouble(pod: Any, now: Any) -> None:
    leaving = pod(state=_terminated())
    leaving["metadata"]["deletionTimestamp"] = "2026-11-21T00:00:00Z"
    assert pod_trouble(leaving, now) is None


def test_a_pod_may_wait_a_moment_for_its_node(after: Any, condition: Any, pod: Any) -> None:
    """A new claim is bound, and a node made, while the pod waits: no alarm before that has had its time."""
    cases: list[tuple[str, Reason, float | None]] = [
        ("12:00:00", Reason.STARTING, 15.0),
        ("12:00:01", Reason.STARTING, 15.0),  # another machine's clock
        ("11:59:55", Reason.STARTING, 10.0),
        ("11:59:45", Reason.UNSCHEDULABLE, None),
    ]
    for stamp, reason, again in cases:
        waiting = [{**UNSCHEDULED[0], "lastTransitionTime": f"2026-11-21T{stamp}Z"}]
        state = after({"readyReplicas": 0}, pod(phase="Pending", conditions=waiting))
        assert condition(state, "Ready").reason is reason
        assert state.again_after == again


def test_the_worst_of_many_is_told(pod: Any, now: Any) -> None:
    pods = [
        pod("a", phase="Pending", conditions=UNSCHEDULED),
        pod("b", state=_terminated("OOMKilled", 137)),
        pod("c", state=_waiting("ErrImagePull")),
    ]
    assert worst_trouble(pods, now).reason is Reason.OOM_KILLED
    assert worst_trouble([], now) is None


def test_a_message_does_not_change_while_the_pod_backs_off(pod: Any, now: Any) -> None:
    ended = _terminated(message="x")
    states = [_waiting("CrashLoopBackOff", f"back-off {seconds}s") for seconds in (10, 20, 40)]
    assert len({pod_trouble(pod(state=state, lastState=ended), now).message for state in states}) == 1


def test_a_long_log_is_shortened_to_its_end(pod: Any, now: Any) -> None:
    said = "\n".join(f"line {n}" for n in range(500)) + "\nRuntimeError: the end"
    message = pod_trouble(pod(state=_terminated(message=said)), now).message
    assert message.endswith("RuntimeError: the end")
    assert len(message) < 800


def test_with_manual_memory_the_remedy_is_the_users_limit(after: Any, condition: Any, pod: Any) -> None:
    fields = {"spec.memory": {"policy": "Manual"}, "spec.resources": {"limits": {"memory": "1Gi"}}}
    state = after({"readyReplicas": 0}, pod(state=_terminated("OOMKilled", 137)), fields=fields)
    assert "raise resources.limits.memory" in condition(state, "Ready").message


def test_a_pod_that_came_back_is_ready_and_its_death_is_told(after: Any, condition: Any, pod: Any) -> None:
    state = after({}, pod(ready=True, state={"running": {}}, lastState=_terminated("OOMKilled", 137)))
    assert condition(state, "Ready").status == "True"
    assert "chat-0 had been killed for memory before" in condition(state, "Ready").message


def test_pods_of_a_predecessor_are_not_ours(after: Any, condition: Any, pod: Any) -> None:
    state = after({"readyReplicas": 0}, pod(resource="older", state=_terminated("OOMKilled", 137)))
    assert condition(state, "Ready").reason is Reason.PODS_MISSING


def test_while_models_are_inspected_anew_what_serves_stays_ready(
    plan: Any, raw: Any, applied: Any, claim: Any, condition: Any
) -> None:
    """The earlier configuration serves and nothing is wrong yet: no alarm."""
    state = dataclasses.replace(applied(plan(raw())), claims={"m": claim("m")})
    changed = plan(raw(**{"spec.model": {"uri": "pvc://m/x"}, "spec.speculative": None}), state)
    assert condition(changed, "Ready").status == "True"
    assert (condition(changed, "Progressing").status, condition(changed, "Progressing").reason) == (
        "True",
        Reason.WAITING,
    )
    assert [step.obj["kind"] for step in changed.apply] == ["Job"]
