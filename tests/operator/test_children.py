"""What each builder makes."""

import dataclasses
from typing import Any

import pytest

from speccache_api import names
from speccache_api.geometry import builtin_facts
from speccache_api.quantity import format_bytes
from speccache_api.sizing import size_memory
from speccache_api.storage_target import resolve
from speccache_api.wire import WireDocument, build_wire
from speccache_operator.children import (
    claim,
    config_map,
    deployment,
    headless_service,
    inspection_job,
    inspection_record,
    network_policy,
    pod_disruption_budget,
    service,
    service_account,
)
from speccache_operator.children.answer import Answer
from speccache_operator.children.context import BuildContext, Inquiry, RuntimeImage, Sized
from speccache_operator.children.inspection_record import RECORD_KEY
from speccache_operator.children.table import CHILDREN, Part
from speccache_operator.kinds import CLAIM

BUILDERS = (
    claim,
    config_map,
    deployment,
    headless_service,
    inspection_job,
    inspection_record,
    network_policy,
    pod_disruption_budget,
    service,
    service_account,
)
ALL = {"spec.podDisruptionBudget": {"maxUnavailable": 1}, "spec.networkPolicy": {}}
STORAGE = {"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "1.5Gi"}}}
ON_CLAIMS = {
    "spec.model": {"uri": "pvc://models/big/target"},
    "spec.speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "pvc://drafts"}},
}


@pytest.fixture
def context(resource: Any) -> Any:
    """A context with everything known."""

    def make(image: RuntimeImage | None = None, **fields: Any) -> BuildContext:
        parsed = resource(**fields)
        facts = builtin_facts("tiny")
        memory = size_memory(parsed.spec, facts)
        sized = Sized(memory, build_wire(parsed, facts, memory))
        return BuildContext(
            parsed,
            image or RuntimeImage("runtime:1"),
            sized,
            Inquiry("chat-inspect-1", "{}"),
            resolve(parsed),
            Inquiry("chat-storage-1", '{"ok": true}'),
            "ab" * 32,
        )

    return make


def _container(obj: Any) -> Any:
    (container,) = obj["spec"]["template"]["spec"]["containers"]
    return container


def test_every_child_is_labelled_in_the_namespace_and_owned(context: Any) -> None:
    for builder in BUILDERS:
        obj = builder.build(context(**STORAGE, **ALL, **{"spec.model": {"uri": "pvc://m/x"}, "spec.speculative": None}))
        assert not isinstance(obj, Answer)
        meta = obj["metadata"]
        assert meta["namespace"] == "demo"
        assert meta["labels"][names.LABEL_INSTANCE] == "chat"
        assert meta["labels"][names.LABEL_MANAGED_BY] == names.MANAGED_BY
        if builder is not claim:
            (owner,) = meta["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == ("u-1", True)


@pytest.mark.parametrize("builder", [deployment, config_map], ids=["Deployment", "ConfigMap"])
def test_what_is_not_sized_is_left_as_it_is(builder: Any, resource: Any) -> None:
    assert builder.build(BuildContext(resource(), RuntimeImage("x"))) is Answer.UNKNOWN


@pytest.mark.parametrize("builder", [inspection_job, inspection_record, network_policy, pod_disruption_budget])
def test_what_is_not_wanted_must_not_exist(builder: Any, resource: Any) -> None:
    assert builder.build(BuildContext(resource(), RuntimeImage("x"))) is Answer.ABSENT


def test_a_claim_is_never_to_be_deleted(context: Any, resource: Any) -> None:
    assert claim.build(context()) is Answer.UNKNOWN
    assert not any(child.deleted for child in CHILDREN if child.kind is CLAIM)


def test_memory_is_the_computed_one_as_request_and_limit(context: Any) -> None:
    ctx = context(**{"spec.resources": {"limits": {"cpu": "4"}, "requests": {"cpu": "500m"}}})
    computed = format_bytes(ctx.sized.memory.limit)
    resources = _container(deployment.build(ctx))["resources"]
    assert resources == {"limits": {"cpu": "4", "memory": computed}, "requests": {"cpu": "500m", "memory": computed}}


def test_with_manual_memory_the_users_stand(context: Any) -> None:
    fields = {"spec.memory": {"policy": "Manual"}, "spec.resources": {"limits": {"memory": "3Gi"}}}
    resources = _container(deployment.build(context(**fields)))["resources"]
    assert resources == {"limits": {"memory": "3Gi"}, "requests": {}}


def test_a_gpu_is_asked_for_as_given(context: Any) -> None:
    resources = _container(deployment.build(context(**{"spec.resources": {"limits": {"nvidia.com/gpu": "1"}}})))
    assert resources["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("builder", [deployment, inspection_job])
def test_pods_meet_the_restricted_standard(builder: Any, context: Any) -> None:
    template = builder.build(context(**ON_CLAIMS, **STORAGE))["spec"]["template"]["spec"]
    assert template["automountServiceAccountToken"] is False
    assert template["enableServiceLinks"] is False
    security = template["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"] == 65532
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(template)
    (container,) = template["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }
    assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    kinds = {"configMap", "emptyDir", "persistentVolumeClaim"}
    assert all(kinds & set(volume) for volume in template["volumes"])


@pytest.mark.parametrize("builder", [deployment, inspection_job])
def test_models_are_mounted_read_only_where_the_runtime_looks(builder: Any, context: Any) -> None:
    template = builder.build(context(**ON_CLAIMS))["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in template["volumes"]}
    mounts = {mount["mountPath"]: mount for mount in template["containers"][0]["volumeMounts"]}
    for path, claim_name in ((names.TARGET_MODEL_PATH, "models"), (names.DRAFT_MODEL_PATH, "drafts")):
        assert mounts[path]["readOnly"] is True
        assert "subPath" not in mounts[path], "the kubelet would make a folder that does not exist"
        assert volumes[mounts[path]["name"]]["persistentVolumeClaim"] == {"claimName": claim_name, "readOnly": True}


def test_one_claim_is_one_volume_however_often_it_is_mounted(context: Any) -> None:
    """Storage on the models' claim: the volume stays writable, only the models' mounts are read-only."""
    ctx = context(
        **{
            "spec.model": {"uri": "pvc://all/target"},
            "spec.speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "pvc://all/draft"}},
            "spec.kvCache.storage": {"persistentVolumeClaim": {"claimName": "all"}},
        }
    )
    template = deployment.build(ctx)["spec"]["template"]["spec"]
    volumes = [volume for volume in template["volumes"] if "persistentVolumeClaim" in volume]
    assert volumes == [{"name": "claim-0", "persistentVolumeClaim": {"claimName": "all"}}]
    mounts = {m["mountPath"]: m for m in template["containers"][0]["volumeMounts"] if m["name"] == "claim-0"}
    assert set(mounts) == {names.TARGET_MODEL_PATH, names.DRAFT_MODEL_PATH, names.STORAGE_PATH}
    assert "readOnly" not in mounts[names.STORAGE_PATH]


def test_only_scratch_and_storage_can_be_written(context: Any) -> None:
    container = _container(deployment.build(context(**ON_CLAIMS, **STORAGE)))
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable == {names.SCRATCH_PATH, names.STORAGE_PATH}
    assert {"name": "HOME", "value": names.SCRATCH_PATH} in container["env"]
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in container["env"]


def test_the_runtime_is_told_by_the_wire_document_whose_digest_rolls_it(context: Any) -> None:
    ctx = context()
    document = WireDocument.from_json(config_map.build(ctx)["data"][names.WIRE_KEY])
    obj = deployment.build(ctx)
    annotations = obj["spec"]["template"]["metadata"]["annotations"]
    assert annotations == {names.ANNOTATION_WIRE_HASH: document.digest()}
    assert _container(obj)["command"] == ["speccache-runtime", "serve", "--wire", names.WIRE_PATH]
    mount = next(m for m in _container(obj)["volumeMounts"] if m["name"] == "wire")
    assert f"{mount['mountPath']}/{names.WIRE_KEY}" == names.WIRE_PATH


def test_the_grace_period_covers_the_drain(context: Any) -> None:
    obj = deployment.build(context(**{"spec.drain": {"requestTimeoutSeconds": 7, "flushTimeoutSeconds": 100}}))
    assert obj["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] == 7 + 100 + 15


def test_a_pod_serves_until_nobody_is_led_to_it(context: Any) -> None:
    container = _container(deployment.build(context()))
    assert container["lifecycle"]["preStop"] == {"sleep": {"seconds": deployment.FORGOTTEN_SECONDS}}
    assert deployment.FORGOTTEN_SECONDS < deployment.SHUTDOWN_SECONDS


def test_probes_ask_what_the_runtime_answers(context: Any) -> None:
    container = _container(deployment.build(context()))
    paths = {kind: container[kind]["httpGet"]["path"] for kind in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 600
    assert container["ports"][0]["containerPort"] == names.HTTP_PORT


def test_shared_memory_is_a_sized_volume_only_when_it_is_used(context: Any) -> None:
    ctx = context()
    assert "/dev/shm" not in str(deployment.build(ctx))
    sized = Sized(dataclasses.replace(ctx.sized.memory, shared_memory=64 * 2**20), ctx.sized.wire)
    template = deployment.build(dataclasses.replace(ctx, sized=sized))["spec"]["template"]["spec"]
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "64Mi"}} in template["volumes"]
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in template["containers"][0]["volumeMounts"]


def test_services_select_the_served_pods_only(context: Any) -> None:
    ctx = context()
    labels = deployment.build(ctx)["spec"]["template"]["metadata"]["labels"]
    inspection = inspection_job.build(ctx)["spec"]["template"]["metadata"]["labels"]
    for builder in (service, headless_service):
        selector = builder.build(ctx)["spec"]["selector"]
        assert selector.items() <= labels.items()
        assert not selector.items() <= inspection.items()


@pytest.mark.parametrize(("retention", "owners"), [("Retain", 0), ("Delete", 1)])
def test_a_claim_is_owned_when_it_is_to_go(retention: str, owners: int, context: Any) -> None:
    fields = {"spec.kvCache.storage": {"persistentVolumeClaim": {"size": "1.5Gi"}, "retention": retention}}
    obj = claim.build(context(**fields))
    assert len(obj["metadata"].get("ownerReferences", [])) == owners
    assert obj["spec"] == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1536Mi"}}}


def test_a_claim_has_the_given_class_and_modes(context: Any) -> None:
    wanted = {"size": "1Gi", "storageClassName": "fast", "accessModes": ["ReadWriteMany"]}
    spec = claim.build(context(**{"spec.kvCache.storage": {"persistentVolumeClaim": wanted}}))["spec"]
    assert spec["storageClassName"] == "fast"
    assert spec["accessModes"] == ["ReadWriteMany"]


def test_pull_secrets_are_on_the_service_account(context: Any) -> None:
    image = RuntimeImage("runtime:1", "Always", ("one", "two"))
    account = service_account.build(context(image))
    assert account["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert account["automountServiceAccountToken"] is False
    assert "imagePullSecrets" not in service_account.build(context())
    assert _container(deployment.build(context(image)))["imagePullPolicy"] == "Always"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (ON_CLAIMS, "--target /models/target/big/target --draft /models/draft --algorithm EAGLE3"),
        ({"spec.model": {"uri": "pvc://m/x"}, "spec.speculative": None}, "--target /models/target/x"),
        (
            {"spec.speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "pvc://drafts"}}},
            "--target builtin://tiny --draft /models/draft --algorithm EAGLE3",
        ),
        (
            {"spec.speculative": {"algorithm": "Standalone", "draftModel": {"uri": "pvc://drafts"}}},
            "--target builtin://tiny --draft /models/draft --algorithm Standalone",
        ),
    ],
    ids=["both on claims", "no draft", "built-in target", "a draft of another kind"],
)
def test_the_job_inspects_what_is_served(fields: dict[str, Any], words: str, context: Any) -> None:
    command = inspection_job.command(context(**fields))
    assert " ".join(command) == f"speccache-runtime inspect {words} --termination-message"


def test_the_record_holds_the_result_under_the_jobs_name(context: Any) -> None:
    obj = inspection_record.build(context())
    assert obj["data"] == {RECORD_KEY: "{}"}
    assert obj["metadata"]["name"] == "chat-inspect-1"


@pytest.mark.parametrize(("shared", "strategy"), [(True, deployment.SURGE), (False, deployment.RECREATE)])
def test_a_new_pod_serves_before_an_old_one_goes_where_both_can_mount_everything(
    shared: bool, strategy: Any, context: Any
) -> None:
    spec = deployment.build(dataclasses.replace(context(), shared=shared))["spec"]
    assert spec["strategy"] == strategy
    assert deployment.SURGE["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    assert "replicas" not in spec, "how many there are to be is apart from the template"


def test_pods_know_their_resource_and_the_selector_does_not(context: Any) -> None:
    spec = deployment.build(context())["spec"]
    assert spec["template"]["metadata"]["labels"][names.LABEL_RESOURCE_UID] == "u-1"
    assert spec["selector"]["matchLabels"] == names.selector_labels("chat")


@pytest.mark.parametrize("bound", [{"minAvailable": 1}, {"maxUnavailable": "25%"}, {"minAvailable": 0}], ids=str)
def test_a_budget_is_the_given_one_over_the_served_pods(bound: dict[str, Any], context: Any) -> None:
    spec = pod_disruption_budget.build(context(**{"spec.podDisruptionBudget": bound}))["spec"]
    assert spec == {
        **bound,
        "selector": {"matchLabels": names.selector_labels("chat")},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }


PEERS: list[Any] = [
    {"podSelector": {"matchLabels": {"app": "gateway"}}},
    {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}, "podSelector": {}},
    {"ipBlock": {"cidr": "10.0.0.0/8"}},
]


@pytest.mark.parametrize(
    ("policy", "peers", "types"),
    [
        ({}, [{"podSelector": {}}], ["Ingress"]),
        ({"allowFrom": PEERS}, PEERS, ["Ingress"]),
        ({"egress": "Deny"}, [{"podSelector": {}}], ["Ingress", "Egress"]),
    ],
    ids=["default", "peers", "no egress"],
)
def test_a_network_policy_opens_the_http_port_to_those_who_may(
    policy: dict[str, Any], peers: Any, types: list[str], context: Any
) -> None:
    spec = network_policy.build(context(**{"spec.networkPolicy": policy}))["spec"]
    assert spec["podSelector"] == {"matchLabels": names.selector_labels("chat")}
    assert spec["policyTypes"] == types
    assert spec["ingress"] == [{"from": peers, "ports": [{"port": names.HTTP_PORT, "protocol": "TCP"}]}]
    assert spec.get("egress", []) == []


def test_no_child_has_the_name_of_what_is_in_every_namespace(context: Any) -> None:
    """A resource may be called `default`, as the account that Kubernetes makes."""
    ctx = context(**{"metadata.name": "default"})
    assert service_account.build(ctx)["metadata"]["name"] == "default-runtime"
    assert deployment.build(ctx)["spec"]["template"]["spec"]["serviceAccountName"] == "default-runtime"


def test_the_table_has_each_place_once() -> None:
    places = [(child.kind, child.name("chat")) for child in CHILDREN if child.name is not None]
    assert len(set(places)) == len(places)
    assert {child.kind.name for child in CHILDREN if child.part is Part.RUNS} == {"Job", "Deployment"}
    for child in CHILDREN:
        assert child.applied or child.deleted
