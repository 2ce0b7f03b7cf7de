"""Builds the cluster's programs from the Go module proxy, each one once per pinned version.

A machine that reaches package registries only has no release downloads, but the Go proxy holds the same sources.
A program's file lies in a folder named after its version, so a changed pin builds anew and an old one keeps working.
"""

import fcntl
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from speccache_tools.cluster.settings import CACHE, ETCD_VERSION, HELM_VERSION, KUBERNETES_VERSION, VERSITYGW_VERSION


class BuildError(Exception):
    """A program could not be built; the message holds what Go said."""


@dataclass(frozen=True, slots=True)
class Program:
    """One executable: `package` is what `go build` is given, `module` the pinned module that holds it."""

    name: str
    project: str
    module: str
    version: str
    package: str

    @property
    def path(self) -> Path:
        return CACHE / "bin" / f"{self.project}-{self.version}" / self.name


_KUBERNETES = "k8s.io/kubernetes"
Say = Callable[[str], None]
"""Where progress lines go."""


def _kubernetes(name: str) -> Program:
    return Program(name, "kubernetes", _KUBERNETES, KUBERNETES_VERSION, f"{_KUBERNETES}/cmd/{name}")


ETCD = Program("etcd", "etcd", "go.etcd.io/etcd/server/v3", ETCD_VERSION, "go.etcd.io/etcd/server/v3")
APISERVER = _kubernetes("kube-apiserver")
KUBECTL = _kubernetes("kubectl")
CONTROLLER_MANAGER = _kubernetes("kube-controller-manager")
SCHEDULER = _kubernetes("kube-scheduler")
KUBELET = _kubernetes("kubelet")
PROXY = _kubernetes("kube-proxy")
HELM = Program("helm", "helm", "helm.sh/helm/v3", HELM_VERSION, "helm.sh/helm/v3/cmd/helm")
VERSITYGW = Program(
    "versitygw",
    "versitygw",
    "github.com/versity/versitygw",
    VERSITYGW_VERSION,
    "github.com/versity/versitygw/cmd/versitygw",
)

# No DNS server: nothing of ours resolves a cluster name (clients use the API server's or a pod's address).
API_PROGRAMS = (ETCD, APISERVER, KUBECTL)
CLUSTER_PROGRAMS = (*API_PROGRAMS, CONTROLLER_MANAGER, SCHEDULER, KUBELET, PROXY, HELM)
"""What a cluster needs. The S3 server takes two minutes more and is not: only tests and people ask for it."""

_HINT = {"kube-apiserver": " (the longest: 5 to 10 minutes; the next ones share most of its packages)"}


def missing(programs: tuple[Program, ...]) -> tuple[Program, ...]:
    """Those of `programs` that are not built yet."""
    return tuple(program for program in programs if not program.path.exists())


def build(programs: tuple[Program, ...], say: Say) -> None:
    """Builds what is missing, in the given order; raises `BuildError`."""
    for program in missing(programs):
        with _lock(program):
            if program.path.exists():  # another process built it while this one waited
                continue
            say(f"building {program.name} {program.version} from {program.module}{_HINT.get(program.name, '')}")
            started = time.monotonic()
            _build_one(program)
            say(f"built {program.name} in {time.monotonic() - started:.0f} s")


def build_file(source: Path, out: Path) -> None:
    """Builds one Go file that needs the standard library alone."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _go(["build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-o", str(out), source.name], source.parent)


def _build_one(program: Program) -> None:
    module = CACHE / "src" / f"{program.path.parent.name}-{program.name}"
    module.mkdir(parents=True, exist_ok=True)
    (module / "go.mod").write_text(_go_mod(program))
    unfinished = program.path.with_suffix(".part")
    flags = ["-mod=mod", "-buildvcs=false", "-trimpath", f"-ldflags=-s -w {_version_flags(program)}"]
    _go(["build", *flags, "-o", str(unfinished), program.package], module)
    unfinished.rename(program.path)


def _go_mod(program: Program) -> str:
    head = f"module speccache.test/{program.name}\n\ngo 1.25.0\n\nrequire {program.module} {program.version}\n"
    if program.module != _KUBERNETES:
        return head
    return f"{head}\ngodebug default=go1.25\n\nreplace (\n" + "\n".join(_staging_replacements(program)) + "\n)\n"


def _staging_replacements(program: Program) -> Iterator[str]:
    """Kubernetes replaces its libraries by folders of its own tree; elsewhere their published tags are meant."""
    downloaded = _go(["mod", "download", "-json", f"{program.module}@{program.version}"], CACHE / "src")
    go_mod = Path(json.loads(downloaded)["GoMod"]).read_text()
    tag = re.sub(r"^v1\.", "v0.", program.version)
    for library in re.findall(r"^\s*(k8s\.io/[a-z-]+) => \./staging", go_mod, re.MULTILINE):
        yield f"\t{library} => {library} {tag}"


def _version_flags(program: Program) -> str:
    """kubectl and the API server must report a version that clients can parse; without a git tree nobody sets it.

    Helm must know which Kubernetes `helm template` is for: unless told, it assumes one older than our charts take.
    """
    if program is HELM:
        major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
        return " ".join(
            f"-X helm.sh/helm/v3/pkg/{package}.k8sVersion{part}={value}"
            for package in ("chartutil", "lint/rules")
            for part, value in (("Major", major), ("Minor", minor))
        )
    if program.module != _KUBERNETES:
        return ""
    major, minor, _ = program.version.removeprefix("v").split(".")
    values = {"gitVersion": program.version, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
    return " ".join(f"-X k8s.io/component-base/version.{key}={value}" for key, value in values.items())


def _go(arguments: list[str], folder: Path) -> str:
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOWORK": "off"}
    completed = subprocess.run(["go", *arguments], cwd=folder, env=environment, capture_output=True, text=True)
    if completed.returncode != 0:
        raise BuildError(f"go {arguments[0]} in {folder} failed:\n{completed.stderr}")
    return completed.stdout


@contextmanager
def _lock(program: Program) -> Iterator[None]:
    program.path.parent.mkdir(parents=True, exist_ok=True)
    with program.path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
