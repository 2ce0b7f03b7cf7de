"""The PodDisruptionBudget: how many pods evictions may take at the same time."""

from typing import Any

from speccache_api import names
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.kinds import POD_DISRUPTION_BUDGET


def build(ctx: BuildContext) -> Built:
    """Wanted when `podDisruptionBudget` is given."""
    budget = ctx.resource.spec.pod_disruption_budget
    if budget is None:
        return Answer.ABSENT
    name = ctx.resource.name
    bound: dict[str, Any] = (
        {"minAvailable": budget.min_available}
        if budget.min_available is not None
        else {"maxUnavailable": budget.max_unavailable}
    )
    return {
        "apiVersion": POD_DISRUPTION_BUDGET.api_version,
        "kind": POD_DISRUPTION_BUDGET.name,
        "metadata": metadata(ctx, names.pod_disruption_budget_name(name)),
        "spec": {
            **bound,
            "selector": {"matchLabels": names.selector_labels(name)},
            # A pod that does not serve anyway must not keep its node from being drained.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
