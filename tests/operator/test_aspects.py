"""The aspects one by one: inspection, memory, storage."""

import dataclasses
from datetime import timedelta
from typing import Any

import pytest

from speccache_api import names
from speccache_api.geometry import Inspection, builtin_facts
from speccache_api.storage_target import resolve
from speccache_operator.children.context import RuntimeImage
from speccache_operator.children.inspection_record import RECORD_KEY
from speccache_operator.decide import inquiry, inspection, memory, sharing, storage
from speccache_operator.decide.conditions import Reason
from speccache_operator.observe.observed import NodeCapacity, Observed

GIB = 2**30
ON_CLAIMS = {
    "spec.model": {"uri": "pvc://models/target"},
    "spec.speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "pvc://models/draft"}},
}
GEOMETRY = {"layers": 2, "kvHeads": 2, "headDim": 64, "parameters": 1000}


# ModelInspected


@pytest.fixture
def models(claim: Any) -> dict[str, Any]:
    return {"models": claim("models", "ReadOnlyMany")}


@pytest.fixture
def job(resource: Any, image: RuntimeImage, now: Any) -> Any:
    """The resource's Job in a state: `job("Complete", seconds_ago)`, `job("Failed", ...)`, or running."""

    def make(ended: str = "", ago: float = 1.0, failed: int = 0, age: float = 1.0) -> dict[str, Any]:
        born = (now - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ")
        stamp = (now - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [{"type": ended, "status": "True", "lastTransitionTime": stamp}] if ended else []
        name = inspection.job_name(resource(**ON_CLAIMS), image)
        labels = names.object_labels("chat", names.COMPONENT_INSPECTION)
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": name,
                "namespace": "demo",
                "uid": "job",
                "resourceVersion": "1",
                "labels": labels,
                "creationTimestamp": born,
            },
            "status": {"conditions": conditions, "failed": failed},
        }

    return make


@pytest.fixture
def record(job: Any) -> Any:
    """The resource's record with this text."""

    def make(text: str) -> dict[str, Any]:
        return {**job(), "apiVersion": "v1", "kind": "ConfigMap", "data": {RECORD_KEY: text}}

    return make


@pytest.fixture
def ended(pod: Any) -> Any:
    """A pod of the Job that ended with this message."""

    def make(message: str, code: int = 0, name: str = "p") -> Any:
        state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed", "message": message}}
        return pod(name, owner="job", component=names.COMPONENT_INSPECTION, phase="Failed", state=state)

    return make


@pytest.fixture
def look(resource: Any, image: RuntimeImage, now: Any, models: Any) -> Any:
    """The inspection's finding for models on claims."""

    def run(*inspections: Any, pods: Any = (), **fields: Any) -> inspection.Finding:
        observed = Observed(labelled=inspections, pods=tuple(pods), claims=models)
        return inspection.look(resource(**(ON_CLAIMS | fields)), observed, image, now)

    return run


def test_the_builtin_pair_is_known(resource: Any, image: RuntimeImage, now: Any) -> None:
    finding = inspection.look(resource(), Observed(), image, now)
    assert finding.condition.reason is Reason.BUILT_IN
    assert finding.inspection == builtin_facts("tiny")
    assert finding.wanted is None


def test_declared_geometry_is_taken(resource: Any, image: RuntimeImage, now: Any, models: Any) -> None:
    fields = {"spec.model": {"uri": "pvc://models/a", "kvGeometry": GEOMETRY}, "spec.speculative": None}
    finding = inspection.look(resource(**fields), Observed(claims=models), image, now)
    assert finding.condition.reason is Reason.GEOMETRY_DECLARED
    assert finding.inspection is not None
    assert finding.inspection.target.geometry.layers == 2


def test_declared_geometry_of_one_model_still_needs_the_job(look: Any) -> None:
    finding = look(**{"spec.model": {"uri": "pvc://models/a", "kvGeometry": GEOMETRY}})
    assert finding.condition.reason is Reason.INSPECTION_RUNNING
    assert finding.wanted is not None


