"""A budget that the cluster keeps to, and a network policy: there while the resource says so, gone when it does not."""

import json

import pytest

from speccache_api import names
from speccache_tools.stage import serving
from speccache_tools.stage.kube import SCD, CommandFailed
from speccache_tools.stage.objects import holds


def _patch(stage, **spec):
    stage.venue.kubectl.patch(SCD, "tiny", stage.namespace, {"spec": spec})


def _evict(stage, pod: str) -> None:
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": stage.namespace}}
    path = f"/api/v1/namespaces/{stage.namespace}/pods/{pod}/eviction"
    stage.venue.kubectl("create", f"--raw={path}", "--filename=-", stdin=json.dumps(body))


def test_a_budget_keeps_the_last_pod_until_it_is_switched_off(stage, tiny):
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    old = serving.pod_of(stage.venue, namespace, "tiny")["metadata"]
    _patch(stage, podDisruptionBudget={"minAvailable": 1})
    kubectl.until(
        "poddisruptionbudget",
        "tiny",
        lambda budget: budget.get("status", {}).get("currentHealthy") == 1,
        namespace=namespace,
        seconds=30,
        what="counting the pod",
    )
    with pytest.raises(CommandFailed, match="disruption budget"):
        _evict(stage, old["name"])
    _patch(stage, podDisruptionBudget={"minAvailable": None, "maxUnavailable": 1})
    kubectl.until(
        "poddisruptionbudget",
        "tiny",
        lambda budget: budget.get("status", {}).get("disruptionsAllowed") == 1,
        namespace=namespace,
        seconds=30,
        what="allowing one disruption",
    )
    _patch(stage, podDisruptionBudget=None)
    kubectl.until_gone("poddisruptionbudget", "tiny", namespace, seconds=30)
    assert serving.pod_of(stage.venue, namespace, "tiny")["metadata"]["uid"] == old["uid"], "a budget rolls no pod"
    _evict(stage, old["name"])
    serving.wait_pod(stage.venue, namespace, "tiny", not_uid=old["uid"])
    kubectl.until_gone("pod", old["name"], namespace, seconds=120)


def test_a_network_policy_comes_changes_and_goes(stage, tiny):
    """Whether it is enforced is the cluster network's matter, and ours does not."""
    kubectl, namespace = stage.venue.kubectl, stage.namespace
    _patch(stage, networkPolicy={})
    policy = kubectl.until("networkpolicy", "tiny", lambda _: True, namespace=namespace, seconds=30, what="made")
    assert policy["spec"]["podSelector"]["matchLabels"] == names.selector_labels("tiny")
    assert policy["spec"]["ingress"][0]["from"] == [{"podSelector": {}}]
    _patch(stage, networkPolicy={"egress": "Deny"})
    kubectl.until(
        "networkpolicy",
        "tiny",
        lambda found: "Egress" in found["spec"]["policyTypes"],
        namespace=namespace,
        seconds=30,
        what="forbidding egress",
    )
    _patch(stage, networkPolicy=None)
    kubectl.until_gone("networkpolicy", "tiny", namespace, seconds=30)
    stage.until("tiny", lambda found: holds(found, "ChildrenApplied"), "told to be as planned")
