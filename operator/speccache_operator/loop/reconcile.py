"""One pass over one resource: observe → plan → apply → conditions → status → events; and over what a deleted one left.

What woke it is unknown here, on purpose.
"""

import logging
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from speccache_operator.act import events, status
from speccache_operator.act.apply import carry_out
from speccache_operator.act.removal import remove_left_behind
from speccache_operator.children.context import RuntimeImage
from speccache_operator.cluster import Cluster
from speccache_operator.decide import verdict
from speccache_operator.decide.conditions import READY, Condition
from speccache_operator.decide.judge import Judged, judge
from speccache_operator.decide.plan import make_plan
from speccache_operator.decide.steps import Outcome
from speccache_operator.errors import ClusterError
from speccache_operator.kinds import RESOURCE, Key, Object, Ref
from speccache_operator.logs import fields
from speccache_operator.loop.controller import Result
from speccache_operator.metrics import Metrics
from speccache_operator.observe.cluster_wide import Nodes, Volumes
from speccache_operator.observe.look import claim_names, observe
from speccache_operator.observe.observed import version

logger = logging.getLogger(__name__)


def _utc_now() -> datetime:
    return datetime.now(UTC)


class Reconciler:
    """Knows how to reconcile, and of each resource what the last pass saw (so that events can be told from echoes)."""

    def __init__(
        self,
        cluster: Cluster,
        image: RuntimeImage,
        metrics: Metrics,
        *,
        check_nodes: bool,
        instance: str,
        now: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._cluster = cluster
        self._image = image
        self._metrics = metrics
        self._nodes = Nodes(cluster) if check_nodes else None
        self._volumes = Volumes(cluster) if check_nodes else None
        self._instance = instance
        self._now = now
        self._seen: dict[Key, frozenset[tuple[str, str]]] = {}
        self._claims: dict[Key, tuple[str, ...]] = {}

    async def reconcile(self, key: Key) -> Result:
        """One pass. Raises ClusterError when the API server does not answer; doing it again is always right."""
        raw = await self._cluster.get(Ref(RESOURCE, key.namespace, key.name))
        uid = raw["metadata"]["uid"] if raw is not None else None
        again_after = await remove_left_behind(self._cluster, key, uid, self._image, self._instance, self._now())
        if raw is None:
            self._forget(key)
            return Result(again_after)
        if raw["metadata"].get("deletionTimestamp"):
            # Its children go by their owner references; making them again would fight that.
            return Result(again_after)
        judged = judge(raw)
        self._claims[key] = claim_names(judged.resource) if judged.resource is not None else ()
        return await self._pass(raw, judged, again_after)

    async def _pass(self, raw: Object, judged: Judged, again_after: float | None) -> Result:
        key = judged.key
        observed = await observe(self._cluster, key, judged.resource, self._nodes, self._volumes)
        now = self._now()
        plan = make_plan(judged, observed, self._image, now)
        outcome = await carry_out(self._cluster, plan, observed, self._metrics)
        conditions = verdict.conditions(judged, plan, outcome, observed, now)
        written = await status.write(self._cluster, raw, status.make_status(raw, conditions, plan.facts, now))
        if written is not None:
            self._metrics.writes.labels(RESOURCE.name, "status").inc()
        self._seen[key] = observed.versions() | outcome.versions | {version(written or raw)}
        await self._tell(key, raw, conditions, outcome, now)
        wishes = [wish for wish in (again_after, verdict.again_after(plan, outcome)) if wish is not None]
        return Result(again_after=min(wishes, default=None), failed=verdict.failed(outcome))

    def is_news(self, key: Key, obj: Object) -> bool:
        """False when the last pass has seen, or made, this very state of the object."""
        return version(obj) not in self._seen.get(key, frozenset())

    def users_of_claim(self, namespace: str, claim: str) -> Iterable[Key]:
        """Resources that name this claim, whether it exists or not."""
        return [key for key, claims in self._claims.items() if key.namespace == namespace and claim in claims]

    async def keys(self, namespace: str | None) -> list[Key]:
        """All resources there are, and those that the last passes knew."""
        listed = await self._cluster.list(RESOURCE, namespace)
        found = [Key(obj["metadata"]["namespace"], obj["metadata"]["name"]) for obj in listed]
        return list(dict.fromkeys([*found, *self._claims]))

    def _forget(self, key: Key) -> None:
        self._seen.pop(key, None)
        self._claims.pop(key, None)
        self._metrics.forget_resource(key)

    async def _tell(
        self, key: Key, raw: Object, conditions: Iterable[Condition], outcome: Outcome, now: datetime
    ) -> None:
        """Metrics, log lines and events of this pass. An event that cannot be posted is not worth a second pass."""
        by_type = {condition.type: condition for condition in conditions}
        self._metrics.set_resource(key, by_type[READY].status, by_type[READY].reason)
        notes = (*events.of_writes(outcome.writes), *events.transitions(status.previous(raw), by_type.values()))
        for note in notes:
            level = logging.WARNING if note.warning else logging.INFO
            logger.log(level, "event", extra=fields(key=str(key), reason=note.reason, text=note.message))
            try:
                await self._cluster.create(events.event_object(raw, note, self._instance, now))
            except ClusterError as error:
                logger.warning("cannot post an event", extra=fields(key=str(key), error=str(error)))