def test_the_jobs_name_follows_models_and_image(resource: Any) -> None:
    base = resource(**ON_CLAIMS)
    other_model = resource(**ON_CLAIMS | {"spec.model": {"uri": "pvc://models/b"}})
    no_draft = resource(**ON_CLAIMS | {"spec.speculative": None})
    found = {
        inspection.job_name(base, RuntimeImage("a")),
        inspection.job_name(base, RuntimeImage("b")),
        inspection.job_name(other_model, RuntimeImage("a")),
        inspection.job_name(no_draft, RuntimeImage("a")),
    }
    assert len(found) == 4
    replicas = resource(**ON_CLAIMS, **{"spec.replicas": 4})
    assert inspection.job_name(base, RuntimeImage("a")) == inspection.job_name(replicas, RuntimeImage("a"))


def test_nothing_there_wants_a_job(look: Any) -> None:
    finding = look()
    assert (finding.condition.status, finding.condition.reason) == ("Unknown", Reason.INSPECTION_RUNNING)
    assert finding.wanted.result is None
    assert finding.inspection is None


def test_a_readable_message_is_the_result(look: Any, job: Any, ended: Any, inspected: Inspection) -> None:
    finding = look(job("Complete"), pods=[ended(inspected.to_json())])
    assert finding.inspection == inspected
    assert Inspection.from_json(finding.wanted.result) == inspected


def test_a_record_is_the_result_without_any_job(look: Any, record: Any, inspected: Inspection) -> None:
    finding = look(record(inspected.to_json()))
    assert (finding.condition.reason, finding.inspection) == (Reason.INSPECTED, inspected)


def test_an_unreadable_record_counts_as_none(look: Any, record: Any) -> None:
    assert look(record("{")).condition.reason is Reason.INSPECTION_RUNNING


def test_the_job_is_kept_until_its_result_is_recorded(
    resource: Any, image: Any, now: Any, job: Any, ended: Any, record: Any, inspected: Inspection, models: Any
) -> None:
    done = (job("Complete"),)
    pods = (ended(inspected.to_json()),)
    parsed = resource(**ON_CLAIMS)
    before = Observed(labelled=done, pods=pods, claims=models)
    assert inspection.look(parsed, before, image, now).wanted.running
    both = (*done, record(inspected.to_json()))
    after = Observed(labelled=both, pods=pods, claims=models)
    assert not inspection.look(parsed, after, image, now).wanted.running


@pytest.mark.parametrize("message", ["", "no model here", '{"target": {}}'])
def test_a_complete_job_without_a_result_is_a_failure(message: str, look: Any, job: Any, ended: Any) -> None:
    finding = look(job("Complete"), pods=[ended(message)])
    assert (finding.condition.status, finding.condition.reason) == ("False", Reason.INSPECTION_FAILED)
    assert finding.inspection is None
    assert message in finding.condition.message


def test_a_failed_job_says_what_its_newest_pod_said(look: Any, job: Any, ended: Any) -> None:
    pods = [ended("old words", 1, "a"), ended("config.json is missing", 1, "b")]
    pods[0]["metadata"]["creationTimestamp"] = "2026-11-21T10:00:00Z"
    pods[1]["metadata"]["creationTimestamp"] = "2026-11-21T11:00:00Z"
    finding = look(job("Failed"), pods=pods)
    assert "config.json is missing" in finding.condition.message
    assert "spec.model.uri" in finding.condition.message
    assert finding.wanted is not None


def test_a_failed_job_is_tried_again_after_its_pause(look: Any, job: Any, ended: Any) -> None:
    pods = [ended("broken", 1)]
    early = look(job("Failed", 100.0), pods=pods)
    assert early.again_after == pytest.approx(inspection.RETRY_SECONDS - 100)
    late = look(job("Failed", inspection.RETRY_SECONDS), pods=pods)
    assert late.wanted is None  # so the Job is deleted, and made anew by the next pass
    assert late.condition.reason is Reason.INSPECTION_FAILED


def test_while_attempts_are_left_the_last_failure_is_told(look: Any, job: Any, ended: Any) -> None:
    finding = look(job(failed=1), pods=[ended("no such file", 1)])
    assert finding.condition.reason is Reason.INSPECTION_FAILED
    assert "no such file" in finding.condition.message
    assert finding.wanted is not None


