"""The operator's own life: killed, doubled, cut off, too early, and on small nodes."""

from collections.abc import Iterator
from typing import Any

import pytest

from speccache_api import names


@pytest.fixture
def namespace(new_namespace: Any) -> str:
    """One for each test: operators of two tests must not meet."""
    name: str = new_namespace()
    return name


def _leading(operator: Any) -> bool:
    return bool(operator.metrics().get("speccache_operator_leading") == 1)


@pytest.mark.parametrize("child", ["ConfigMap"])
def test_killed_between_two_writes_it_converges(
    child: str, start: Any, proxy: Any, manifest: Any, client: Any, namespace: str, wait: Any
) -> None:
    """The connection is cut at the first write of `child`, and the process killed there; a new one ends the work."""
    plural = f"{child.lower()}s"
    hit: list[str] = []

    def fault(method: str, path: str) -> int | None:
        if method == "PATCH" and f"/{plural}/" in path:
            hit.append(path)
            return 0
        return None

    proxy.fault = fault
    release = f"killed-{child.lower()}"
    first = start(release, namespace, server=proxy.url)
    name = client.create(manifest())["metadata"]["name"]
    wait(lambda: hit)
    first.kill()
    assert client.get("Deployment", namespace, name) is None
    second = start(release, namespace)
    wait(lambda: client.get("Deployment", namespace, name), seconds=45)  # the dead one's lease must run out
    assert second.stop() == 0
    client.delete(names.KIND, namespace, name)


def test_only_one_of_two_leads_and_the_other_takes_over_at_once_when_it_stops(
    start: Any, manifest: Any, client: Any, namespace: str, wait: Any
) -> None:
    first = start("pair", namespace)
    wait(lambda: _leading(first))
    second = start("pair", namespace)
    assert second.health().json()["leading"] is False
    name = client.create(manifest())["metadata"]["name"]
    wait(lambda: client.get("Deployment", namespace, name))
    assert second.reconciles() == 0
    assert first.stop() == 0
    wait(lambda: _leading(second), seconds=6)  # far less than the lease's duration: it was given back
    lease = client.get("Lease", namespace, "pair-speccache-operator")
    assert lease["spec"]["holderIdentity"].startswith("pair-pod_")
    assert lease["spec"]["leaseTransitions"] >= 1
    assert second.stop() == 0
    assert client.get("Lease", namespace, "pair-speccache-operator")["spec"]["holderIdentity"] == ""
    client.delete(names.KIND, namespace, name)


def test_a_leader_that_cannot_renew_stops_before_another_may_start(
    start: Any, proxy: Any, client: Any, namespace: str, wait: Any
) -> None:
    cut = start("cut", namespace, server=proxy.url)
    wait(lambda: _leading(cut))
    standby = start("cut", namespace)
    proxy.fault = lambda method, path: 503 if "/leases" in path else None
    wait(lambda: cut.process.poll() is not None, seconds=30)
    assert cut.process.returncode == 1
    assert not _leading(standby)
    wait(lambda: _leading(standby), seconds=30)
    assert standby.stop() == 0


def test_a_lease_that_another_one_took_ends_the_process(start: Any, client: Any, namespace: str, wait: Any) -> None:
    robbed = start("robbed", namespace)
    wait(lambda: _leading(robbed))
    client.patch("Lease", namespace, "robbed-speccache-operator", {"spec": {"holderIdentity": "thief"}})
    wait(lambda: robbed.process.poll() is not None, seconds=10)
    assert robbed.process.returncode == 1
    assert client.get("Lease", namespace, "robbed-speccache-operator")["spec"]["holderIdentity"] == "thief"


@pytest.mark.parametrize("status", [0, 503])
def test_trouble_with_the_api_server_delays_and_loses_nothing(
    status: int, start: Any, proxy: Any, manifest: Any, client: Any, namespace: str, wait: Any
) -> None:
    """The first four writes fail, those of the lease excepted."""
    count = iter(range(10**9))

    def fault(method: str, path: str) -> int | None:
        return status if "/leases" not in path and method != "GET" and next(count) < 4 else None

    proxy.fault = fault
    operator = start(f"faults-{status}", namespace, server=proxy.url)
    name = client.create(manifest())["metadata"]["name"]
    wait(lambda: client.get("Deployment", namespace, name), seconds=60)
    wait(lambda: (client.get(names.KIND, namespace, name).get("status") or {}).get("conditions"))
    assert operator.logged("reconcile failed")
    assert not operator.logged("reconcile failed unexpectedly")
    assert operator.health().status_code == 200
    assert operator.stop() == 0
    client.delete(names.KIND, namespace, name)


def test_a_resource_that_is_being_deleted_is_left_alone(
    start: Any, look_again: Any, manifest: Any, client: Any, namespace: str, wait: Any
) -> None:
    """Foreground deletion: the garbage collector takes children one by one, and nobody may put them back."""
    operator = start("deleting", namespace)
    resource = manifest()
    resource["metadata"]["finalizers"] = ["example.test/hold"]
    name = client.create(resource)["metadata"]["name"]
    wait(lambda: client.get("Deployment", namespace, name))
    client.delete(names.KIND, namespace, name)

    def taken() -> bool:
        """Takes the Service. A pass that began before the deletion may still put it back."""
        if client.get("Service", namespace, name) is not None:
            client.delete("Service", namespace, name)
        look_again(operator, name, 1)
        return client.get("Service", namespace, name) is None

    wait(taken)
    look_again(operator, name, 3)
    assert client.get("Service", namespace, name) is None
    client.patch(names.KIND, namespace, name, {"metadata": {"finalizers": None}})
    assert client.get(names.KIND, namespace, name) is None
    wait(lambda: not [key for key in operator.metrics() if key.startswith("speccache_operator_resources{")])
    assert operator.stop() == 0


@pytest.fixture
def small_node(client: Any) -> Iterator[None]:
    client.create({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "small"}})
    status = {"allocatable": {"memory": "1Gi"}, "capacity": {"memory": "1Gi"}}
    client.patch("Node", None, "small", {"status": status}, subresource="status")
    yield
    client.delete("Node", None, "small")


def test_no_pod_is_made_that_no_node_can_hold(
    small_node: None, start: Any, manifest: Any, client: Any, namespace: str, wait: Any, condition: Any
) -> None:
    operator = start("nodes", namespace)
    name = client.create(manifest())["metadata"]["name"]
    wait(lambda: condition(name, "MemorySized").get("reason") == "ExceedsNodeAllocatable")
    message = condition(name, "Ready")["message"]
    assert "the largest node that fits, small, offers 1Gi" in message
    assert "spec.kvCache.host" in message
    assert client.get("Deployment", namespace, name) is None
    assert operator.stop() == 0
    unchecked = start("nodes", namespace, "checkNodes=false")
    wait(lambda: client.get("Deployment", namespace, name))
    assert unchecked.stop() == 0
    client.delete(names.KIND, namespace, name)
