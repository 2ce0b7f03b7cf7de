"""A real Kubernetes cluster of one node on this machine, from package registries only.

up          build what is missing, start what does not run, load the images, print how to reach the cluster
down        stop it and leave nothing behind (built programs and images stay, outside the repository)
status      say what runs; exit code 1 when the cluster is not whole
api         etcd and the API server alone, in the foreground, beside anything else; ends with its caller
programs    only build (`--api`: only what `api` needs; `--helm`: only helm); `--list`: say where they are, as JSON
images      build the project's images from the Dockerfile, load them when the cluster is up
"""

import argparse
import fcntl
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speccache_tools.cluster import (
    api_only,
    binaries,
    containerd,
    control_plane,
    credentials,
    images,
    network,
    node,
    provisioner,
    teardown,
)
from speccache_tools.cluster.process import Processes, StartError
from speccache_tools.cluster.settings import APISERVER_PORT, CACHE, NODE_IP, RUN

KUBECONFIG = node.CREDENTIALS / "admin.kubeconfig"
PROGRAMS = ("etcd", "apiserver", "controller-manager", "scheduler", "containerd", "kubelet", "proxy", "provisioner")

_STARTED = time.monotonic()
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def say(text: str) -> None:
    """Progress goes to standard error, so that `eval "$(… up)"` works."""
    sys.stderr.write(f"[{time.monotonic() - _STARTED:6.1f} s] {text}\n")


def up(node_memory: int | None) -> None:
    binaries.build(binaries.ALL_PROGRAMS, say)
    if _is_left_over():
        say("clearing what an interrupted stop or an earlier boot left")
        teardown.down()
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / "boot").write_text(_BOOT.read_text())
    network.fence()
    processes = Processes(RUN)
    credentials.create(node.CREDENTIALS, f"https://{NODE_IP}:{APISERVER_PORT}")
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
    applied = control_plane.kubectl(node.CREDENTIALS, "apply", "--server-side", "--filename=-", stdin=storage_class)
    if applied.returncode != 0:
        raise StartError(f"storage class: {applied.stderr.strip()}")
    kubeconfig = str(node.CREDENTIALS / "provisioner.kubeconfig")
    command = [sys.executable, "-m", provisioner.__name__, kubeconfig, str(RUN / "volumes")]
    processes.start("provisioner", command)


def status(*, as_json: bool) -> bool:
    """Writes what runs; True when everything does and the API server answers."""
    processes = Processes(RUN) if RUN.exists() else None
    running = {name: processes.pid(name) if processes else None for name in PROGRAMS}
    whole = all(running.values()) and not teardown.CLOSING.exists() and control_plane.ready(node.CREDENTIALS)
    if as_json:
        sys.stdout.write(json.dumps({"ready": whole, "kubeconfig": str(KUBECONFIG), "pids": running}) + "\n")
        return whole
    for name, pid in running.items():
        sys.stdout.write(f"{name:20} {'pid ' + str(pid) if pid else 'not running'}\n")
    return whole


def list_programs() -> None:
    paths = {program.name: str(program.path) if program.path.exists() else None for program in binaries.ALL_PROGRAMS}
    sys.stdout.write(json.dumps(paths) + "\n")


def exports() -> str:
    path = f"{binaries.KUBECTL.path.parent}:{binaries.HELM.path.parent}"
    return f"export KUBECONFIG={shlex.quote(str(KUBECONFIG))}\nexport PATH={shlex.quote(path)}:$PATH\n"


def memory(text: str) -> int:
    """Bytes from a number with an optional Ki, Mi or Gi."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4Gi")
    return int(match[1]) * {"": 1, "Ki": 1024, "Mi": 1024**2, "Gi": 1024**3}[match[2]]


@contextmanager
def one_at_a_time() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up")
    start.add_argument("--node-memory", type=memory, help="allocatable memory that the node claims, such as 4Gi")
    commands.add_parser("down")
    commands.add_parser("status").add_argument("--json", action="store_true")
    commands.add_parser("api")
    commands.add_parser("images")
    programs = commands.add_parser("programs")
    programs.add_argument("--api", action="store_true")
    programs.add_argument("--helm", action="store_true")
    programs.add_argument("--list", action="store_true")
    return parser.parse_args()


def main() -> int:
    chosen = arguments()
    if chosen.command in ("up", "down", "images") and os.geteuid() != 0:
        sys.stderr.write("containers need root\n")
        return 1
    try:
        if chosen.command == "up":
            with one_at_a_time():
                up(chosen.node_memory)
            sys.stdout.write(exports())
        elif chosen.command == "down":
            with one_at_a_time():
                teardown.down()
            say(f"the cluster is gone; built programs and images stay in {CACHE} (`make clean` removes them)")
        elif chosen.command == "status":
            return 0 if status(as_json=chosen.json) else 1
        elif chosen.command == "images":
            with one_at_a_time():
                images.build(say)
        elif chosen.command == "api":
            binaries.build(binaries.API_PROGRAMS, say)
            api_only.run("export KUBECONFIG={kubeconfig}")
        elif chosen.command == "programs" and chosen.list:
            list_programs()
        elif chosen.command == "programs":
            only = (binaries.API_PROGRAMS if chosen.api else ()) + ((binaries.HELM,) if chosen.helm else ())
            binaries.build(only or binaries.ALL_PROGRAMS, say)
    except (binaries.BuildError, StartError, network.FenceError, containerd.ImageError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