def test_a_job_that_gets_no_pod_is_told(look: Any, job: Any) -> None:
    early = look(job(age=5.0))
    assert (early.condition.reason, early.again_after) == (Reason.INSPECTION_RUNNING, inquiry.PATIENCE_SECONDS - 5)
    late = look(job(age=inquiry.PATIENCE_SECONDS))
    assert (late.condition.status, late.condition.reason) == ("False", Reason.PODS_MISSING)
    assert "quota" in late.condition.message
    assert late.wanted is not None


def test_a_pod_that_failed_is_a_failed_inspection_before_its_job_counts_it(look: Any, job: Any, ended: Any) -> None:
    assert look(job(), pods=[ended("no such file", 1)]).condition.reason is Reason.INSPECTION_FAILED


def test_trouble_of_the_inspection_pod_is_told(look: Any, job: Any, pod: Any) -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "denied"}}
    stuck = pod(owner="job", component=names.COMPONENT_INSPECTION, phase="Pending", state=waiting)
    finding = look(job(), pods=[stuck])
    assert finding.condition.reason is Reason.IMAGE_PULL_FAILED
    assert "denied" in finding.condition.message


def test_pods_of_another_job_are_not_listened_to(look: Any, job: Any, ended: Any, inspected: Inspection) -> None:
    stranger = ended(inspected.to_json())
    stranger["metadata"]["ownerReferences"][0]["uid"] = "older"
    assert look(job("Complete"), pods=[stranger]).inspection is None


@pytest.mark.parametrize("known", [{}, {"kvGeometry": GEOMETRY}], ids=["to be inspected", "declared"])
def test_a_missing_claim_is_told_whatever_is_known_of_the_model(
    known: dict[str, Any], resource: Any, image: RuntimeImage, now: Any
) -> None:
    """Its pods could never start."""
    fields = {"spec.model": {"uri": "pvc://models/a", **known}, "spec.speculative": None}
    finding = inspection.look(resource(**fields), Observed(), image, now)
    assert finding.condition.reason is Reason.MODEL_CLAIM_NOT_FOUND
    assert "spec.model.uri: claim models" in finding.condition.message
    assert finding.inspection is None


def test_a_record_outlives_a_claim_that_is_missing_for_a_while(
    resource: Any, image: RuntimeImage, now: Any, record: Any, inspected: Inspection
) -> None:
    state = Observed(labelled=(record(inspected.to_json()),))
    finding = inspection.look(resource(**ON_CLAIMS), state, image, now)
    assert finding.condition.reason is Reason.MODEL_CLAIM_NOT_FOUND
    assert Inspection.from_json(finding.wanted.result) == inspected
    assert not finding.wanted.running


