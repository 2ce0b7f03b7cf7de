"""The life of samples/tiny.yaml: it starts, serves, loses its pod and gets its pairs back from storage; then it loses
the draft's half of its pages too, and pays for that in accept length and not in text.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from speccache_api import names
from speccache_api.quantity import format_bytes
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import MemoryPlan, known_inspection, size_memory
from speccache_runtime.bench.client import Answer, complete
from speccache_runtime.bench.prompts import load_prompts
from speccache_runtime.bench.report import COLD, RESTORED, WITHHELD, Report, Run
from speccache_tools.demo import ask
from speccache_tools.stage import reach, serving
from speccache_tools.stage.kube import SCD, CommandFailed
from speccache_tools.stage.objects import conditions

PROMPTS = load_prompts()


@pytest.fixture(scope="module")
def plan(sample) -> MemoryPlan:
    """The memory of the sample as this machine computes it."""
    spec = SpecCacheDeployment.parse(sample("tiny.yaml")).spec
    inspection = known_inspection(spec)
    assert inspection is not None
    return size_memory(spec, inspection)


@pytest.fixture(scope="module")
def cold(stage, tiny) -> Run:
    """All prompts, for the first time; storage has everything afterwards."""
    with reach.service(stage.venue, stage.namespace, "tiny") as url:
        run = ask(url, "tiny", COLD, PROMPTS)
        serving.wait_written(url)
    return run


@pytest.fixture(scope="module")
def restored(stage, cold) -> Run:
    """The same prompts, asked of the successor of a deleted pod."""
    serving.replace_pod(stage.venue, stage.namespace, "tiny")
    return _ask(stage, RESTORED)


@pytest.fixture(scope="module")
def withheld(stage, restored) -> Run:
    """The same prompts, after the draft's halves were deleted from storage and the pod was told to do without."""
    assert serving.withhold_drafts(stage.venue, stage.namespace, "tiny") > 0
    _patch_missing_draft(stage, "Degrade")
    stage.settled("tiny")
    return _ask(stage, WITHHELD)


def _ask(stage, name: str) -> Run:
    with reach.service(stage.venue, stage.namespace, "tiny") as url:
        return ask(url, "tiny", name, PROMPTS)


def _patch_missing_draft(stage, answer: str) -> None:
    patch = {"spec": {"kvCache": {"storage": {"missingDraft": answer}}}}
    stage.venue.kubectl.patch(SCD, "tiny", stage.namespace, patch)


def test_every_condition_is_good(tiny):
    assert {kind: found["status"] for kind, found in conditions(tiny).items()} == {
        "Ready": "True",
        "ConfigValid": "True",
        "ModelInspected": "True",
        "MemorySized": "True",
        "StorageReady": "True",
        "ChildrenApplied": "True",
        "Progressing": "False",
    }
    assert conditions(tiny)["Progressing"]["reason"] == "Complete"
    assert tiny["status"]["observedGeneration"] == tiny["metadata"]["generation"]


def test_the_pod_has_exactly_the_computed_memory(stage, tiny, plan):
    pod = serving.pod_of(stage.venue, stage.namespace, "tiny")
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["memory"] == format_bytes(plan.limit)
    assert container["resources"]["requests"]["memory"] == format_bytes(plan.limit)
    assert tiny["status"]["memory"] == plan.to_status()


def test_the_namespace_admits_restricted_pods_only(stage, tiny):
    """Else it would prove nothing that our pods were admitted."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "not-restricted"},
        "spec": {"containers": [{"name": "any", "image": stage.venue.runtime_image}]},
    }
    with pytest.raises(CommandFailed, match="violates PodSecurity"):
        stage.venue.kubectl.apply(pod, stage.namespace)


def test_columns_tell_the_state(stage, tiny, plan):
    head, row = stage.venue.kubectl("get", "scd", "tiny", namespace=stage.namespace).splitlines()
    found = dict(zip(head.split(), row.split(), strict=True))
    assert found.pop("AGE")
    assert found == {
        "NAME": "tiny",
        "READY": "True",
        "REASON": "Serving",
        "MODEL": "tiny",
        "DRAFT": "tiny",
        "REPLICAS": "1",
        "MEMORY": format_bytes(plan.limit),
        "STORAGE": "tiny-kv",
    }


def test_scale_finds_the_pods(stage, tiny):
    path = f"/apis/{names.API_VERSION}/namespaces/{stage.namespace}/{names.PLURAL}/tiny/scale"
    scale = json.loads(stage.venue.kubectl("get", "--raw", path))
    assert scale["spec"]["replicas"] == scale["status"]["replicas"] == 1
    (pod,) = stage.venue.kubectl.list("pods", stage.namespace, scale["status"]["selector"])
    assert pod["metadata"]["uid"] == serving.pod_of(stage.venue, stage.namespace, "tiny")["metadata"]["uid"]


@pytest.fixture
def openai(stage, tiny):
    """A client of the Service."""
    with (
        reach.service(stage.venue, stage.namespace, "tiny") as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        yield client


def test_models_are_listed(openai):
    (model,) = openai.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"


def test_completions_are_answered_whole_and_streamed(openai):
    body = {"model": "tiny", "prompt": "def main():\n", "max_tokens": 24, "temperature": 0}
    whole = openai.post("/v1/completions", json=body).raise_for_status().json()
    assert whole["usage"]["completion_tokens"] == 24
    events = _events(openai, "/v1/completions", {**body, "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == whole["choices"][0]["text"]


def test_chats_are_answered_whole_and_streamed(openai):
    messages = [{"role": "user", "content": "What does a cache keep?"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 16, "temperature": 0}
    whole = openai.post("/v1/chat/completions", json=body).raise_for_status().json()
    assert whole["choices"][0]["message"]["role"] == "assistant"
    events = _events(openai, "/v1/chat/completions", {**body, "stream": True})
    said = "".join(event["choices"][0]["delta"].get("content", "") for event in events)
    assert said == whole["choices"][0]["message"]["content"]


def _events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert data[-1] == "[DONE]"
    return [json.loads(text) for text in data[:-1]]


def test_a_field_that_is_not_served_is_refused_by_name(openai):
    body = {"model": "tiny", "prompt": "def", "max_tokens": 4, "best_of": 3}
    answer = openai.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "best_of"


def test_cold_prompts_come_from_nowhere(cold):
    assert len(cold.answers) >= 24
    assert sum(cold.cached_tokens.values()) <= 0.02 * cold.prompt_tokens


def test_memory_stays_under_the_limit(stage, cold, plan):
    """After the load, since the pod's start."""
    pod = serving.pod_of(stage.venue, stage.namespace, "tiny")
    peak = serving.memory_peak(stage.venue, pod)
    stage.note(
        f"memory of the pod after {len(cold.prompts)} prompts: limit {plan.limit / 2**20:.0f} MiB, the container was "
        f"charged {peak.total / 2**20:.0f} MiB at most; the process had {peak.process / 2**20:.0f} MiB resident at most"
    )
    assert peak.process < plan.limit
    assert peak.total <= plan.limit
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0


