"""samples/tiny-s3.yaml on a real S3 server: two replicas share a bucket, lose a pod, the drafts' halves and the server.
And buckets that cannot be used: told before any pod is made, and used without anybody's help once they can be.

The cluster's network does not enforce policies: that one lets the pods out to the bucket is only as true as its rules.
"""

import time
from collections.abc import Iterator

import pytest

from speccache_runtime.bench.client import Answer, complete
from speccache_runtime.bench.prompts import load_prompts
from speccache_runtime.bench.report import COLD, RESTORED, WITHHELD, Report, Run
from speccache_tools.demo import NEW_TOKENS, ask
from speccache_tools.stage import reach, serving
from speccache_tools.stage.kube import SCD, Object
from speccache_tools.stage.manifests import resource, secret
from speccache_tools.stage.objects import conditions, has_reason, holds
from speccache_tools.stage.s3_server import LABELS, PORT, s3_server

PROMPTS = load_prompts()[::2]
"""Of both kinds. All of them are asked in test_life."""
BUCKET = "speccache"
NAME = "tiny-s3"
REFUSALS = {
    NAME: ("NoCredentials", f"Secret {NAME} with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY is not there: create it"),
    "no-bucket": ("BucketNotFound", "create it or correct the name"),
    "bad-secret": ("AccessDenied", "check the keys"),
    "no-server": ("EndpointUnreachable", "check the endpoint"),
}
"""Resources, the reasons that they give, and the remedies."""
CAPACITY = 32 * 2**20


@pytest.fixture(scope="module")
def server(stage):
    """An S3 server in a pod, with the sample's bucket."""
    if stage.venue.ours and not stage.venue.has_image(stage.venue.s3_image):
        pytest.skip("the cluster lacks the S3 server: run `make bucket-server cluster`")
    with s3_server(stage.venue, stage.namespace) as made:
        made.make_bucket(BUCKET)
        yield made


@pytest.fixture(scope="module")
def unusable(stage, server, sample) -> Iterator[dict[str, Object]]:
    """Four resources whose buckets cannot be used, as they say so. One is the sample, before its Secret exists; it has
    a network policy, and an address that needs no DNS.
    """
    manifest = sample("tiny-s3.yaml")
    manifest["spec"]["kvCache"]["storage"]["s3"]["endpoint"] = server.endpoint
    manifest["spec"]["networkPolicy"] = {}
    wrong = server.keys | {"AWS_SECRET_ACCESS_KEY": "wrong"}
    away = _service("s3-away", {"app": "none"})
    with stage.applied(secret("good", server.keys), secret("bad", wrong), away):
        address = stage.venue.kubectl.must_get("service", "s3-away", stage.namespace)["spec"]["clusterIP"]
        others = (
            _idle("no-bucket", _bucket(server, "not-made", "good")),
            _idle("bad-secret", _bucket(server, BUCKET, "bad")),
            _idle("no-server", _bucket(server, BUCKET, "good") | {"endpoint": f"http://{address}:{PORT}"}),
        )
        with stage.applied(manifest, *others):
            yield {name: stage.refused(name, "StorageReady", reason) for name, (reason, _) in REFUSALS.items()}


@pytest.fixture(scope="module")
def mended(stage, server, unusable) -> Iterator[float]:
    """What was in the way is gone, since that time."""
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    kubectl.apply(secret("bad", server.keys), namespace)
    server.make_bucket("not-made")
    kubectl.apply(_service("s3-away", LABELS), namespace)
    (job,) = kubectl.list("jobs", namespace, "app.kubernetes.io/instance=no-server")
    kubectl.delete("job", job["metadata"]["name"], namespace)  # as the message says: tried again at once
    with stage.applied(secret(NAME, server.keys)):
        yield time.monotonic()


@pytest.fixture(scope="module")
def shared(stage, mended) -> Object:
    """The sample, serving by two replicas."""
    return stage.settled(NAME)


@pytest.fixture(scope="module")
def replicas(stage, shared) -> list[Object]:
    return serving.pods_of(stage.venue, stage.namespace, NAME)