# MemorySized


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (None, Reason.SIZED),
        ((), Reason.SIZED),
        ((NodeCapacity("big", 64 * GIB),), Reason.SIZED),
        ((NodeCapacity("small", GIB), NodeCapacity("big", 64 * GIB)), Reason.SIZED),
        ((NodeCapacity("small", GIB), NodeCapacity("less", GIB // 2)), Reason.EXCEEDS_NODE_ALLOCATABLE),
    ],
    ids=["not to be seen", "none", "one", "a larger one", "all too small"],
)
def test_the_limit_is_compared_with_the_largest_node(nodes: Any, reason: Reason, resource: Any) -> None:
    finding = memory.look(resource().spec, builtin_facts("tiny"), nodes)
    assert finding.condition.reason is reason
    assert finding.allowed is (reason is Reason.SIZED)
    assert finding.memory is not None


def test_a_limit_that_just_fits_is_allowed(resource: Any) -> None:
    spec = resource().spec
    limit = memory.look(spec, builtin_facts("tiny"), None).memory.limit
    assert memory.look(spec, builtin_facts("tiny"), (NodeCapacity("n", limit),)).allowed
    assert not memory.look(spec, builtin_facts("tiny"), (NodeCapacity("n", limit - 1),)).allowed


def test_only_nodes_with_a_gpu_count_for_a_pod_with_one(resource: Any) -> None:
    spec = resource(**{"spec.resources": {"limits": {"nvidia.com/gpu": "1"}}}).spec
    nodes = (NodeCapacity("plain", 999 * GIB), NodeCapacity("gpu", GIB, gpus=8))
    finding = memory.look(spec, builtin_facts("tiny"), nodes)
    assert finding.condition.reason is Reason.EXCEEDS_NODE_ALLOCATABLE
    assert "gpu, offers 1Gi" in finding.condition.message


@pytest.mark.parametrize(
    ("limit", "status", "reason", "text"),
    [
        ("64Gi", "True", Reason.MANUAL, "covers the computed"),
        ("1Gi", "False", Reason.MANUAL_SHORTFALL, "short of the computed"),
        ("99999999999999m", "False", Reason.INVALID_LIMIT, "spec.resources.limits.memory"),
    ],
)
def test_manual_memory_is_compared_and_stands(
    limit: str, status: str, reason: Reason, text: str, resource: Any
) -> None:
    spec = resource(**{"spec.memory": {"policy": "Manual"}, "spec.resources": {"limits": {"memory": limit}}}).spec
    finding = memory.look(spec, builtin_facts("tiny"), None)
    assert (finding.condition.status, finding.condition.reason) == (status, reason)
    assert text in finding.condition.message
    assert finding.allowed is (reason is not Reason.INVALID_LIMIT)


def test_the_sum_is_told_term_by_term(resource: Any) -> None:
    finding = memory.look(resource().spec, builtin_facts("tiny"), None)
    assert finding.memory is not None
    for term in ("host target", "host draft", "weights and device pages", "overhead 2Gi"):
        assert term in finding.condition.message
    assert "staging" not in finding.condition.message


# StorageReady

CREATED = {"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "1Gi"}}}
NAMED = {"spec.kvCache.storage": {"persistentVolumeClaim": {"claimName": "mine"}}}


@pytest.fixture
def look_at_storage(resource: Any, image: RuntimeImage, now: Any) -> Any:
    """The finding for a resource with these fields in a state."""

    def run(observed: Observed, **fields: Any) -> storage.Finding:
        parsed = resource(**fields)
        return storage.look(parsed, resolve(parsed), observed, image, now)

    return run


@pytest.mark.parametrize(
    ("replicas", "modes", "phase", "status", "reason", "usable"),
    [
        (1, ["ReadWriteOnce"], "Bound", "True", Reason.CLAIM_BOUND, True),
        (1, ["ReadWriteOncePod"], "Bound", "True", Reason.CLAIM_BOUND, True),
        (1, ["ReadWriteOnce"], "Pending", "Unknown", Reason.CLAIM_PENDING, True),
        (1, ["ReadWriteOnce"], "Lost", "False", Reason.CLAIM_LOST, False),
        (1, ["ReadOnlyMany"], "Bound", "False", Reason.ACCESS_MODE_READ_ONLY, False),
        (2, ["ReadWriteOnce"], "Bound", "False", Reason.ACCESS_MODE_NOT_SHARED, False),
        (2, ["ReadWriteOnce", "ReadOnlyMany"], "Bound", "False", Reason.ACCESS_MODE_NOT_SHARED, False),
        (2, ["ReadWriteMany"], "Bound", "True", Reason.CLAIM_BOUND, True),
        (0, ["ReadWriteOnce"], "Bound", "True", Reason.CLAIM_BOUND, True),
    ],
)
def test_a_named_claim(
    replicas: int,
    modes: list[str],
    phase: str,
    status: str,
    reason: Reason,
    usable: bool,
    look_at_storage: Any,
    claim: Any,
) -> None:
    state = Observed(claims={"mine": claim("mine", *modes, phase=phase)})
    finding = look_at_storage(state, **NAMED, **{"spec.replicas": replicas})
    assert (finding.condition.status, finding.condition.reason) == (status, reason)
    assert finding.usable is usable


def test_a_claim_that_is_being_deleted_is_not_used(look_at_storage: Any, claim: Any) -> None:
    state = Observed(claims={"mine": claim("mine", deletionTimestamp="2026-11-21T00:00:00Z")})
    assert look_at_storage(state, **NAMED).condition.reason is Reason.CLAIM_DELETING


def test_a_claim_yet_to_be_made_is_no_obstacle(look_at_storage: Any) -> None:
    finding = look_at_storage(Observed(), **CREATED)
    assert (finding.condition.reason, finding.usable) == (Reason.CLAIM_PENDING, True)


def test_no_storage_tier_is_fine(look_at_storage: Any) -> None:
    finding = look_at_storage(Observed())
    assert (finding.condition.status, finding.condition.reason) == ("True", Reason.NO_STORAGE_TIER)


def test_findings_are_values(look_at_storage: Any) -> None:
    finding = look_at_storage(Observed())
    with pytest.raises(dataclasses.FrozenInstanceError):
        finding.usable = False  # type: ignore[misc]


# Sharing


@pytest.fixture
def volume() -> Any:
    """A volume that these terms lead to; a term is (key, operator, values)."""

    def make(*terms: tuple[str, str, list[str]]) -> dict[str, Any]:
        selectors = [{"matchExpressions": [dict(zip(("key", "operator", "values"), t, strict=True))]} for t in terms]
        affinity = {"nodeAffinity": {"required": {"nodeSelectorTerms": selectors}}} if terms else {}
        return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "v"}, "spec": affinity}

    return make


