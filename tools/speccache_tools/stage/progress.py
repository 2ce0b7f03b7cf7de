"""Tells a person what is going on: one line with its time for each thing that changes."""

import queue
import sys
import time
from contextlib import suppress

from speccache_api import names
from speccache_tools.stage.kube import SCD, Change, Late, Object
from speccache_tools.stage.objects import conditions, holds, is_leaving, is_settled, pod_state
from speccache_tools.stage.venue import Venue


class Progress:
    """Writes to standard error, so that standard output has the result alone."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._states: dict[str, str] = {}

    def __call__(self, text: str, end: str = "\n") -> None:
        self.more(f"[{time.monotonic() - self._began:6.1f} s] {text}{end}")

    def state(self, of: str, text: str) -> None:
        """Tells a state of something, unless it is the one that was told last."""
        if self._states.get(of) != text:
            self._states[of] = text
            self(text)

    def more(self, text: str) -> None:
        """Goes on with a line."""
        sys.stderr.write(text)
        sys.stderr.flush()

    def dot(self) -> None:
        self.more(".")


def follow(venue: Venue, namespace: str, name: str, say: Progress, *, seconds: float) -> None:
    """Return when the resource serves as its spec says, by a pod that is not being deleted; tells each change once.

    Raises Late with the last states.
    """
    deadline = time.monotonic() + seconds
    view = _View()
    selector = ",".join(f"{key}={value}" for key, value in names.selector_labels(name).items())
    streams = ((SCD, f"metadata.name={name}", ""), ("pods", "", selector))
    with venue.kubectl.watching(*streams, namespace=namespace) as changes:
        while not view.done:
            left = deadline - time.monotonic()
            if left <= 0:
                raise Late(f"{name} does not serve after {seconds:.0f} s: {view.resource}; {view.pods}")
            with suppress(queue.Empty):
                say.state(*view.take(changes.get(timeout=left)))


class _View:
    """The last states of the resource and of its pods."""

    def __init__(self) -> None:
        self._resource: Object | None = None
        self._pods: dict[str, Object] = {}

    def take(self, change: Change) -> tuple[str, str]:
        """What has changed, and its state now."""
        if change.obj["kind"] == names.KIND:
            self._resource = None if change.gone else change.obj
            return "resource", self.resource
        self._pods.pop(change.obj["metadata"]["name"], None)
        if not change.gone:
            self._pods[change.obj["metadata"]["name"]] = change.obj
        return "pods", f"  {self.pods}"

    @property
    def resource(self) -> str:
        if self._resource is None:
            return "the resource does not exist"
        ready = conditions(self._resource).get("Ready")
        if ready is None:
            return "the operator has not seen the resource"
        return f"Ready={ready['status']} {ready['reason']}: {ready['message']}"

    @property
    def pods(self) -> str:
        return ", ".join(f"pod {name} {pod_state(pod)}" for name, pod in sorted(self._pods.items())) or "no pod"

    @property
    def done(self) -> bool:
        # The resource's status may be a moment behind its pods.
        serving = all(holds(pod, "Ready") and not is_leaving(pod) for pod in self._pods.values())
        return bool(self._resource and self._pods and is_settled(self._resource) and serving)
