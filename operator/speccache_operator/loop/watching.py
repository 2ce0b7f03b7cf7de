"""How kopf is set up, and how an event finds the resources that it may concern."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import kopf

from speccache_api import names
from speccache_operator.children import table
from speccache_operator.cluster import SERVICE_ACCOUNT_FOLDER, in_cluster, in_cluster_server
from speccache_operator.kinds import POD, Key, Kind
from speccache_operator.loop.controller import Controller
from speccache_operator.loop.reconcile import Reconciler

Handler = TypeVar("Handler", bound=Callable[..., Any])
logger = logging.getLogger(__name__)

LABELLED = (*table.watched_kinds(), POD)
_BACKOFFS = (1, 1, 2, 3, 5, 8, 13, 21, 30, 30, 30)


def configure(settings: kopf.OperatorSettings) -> None:
    """Watch with timeouts, ask the API server for labelled objects only, and leave everything else alone."""
    settings.scanning.disabled = True  # no watching of CRDs and namespaces, hence no rights to
    settings.posting.enabled = False  # events are our own (events.py)
    settings.peering.standalone = True  # the Lease decides who runs (leader.py)
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = _BACKOFFS
    settings.watching.server_timeout = 300
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1.0
    for kind in LABELLED:
        selector = f"{names.LABEL_MANAGED_BY}={names.MANAGED_BY}"
        settings.watching.label_selectors[(*kind.group_version, kind.plural)] = selector


def on_event(*kinds: Kind) -> Callable[[Handler], Handler]:
    """`kopf.on.event` of all these kinds."""

    def decorate(handler: Handler) -> Handler:
        for kind in kinds:
            kopf.on.event(*kind.group_version, kind.plural)(handler)
        return handler

    return decorate


def login(settings: kopf.OperatorSettings) -> kopf.ConnectionInfo | None:
    """The same API server that `KubernetesCluster.connect` talks to."""
    if not in_cluster():
        return kopf.login_with_kubeconfig(settings=settings)
    return kopf.ConnectionInfo(
        server=in_cluster_server(),
        ca_path=str(Path(SERVICE_ACCOUNT_FOLDER) / "ca.crt"),
        token=(SERVICE_ACCOUNT_FOLDER / "token").read_text().strip(),
    )


class Wakeups:
    """Turns watched objects into keys. States that the last pass has seen or made are no news."""

    def __init__(self, controller: Controller, reconciler: Reconciler) -> None:
        self._controller = controller
        self._reconciler = reconciler

    def resource(self, obj: Any) -> None:
        """The resource itself."""
        self._wake(Key(obj["metadata"]["namespace"], obj["metadata"]["name"]), obj)

    def child(self, obj: Any) -> None:
        """An object that carries the name of its resource."""
        labels = obj["metadata"].get("labels", {})
        if labels.get(names.LABEL_MANAGED_BY) == names.MANAGED_BY and names.LABEL_INSTANCE in labels:
            self._wake(Key(obj["metadata"]["namespace"], labels[names.LABEL_INSTANCE]), obj)

    def claim(self, obj: Any) -> None:
        """A claim: of one resource by label, of any number by mention."""
        self.child(obj)
        for key in self._reconciler.users_of_claim(obj["metadata"]["namespace"], obj["metadata"]["name"]):
            self._wake(key, obj)

    def _wake(self, key: Key, obj: Any) -> None:
        if self._reconciler.is_news(key, obj):
            self._controller.wake(key)
