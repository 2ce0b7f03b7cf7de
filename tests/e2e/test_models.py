"""Models outside the image: an inspection Job reads them on a volume, then they are served. And a target alone."""

import pytest

from speccache_runtime.bench.client import complete
from speccache_runtime.bench.prompts import load_prompts
from speccache_tools.demo import NEW_TOKENS
from speccache_tools.stage import reach
from speccache_tools.stage.manifests import claim, resource, shell_pod
from speccache_tools.stage.objects import conditions

CLAIM = "own-models"
PROMPT = "Not yet in any cache:\n" + load_prompts()[0].text

FILL = """
packaged=$(python -c 'import speccache_runtime.builtin as b; print(b.__path__[0])')
cp -r $packaged/tiny /models/tiny
cp -r $packaged/tiny /models/broken
head -c 100 $packaged/tiny/target/config.json > /models/broken/target/config.json
"""


@pytest.fixture(scope="module")
def models(stage):
    """A claim with the packaged pair in tiny/, and in broken/ the same with a cut configuration."""
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    fill = shell_pod("fill-models", stage.venue.runtime_image, FILL, {"/models": CLAIM})

    def done(pod) -> bool:
        return pod["status"]["phase"] == "Succeeded"

    with stage.applied(claim(CLAIM)):
        with stage.applied(fill):
            kubectl.until("pod", "fill-models", done, namespace=namespace, seconds=60, what="done")
        yield


def _on_claim(name: str, folder: str):
    draft = {"algorithm": "EAGLE3", "draftModel": {"uri": f"pvc://{CLAIM}/{folder}/draft"}}
    return resource(name, model={"uri": f"pvc://{CLAIM}/{folder}/target"}, speculative=draft)


def _answer(stage, name: str, model: str):
    with reach.service(stage.venue, stage.namespace, name) as url:
        return complete(url, model, PROMPT, NEW_TOKENS)


def test_a_model_on_a_claim_is_inspected_and_served(stage, models, tiny):
    with stage.applied(_on_claim("own", "tiny")):
        own = stage.settled("own")
        assert conditions(own)["ModelInspected"]["reason"] == "Inspected"
        assert own["status"]["memory"]["draftBytesPerToken"] == tiny["status"]["memory"]["draftBytesPerToken"]
        assert stage.venue.kubectl.list("jobs", stage.namespace) == [], "the result is recorded, so the Job is gone"
        from_claim, packaged = _answer(stage, "own", "own"), _answer(stage, "tiny", "tiny")
    assert from_claim.text == packaged.text
    steps = [answer.usage["speculation"]["accepted_by_step"] for answer in (from_claim, packaged)]
    assert steps[0] == steps[1]


def test_a_broken_model_is_told_in_one_line(stage, models):
    with stage.applied(_on_claim("broken", "broken")):
        broken = stage.refused("broken", "ModelInspected", "InspectionFailed")
        message = conditions(broken)["ModelInspected"]["message"]
        stage.note(f"broken model: {message}")
        assert "config.json" in message
        assert "\n" not in message
        assert conditions(broken)["Ready"]["reason"] == "InspectionFailed"
        assert stage.venue.kubectl.get("deployment", "broken", stage.namespace) is None


def test_a_target_alone_gives_the_same_text(stage, tiny, sample):
    with stage.applied(sample("tiny-plain.yaml")):
        plain = stage.settled("tiny-plain")
        assert conditions(plain)["StorageReady"]["reason"] == "NoStorageTier"
        alone, drafted = _answer(stage, "tiny-plain", "tiny"), _answer(stage, "tiny", "tiny")
    assert alone.text == drafted.text
    assert alone.usage["speculation"]["accept_length"] <= 1.1
