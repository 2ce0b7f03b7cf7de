"""What is done with a served resource: wait for it, read its metrics, look at its pod and at its storage."""

import queue
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from speccache_api import names
from speccache_tools.stage import reach
from speccache_tools.stage.kube import SCD, Late, Object, StageError
from speccache_tools.stage.objects import holds, is_leaving, is_settled
from speccache_tools.stage.venue import Venue

_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


def wait_settled(venue: Venue, namespace: str, name: str, seconds: float = 120) -> Object:
    """The resource, once it serves as its spec says and nothing is on its way."""
    return venue.kubectl.until(SCD, name, is_settled, namespace=namespace, seconds=seconds, what="ready and complete")


def pods_of(venue: Venue, namespace: str, name: str) -> list[Object]:
    """The served pods that are not on their way out, the newest first."""
    pods = [pod for pod in venue.kubectl.list("pods", namespace, _selector(name)) if not is_leaving(pod)]
    return sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"]), reverse=True)


def pod_of(venue: Venue, namespace: str, name: str) -> Object:
    """The newest served pod. Raises StageError when there is none."""
    for pod in pods_of(venue, namespace, name):
        return pod
    raise StageError(f"{name} has no pod")


def wait_pod(venue: Venue, namespace: str, name: str, *, not_uid: str = "", seconds: float = 120) -> Object:
    """A served pod that is ready, stays, and is another one than `not_uid`. Raises Late."""
    deadline = time.monotonic() + seconds
    with venue.kubectl.watching(("pods", "", _selector(name)), namespace=namespace) as changes:
        while (left := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                change = changes.get(timeout=left)
                pod = change.obj
                if not (change.gone or is_leaving(pod) or pod["metadata"]["uid"] == not_uid) and holds(pod, "Ready"):
                    return pod
    raise Late(f"{name} has no {'successor' if not_uid else 'pod'} that is ready after {seconds:.0f} s")


def replace_pod(venue: Venue, namespace: str, name: str) -> Object:
    """Delete the served pod as a drain of its node would; answers its successor, when it is ready and the old pod has
    written what it had and is gone.
    """
    old = pod_of(venue, namespace, name)["metadata"]
    venue.kubectl.delete("pod", old["name"], namespace, wait=False)
    successor = wait_pod(venue, namespace, name, not_uid=old["uid"])
    venue.kubectl.until_gone("pod", old["name"], namespace, seconds=120)
    return successor


def _selector(name: str) -> str:
    return ",".join(f"{key}={value}" for key, value in names.selector_labels(name).items())


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of all samples of a metric that have these labels; 0 when there is none."""
    return sum(value for sample, value in _samples(url, name) if all(f'{k}="{v}"' in sample for k, v in labels.items()))


def wait_written(url: str, seconds: float = 60) -> int:
    """Return when storage has every byte that was copied to the host tier; answers the bytes. Raises Late.

    Only true of a server that began on empty storage: what is there already is not written again.
    """
    deadline = time.monotonic() + seconds
    while True:
        copied = metric(url, "speccache_transfer_bytes_total", direction="device_to_host")
        written = metric(url, "speccache_storage_bytes_total", operation="write")
        if copied and written == copied:
            return int(written)
        if time.monotonic() > deadline:
            raise Late(f"storage has {written:.0f} of {copied:.0f} bytes after {seconds:.0f} s")
        time.sleep(0.2)


def withhold_drafts(venue: Venue, namespace: str, name: str) -> int:
    """Delete every draft object from the storage of a running pod; answers how many there were."""
    pod = pod_of(venue, namespace, name)["metadata"]["name"]
    find = ("find", names.STORAGE_PATH, "-path", "*/d/*", "-type", "f", "-print", "-delete")
    return len(venue.kubectl("exec", pod, "--", *find, namespace=namespace).splitlines())


def wait_running(url: str, count: int, seconds: float = 60) -> None:
    """Return when that many requests are being computed. Raises Late."""
    deadline = time.monotonic() + seconds
    while (running := metric(url, "speccache_requests_running")) < count:
        if time.monotonic() > deadline:
            raise Late(f"{running:.0f} of {count} requests run after {seconds:.0f} s")
        time.sleep(0.05)


@dataclass(frozen=True, slots=True)
class MemoryPeak:
    """The most bytes at any time since the pod's start. `total` is what the container was charged with, page cache
    included (which the kernel drops before it kills); `process` is what the serving process had resident, libraries
    included that were read before and are charged to others.
    """

    total: int
    process: int


def memory_peak(venue: Venue, pod: Object) -> MemoryPeak:
    """Read inside the container, from version 1 or 2 of the kernel's control groups."""
    read = "cat /sys/fs/cgroup/memory/memory.max_usage_in_bytes 2>/dev/null || cat /sys/fs/cgroup/memory.peak"
    meta = pod["metadata"]
    command = ("exec", meta["name"], "--", "sh", "-c", f"{read}; cat /proc/1/status")
    total, *status = venue.kubectl(*command, namespace=meta["namespace"]).splitlines()
    (process,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    return MemoryPeak(int(total), process)


def _samples(url: str, name: str) -> Iterator[tuple[str, float]]:
    for line in reach.fetch(f"{url}/metrics").splitlines():
        found = _SAMPLE.fullmatch(line)
        if found and found[1] == name:
            yield found[2] or "", float(found[3])
