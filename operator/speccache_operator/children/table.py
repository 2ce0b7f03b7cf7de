"""Every child, one entry each, in the order in which they are made.

What is watched, what a pass reads, what it applies and deletes, and which rights the operator needs all come from here.
A new child is an entry and a file with its builder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from speccache_api import names
from speccache_operator.children import (
    claim,
    config_map,
    deployment,
    headless_service,
    inspection_job,
    inspection_record,
    network_policy,
    pod_disruption_budget,
    service,
    service_account,
    stateful_set,
    storage_check_job,
    storage_check_record,
    storage_removal,
)
from speccache_operator.children.answer import Built
from speccache_operator.children.context import BuildContext
from speccache_operator.kinds import (
    CLAIM,
    CONFIG_MAP,
    DEPLOYMENT,
    JOB,
    NETWORK_POLICY,
    POD_DISRUPTION_BUDGET,
    SERVICE,
    SERVICE_ACCOUNT,
    STATEFUL_SET,
    Kind,
)


class Part(Enum):
    """What a child is to the pods."""

    NEEDED = "needed"  # no pod is made or changed while it cannot be applied
    RUNS = "runs"  # makes pods
    BESIDE = "beside"  # pods do not need it, but without it the resource is not what it says
    OPTIONAL = "optional"  # as BESIDE, but the resource is Ready without it, and its kind may be missing in the cluster


@dataclass(frozen=True, slots=True)
class Child:
    """One child, or with a changing name one sort of them.

    `name` makes its name from the resource's. None: it has a changing name, and there may be several; they are
    found by the label `component`. `watched`: its events wake the resource. `applied`: False for what only ever is
    deleted. `deleted`: its builder may answer ABSENT. `fixed`: it cannot change; a new one is made when it is gone.
    `collected`: a new one does not replace those before it.
    """

    kind: Kind
    build: Callable[[BuildContext], Built]
    name: Callable[[str], str] | None
    part: Part = Part.BESIDE
    component: str = names.COMPONENT_SERVER
    watched: bool = True
    applied: bool = True
    deleted: bool = False
    fixed: bool = False
    collected: bool = False


CHILDREN: tuple[Child, ...] = (
    Child(SERVICE_ACCOUNT, service_account.build, names.service_account_name, Part.NEEDED),
    Child(SERVICE, service.build, names.service_name),
    Child(SERVICE, headless_service.build, names.headless_service_name),
    Child(JOB, inspection_job.build, None, Part.RUNS, names.COMPONENT_INSPECTION, deleted=True, fixed=True),
    Child(JOB, storage_check_job.build, None, Part.RUNS, names.COMPONENT_STORAGE_CHECK, deleted=True, fixed=True),
    Child(CLAIM, claim.build, names.claim_name, Part.NEEDED),
    Child(CONFIG_MAP, inspection_record.build, None, Part.BESIDE, names.COMPONENT_INSPECTION, deleted=True),
    Child(CONFIG_MAP, storage_check_record.build, None, Part.BESIDE, names.COMPONENT_STORAGE_CHECK, deleted=True),
    Child(
        CONFIG_MAP,
        storage_removal.build,
        None,
        Part.NEEDED,
        names.COMPONENT_STORAGE_REMOVAL,
        deleted=True,
        collected=True,
    ),
    Child(CONFIG_MAP, config_map.build, names.config_map_name, Part.NEEDED),
    Child(DEPLOYMENT, deployment.build, names.workload_name, Part.RUNS),
    Child(STATEFUL_SET, stateful_set.build, names.workload_name, watched=False, applied=False, deleted=True),
    Child(
        POD_DISRUPTION_BUDGET,
        pod_disruption_budget.build,
        names.pod_disruption_budget_name,
        Part.OPTIONAL,
        deleted=True,
    ),
    Child(NETWORK_POLICY, network_policy.build, names.network_policy_name, Part.OPTIONAL, deleted=True),
)


def watched_kinds() -> tuple[Kind, ...]:
    """Kinds of which the objects with our labels are watched, each once. Claims are watched whoever made them."""
    return tuple(dict.fromkeys(child.kind for child in CHILDREN if child.watched and child.kind is not CLAIM))
