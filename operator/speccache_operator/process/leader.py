"""One writer at a time: who holds the Lease may reconcile, everybody else waits.

Why not the client library's election: it stamps local time as UTC, gives its requests no timeout (so a leader that is
cut off from the API server can go on for minutes after its Lease ran out), and cannot hand the Lease back on a clean
stop. The rules here are client-go's: others' clocks are never trusted, a Lease is free when it has not *changed* for
its duration, and our own time is counted from before the request that renewed it.
"""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from speccache_operator.cluster import Cluster
from speccache_operator.errors import ClusterError, Conflict, LeadershipLost
from speccache_operator.kinds import LEASE, Object, Ref
from speccache_operator.logs import fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `renew_within` < `duration` keeps two writers apart: a holder stops before others may start."""

    duration: int = 15
    renew_within: float = 10.0
    retry: float = 2.0


@dataclass(frozen=True, slots=True)
class Sighting:
    """A Lease version, and when (monotonic seconds) this process first saw it."""

    version: str
    at: float


def is_free(lease: Object, sighting: Sighting, now: float) -> bool:
    """True when nobody holds the Lease, or it has not changed for its duration since we first saw this version."""
    spec: Mapping[str, Any] = lease.get("spec", {})
    if not spec.get("holderIdentity"):
        return True
    return now - sighting.at >= float(spec.get("leaseDurationSeconds", 0))


class Elector:
    """Takes, keeps and gives back one Lease. `acquire`, then `hold`, then `release`."""

    def __init__(self, cluster: Cluster, ref: Ref, identity: str, timing: Timing | None = None) -> None:
        assert ref.kind is LEASE
        self._cluster = cluster
        self._ref = ref
        self._identity = identity
        self._timing = timing or Timing()
        self._held: Object | None = None
        self._renewed = 0.0
        self._sighting: Sighting | None = None

    async def acquire(self) -> None:
        """Return as the holder. Waits for as long as another one renews; errors of the API server are retried."""
        while True:
            started = asyncio.get_running_loop().time()
            try:
                self._held = await self._try_acquire()
            except ClusterError as error:
                logger.warning("cannot read or take the lease", extra=fields(error=str(error)))
            if self._held is not None:
                self._renewed = started
                logger.info("leading", extra=fields(lease=str(self._ref), identity=self._identity))
                return
            await asyncio.sleep(self._timing.retry)

    async def hold(self) -> None:
        """Renew for ever. Raises LeadershipLost as soon as another holder is seen or `renew_within` passed in vain."""
        while True:
            try:
                async with asyncio.timeout_at(self._renewed + self._timing.renew_within):
                    await asyncio.sleep(self._timing.retry)
                    await self._renew()
            except TimeoutError as error:
                raise LeadershipLost(f"lease not renewed for {self._timing.renew_within} s") from error

    async def release(self) -> None:
        """Give the Lease back, so that a successor need not wait for it to run out. Tries once, raises nothing."""
        if self._held is None:
            return
        try:
            # Read anew: the renewal that the end has cancelled may have been done all the same.
            lease, self._held = await self._cluster.get(self._ref), None
            if lease is not None and lease.get("spec", {}).get("holderIdentity") == self._identity:
                await self._cluster.replace(self._record(lease, holder=""))
        except ClusterError as error:
            logger.warning("cannot release the lease", extra=fields(error=str(error)))

    async def _try_acquire(self) -> Object | None:
        lease = await self._cluster.get(self._ref)
        if lease is None:
            return await self._cluster.create(self._record(None, holder=self._identity))
        now = asyncio.get_running_loop().time()
        version = lease["metadata"]["resourceVersion"]
        if self._sighting is None or self._sighting.version != version:
            self._sighting = Sighting(version, now)
        if not is_free(lease, self._sighting, now):
            return None
        return await self._cluster.replace(self._record(lease, holder=self._identity))

    async def _renew(self) -> None:
        """One renewal; repeats until it works or the caller's time is up."""
        while True:
            assert self._held is not None
            started = asyncio.get_running_loop().time()
            try:
                self._held = await self._cluster.replace(self._record(self._held, holder=self._identity))
            except Conflict:
                await self._reread()
            except ClusterError as error:
                logger.warning("cannot renew the lease", extra=fields(error=str(error)))
                await asyncio.sleep(self._timing.retry)
            else:
                self._renewed = started
                return

    async def _reread(self) -> None:
        """After a conflict: our own lost answer is fine, another holder is the end."""
        try:
            lease = await self._cluster.get(self._ref)
        except ClusterError:
            return
        if lease is None or lease.get("spec", {}).get("holderIdentity") != self._identity:
            raise LeadershipLost("another process took the lease")
        self._held = lease

    def _record(self, lease: Object | None, *, holder: str) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        meta: Mapping[str, Any] = {"name": self._ref.name, "namespace": self._ref.namespace}
        spec: dict[str, Any] = {}
        if lease is not None:
            meta = lease["metadata"]  # whole: labels that others put there stay, and the version guards the write
            spec.update(lease.get("spec", {}))
        if spec.get("holderIdentity") != holder:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = spec.get("leaseTransitions", -1) + 1
        spec |= {"holderIdentity": holder, "leaseDurationSeconds": self._timing.duration, "renewTime": now}
        return {"apiVersion": LEASE.api_version, "kind": LEASE.name, "metadata": meta, "spec": spec}