HOST = "kubernetes.io/hostname"


@pytest.mark.parametrize(
    ("modes", "terms", "shared"),
    [
        (["ReadWriteMany"], None, True),
        (["ReadWriteOnce", "ReadWriteMany"], None, True),
        (["ReadWriteOnce"], None, False),
        (["ReadWriteOnce"], [], False),
        (["ReadWriteOnce"], [(HOST, "In", ["n1"])], True),
        (["ReadWriteOnce"], [(HOST, "In", ["n1"]), (HOST, "In", ["n1"])], True),
        (["ReadWriteOnce"], [(HOST, "In", ["n1", "n2"])], False),
        (["ReadWriteOnce"], [(HOST, "In", ["n1"]), (HOST, "In", ["n2"])], False),
        (["ReadWriteOnce"], [(HOST, "In", ["n1"]), ("topology.kubernetes.io/zone", "In", ["z"])], False),
        (["ReadWriteOnce"], [("topology.kubernetes.io/zone", "In", ["z"])], False),
        (["ReadWriteOnce"], [(HOST, "NotIn", ["n1"])], False),
        (["ReadWriteOncePod"], [(HOST, "In", ["n1"])], False),
    ],
    ids=str,
)
def test_which_claims_two_pods_can_mount(
    modes: list[str], terms: Any, shared: bool, resource: Any, claim: Any, volume: Any
) -> None:
    volumes = {} if terms is None else {"mine": volume(*terms)}
    state = Observed(claims={"mine": claim("mine", *modes)}, volumes=volumes)
    assert sharing.look(resource(**NAMED), state) is shared
    # The models' claims are mounted as well.
    models = {"spec.model": {"uri": "pvc://mine/x"}, "spec.speculative": None}
    assert sharing.look(resource(**models), state) is shared


def test_a_bucket_is_shared_from_every_node(resource: Any, claim: Any) -> None:
    bucket = {"spec.kvCache.storage": {"s3": {"bucket": "pages"}}}
    assert sharing.look(resource(**bucket), Observed())
    # What else the pods mount still counts.
    models = {**bucket, "spec.model": {"uri": "pvc://mine/x"}, "spec.speculative": None}
    assert not sharing.look(resource(**models), Observed(claims={"mine": claim("mine", "ReadWriteOnce")}))


def test_sharing_without_claims_and_with_one_that_is_not_made_yet(resource: Any) -> None:
    many = {"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "1Gi", "accessModes": ["ReadWriteMany"]}}}
    assert sharing.look(resource(), Observed())
    assert not sharing.look(resource(**CREATED), Observed())
    assert sharing.look(resource(**many), Observed())
