"""Takes the cluster down so that nothing of it is left, whatever state it was found in.

The order matters: the kubelet itself must take the pods away, because only it knows their mounts, addresses and
groups. What it could not finish (killed, or its API server gone) is cleaned up after it.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from speccache_tools.cluster import cgroup, control_plane, network
from speccache_tools.cluster.containerd import SOCKET, ctr
from speccache_tools.cluster.node import IMAGE_STORE
from speccache_tools.cluster.process import Processes, until
from speccache_tools.cluster.settings import CREDENTIALS, RUN

CLOSING = RUN / "closing"
"""Exists from the first step on: a start that finds it finishes the interrupted stop before."""


def down() -> None:
    """Stops and removes everything but built programs and images. Does nothing when there is nothing."""
    if not RUN.exists():
        return
    CLOSING.touch()
    processes = Processes(RUN)
    for name in ("controller-manager", "scheduler", "provisioner"):  # or they would make what is deleted next
        processes.stop(name, grace=0)
    if all(processes.alive(name) for name in ("apiserver", "etcd", "kubelet", "containerd")):
        _delete_pods()
    processes.stop("kubelet")
    processes.stop("proxy")
    processes.stop("apiserver", grace=0)
    processes.stop("etcd", grace=0)
    if processes.alive("containerd"):
        _delete_containers()
    processes.stop("containerd")
    _kill_shims()
    cgroup.kill_and_remove()
    _unmount()
    network.remove()
    _remove_traces()
    shutil.rmtree(RUN)


def _delete_pods() -> None:
    control_plane.kubectl(
        CREDENTIALS, "delete", "pods", "--all", "--all-namespaces", "--grace-period=1", "--wait=false"
    )
    until(lambda: not ctr("tasks", "list", "--quiet").stdout.strip(), seconds=30.0, pause=0.2)


def _delete_containers() -> None:
    for name in ctr("tasks", "list", "--quiet").stdout.split():
        ctr("tasks", "delete", "--force", name)
    for name in ctr("containers", "list", "--quiet").stdout.split():
        ctr("containers", "delete", name)


def _kill_shims() -> None:
    """A shim is ours when it is containerd's program and serves our socket; it outlives containerd on purpose."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            program = os.readlink(folder / "exe")
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue  # ended meanwhile, or a thread of the kernel
        if program.endswith("/containerd-shim-runc-v2") and os.fsencode(SOCKET) in arguments:
            os.kill(int(folder.name), signal.SIGKILL)


def _unmount() -> None:
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for target in reversed(mounts):  # the latest first: it may lie in an earlier one
        if target.startswith(f"{RUN}/"):
            subprocess.run(["umount", "--lazy", target], check=True)


def _remove_traces() -> None:
    """The places outside our folder that containerd, the kubelet and the network plugins insist on."""
    for link in Path("/var/log/containers").glob("*.log"):
        if os.readlink(link).startswith(f"{RUN}/"):
            link.unlink()
    for result in Path("/var/lib/cni/results").glob("*"):
        if f"{RUN}/" in result.read_text():  # of a pod whose network namespace lies there
            result.unlink()
    Path("/var/lib/kubelet/device-plugins/kubelet.sock").unlink(missing_ok=True)
    for folder in ("lib/cni/results", "lib/cni", "lib/kubelet/device-plugins", "lib/kubelet", "log/containers"):
        with contextlib.suppress(OSError):  # gone, or somebody else's too
            Path("/var", folder).rmdir()
    for name in ("sandboxes", "containers"):
        shutil.rmtree(IMAGE_STORE / "io.containerd.grpc.v1.cri" / name, ignore_errors=True)