@pytest.fixture(scope="module")
def cold(stage, replicas) -> Run:
    """All prompts, asked of one replica; the bucket has everything afterwards."""
    with reach.pod(stage.venue, replicas[0]) as url:
        run = ask(url, NAME, COLD, PROMPTS)
        serving.wait_written(url)
    return run


@pytest.fixture(scope="module")
def restored(stage, cold, replicas) -> Run:
    """The same prompts, asked of the successor of the replica that computed them."""
    before = {pod["metadata"]["uid"] for pod in replicas}
    stage.venue.kubectl.delete("pod", replicas[0]["metadata"]["name"], stage.namespace)
    stage.settled(NAME)
    pods = serving.pods_of(stage.venue, stage.namespace, NAME)
    (successor,) = (pod for pod in pods if pod["metadata"]["uid"] not in before)
    with reach.pod(stage.venue, successor) as url:
        return ask(url, NAME, RESTORED, PROMPTS)


@pytest.fixture(scope="module")
def withheld(stage, server, restored) -> Run:
    """The same prompts without the drafts' halves; one replica is enough for that."""
    assert server.withhold_drafts(BUCKET) > 0
    patch = {"spec": {"replicas": 1, "kvCache": {"storage": {"missingDraft": "Degrade"}}}}
    stage.venue.kubectl.patch(SCD, NAME, stage.namespace, patch)
    stage.settled(NAME)
    with reach.pod(stage.venue, serving.pod_of(stage.venue, stage.namespace, NAME)) as url:
        return ask(url, NAME, WITHHELD, PROMPTS)


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bucket_that_cannot_be_used_is_told_before_any_pod_is_made(stage, unusable, name):
    reason, remedy = REFUSALS[name]
    message = conditions(unusable[name])["StorageReady"]["message"]
    stage.note(f"{name}: {message}")
    assert remedy in message
    assert conditions(unusable[name])["Ready"]["reason"] == reason
    assert stage.venue.kubectl.get("deployment", name, stage.namespace) is None
    assert stage.pods(name) == []


@pytest.mark.parametrize("name", REFUSALS)
def test_a_bucket_is_used_once_it_can_be(stage, mended, name):
    """By itself; at once when the Job is deleted."""
    stage.until(name, lambda found: has_reason(found, "StorageReady", "True", "BucketReady"), "usable")
    stage.note(f"{name}: usable at most {time.monotonic() - mended:.0f} s after it was mended")


def test_the_bucket_was_tried_and_is_what_the_column_says(stage, shared):
    assert has_reason(shared, "StorageReady", "True", "BucketReady")
    assert shared["status"]["storage"] == f"s3://{BUCKET}/tiny"
    jobs = stage.venue.kubectl.list("jobs", stage.namespace, f"app.kubernetes.io/instance={NAME}")
    assert jobs == [], "the answer is recorded, so the Job is gone"


def test_another_replica_is_served_from_the_bucket(stage, cold, replicas):
    assert sum(cold.cached_tokens.values()) <= 0.02 * cold.prompt_tokens
    some = Run(COLD, PROMPTS[::2], cold.answers[::2])
    with reach.pod(stage.venue, replicas[1]) as url:
        run = ask(url, NAME, RESTORED, PROMPTS[::2])
        found = run.cached_tokens["storage"]
        # A request is counted a moment after its answer.
        _until(lambda: serving.metric(url, "speccache_cached_tokens_total", tier="storage") == found, "counted")
        assert serving.metric(url, "speccache_storage_operations_total", result="written") < 10, "it has nothing new"
    assert found >= 0.9 * run.prompt_tokens
    assert run.same_text(some)
    assert run.same_steps(some)


def test_the_successor_of_a_pod_drafts_from_the_bucket_as_well_as_its_predecessor(cold, restored):
    assert restored.cached_tokens["storage"] >= 0.9 * restored.prompt_tokens
    assert restored.same_text(cold)
    assert restored.same_steps(cold)


def test_without_the_drafts_half_the_text_is_the_same_and_the_speed_is_lost(stage, cold, restored, withheld):
    stage.note(f"from a bucket:\n{Report([cold, restored, withheld]).to_text()}")
    assert withheld.same_text(cold)
    assert withheld.cached_tokens["storage"] >= 0.9 * withheld.prompt_tokens
    assert withheld.of_kind("copy").accept_length <= 0.6 * cold.of_kind("copy").accept_length


