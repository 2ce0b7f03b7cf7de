"""Optional children: they come, change and go with their field, and nothing else depends on them."""

from typing import Any

import pytest

from speccache_api import names

BUDGETS: list[dict[str, Any]] = [{"maxUnavailable": 1}, {"minAvailable": "50%"}]
POLICIES: list[dict[str, Any]] = [
    {},
    {
        "allowFrom": [
            {"podSelector": {"matchLabels": {"app": "gateway"}}},
            {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}},
            {"ipBlock": {"cidr": "10.0.0.0/8"}},
        ],
        "egress": "Deny",
    },
]
OPTIONAL = [("podDisruptionBudget", "PodDisruptionBudget", BUDGETS), ("networkPolicy", "NetworkPolicy", POLICIES)]


@pytest.mark.parametrize(("field", "kind", "values"), OPTIONAL, ids=[case[0] for case in OPTIONAL])
def test_it_is_made_changed_put_back_and_deleted(
    field: str,
    kind: str,
    values: list[Any],
    manifest: Any,
    operator: Any,
    client: Any,
    namespace: str,
    wait: Any,
    condition: Any,
) -> None:
    name = client.create(manifest())["metadata"]["name"]
    wait(lambda: client.get("Deployment", namespace, name))
    assert client.get(kind, namespace, name) is None
    client.patch(names.KIND, namespace, name, {"spec": {field: values[0]}})
    first = wait(lambda: client.get(kind, namespace, name))
    assert first["metadata"]["ownerReferences"][0]["controller"] is True
    client.patch(names.KIND, namespace, name, {"spec": {field: None}})
    wait(lambda: client.get(kind, namespace, name) is None)
    client.patch(names.KIND, namespace, name, {"spec": {field: values[1]}})
    second = wait(lambda: client.get(kind, namespace, name))
    assert second["spec"] != first["spec"]
    selector = "selector" if kind == "PodDisruptionBudget" else "podSelector"
    client.patch(kind, namespace, name, {"spec": {selector: {"matchLabels": {"more": "x"}}}})
    wait(lambda: client.get(kind, namespace, name)["spec"] == second["spec"])
    wait(lambda: condition(name, "ChildrenApplied").get("status") == "True")


def test_the_policy_says_what_the_resource_says(
    manifest: Any, operator: Any, client: Any, namespace: str, wait: Any
) -> None:
    name = client.create(manifest(networkPolicy=POLICIES[1]))["metadata"]["name"]
    spec = wait(lambda: client.get("NetworkPolicy", namespace, name))["spec"]
    assert spec["podSelector"] == {"matchLabels": names.selector_labels(name)}
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    (rule,) = spec["ingress"]
    assert rule["ports"] == [{"port": names.HTTP_PORT, "protocol": "TCP"}]
    assert rule["from"] == POLICIES[1]["allowFrom"]
    assert "egress" not in spec


def test_a_foreign_one_is_told_and_pods_are_made(
    manifest: Any, operator: Any, client: Any, namespace: str, wait: Any, condition: Any
) -> None:
    resource = manifest(podDisruptionBudget=BUDGETS[0])
    name = resource["metadata"]["name"]
    spec = {"minAvailable": 0, "selector": {"matchLabels": {"a": "b"}}}
    meta = {"name": name, "namespace": namespace}
    client.create({"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": meta, "spec": spec})
    client.create(resource)
    wait(lambda: client.get("Deployment", namespace, name))
    wait(lambda: condition(name, "ChildrenApplied").get("reason") == "ObjectNotOwned")
    assert f"PodDisruptionBudget {name}" in condition(name, "ChildrenApplied")["message"]
    assert condition(name, "Progressing")["reason"] == "RollingOut"
    # Switched off, it is not ours to delete.
    client.patch(names.KIND, namespace, name, {"spec": {"podDisruptionBudget": None}})
    wait(lambda: condition(name, "ChildrenApplied").get("reason") == "Applied")
    assert client.get("PodDisruptionBudget", namespace, name)["spec"]["minAvailable"] == 0


def test_a_kind_that_is_not_served_is_a_condition_and_no_endless_retry(
    start: Any, proxy: Any, manifest: Any, client: Any, new_namespace: Any, wait: Any
) -> None:
    namespace = new_namespace()
    proxy.fault = lambda method, path: 404 if "/apis/policy" in path else None
    operator = start("bare", namespace, server=proxy.url)
    resource = manifest(podDisruptionBudget=BUDGETS[0])
    resource["metadata"]["namespace"] = namespace
    name = client.create(resource)["metadata"]["name"]

    def applied() -> dict[str, Any]:
        found = client.get(names.KIND, namespace, name).get("status", {}).get("conditions", [])
        return {entry["type"]: entry for entry in found}.get("ChildrenApplied", {})

    wait(lambda: applied().get("reason") == "KindNotServed")
    assert "does not serve PodDisruptionBudget of policy/v1" in applied()["message"]
    assert client.get("Deployment", namespace, name)
    retried = {key: value for key, value in operator.metrics().items() if 'result="retry"' in key}
    assert not any(retried.values())
    assert not operator.logged("reconcile failed")
    proxy.fault = lambda method, path: None
    wait(lambda: client.get("PodDisruptionBudget", namespace, name))  # by the resync
    wait(lambda: applied().get("reason") == "Applied")
    assert operator.stop() == 0
    client.delete(names.KIND, namespace, name)
