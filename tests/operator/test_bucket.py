"""A bucket: what pods get to use it, the check before any of them exists, and what is removed after the last."""

import json
from datetime import timedelta
from typing import Any

import pytest

from speccache_api import names
from speccache_api.names import object_labels
from speccache_api.storage_target import BucketTarget, resolve
from speccache_operator.children import storage_removal
from speccache_operator.children.context import RuntimeImage
from speccache_operator.children.storage_removal import FINGERPRINT_KEY, TARGET_KEY
from speccache_operator.decide import removal, storage_check
from speccache_operator.decide.conditions import Reason
from speccache_operator.decide.removal import Do
from speccache_operator.kinds import Ref
from speccache_operator.observe.observed import Observed

S3 = {
    "bucket": "pages",
    "prefix": "chat",
    "endpoint": "https://minio:9000",
    "credentialsSecret": "keys",
    "caBundleConfigMap": "authorities",
    "serviceAccountName": "pages",
}
BUCKET = {"spec.kvCache.storage": {"s3": S3}}
DELETED = {"spec.kvCache.storage": {"s3": S3, "retention": "Delete"}}
GOOD = '{"ok": true}\n'


def _of(plan: Any, kind: str, part: str = "") -> list[Any]:
    return [s.obj for s in plan.apply if s.obj["kind"] == kind and part in s.obj["metadata"]["name"]]


@pytest.fixture
def check(resource: Any, image: RuntimeImage, now: Any) -> Any:
    """The check's Job of a resource with these fields in a state, as in test_aspects."""

    def make(ended: str = "", ago: float = 1.0, *, age: float = 1.0, **fields: Any) -> dict[str, Any]:
        parsed = resource(**(BUCKET | fields))
        target = resolve(parsed)
        assert isinstance(target, BucketTarget)
        stamp = (now - timedelta(seconds=ago)).strftime("%Y-%m-%dT%H:%M:%SZ")
        conditions = [{"type": ended, "status": "True", "lastTransitionTime": stamp}] if ended else []
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {
                "name": storage_check.job_name(parsed, target, image),
                "namespace": "demo",
                "uid": "job",
                "resourceVersion": "1",
                "generation": 1,
                "labels": object_labels("chat", names.COMPONENT_STORAGE_CHECK),
                "creationTimestamp": (now - timedelta(seconds=age)).strftime("%Y-%m-%dT%H:%M:%SZ"),
                "ownerReferences": [{"kind": names.KIND, "name": "chat", "uid": "u-1", "controller": True}],
            },
            "status": {"conditions": conditions},
        }

    return make


@pytest.fixture
def said(pod: Any) -> Any:
    """The Job's pod that ended with this message."""

    def make(message: str, component: str = names.COMPONENT_STORAGE_CHECK) -> Any:
        failed = message != GOOD
        state = {"terminated": {"exitCode": int(failed), "reason": "Error" if failed else "Completed"}}
        state["terminated"]["message"] = message
        return pod("p", owner="job", component=component, phase="Failed" if failed else "Succeeded", state=state)

    return make


@pytest.fixture
def checked(check: Any) -> Any:
    """The record of a bucket that was found good."""

    def make(**fields: Any) -> dict[str, Any]:
        key = storage_check.RECORD_KEY
        return {**check(**fields), "apiVersion": "v1", "kind": "ConfigMap", "data": {key: GOOD.strip()}}

    return make


# The check


def test_no_pod_is_made_before_the_bucket_was_tried(raw: Any, plan: Any, condition: Any) -> None:
    first = plan(raw(**BUCKET))
    (job,) = _of(first, "Job")
    assert not _of(first, "Deployment")
    assert (condition(first, "StorageReady").status, condition(first, "Ready").reason) == ("Unknown", Reason.WAITING)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = container["command"]
    assert command[:3] == ["speccache-runtime", "check-storage", "--target"]
    assert json.loads(command[3])["bucket"] == "pages"
    assert command[4:] == ["--termination-message"]


