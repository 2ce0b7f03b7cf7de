"""The resource as the API server stores it, judged: what is wrong with it is an answer, not an exception."""

from dataclasses import dataclass
from typing import Any

from speccache_api.resource import InvalidResource, SpecCacheDeployment
from speccache_operator.kinds import Key, Object


@dataclass(frozen=True, slots=True)
class Judged:
    """A resource, or why it is none (`problem`). `replicas` are the wanted ones; None when even that cannot be read."""

    key: Key
    uid: str
    replicas: int | None
    resource: SpecCacheDeployment | None
    problem: str = ""


def judge(raw: Object) -> Judged:
    """Parse `raw`. Never raises for what a resource says."""
    meta = raw["metadata"]
    key, uid = Key(meta["namespace"], meta["name"]), meta["uid"]
    try:
        resource = SpecCacheDeployment.parse(dict(raw))
    except InvalidResource as error:
        return Judged(key, uid, _wanted(raw.get("spec")), None, str(error).replace("\n", "; "))
    return Judged(key, uid, resource.spec.wanted_replicas, resource)


def _wanted(spec: Any) -> int | None:
    """The wanted replicas of a spec that is wrong somewhere: whoever scales down must be heard all the same."""
    wanted = spec.get("replicas", 1) if isinstance(spec, dict) else None
    return wanted if type(wanted) is int and wanted >= 0 else None
