"""The NetworkPolicy: who may open connections to the pods, and whether they may open any."""

from typing import Any

from speccache_api import names
from speccache_api.spec_policies import LabelSelector, NetworkPeer
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.kinds import NETWORK_POLICY

_THIS_NAMESPACE: list[dict[str, Any]] = [{"podSelector": {}}]


def build(ctx: BuildContext) -> Built:
    """Wanted when `networkPolicy` is given."""
    policy = ctx.resource.spec.network_policy
    if policy is None:
        return Answer.ABSENT
    name = ctx.resource.name
    peers = [_peer(peer) for peer in policy.allow_from] if policy.allow_from else _THIS_NAMESPACE
    ingress = {"from": peers, "ports": [{"port": names.HTTP_PORT, "protocol": "TCP"}]}
    return {
        "apiVersion": NETWORK_POLICY.api_version,
        "kind": NETWORK_POLICY.name,
        "metadata": metadata(ctx, names.network_policy_name(name)),
        "spec": {
            "podSelector": {"matchLabels": names.selector_labels(name)},
            "policyTypes": ["Ingress", "Egress"] if policy.egress == "Deny" else ["Ingress"],
            "ingress": [ingress],
            **({"egress": []} if policy.egress == "Deny" else {}),
        },
    }


def _peer(peer: NetworkPeer) -> dict[str, Any]:
    if peer.ip_block is not None:
        return {"ipBlock": {"cidr": peer.ip_block.cidr}}
    selectors = {"podSelector": peer.pod_selector, "namespaceSelector": peer.namespace_selector}
    return {key: _selector(selector) for key, selector in selectors.items() if selector is not None}


def _selector(selector: LabelSelector) -> dict[str, Any]:
    return {"matchLabels": dict(selector.match_labels)} if selector.match_labels else {}