def test_requests_are_answered_while_the_server_is_away_and_stored_when_it_is_back(stage, server, withheld):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    with reach.service(stage.venue, namespace, NAME) as url:

        def written() -> float:
            return serving.metric(url, "speccache_storage_operations_total", operation="write", result="written")

        def answer(number: int) -> Answer:
            return complete(url, NAME, f"Number {number}:\n{PROMPTS[number].text}", NEW_TOKENS)

        server.go_away()
        without = [answer(number) for number in range(4)]
        waits = ", ".join(f"{1000 * each.first_token:.0f}" for each in without)
        stage.note(f"while the S3 server is away: {waits} ms to the first token")
        errors = serving.metric(url, "speccache_storage_errors_total")
        stored = written()
        server.come_back()
        _until(lambda: answer(5) and written() > stored, "stored again")
        assert not serving.metric(url, "speccache_storage_breaker_open", operation="write")
        assert errors > 0
        assert [answer(number).text for number in range(4)] == [each.text for each in without]
    pod = serving.pod_of(stage.venue, namespace, NAME)
    assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
    assert holds(kubectl.must_get(SCD, NAME, namespace), "Ready")


@pytest.fixture(scope="module")
def small(stage, server, mended) -> Iterator[str]:
    """A resource with a small capacity, on its way."""
    bucket = _bucket(server, BUCKET, "good") | {"prefix": "small"}
    cache = {"storage": {"s3": bucket, "capacity": str(CAPACITY)}, "host": {"tokens": 32768}}
    # What has no room is tried again until that time has passed.
    with stage.applied(resource("small", kvCache=cache, drain={"flushTimeoutSeconds": 1})):
        yield "small"


def test_nothing_is_left_of_a_resource_that_is_to_be_deleted_with_its_pages(stage, server, withheld, small):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    assert _below(server.objects(BUCKET), "tiny")
    labels = f"app.kubernetes.io/component=storage-removal,app.kubernetes.io/instance={NAME}"
    (record,) = kubectl.list("configmaps", namespace, labels)
    kubectl.delete(SCD, NAME, namespace)
    kubectl.until_gone("configmap", record["metadata"]["name"], namespace, seconds=60)
    assert _below(server.objects(BUCKET), "tiny") == {}
    kubectl.until_gone("job", record["metadata"]["name"], namespace, seconds=30)


def test_a_small_capacity_holds_and_what_is_retained_stays(stage, server, small):
    stage.settled(small)
    with reach.service(stage.venue, stage.namespace, small) as url:
        for prompt in PROMPTS:
            complete(url, small, prompt.text, 16)
        _until(lambda: serving.metric(url, "speccache_storage_operations_total", result="full") > 0, "full")
    stored = sum(server.pages(BUCKET).values())
    stage.note(f"a capacity of {CAPACITY} bytes: {stored} stored")
    assert 0.5 * CAPACITY < stored <= 1.05 * CAPACITY
    (pod,) = stage.pods(small)
    stage.venue.kubectl.delete(SCD, small, stage.namespace)
    stage.venue.kubectl.until_gone("pod", pod["metadata"]["name"], stage.namespace, seconds=60)
    left = sum(server.pages(BUCKET).values())
    assert 0.5 * CAPACITY < left <= 1.05 * CAPACITY


def _idle(name: str, bucket: Object) -> Object:
    """A resource that wants no pods: its bucket is tried all the same."""
    return resource(name, kvCache={"storage": {"s3": bucket}}, replicas=0)


def _bucket(server, name: str, keys: str) -> Object:
    return {"bucket": name, "endpoint": server.endpoint, "forcePathStyle": True, "credentialsSecret": keys}


def _below(objects: dict[str, int], prefix: str) -> dict[str, int]:
    return {key: size for key, size in objects.items() if key.startswith(f"{prefix}/")}


def _service(name: str, selector: dict[str, str]) -> Object:
    """Another address of the server, or of nobody."""
    spec = {"selector": selector, "ports": [{"port": PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec}


def _until(test, what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not test():
        assert time.monotonic() < deadline, f"not {what} after {seconds:.0f} s"
        time.sleep(0.2)
