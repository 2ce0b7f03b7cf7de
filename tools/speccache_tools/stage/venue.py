"""Which cluster the stage stands on, and with which programs it is reached."""

import os
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from speccache_tools.cluster import state
from speccache_tools.cluster.binaries import HELM, KUBECTL, Program
from speccache_tools.cluster.settings import CONTEXT, KUBECONFIG, S3_IMAGE, image
from speccache_tools.stage.kube import Kubectl, StageError, environment, run


@dataclass(frozen=True)
class Venue:
    """A cluster. `ours` is the one that `speccache_tools.cluster` makes: this machine has routes to its services, and
    whatever runs there may be removed.
    """

    kubectl_program: Path
    helm_program: Path
    kubeconfig: Path
    ours: bool
    operator_image: str = image("operator")
    runtime_image: str = image("runtime")
    s3_image: str = S3_IMAGE
    """An S3 server for tests of buckets: versitygw's arguments, without a shell."""

    @cached_property
    def kubectl(self) -> Kubectl:
        return Kubectl(self.kubectl_program, self.kubeconfig)

    def has_image(self, image: str) -> bool:
        """Has a node this image already? Our nodes can pull none."""
        return image in self.kubectl("get", "nodes", "--output=jsonpath={.items[*].status.images[*].names}")

    def helm(self, *arguments: str) -> str:
        """Run helm; raises CommandFailed."""
        return run([str(self.helm_program), *arguments], environment(self.kubeconfig))


def make_venue(kubectl: Path, helm: Path, kubeconfig: Path) -> Venue:
    """The venue behind a kubeconfig. Raises StageError when it is not clear which images its nodes can run."""
    venue = Venue(kubectl, helm, kubeconfig, ours=not is_callers())
    known = venue.kubectl("config", "current-context").strip() == CONTEXT
    operator, runtime = (os.environ.get(name, "") for name in ("OPERATOR_IMAGE", "RUNTIME_IMAGE"))
    if operator and runtime:
        server = os.environ.get("S3_IMAGE", S3_IMAGE)
        return replace(venue, operator_image=operator, runtime_image=runtime, s3_image=server)
    if not known:
        raise StageError(
            "the nodes of that cluster cannot see this machine's images: build both targets of the Dockerfile, push "
            "them to a registry that the nodes can pull from, and name them by OPERATOR_IMAGE=... RUNTIME_IMAGE=..."
        )
    return venue


def is_callers() -> bool:
    """The cluster is one that the caller has chosen (CLUSTER=existing): not ours to start or stop."""
    return os.environ.get("CLUSTER") == "existing"


def find_venue() -> Venue:
    """The venue of a person at a shell: the cluster of `make cluster`, or with CLUSTER=existing that of KUBECONFIG.

    Raises StageError when there is none.
    """
    kubectl, helm = (_program(program) for program in (KUBECTL, HELM))
    if is_callers():
        named = os.environ.get("KUBECONFIG") or str(Path.home() / ".kube" / "config")
        if not Path(named).is_file():
            raise StageError(f"CLUSTER=existing: KUBECONFIG must name one file, and {named} is none")
        return make_venue(kubectl, helm, Path(named))
    if not state.look().ready:
        raise StageError("no cluster is up: run `make cluster`, or use yours with CLUSTER=existing")
    return make_venue(kubectl, helm, KUBECONFIG)


def _program(program: Program) -> Path:
    """The pinned one if it is built, else the machine's own."""
    found = str(program.path) if program.path.exists() else shutil.which(program.name)
    if found is None:
        raise StageError(f"{program.name} is missing: run `make programs`")
    return Path(found)