def test_the_check_can_do_what_the_served_pods_can(raw: Any, plan: Any, checked: Any) -> None:
    (job,) = _of(plan(raw(**BUCKET)), "Job")
    (served,) = _of(plan(raw(**BUCKET), Observed(labelled=(checked(),))), "Deployment")
    checking, serving = job["spec"]["template"]["spec"], served["spec"]["template"]["spec"]
    for field in ("serviceAccountName", "securityContext", "automountServiceAccountToken"):
        assert checking[field] == serving[field]
    assert checking["serviceAccountName"] == "pages"
    assert checking["containers"][0]["securityContext"] == serving["containers"][0]["securityContext"]
    for part in (checking["volumes"], checking["containers"][0]["volumeMounts"]):
        for entry in part:
            assert entry in (*serving["volumes"], *serving["containers"][0]["volumeMounts"])


def test_secret_and_certificates_are_files_that_nobody_can_write(raw: Any, plan: Any, checked: Any) -> None:
    (served,) = _of(plan(raw(**BUCKET), Observed(labelled=(checked(),))), "Deployment")
    spec = served["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    secret, bundle = mounts[names.S3_CREDENTIALS_PATH], mounts[names.S3_CA_BUNDLE_PATH]
    assert volumes[secret["name"]]["secret"] == {"secretName": "keys", "defaultMode": 0o440, "optional": True}
    assert volumes[bundle["name"]]["configMap"] == {"name": "authorities", "optional": True}
    assert secret["readOnly"] is bundle["readOnly"] is True
    assert names.STORAGE_PATH not in mounts
    # Rotation would not reach variables.
    assert not any("valueFrom" in entry or "AWS" in entry["name"] for entry in spec["containers"][0]["env"])


def test_without_secret_or_account_the_pods_identity_is_the_operators(raw: Any, plan: Any, checked: Any) -> None:
    plain = {"spec.kvCache.storage": {"s3": {"bucket": "pages"}}}
    (served,) = _of(plan(raw(**plain), Observed(labelled=(checked(**plain),))), "Deployment")
    spec = served["spec"]["template"]["spec"]
    assert spec["serviceAccountName"] == "chat-runtime"
    assert not [volume for volume in spec["volumes"] if "secret" in volume]


def test_pull_secrets_follow_to_an_account_that_is_not_ours(resource: Any) -> None:
    image = RuntimeImage("runtime:1", pull_secrets=("registry",))
    record = _record(resource(**DELETED))
    found = storage_removal.Removal.of(record)
    assert found is not None
    assert storage_removal.job(record, found, image)["spec"]["template"]["spec"]["imagePullSecrets"] == [
        {"name": "registry"}
    ]


def test_replicas_share_a_bucket_and_are_replaced_with_surge(raw: Any, plan: Any, checked: Any) -> None:
    (served,) = _of(plan(raw(**BUCKET, **{"spec.replicas": 3}), Observed(labelled=(checked(),))), "Deployment")
    assert served["spec"]["strategy"]["type"] == "RollingUpdate"
    assert served["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


def test_a_good_answer_is_recorded_and_pods_are_made_at_once(raw: Any, plan: Any, check: Any, said: Any) -> None:
    done = plan(raw(**BUCKET), Observed(labelled=(check("Complete"),), pods=(said(GOOD),)))
    (record,) = _of(done, "ConfigMap", "-storage-")
    assert record["data"] == {"storage-check.json": '{"ok": true}'}
    assert _of(done, "Deployment")


def test_after_the_record_the_job_goes(raw: Any, plan: Any, check: Any, checked: Any, condition: Any) -> None:
    after = plan(raw(**BUCKET), Observed(labelled=(check("Complete"), checked())))
    assert [Ref.of(check())] == [step.ref for step in after.delete]
    ready = condition(after, "StorageReady")
    assert (ready.status, ready.reason) == ("True", Reason.BUCKET_READY)
    assert "s3://pages/chat" in ready.message


@pytest.mark.parametrize("kind", ["StorageReady", "Ready"])
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("BucketNotFound", "BucketNotFound"),
        ("AccessDenied", "AccessDenied"),
        ("NoCredentials", "NoCredentials"),
        ("CredentialsExpired", "CredentialsExpired"),
        ("EndpointUnreachable", "EndpointUnreachable"),
        ("TlsFailed", "TlsFailed"),
        ("WrongRegion", "WrongRegion"),
        ("ClockSkew", "ClockSkew"),
        ("Timeout", "Timeout"),
        ("Unsupported", "ConditionalPutUnsupported"),
        ("ServerError", "StorageCheckFailed"),
        ("SomethingOfAServer", "StorageCheckFailed"),
    ],
)
def test_a_bad_answer_is_told_with_its_remedy(
    kind: str, code: str, reason: str, raw: Any, plan: Any, check: Any, said: Any, condition: Any
) -> None:
    answer = json.dumps({"ok": False, "code": code, "message": "what is wrong; what to do."})
    failed = plan(raw(**BUCKET), Observed(labelled=(check(),), pods=(said(answer),)))
    found = condition(failed, kind)
    assert (found.status, found.reason.value) == ("False", reason)
    assert "s3://pages/chat cannot be used: what is wrong; what to do. It is tried again" in found.message
    assert not _of(failed, "Deployment")


