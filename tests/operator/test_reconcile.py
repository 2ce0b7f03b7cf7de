"""One pass after another over objects in memory, cut off at every single request: it must always end in the same state.

The memory keeps objects as they are applied; what a real API server adds is tests/apiserver's matter.
"""

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from speccache_api import names
from speccache_operator.children.context import RuntimeImage
from speccache_operator.decide.removal import ATTEMPTS, RETRY_SECONDS
from speccache_operator.errors import Conflict, Refused, Unavailable
from speccache_operator.kinds import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    NODE,
    POD,
    POD_DISRUPTION_BUDGET,
    RESOURCE,
    SERVICE,
    Key,
    Kind,
    Object,
    Ref,
)
from speccache_operator.loop.reconcile import Reconciler
from speccache_operator.metrics import Metrics
from speccache_operator.observe.cluster_wide import NODES_SECONDS, Nodes

KEY = Key("demo", "chat")
STORAGE = {"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "1Gi"}}}


class Memory:
    """A cluster in memory. Request number `fail_at` (from 0) raises `error` after its effect, or `before`."""

    def __init__(self, *objects: Any) -> None:
        self.objects: dict[Ref, dict[str, Any]] = {}
        self.version = 0
        self.requests = 0
        self.writes: list[str] = []
        self.deleted: list[Ref] = []
        self.fail_at: int | None = None
        self.before = True
        self.error: Exception = Unavailable("cut")
        self.refuse: Kind | None = None
        for obj in objects:
            self._put(obj)

    async def get(self, ref: Ref) -> Object | None:
        self._count()
        return copy.deepcopy(self.objects.get(ref))

    async def list(self, kind: Kind, namespace: str | None, labels: Any = None) -> list[Object]:
        self._count()
        wanted = (labels or {}).items()
        found = [obj for ref, obj in self.objects.items() if ref.kind is kind]
        return [copy.deepcopy(o) for o in found if wanted <= o["metadata"].get("labels", {}).items()]

    async def apply(self, obj: Object, *, subresource: str = "") -> Object:
        ref = Ref.of(obj)
        fail = self._write(f"apply {ref} {subresource}".strip())
        if ref.kind is self.refuse:
            raise Refused(403, "exceeded quota", "PATCH")
        live = self.objects.get(ref)
        uid = obj["metadata"].get("uid")
        if uid is not None and (live is None or live["metadata"]["uid"] != uid):
            raise Conflict(409, "uid", "PATCH")
        result = self._put({**(live or {}), **obj, "metadata": {**(live or {}).get("metadata", {}), **obj["metadata"]}})
        if fail:
            raise self.error
        return copy.deepcopy(result)

    async def merge(self, ref: Ref, patch: Object) -> Object:
        self._write(f"merge {ref}")
        live = self.objects[ref]
        parts = {part: {**live[part], **patch[part]} for part in ("spec", "data") if part in patch}
        return copy.deepcopy(self._put({**live, **parts}))

    async def create(self, obj: Object) -> Object:
        self._write(f"create {obj['kind']}")
        return obj

    async def replace(self, obj: Object) -> Object:
        raise AssertionError("nothing is replaced")

    async def delete(self, ref: Ref, uid: str) -> None:
        self._write(f"delete {ref}")
        if ref in self.objects and self.objects[ref]["metadata"]["uid"] == uid:
            del self.objects[ref]
            self.deleted.append(ref)

    def _put(self, obj: Any) -> dict[str, Any]:
        ref = Ref.of(obj)
        old = self.objects.get(ref)
        new = copy.deepcopy(dict(obj))
        new["metadata"].setdefault("uid", f"uid-{ref}-{self.deleted.count(ref)}")
        new["metadata"].setdefault("creationTimestamp", datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
        new["metadata"].setdefault("generation", 1)
        if old is None or {**old, "metadata": {}} != {**new, "metadata": {}} or old["metadata"] != new["metadata"]:
            self.version += 1
            new["metadata"]["resourceVersion"] = str(self.version)
        self.objects[ref] = new
        return new

    def _count(self) -> bool:
        number, self.requests = self.requests, self.requests + 1
        if number == self.fail_at and self.before:
            raise self.error
        return number == self.fail_at

    def _write(self, text: str) -> bool:
        fail = self._count()
        self.writes.append(text)
        return fail


def _reconciler(memory: Any) -> Reconciler:
    return Reconciler(memory, RuntimeImage("runtime:1"), Metrics(), check_nodes=True, instance="test")


def _state(memory: Memory) -> dict[str, Any]:
    """What was reached, without what differs between any two runs."""
    state = {}
    for ref, obj in memory.objects.items():
        obj = copy.deepcopy(obj)
        for field in ("resourceVersion", "creationTimestamp"):
            obj["metadata"].pop(field)
        for condition in obj.get("status", {}).get("conditions", []):
            condition.pop("lastTransitionTime")
        state[f"{ref}"] = obj
    return state


async def _until_quiet(reconciler: Reconciler, memory: Memory) -> int:
    """Passes until one writes nothing; a pass that fails is repeated, as the controller does."""
    for number in range(1, 20):
        memory.writes.clear()
        try:
            await reconciler.reconcile(KEY)
        except Unavailable:
            continue
        if not memory.writes:
            return number
    raise AssertionError(f"still writing: {memory.writes}")


async def test_two_passes_are_enough_and_the_second_writes_nothing(raw: Any) -> None:
    memory = Memory(raw(**STORAGE))
    assert await _until_quiet(_reconciler(memory), memory) == 3  # children; a status that has seen them; nothing
    assert Ref(DEPLOYMENT, "demo", "chat") in memory.objects


@pytest.mark.parametrize("before", [True, False], ids=["request lost", "answer lost"])
async def test_cut_off_at_any_request_it_ends_in_the_same_state(before: bool, raw: Any) -> None:
    whole = Memory(raw(**STORAGE))
    await _until_quiet(_reconciler(whole), whole)
    total = whole.requests
    for number in range(total):
        memory = Memory(raw(**STORAGE))
        memory.fail_at, memory.before = number, before
        await _until_quiet(_reconciler(memory), memory)
        assert _state(memory) == _state(whole), f"cut at request {number}"


async def test_a_new_process_finds_nothing_to_do(raw: Any) -> None:
    memory = Memory(raw(**STORAGE))
    await _until_quiet(_reconciler(memory), memory)
    assert await _until_quiet(_reconciler(memory), memory) == 1


async def test_a_resource_that_is_gone_or_going_is_left_alone(raw: Any) -> None:
    memory = Memory()
    await _reconciler(memory).reconcile(KEY)
    going = Memory(raw(**{"metadata.deletionTimestamp": "2026-11-21T00:00:00Z"}))
    await _reconciler(going).reconcile(KEY)
    assert memory.writes == going.writes == []


async def test_a_refused_object_stops_what_needs_it_and_is_told(raw: Any) -> None:
    memory = Memory(raw(**STORAGE))
    memory.refuse = CLAIM
    result = await _reconciler(memory).reconcile(KEY)
    assert result.failed
    assert not any(write.startswith("apply Deployment") for write in memory.writes)
    conditions = {c["type"]: c for c in memory.objects[Ref(RESOURCE, "demo", "chat")]["status"]["conditions"]}
    assert conditions["Ready"]["reason"] == conditions["StorageReady"]["reason"] == "ClaimRefused"


async def test_a_claim_that_cannot_grow_is_told_and_stops_nothing(raw: Any) -> None:
    memory = Memory(raw(**STORAGE))
    await _until_quiet(_reconciler(memory), memory)
    larger = {"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "2Gi"}}, "spec.kvCache.host": {"tokens": 640}}
    memory._put(raw(**larger))
    memory.refuse = CLAIM
    result = await _reconciler(memory).reconcile(KEY)
    assert result.failed, "it is tried again: the class may allow it one day"
    assert any(write.startswith("apply Deployment") for write in memory.writes)
    conditions = {c["type"]: c for c in memory.objects[Ref(RESOURCE, "demo", "chat")]["status"]["conditions"]}
    assert conditions["StorageReady"]["reason"] == conditions["ChildrenApplied"]["reason"] == "ClaimCannotGrow"
    assert "from 1Gi to 2Gi: exceeded quota; set allowVolumeExpansion: true" in conditions["StorageReady"]["message"]
    assert "size back to 1Gi" in conditions["StorageReady"]["message"]
    assert (conditions["Ready"]["reason"], conditions["Progressing"]["reason"]) == ("PodsMissing", "RollingOut")


@pytest.mark.parametrize("wanted", [{"spec.podDisruptionBudget": {"maxUnavailable": 1}}, {}], ids=["wanted", "not"])
async def test_an_optional_kind_that_may_not_be_read_or_written_stops_nothing(wanted: Any, raw: Any) -> None:
    """As with the rights of an earlier chart."""

    class Forbidden(Memory):
        async def get(self, ref: Ref) -> Object | None:
            if ref.kind is POD_DISRUPTION_BUDGET:
                raise Refused(403, "forbidden", "GET")
            return await super().get(ref)

    memory = Forbidden(raw(**wanted))
    memory.refuse = POD_DISRUPTION_BUDGET
    result = await _reconciler(memory).reconcile(KEY)
    assert Ref(DEPLOYMENT, "demo", "chat") in memory.objects
    conditions = {c["type"]: c for c in memory.objects[Ref(RESOURCE, "demo", "chat")]["status"]["conditions"]}
    assert conditions["ChildrenApplied"]["reason"] == ("ApplyRefused" if wanted else "Applied")
    assert result.failed is bool(wanted)


@pytest.mark.parametrize(
    ("refuse", "grows"), [(POD_DISRUPTION_BUDGET, True), (SERVICE, True), (CONFIG_MAP, False), (DEPLOYMENT, False)]
)
async def test_pods_become_more_unless_what_they_are_is_refused(refuse: Kind, grows: bool, raw: Any) -> None:
    memory = Memory(raw())
    await _reconciler(memory).reconcile(KEY)
    changed = {"spec.kvCache.host": {"tokens": 640}, "spec.podDisruptionBudget": {"maxUnavailable": 1}}
    memory._put(raw(**changed, **{"spec.replicas": 3}))
    for ref in (Ref(SERVICE, "demo", "chat"), Ref(SERVICE, "demo", "chat-pods")):
        memory.objects[ref]["spec"]["selector"] = {}
    memory.refuse = refuse
    await _reconciler(memory).reconcile(KEY)
    assert memory.objects[Ref(DEPLOYMENT, "demo", "chat")]["spec"]["replicas"] == (3 if grows else 1)


async def test_a_status_that_was_written_in_the_meantime_is_no_repair(raw: Any) -> None:
    """A webhook keeps an image of its own, so each pass applies; the controller writes the status just before."""

    class Busy(Memory):
        async def apply(self, obj: Object, *, subresource: str = "") -> Object:
            live = self.objects.get(Ref.of(obj))
            if obj["kind"] != "Deployment" or live is None:
                return await super().apply(obj, subresource=subresource)
            return copy.deepcopy(self._put({**live, "status": {"observedGeneration": 1, "replicas": 1}}))

    memory = Busy(raw())
    reconciler = _reconciler(memory)
    await reconciler.reconcile(KEY)
    deployment = memory.objects[Ref(DEPLOYMENT, "demo", "chat")]
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/runtime:1"
    memory.writes.clear()
    await reconciler.reconcile(KEY)
    assert not [write for write in memory.writes if write.startswith("create")]


async def test_states_that_were_seen_or_made_are_no_news(raw: Any) -> None:
    memory = Memory(raw(**STORAGE))
    reconciler = _reconciler(memory)
    assert reconciler.is_news(KEY, memory.objects[Ref(RESOURCE, "demo", "chat")])
    await reconciler.reconcile(KEY)
    assert not [ref for ref, obj in memory.objects.items() if reconciler.is_news(KEY, obj)]
    changed = copy.deepcopy(memory.objects[Ref(DEPLOYMENT, "demo", "chat")])
    changed["metadata"]["resourceVersion"] = "999"
    assert reconciler.is_news(KEY, changed)


async def test_a_claim_wakes_those_that_name_it(raw: Any) -> None:
    memory = Memory(raw(**{"spec.kvCache.storage": {"persistentVolumeClaim": {"claimName": "mine"}}}))
    reconciler = _reconciler(memory)
    await reconciler.reconcile(KEY)
    assert reconciler.users_of_claim("demo", "mine") == [KEY]
    assert reconciler.users_of_claim("other", "mine") == []
    assert reconciler.users_of_claim("demo", "yours") == []


async def test_a_resync_covers_what_exists_and_what_was_known(raw: Any) -> None:
    memory = Memory(raw())
    reconciler = _reconciler(memory)
    await reconciler.reconcile(KEY)
    memory.objects.clear()
    memory._put(raw(**{"metadata.name": "other"}))
    assert await reconciler.keys(None) == [Key("demo", "other"), KEY]
    await reconciler.reconcile(KEY)
    assert await reconciler.keys(None) == [Key("demo", "other")]


async def test_an_invalid_resource_is_a_condition_and_no_error(raw: Any) -> None:
    memory = Memory(raw(**{"spec.kvCache.pageSize": 3}))
    result = await _reconciler(memory).reconcile(KEY)
    assert not result.failed
    assert [write for write in memory.writes if "create" not in write] == [f"apply {RESOURCE.name} chat status"]


async def test_pods_are_read_after_their_owners(raw: Any) -> None:
    """Or a Job that just ended would be seen as complete beside a list without its pod's message."""
    order: list[str] = []

    class Ordered(Memory):
        async def list(self, kind: Kind, namespace: str | None, labels: Any = None) -> list[Object]:
            order.append(kind.name)
            return await super().list(kind, namespace, labels)

    memory = Ordered(raw())
    await _reconciler(memory).reconcile(KEY)
    assert order.index(POD.name) > order.index("Job")


async def test_without_the_right_to_see_nodes_memory_is_not_compared(raw: Any) -> None:
    class NoNodes(Memory):
        async def list(self, kind: Kind, namespace: str | None, labels: Any = None) -> list[Object]:
            if kind is NODE:
                raise Refused(403, "forbidden", "GET")
            return await super().list(kind, namespace, labels)

    memory = NoNodes(raw())
    await _reconciler(memory).reconcile(KEY)
    assert Ref(DEPLOYMENT, "demo", "chat") in memory.objects


async def test_nodes_are_read_once_for_many_passes() -> None:
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}, "status": {"allocatable": {}}}
    amounts = [("16303428Ki", "8"), ("8Gi", "x"), ("lots", "0")]
    many = [copy.deepcopy(node) for _ in amounts]
    for number, (memory, gpus) in enumerate(amounts):
        many[number]["metadata"]["name"] = f"n{number}"
        many[number]["status"]["allocatable"] = {"memory": memory, "nvidia.com/gpu": gpus}
    cluster: Any = Memory(*many)
    clock = [0.0]
    nodes = Nodes(cluster, lambda: clock[0])
    first = await nodes.capacities()
    assert [(n.memory, n.gpus) for n in first or ()] == [(16303428 * 1024, 8), (8 * 2**30, 0), (0, 0)]
    await nodes.capacities()
    assert cluster.requests == 1
    clock[0] = NODES_SECONDS
    await nodes.capacities()
    assert cluster.requests == 2


# What a deleted resource left in a bucket


BUCKET = {"spec.kvCache.storage": {"s3": {"bucket": "pages"}, "retention": "Delete"}}


def _ended(memory: Memory, job: dict[str, Any], how: str, seconds: float = 0.0) -> None:
    when = (datetime.now(UTC) - timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    condition = {"type": how, "status": "True", "lastTransitionTime": when}
    memory._put({**job, "status": {"conditions": [condition]}})


def _jobs(memory: Memory) -> list[dict[str, Any]]:
    found = [obj for ref, obj in memory.objects.items() if ref.kind is JOB and "-remove-" in ref.name]
    for job in found:  # the resource is gone: it would take the Job with it
        assert [owner["kind"] for owner in job["metadata"]["ownerReferences"]] == ["ConfigMap"]
    return found


def _records(memory: Memory) -> list[dict[str, Any]]:
    return [obj for ref, obj in memory.objects.items() if ref.kind is CONFIG_MAP and "-remove-" in ref.name]


@pytest.fixture
async def left(raw: Any) -> Memory:
    """A cluster whose resource with a bucket and retention Delete has been served, and is gone."""
    memory = Memory(raw(**BUCKET))
    await _reconciler(memory).reconcile(KEY)
    assert _records(memory)
    for ref in [ref for ref, obj in memory.objects.items() if obj["metadata"].get("ownerReferences")]:
        del memory.objects[ref]
    del memory.objects[Ref(RESOURCE, "demo", "chat")]
    return memory


async def test_a_deleted_resources_pages_are_removed_by_a_job_and_then_forgotten(left: Memory) -> None:
    assert await _until_quiet(_reconciler(left), left) == 2
    (job,) = _jobs(left)
    assert await _until_quiet(_reconciler(left), left) == 1, "another operator finds the Job and waits"
    _ended(left, job, "Complete")
    await _reconciler(left).reconcile(KEY)
    assert not _records(left)
    assert "create Event" in left.writes


async def test_nothing_is_removed_while_the_resource_lives(raw: Any) -> None:
    memory = Memory(raw(**BUCKET))
    await _until_quiet(_reconciler(memory), memory)
    assert _records(memory)
    assert not _jobs(memory)


async def test_nothing_is_removed_while_its_pods_still_write(left: Memory, pod: Any) -> None:
    draining = pod()
    left._put({**draining, "metadata": {**draining["metadata"], "namespace": "demo"}})
    await _until_quiet(_reconciler(left), left)
    assert not _jobs(left)
    del left.objects[Ref(POD, "demo", "chat-0")]
    await _until_quiet(_reconciler(left), left)
    assert _jobs(left)


async def test_a_successor_of_the_name_serves_while_its_predecessors_pages_are_removed(left: Memory, raw: Any) -> None:
    left._put(raw(**{"metadata.uid": "u-2", "spec.kvCache.storage": BUCKET["spec.kvCache.storage"]}))
    await _until_quiet(_reconciler(left), left)
    assert {record["metadata"]["labels"][names.LABEL_RESOURCE_UID] for record in _records(left)} == {"u-1", "u-2"}
    (job,) = _jobs(left)
    _ended(left, job, "Complete")
    await _until_quiet(_reconciler(left), left)
    assert {record["metadata"]["labels"][names.LABEL_RESOURCE_UID] for record in _records(left)} == {"u-2"}


async def test_a_refused_removal_does_not_hold_up_a_successor(left: Memory, raw: Any) -> None:
    left._put(raw(**{"metadata.uid": "u-2"}))
    left.refuse = JOB
    result = await _reconciler(left).reconcile(KEY)
    assert result.again_after is not None
    assert Ref(DEPLOYMENT, "demo", "chat") in left.objects


async def test_a_failing_removal_is_tried_a_bounded_number_of_times(left: Memory) -> None:
    for attempt in range(1, ATTEMPTS + 1):
        await _until_quiet(_reconciler(left), left)
        (job,) = _jobs(left)
        assert _records(left)[0]["data"].get("attempts", "0") == str(attempt - 1)
        _ended(left, job, "Failed")
        result = await _reconciler(left).reconcile(KEY)
        assert "create Event" in left.writes
        assert _records(left)[0]["data"]["attempts"] == str(attempt)
        result = await _reconciler(left).reconcile(KEY)
        assert (result.again_after is not None) is (attempt < ATTEMPTS)
        _ended(left, job, "Failed", RETRY_SECONDS)
    assert await _until_quiet(_reconciler(left), left) == 1
    assert "given up" in _records(left)[0]["data"]["failure"]
    left.objects = {ref: obj for ref, obj in left.objects.items() if ref.kind is not JOB}  # its time is up
    assert await _until_quiet(_reconciler(left), left) == 1


@pytest.mark.parametrize("before", [True, False], ids=["request lost", "answer lost"])
async def test_a_removal_cut_off_at_any_request_still_ends(before: bool, left: Memory) -> None:
    for number in range(8):
        memory = Memory(*left.objects.values())
        memory.fail_at, memory.before = number, before
        await _until_quiet(_reconciler(memory), memory)
        (job,) = _jobs(memory)
        _ended(memory, job, "Complete")
        memory.requests = 0
        await _until_quiet(_reconciler(memory), memory)
        assert not _records(memory), f"cut at request {number}"
