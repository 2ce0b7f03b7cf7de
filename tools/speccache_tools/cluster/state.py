"""What of the cluster runs."""

from collections.abc import Mapping
from dataclasses import dataclass

from speccache_tools.cluster import control_plane, teardown
from speccache_tools.cluster.process import Processes
from speccache_tools.cluster.settings import CREDENTIALS, RUN

PROGRAMS = ("etcd", "apiserver", "controller-manager", "scheduler", "containerd", "kubelet", "proxy", "provisioner")


@dataclass(frozen=True, slots=True)
class State:
    """`pids` has every program of the cluster, None for one that does not run. `ready` means that all do, that no stop
    is under way, and that the API server answers.
    """

    ready: bool
    pids: Mapping[str, int | None]


def look() -> State:
    """The state now; takes no lock and changes nothing."""
    processes = Processes(RUN) if RUN.exists() else None
    pids = {name: processes.pid(name) if processes else None for name in PROGRAMS}
    ready = all(pids.values()) and not teardown.CLOSING.exists() and control_plane.ready(CREDENTIALS)
    return State(ready, pids)