@pytest.mark.parametrize("text", ["Traceback: no module", "[]", '{"ok": false}', '{"ok": "true"}', '{"code": 5}'])
def test_what_is_no_answer_is_told_as_it_is(
    text: str, raw: Any, plan: Any, check: Any, said: Any, condition: Any
) -> None:
    failed = plan(raw(**BUCKET), Observed(labelled=(check("Failed"),), pods=(said(text),)))
    found = condition(failed, "StorageReady")
    assert found.reason is Reason.STORAGE_CHECK_FAILED
    assert text in found.message


def test_a_failed_check_is_made_anew_after_a_pause(
    resource: Any, image: RuntimeImage, now: Any, check: Any, said: Any
) -> None:
    parsed, pods = resource(**BUCKET), (said('{"ok": false, "code": "BucketNotFound", "message": "no"}'),)
    target = resolve(parsed)
    assert isinstance(target, BucketTarget)
    soon = storage_check.look(parsed, target, Observed(labelled=(check("Failed", 20.0),), pods=pods), image, now)
    assert soon.wanted is not None
    assert soon.again_after == storage_check.RETRY_SECONDS - 20
    late = storage_check.look(parsed, target, Observed(labelled=(check("Failed", 121.0),), pods=pods), image, now)
    assert late.wanted is None, "without it the Job is removed, and then made anew"


def test_the_words_of_a_container_count_before_its_pod_and_its_job_have_ended(
    raw: Any, plan: Any, check: Any, pod: Any, condition: Any
) -> None:
    answer = json.dumps({"ok": False, "code": "NoCredentials", "message": "create it"})
    state = {"terminated": {"exitCode": 1, "reason": "Error", "message": answer}}
    ending = pod("p", owner="job", component=names.COMPONENT_STORAGE_CHECK, phase="Running", state=state)
    found = condition(plan(raw(**BUCKET), Observed(labelled=(check(),), pods=(ending,))), "StorageReady")
    assert found.reason is Reason.NO_CREDENTIALS


def test_a_good_answer_after_a_failed_attempt_is_no_failure(
    raw: Any, plan: Any, check: Any, said: Any, condition: Any
) -> None:
    """The Job is told to have ended a moment after its pod."""
    running = check()
    running["status"]["failed"] = 1
    found = condition(plan(raw(**BUCKET), Observed(labelled=(running,), pods=(said(GOOD),))), "StorageReady")
    assert (found.status, found.reason) == ("Unknown", Reason.STORAGE_CHECK_RUNNING)


def test_trouble_of_its_pod_is_told(raw: Any, plan: Any, check: Any, pod: Any, condition: Any) -> None:
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    stuck = pod("p", owner="job", component=names.COMPONENT_STORAGE_CHECK, phase="Pending", state=state)
    found = condition(plan(raw(**BUCKET), Observed(labelled=(check(),), pods=(stuck,))), "StorageReady")
    assert (found.status, found.reason) == ("False", Reason.IMAGE_PULL_FAILED)
    assert "no such image" in found.message


