"""What is done with a served resource: wait for it, read its metrics, look at its pod and at its storage."""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass

from speccache_api import names
from speccache_tools.stage import reach
from speccache_tools.stage.kube import SCD, Late, Object
from speccache_tools.stage.objects import holds, is_settled
from speccache_tools.stage.venue import Venue

_SAMPLE = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


def wait_settled(venue: Venue, namespace: str, name: str, seconds: float = 120) -> Object:
    """The resource, once it serves as its spec says and nothing is on its way."""
    return venue.kubectl.until(SCD, name, is_settled, namespace=namespace, seconds=seconds, what="ready and complete")


def pod_of(venue: Venue, namespace: str, name: str) -> Object:
    """The first replica's pod."""
    return venue.kubectl.must_get("pod", f"{names.statefulset_name(name)}-0", namespace)


def wait_pod(venue: Venue, namespace: str, name: str, *, not_uid: str = "", seconds: float = 120) -> Object:
    """The first replica's pod when it is ready and another one than `not_uid`."""

    def is_it(pod: Object) -> bool:
        return pod["metadata"]["uid"] != not_uid and holds(pod, "Ready")

    pod = f"{names.statefulset_name(name)}-0"
    what = "a ready successor" if not_uid else "ready"
    return venue.kubectl.until("pod", pod, is_it, namespace=namespace, seconds=seconds, what=what)


def replace_pod(venue: Venue, namespace: str, name: str) -> Object:
    """Delete the first replica's pod as a drain of its node would; answers its ready successor."""
    old = pod_of(venue, namespace, name)
    venue.kubectl.delete("pod", old["metadata"]["name"], namespace, wait=False)
    return wait_pod(venue, namespace, name, not_uid=old["metadata"]["uid"])


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
