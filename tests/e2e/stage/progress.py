"""Tells a person what is going on: one line with its time for each thing that changes."""

import queue
import sys
import time
from contextlib import suppress

from stage.kube import SCD, Change, Late, Object
from stage.objects import conditions, holds, is_leaving, is_settled, pod_state, summary
from stage.venue import Venue

from speccache_api import names


class Progress:
    """Writes to standard error, so that standard output has the result alone."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str, end: str = "\n") -> None:
        self.more(f"[{time.monotonic() - self._began:6.1f} s] {text}{end}")

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
                raise Late(f"{name} does not serve after {seconds:.0f} s: {view.line}")
            with suppress(queue.Empty):
                if view.take(changes.get(timeout=left)):
                    say(view.line)


class _View:
    """The last states of the resource and of its pods, as one line."""

    def __init__(self) -> None:
        self._resource: Object | None = None
        self._pods: dict[str, Object] = {}
        self.line = ""

    def take(self, change: Change) -> bool:
        """True when the line is another one now."""
        if change.obj["kind"] != names.KIND:
            self._pods.pop(change.obj["metadata"]["name"], None)
            if not change.gone:
                self._pods[change.obj["metadata"]["name"]] = change.obj
        else:
            self._resource = None if change.gone else change.obj
        before, self.line = self.line, self._line()
        return bool(self._resource) and self.line != before

    @property
    def done(self) -> bool:
        # The resource's status may be a moment behind its pods.
        serving = all(holds(pod, "Ready") and not is_leaving(pod) for pod in self._pods.values())
        return bool(self._resource and self._pods and is_settled(self._resource) and serving)

    def _line(self) -> str:
        pods = ", ".join(f"pod {name} {pod_state(pod)}" for name, pod in sorted(self._pods.items())) or "no pod"
        if self._resource is None:
            return pods
        ready = conditions(self._resource).get("Ready")
        if ready is None:
            return f"{pods}; {summary(self._resource)}"
        return f"Ready={ready['status']} {ready['reason']}: {ready['message']}; {pods}"