def test_a_job_that_gets_no_pod_says_so(raw: Any, plan: Any, check: Any, condition: Any) -> None:
    found = condition(plan(raw(**BUCKET), Observed(labelled=(check(age=60.0),))), "StorageReady")
    assert found.reason is Reason.PODS_MISSING
    assert "no such ServiceAccount" in found.message


@pytest.mark.parametrize("field", ["bucket", "prefix", "endpoint", "credentialsSecret", "serviceAccountName"])
def test_another_bucket_is_tried_anew_while_the_old_one_serves(
    field: str, raw: Any, plan: Any, checked: Any, applied: Any, condition: Any
) -> None:
    serving = applied(plan(raw(**BUCKET), Observed(labelled=(checked(),))))
    serving = Observed(serving.children, (checked(),), serving.pods, serving.claims)
    other = {"spec.kvCache.storage": {"s3": {**S3, field: "https://other" if field == "endpoint" else "other"}}}
    moved = plan(raw(**other), serving)
    assert _of(moved, "Job")
    assert not _of(moved, "Deployment")
    assert [step.ref for step in moved.delete] == [Ref.of(checked())]
    assert condition(moved, "StorageReady").reason is Reason.STORAGE_CHECK_RUNNING


def test_another_image_tries_anew(resource: Any) -> None:
    parsed = resource(**BUCKET)
    target = resolve(parsed)
    assert isinstance(target, BucketTarget)
    found = {storage_check.job_name(parsed, target, RuntimeImage(name)) for name in "ab"}
    assert len(found) == 2
    assert all(len(name) + len("-xxxxx") <= 63 - names.MAX_NAME_LENGTH + len("chat") for name in found)


