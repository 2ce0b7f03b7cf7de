"""Brings the cluster up from whatever state it is found in."""

import json
import sys
from pathlib import Path

from speccache_tools.cluster import (
    binaries,
    control_plane,
    credentials,
    images,
    network,
    node,
    provisioner,
    teardown,
)
from speccache_tools.cluster.binaries import Say
from speccache_tools.cluster.process import Processes, StartError
from speccache_tools.cluster.settings import APISERVER_PORT, CREDENTIALS, NODE_IP, RUN

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def up(node_memory: int | None, say: Say) -> None:
    """Builds what is missing, starts what does not run, loads the images; returns when pods can run.

    `node_memory`: allocatable bytes that the node claims (None: all). Raises `BuildError`, `StartError`, `FenceError`
    or `ImageError`.
    """
    binaries.build(binaries.CLUSTER_PROGRAMS, say)
    if _is_left_over():
        say("clearing what an interrupted stop or an earlier boot left")
        teardown.down()
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / "boot").write_text(_BOOT.read_text())
    network.fence()
    processes = Processes(RUN)
    credentials.create(CREDENTIALS, f"https://{NODE_IP}:{APISERVER_PORT}")
    control_plane.start(processes, RUN)
    say("API server answers")
    node.start(processes, node_memory)
    _start_provisioner(processes)
    node.wait_ready(processes)
    network.check()
    say("node is ready")
    images.load(say)


def _is_left_over() -> bool:
    boot = RUN / "boot"
    return teardown.CLOSING.exists() or (boot.exists() and boot.read_text() != _BOOT.read_text())


def _start_provisioner(processes: Processes) -> None:
    storage_class = json.dumps(provisioner.STORAGE_CLASS_OBJECT)
    applied = control_plane.kubectl(CREDENTIALS, "apply", "--server-side", "--filename=-", stdin=storage_class)
    if applied.returncode != 0:
        raise StartError(f"storage class: {applied.stderr.strip()}")
    kubeconfig = str(CREDENTIALS / "provisioner.kubeconfig")
    command = [sys.executable, "-m", provisioner.__name__, kubeconfig, str(RUN / "volumes")]
    processes.start("provisioner", command)
