"""Puts the charts onto a cluster and takes everything off again."""

from speccache_tools.cluster.settings import REPOSITORY
from speccache_tools.stage.kube import SCD, Object
from speccache_tools.stage.objects import is_leaving
from speccache_tools.stage.venue import Venue

NAMESPACE = "speccache-system"
OPERATOR = "speccache"
CRDS = "speccache-crds"
DEPLOYMENT = "speccache-operator"
OPERATOR_PODS = "app.kubernetes.io/name=speccache-operator"

_RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}


def install(venue: Venue) -> None:
    """Install or update both charts and wait for the operator. Raises CommandFailed."""
    make_namespace(venue, NAMESPACE)
    before = deployed(venue)
    _helm_install(venue, CRDS, "--set=keep=false")
    images = (f"image={venue.operator_image}", f"runtime.image={venue.runtime_image}")
    _helm_install(venue, OPERATOR, *(f"--set={value}" for value in images))
    if OPERATOR in before:
        # The image may be a new one under its old name, which helm cannot see.
        venue.kubectl("rollout", "restart", f"deployment/{DEPLOYMENT}", namespace=NAMESPACE)
    venue.kubectl("rollout", "status", f"deployment/{DEPLOYMENT}", "--timeout=100s", namespace=NAMESPACE)


def deployed(venue: Venue) -> tuple[str, ...]:
    """Our releases that are installed."""
    return tuple(venue.helm("list", "--short", f"--namespace={NAMESPACE}").split())


def uninstall(venue: Venue, *namespaces: str) -> None:
    """Remove every resource, both releases, our namespace and `namespaces`; what is gone already is no error."""
    if venue.kubectl.get("crd", SCD):
        venue.kubectl("delete", SCD, "--all", "--all-namespaces", "--timeout=110s")
    for release in (OPERATOR, CRDS):
        venue.helm("uninstall", release, f"--namespace={NAMESPACE}", "--ignore-not-found", "--wait")
    venue.kubectl.delete("crd", SCD)  # a chart installed by hand keeps it
    for namespace in (*namespaces, NAMESPACE):
        venue.kubectl.delete("namespace", namespace)


def make_namespace(venue: Venue, name: str) -> None:
    """A namespace that enforces the *restricted* Pod Security Standard."""
    meta = {"name": name, "labels": _RESTRICTED}
    venue.kubectl.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})


def operator_pods(venue: Venue) -> list[Object]:
    """The operator's pods that are not on their way out."""
    pods = venue.kubectl.list("pods", NAMESPACE, OPERATOR_PODS)
    return [pod for pod in pods if not is_leaving(pod)]


def _helm_install(venue: Venue, release: str, *more: str) -> None:
    chart = str(REPOSITORY / "charts" / release)
    venue.helm("upgrade", "--install", release, chart, f"--namespace={NAMESPACE}", "--wait", "--timeout=100s", *more)