def test_a_volume_is_not_tried(raw: Any, plan: Any) -> None:
    made = plan(raw(**{"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "1Gi"}}}))
    assert not _of(made, "Job")


# What is removed with the resource


def _record(parsed: Any, uid: str = "u-1", **data: str) -> dict[str, Any]:
    target = resolve(parsed)
    assert target is not None
    labels = object_labels("chat", names.COMPONENT_STORAGE_REMOVAL) | {names.LABEL_RESOURCE_UID: uid}
    meta = {"name": "chat-remove-1", "namespace": "demo", "uid": "record", "resourceVersion": "1", "generation": 1}
    meta["labels"] = labels
    stored = {TARGET_KEY: target.to_json(), FINGERPRINT_KEY: "ab" * 32}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": {**stored, **data}}


def test_what_is_to_be_removed_is_recorded_before_the_first_pod(raw: Any, plan: Any, checked: Any) -> None:
    made = plan(raw(**DELETED), Observed(labelled=(checked(),)))
    (record,) = _of(made, "ConfigMap", "-remove-")
    kinds = [step.obj["kind"] for step in made.apply]
    assert made.apply[kinds.index("Deployment")].child is not None
    assert [step.obj for step in made.apply].index(record) < kinds.index("Deployment")
    assert "ownerReferences" not in record["metadata"]
    assert "finalizers" not in record["metadata"]
    assert record["metadata"]["labels"][names.LABEL_RESOURCE_UID] == "u-1"
    found = storage_removal.Removal.of(record)
    assert found is not None
    assert (found.target.url, found.fingerprint) == ("s3://pages/chat", made.facts["fingerprint"])


def test_what_is_retained_is_not_recorded(raw: Any, plan: Any, checked: Any) -> None:
    assert not _of(plan(raw(**BUCKET), Observed(labelled=(checked(),))), "ConfigMap", "-remove-")


def test_retaining_after_all_forgets_what_was_recorded(raw: Any, plan: Any, checked: Any, resource: Any) -> None:
    record = _record(resource(**DELETED))
    kept = plan(raw(**BUCKET), Observed(labelled=(checked(), record)))
    assert [step.ref for step in kept.delete] == [Ref.of(record)]


def test_a_predecessors_record_is_not_the_successors(raw: Any, plan: Any, checked: Any, resource: Any) -> None:
    record = _record(resource(**DELETED), uid="u-0")
    kept = plan(raw(**BUCKET), Observed(labelled=(checked(), record)))
    assert not kept.delete


def test_every_place_that_was_written_is_remembered(raw: Any, plan: Any, checked: Any, resource: Any) -> None:
    old = _record(resource(**DELETED))
    moved = {"spec.kvCache.storage": {"s3": {**S3, "prefix": "other"}, "retention": "Delete"}}
    found = plan(raw(**moved), Observed(labelled=(checked(**moved), old)))
    assert _of(found, "ConfigMap", "-remove-")
    assert not [step for step in found.delete if step.ref == Ref.of(old)]
    # Nor is it forgotten without a storage tier, when nothing is said of retention.
    assert Ref.of(old) not in [step.ref for step in plan(raw(), Observed(labelled=(old,))).delete]


@pytest.mark.parametrize(("field", "same"), [("credentialsSecret", True), ("prefix", False), ("bucket", False)])
def test_a_place_has_one_record_however_it_is_reached(
    field: str, same: bool, raw: Any, plan: Any, checked: Any
) -> None:
    other = {"spec.kvCache.storage": {"s3": {**S3, field: "other"}, "retention": "Delete"}}
    records = [
        _of(plan(raw(**fields), Observed(labelled=(checked(**fields),))), "ConfigMap", "-remove-")[0]["metadata"]
        for fields in (DELETED, other)
    ]
    assert (records[0]["name"] == records[1]["name"]) is same


@pytest.fixture
def ended(check: Any) -> Any:
    """The removal's Job in a state."""

    def make(how: str = "", ago: float = 1.0) -> dict[str, Any]:
        job: dict[str, Any] = check(how, ago)
        labels = object_labels("chat", names.COMPONENT_STORAGE_REMOVAL)
        return {**job, "metadata": {**job["metadata"], "name": "chat-remove-1", "labels": labels}}

    return make


def test_the_job_needs_nothing_of_the_resource(resource: Any) -> None:
    record = _record(resource(**DELETED))
    found = storage_removal.Removal.of(record)
    assert found is not None
    job = storage_removal.job(record, found, RuntimeImage("runtime:1"))
    owners = [(owner["kind"], owner["name"], owner["uid"]) for owner in job["metadata"]["ownerReferences"]]
    assert owners == [("ConfigMap", record["metadata"]["name"], record["metadata"]["uid"])], "it goes with the record"
    assert job["spec"]["ttlSecondsAfterFinished"] > removal.RETRY_SECONDS
    assert {"backoffLimit", "activeDeadlineSeconds"} <= job["spec"].keys()
    spec = job["spec"]["template"]["spec"]
    assert (spec["serviceAccountName"], spec["restartPolicy"]) == ("pages", "Never")
    assert spec["containers"][0]["command"][1] == "empty-storage"
    assert spec["containers"][0]["command"][-3:] == ["--fingerprint", "ab" * 32, "--termination-message"]
    assert {names.S3_CREDENTIALS_PATH, names.S3_CA_BUNDLE_PATH} <= {
        mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]
    }


def test_without_an_account_of_its_own_the_job_takes_the_namespaces(resource: Any) -> None:
    fields = {"spec.kvCache.storage": {"s3": {"bucket": "pages"}, "retention": "Delete"}}
    record = _record(resource(**fields))
    found = storage_removal.Removal.of(record)
    assert found is not None
    job = storage_removal.job(record, found, RuntimeImage("runtime:1"))
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == "default"


def test_a_removal_waits_for_pods_that_still_write(resource: Any, now: Any) -> None:
    record = _record(resource(**DELETED))
    assert removal.decide(record, None, (), serving=True, now=now).do is Do.WAIT
    assert removal.decide(record, None, (), serving=False, now=now).do is Do.START


def test_a_running_job_is_left_alone_and_a_good_end_ends_the_record(resource: Any, ended: Any, now: Any) -> None:
    record = _record(resource(**DELETED))
    assert removal.decide(record, ended(), (), serving=False, now=now).do is Do.WAIT
    done = removal.decide(record, ended("Complete"), (), serving=False, now=now)
    assert done.do is Do.FORGET
    assert "s3://pages/chat" in done.text


def test_a_failure_is_counted_once_told_and_tried_again(resource: Any, ended: Any, said: Any, now: Any) -> None:
    pods = (said("AccessDenied: ask", names.COMPONENT_STORAGE_REMOVAL),)
    first = removal.decide(_record(resource(**DELETED)), ended("Failed"), pods, serving=False, now=now)
    assert first.do is Do.COUNT
    assert "AccessDenied: ask; it is tried again in 10 minutes" in first.text
    record = _record(resource(**DELETED), attempts="1", countedJob="job")
    waiting = removal.decide(record, ended("Failed", 100.0), pods, serving=False, now=now)
    assert (waiting.do, waiting.text, waiting.again_after) == (Do.WAIT, "", removal.RETRY_SECONDS - 100)
    assert removal.decide(record, ended("Failed", 601.0), pods, serving=False, now=now).do is Do.RETRY


def test_it_is_given_up_with_a_message(resource: Any, ended: Any, said: Any, now: Any) -> None:
    pods = (said("BucketNotFound", names.COMPONENT_STORAGE_REMOVAL),)
    record = _record(resource(**DELETED), attempts=str(removal.ATTEMPTS - 1), countedJob="earlier")
    last = removal.decide(record, ended("Failed"), pods, serving=False, now=now)
    assert last.do is Do.COUNT
    assert f"(attempt {removal.ATTEMPTS} of {removal.ATTEMPTS}): BucketNotFound; given up." in last.text
    assert "delete ConfigMap chat-remove-1" in last.text
    over = _record(resource(**DELETED), attempts=str(removal.ATTEMPTS), countedJob="job")
    for job in (ended("Failed", 9999.0), None):
        assert removal.decide(over, job, (), serving=False, now=now) == removal.Decision(Do.LEAVE)


@pytest.mark.parametrize(
    "data", [{}, {TARGET_KEY: "{"}, {TARGET_KEY: '{"kind": "Volume", "claim": null, "path": "/"}'}]
)
def test_a_record_that_somebody_else_wrote_is_left_alone(data: dict[str, str], resource: Any, now: Any) -> None:
    record = {**_record(resource(**DELETED)), "data": data}
    assert removal.decide(record, None, (), serving=False, now=now).do is Do.LEAVE


# The admin port


def test_the_admin_port_has_its_token_as_a_file_and_no_service(raw: Any, plan: Any) -> None:
    made = plan(raw(**{"spec.admin": {"tokenSecret": {"name": "admin", "key": "t"}}}))
    (served,) = _of(made, "Deployment")
    spec = served["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert [(port["name"], port["containerPort"]) for port in container["ports"]] == [("http", 8000), ("admin", 8081)]
    mount = next(m for m in container["volumeMounts"] if m["mountPath"] == "/var/run/speccache/admin")
    volume = next(v for v in spec["volumes"] if v["name"] == mount["name"])
    assert volume["secret"]["items"] == [{"key": "t", "path": "token"}]
    assert all(len(service["spec"]["ports"]) == 1 for service in _of(made, "Service"))


def test_a_network_policy_keeps_everybody_from_the_admin_port(raw: Any, plan: Any) -> None:
    made = plan(raw(**{"spec.admin": {"tokenSecret": {"name": "admin"}}, "spec.networkPolicy": {}}))
    (policy,) = _of(made, "NetworkPolicy")
    assert [port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]] == [8000]


def test_a_network_policy_leaves_the_way_to_the_bucket_open(raw: Any, plan: Any, checked: Any) -> None:
    made = plan(raw(**BUCKET, **{"spec.networkPolicy": {}}), Observed(labelled=(checked(),)))
    (policy,) = _of(made, "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
