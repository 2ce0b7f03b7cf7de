"""A real Kubernetes cluster of one node on this machine, from package registries only.

up          build what is missing, start what does not run, load the images, print how to reach the cluster
down        stop it and leave nothing behind (built programs and images stay, outside the repository)
status      say what runs; exit code 1 when the cluster is not whole
api         etcd and the API server alone, in the foreground, beside anything else; ends with its caller
s3          an S3 server over a directory, likewise
programs    only build what a cluster needs (`--api`: only what `api` needs; `--helm`: only helm; `--s3`: the S3 server)
images      build the project's images from the Dockerfile, load them when the cluster is up
"""

import argparse
import fcntl
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speccache_tools.cluster import api_only, binaries, images, s3_server, startup, state, teardown
from speccache_tools.cluster.containerd import ImageError
from speccache_tools.cluster.network import FenceError
from speccache_tools.cluster.process import StartError
from speccache_tools.cluster.settings import CACHE, KUBECONFIG

_NEED_ROOT = ("up", "down", "images")
_STARTED = time.monotonic()


def say(text: str) -> None:
    """Progress goes to standard error, so that `eval "$(… up)"` works."""
    sys.stderr.write(f"[{time.monotonic() - _STARTED:6.1f} s] {text}\n")


def status() -> bool:
    """Writes what runs; True when everything does and the API server answers."""
    found = state.look()
    for name, pid in found.pids.items():
        sys.stdout.write(f"{name:20} {'pid ' + str(pid) if pid else 'not running'}\n")
    return found.ready


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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "python -m speccache_tools.cluster",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = made.add_subparsers(dest="command", required=True)
    start = commands.add_parser("up")
    start.add_argument("--node-memory", type=memory, help="allocatable memory that the node claims, such as 4Gi")
    commands.add_parser("down")
    commands.add_parser("status")
    commands.add_parser("api")
    s3 = commands.add_parser("s3")
    s3.add_argument("--directory", type=Path, required=True, help="made if it is missing; a folder in it is a bucket")
    s3.add_argument("--bucket", action="append", default=[], help="make this bucket; repeatable")
    s3.add_argument("--port", type=int, help="default: a free one")
    commands.add_parser("images")
    programs = commands.add_parser("programs")
    programs.add_argument("--api", action="store_true")
    programs.add_argument("--helm", action="store_true")
    programs.add_argument("--s3", action="store_true")
    return made


def run(chosen: argparse.Namespace) -> int:
    """Does what one command line says; returns the exit code."""
    match chosen.command:
        case "up":
            with one_at_a_time():
                startup.up(chosen.node_memory, say)
            sys.stdout.write(exports())
        case "down":
            with one_at_a_time():
                teardown.down()
            say(f"the cluster is gone; built programs and images stay in {CACHE} (`make clean` removes them)")
        case "status":
            return 0 if status() else 1
        case "images":
            with one_at_a_time():
                images.build(say)
        case "api":
            binaries.build(binaries.API_PROGRAMS, say)
            api_only.run("export KUBECONFIG={kubeconfig}")
        case "s3":
            binaries.build((binaries.VERSITYGW,), say)
            s3_server.run(chosen.directory, chosen.bucket, chosen.port)
        case "programs":
            asked = {binaries.API_PROGRAMS: chosen.api, (binaries.HELM,): chosen.helm, (binaries.VERSITYGW,): chosen.s3}
            only = tuple(program for programs, wanted in asked.items() if wanted for program in programs)
            binaries.build(only or binaries.CLUSTER_PROGRAMS, say)
    return 0


def main() -> int:
    chosen = parser().parse_args()
    if chosen.command in _NEED_ROOT and os.geteuid() != 0:
        sys.stderr.write("containers need root\n")
        return 1
    try:
        return run(chosen)
    except (binaries.BuildError, StartError, FenceError, ImageError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
