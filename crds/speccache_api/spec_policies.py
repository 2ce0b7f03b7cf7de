"""`spec.podDisruptionBudget`, `spec.networkPolicy` and `spec.admin`: how the cluster may take pods away, who may reach
them, and who may steer them.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from speccache_api.fields import LABEL_KEY_PATTERN, Cidr, CountOrPercent, LabelValue, ObjectName
from speccache_api.rules import Rule, SpecModel, exactly_one

MOST_PEERS = 8
Labels = Annotated[dict[str, LabelValue], Field(max_length=8)]


class PodDisruptionBudget(SpecModel):
    """How many pods evictions (drains of nodes, for example) may take at the same time. Exactly one of minAvailable,
    maxUnavailable. Pods that are not ready never hold up an eviction.
    """

    min_available: CountOrPercent | None = None
    """Pods that must stay ready: `1` or `50%`. As many as there are replicas means that no node can be drained."""
    max_unavailable: CountOrPercent | None = None
    """Pods that may be missing: `1` or `50%`. `0` means that no node can be drained."""

    RULES: ClassVar[tuple[Rule, ...]] = (exactly_one("minAvailable", "maxUnavailable"),)


class LabelSelector(SpecModel):
    """Objects by their labels. Without labels: all."""

    match_labels: Labels | None = None
    """Labels that all must be there, each with this value."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel=f"!has(self.matchLabels) || self.matchLabels.all(k, k.matches('{LABEL_KEY_PATTERN}'))",
            message="a label's name is letters, digits, -, _ and . (at most 63), and may begin with a domain and /;"
            " correct it",
            check=lambda s: all(re.fullmatch(LABEL_KEY_PATTERN, key) for key in s.match_labels or ()),
            at=".matchLabels",
        ),
    )


class IPBlock(SpecModel):
    """A range of addresses."""

    cidr: Cidr
    """`10.0.0.0/8` or `fd00::/8`. Addresses of clients outside the cluster may be changed on their way."""


class NetworkPeer(SpecModel):
    """Who may open a connection: pods by their labels and their namespace's, or a range of addresses."""

    pod_selector: LabelSelector | None = None
    """Pods with these labels, of this namespace or of those that namespaceSelector chooses."""
    namespace_selector: LabelSelector | None = None
    """Pods of the namespaces with these labels, such as `kubernetes.io/metadata.name: monitoring`."""
    ip_block: IPBlock | None = None
    """Addresses instead of pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="has(self.podSelector) || has(self.namespaceSelector) || has(self.ipBlock)",
            message="say who: give podSelector, namespaceSelector or ipBlock",
            check=lambda p: p.pod_selector is not None or p.namespace_selector is not None or p.ip_block is not None,
        ),
        Rule(
            cel="!has(self.ipBlock) || !(has(self.podSelector) || has(self.namespaceSelector))",
            message="addresses and pods are two entries of the list; give ipBlock alone",
            check=lambda p: p.ip_block is None or (p.pod_selector is None and p.namespace_selector is None),
            at=".ipBlock",
        ),
    )


class NetworkPolicy(SpecModel):
    """Who may reach the pods, on clusters whose network enforces NetworkPolicies. Without it everybody may. The
    model's API and /metrics are on the same port, so Prometheus has to be among those who may. Probes of the kubelet
    always may.
    """

    allow_from: Annotated[list[NetworkPeer], Field(min_length=1, max_length=MOST_PEERS)] | None = None
    """Who may connect to the pods' HTTP port; nothing else can be reached. Default: all pods of this namespace."""
    egress: Literal["Allow", "Deny"] = "Allow"
    """Whether the pods may open connections. `Allow` (default) leaves that alone. `Deny` forbids all: the runtime opens
    none, as volumes are mounted by the node. Not with a bucket.
    """


class TokenSecret(SpecModel):
    """Where a token is kept."""

    name: ObjectName
    """Name of a Secret in this namespace. It is mounted into the pods; the operator never reads it."""
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._A-Za-z0-9]+$")] = "token"
    """Key in the Secret whose value is the token. Default: token."""


class Admin(SpecModel):
    """A port of each pod (8081) for looking at and changing its storage tier: GET, PUT and DELETE /admin/storage, POST
    /admin/storage/flush. No Service leads to it, and a networkPolicy keeps everybody from it; `kubectl port-forward`
    reaches it.
    """

    token_secret: TokenSecret
    """The token that each request there must carry."""