def test_a_change_that_the_pod_does_not_see_leaves_it_alone(stage, cold):
    """Retention is a matter of the claim's owner only."""
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    pod = serving.pod_of(stage.venue, namespace, "tiny")
    generation = kubectl.must_get("deployment", "tiny", namespace)["metadata"]["generation"]
    for retention, owners in (("Retain", 0), ("Delete", 1)):
        kubectl.patch(SCD, "tiny", namespace, {"spec": {"kvCache": {"storage": {"retention": retention}}}})
        stage.settled("tiny")
        claim = kubectl.must_get("pvc", "tiny-kv", namespace)
        assert len(claim["metadata"].get("ownerReferences", ())) == owners
    assert serving.pod_of(stage.venue, namespace, "tiny")["metadata"]["uid"] == pod["metadata"]["uid"]
    assert kubectl.must_get("deployment", "tiny", namespace)["metadata"]["generation"] == generation


def test_the_successor_gets_the_prompts_from_storage(restored):
    assert restored.cached_tokens["storage"] >= 0.9 * restored.prompt_tokens


def test_the_successor_drafts_as_well_as_its_predecessor(cold, restored):
    assert restored.same_text(cold)
    assert restored.accept_length >= 0.98 * cold.accept_length
    different = [
        (prompt.name, _steps(before), _steps(after))
        for prompt, before, after in zip(cold.prompts, cold.answers, restored.answers, strict=True)
        if _steps(before) != _steps(after)
    ]
    assert different == []


def test_without_the_drafts_half_the_text_is_the_same_and_the_speed_is_lost(stage, cold, restored, withheld):
    stage.note(Report([cold, restored, withheld]).to_text())
    assert withheld.same_text(cold)
    assert withheld.cached_tokens["storage"] >= 0.9 * withheld.prompt_tokens
    assert withheld.of_kind("copy").accept_length <= 0.6 * cold.of_kind("copy").accept_length


def test_a_change_of_the_wire_document_has_rolled_the_pod(stage, withheld):
    config = stage.venue.kubectl.must_get("configmap", "tiny-wire", stage.namespace)
    assert json.loads(config["data"][names.WIRE_KEY])["kvCache"]["storage"]["missingDraft"] == "Degrade"
    pod = serving.pod_of(stage.venue, stage.namespace, "tiny")
    template = stage.venue.kubectl.must_get("deployment", "tiny", stage.namespace)["spec"]["template"]
    digest = template["metadata"]["annotations"][names.ANNOTATION_WIRE_HASH]
    assert pod["metadata"]["annotations"][names.ANNOTATION_WIRE_HASH] == digest


def _steps(answer: Answer) -> list[int]:
    return list(answer.usage["speculation"]["accepted_by_step"])


IN_FLIGHT = 4
IN_FLIGHT_TOKENS = 512


def test_a_deleted_pod_finishes_its_requests_and_keeps_what_it_computed(stage, withheld):
    """The pod is deleted while it generates; nobody waits for storage before that."""
    texts = [f"Once more, with number {number}:\n{PROMPTS[number].text}" for number in range(IN_FLIGHT)]
    old = serving.pod_of(stage.venue, stage.namespace, "tiny")
    with (
        reach.service(stage.venue, stage.namespace, "tiny") as url,
        ThreadPoolExecutor(IN_FLIGHT) as threads,
    ):
        answers = [threads.submit(complete, url, "tiny", text, IN_FLIGHT_TOKENS) for text in texts]
        serving.wait_running(url, IN_FLIGHT)
        stage.venue.kubectl.delete("pod", old["metadata"]["name"], stage.namespace, wait=False)
        finished = [answer.result() for answer in answers]
    assert [answer.completion_tokens for answer in finished] == [IN_FLIGHT_TOKENS] * IN_FLIGHT
    serving.wait_pod(stage.venue, stage.namespace, "tiny", not_uid=old["metadata"]["uid"])
    stage.venue.kubectl.until_gone("pod", old["metadata"]["name"], stage.namespace, seconds=120)
    with reach.service(stage.venue, stage.namespace, "tiny") as url:
        for text, before in zip(texts, finished, strict=True):
            after = complete(url, "tiny", text + before.text, 1)
            assert after.usage["prompt_tokens_details"]["storage"] >= 0.9 * after.usage["prompt_tokens"]
