"""Models outside the image: an inspection Job reads them on a volume, then they are served. And a target alone."""

import pytest
from stage import reach, serving
from stage.kube import SCD
from stage.objects import conditions, has_reason

from speccache_api import names
from speccache_runtime.bench.client import complete
from speccache_runtime.bench.prompts import load_prompts

PROMPT = load_prompts()[0].text

FILL = """
packaged=$(python -c 'import speccache_runtime.builtin as b; print(b.__path__[0])')
cp -r $packaged/tiny /models/tiny
cp -r $packaged/tiny /models/broken
head -c 100 $packaged/tiny/target/config.json > /models/broken/target/config.json
"""
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture(scope="module")
def models(stage) -> str:
    """A claim with the packaged pair in tiny/, and in broken/ the same with a cut configuration."""
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "64Mi"}}}
    kubectl.apply(_object("v1", "PersistentVolumeClaim", "own-models", claim), namespace)
    container = {
        "name": "fill",
        "image": stage.venue.runtime_image,
        "command": ["sh", "-euc", FILL],
        "securityContext": RESTRICTED,
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    }
    pod = {
        "restartPolicy": "Never",
        "securityContext": {"fsGroup": 65532},
        "containers": [container],
        "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "own-models"}}],
    }
    kubectl.apply(_object("v1", "Pod", "fill-models", pod), namespace)
    kubectl.until(
        "pod",
        "fill-models",
        lambda obj: obj["status"]["phase"] == "Succeeded",
        namespace=namespace,
        seconds=60,
        what="done",
    )
    kubectl.delete("pod", "fill-models", namespace)
    return "own-models"


def _object(version: str, kind: str, name: str, spec: dict) -> dict:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _resource(name: str, claim: str, folder: str) -> dict:
    spec = {
        "model": {"uri": f"pvc://{claim}/{folder}/target"},
        "speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": f"pvc://{claim}/{folder}/draft"}},
        "kvCache": {"pageSize": 16, "device": {"tokens": 8192}, "host": {"tokens": 8192}},
    }
    return _object(names.API_VERSION, names.KIND, name, spec)


def test_a_model_on_a_claim_is_inspected_and_served(stage, models, tiny):
    stage.venue.kubectl.apply(_resource("own", models, "tiny"), stage.namespace)
    own = stage.settled("own")
    assert conditions(own)["ModelInspected"]["reason"] == "Inspected"
    assert own["status"]["memory"]["draftBytesPerToken"] == tiny["status"]["memory"]["draftBytesPerToken"]
    jobs = stage.venue.kubectl.list("jobs", stage.namespace)
    assert jobs == [], "the result is recorded, so the Job is gone"
    answers = [_answer(stage, name) for name in ("own", "tiny")]
    assert answers[0].text == answers[1].text
    assert answers[0].usage["speculation"]["accepted_by_step"] == answers[1].usage["speculation"]["accepted_by_step"]
    stage.venue.kubectl.delete(SCD, "own", stage.namespace)


def test_a_broken_model_is_told_in_one_line(stage, models):
    stage.venue.kubectl.apply(_resource("broken", models, "broken"), stage.namespace)
    broken = stage.venue.kubectl.until(
        SCD,
        "broken",
        lambda obj: has_reason(obj, "ModelInspected", "False", "InspectionFailed"),
        namespace=stage.namespace,
        seconds=60,
        what="told to be broken",
    )
    message = conditions(broken)["ModelInspected"]["message"]
    stage.note(f"broken model: {message}")
    assert "config.json" in message
    assert "\n" not in message
    assert conditions(broken)["Ready"]["reason"] == "InspectionFailed"
    assert stage.venue.kubectl.get("statefulset", "broken", stage.namespace) is None
    stage.venue.kubectl.delete(SCD, "broken", stage.namespace)


def test_a_target_alone_gives_the_same_text(stage, tiny):
    stage.apply_sample("tiny-plain.yaml")
    plain = stage.settled("tiny-plain")
    assert conditions(plain)["StorageReady"]["reason"] == "NoStorageTier"
    alone, drafted = _answer(stage, "tiny-plain"), _answer(stage, "tiny")
    assert alone.text == drafted.text
    assert alone.usage["speculation"]["accept_length"] <= 1.1
    stage.venue.kubectl.delete(SCD, "tiny-plain", stage.namespace)


def _answer(stage, name: str):
    model = "tiny" if name == "tiny-plain" else name
    with reach.service(stage.venue, stage.namespace, name) as url:
        return complete(url, model, PROMPT, serving.NEW_TOKENS)
