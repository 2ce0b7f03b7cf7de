"""kubectl as a Python object: commands that raise with what kubectl said, and waiting for a state with a deadline.

Waiting is watching: every state of an object is looked at once, when it comes, and a wait that fails says which state
was the last.
"""

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccache_tools.cluster import settings
from speccache_tools.stage.objects import summary

Object = dict[str, Any]
SCD = "speccachedeployments.speccache.io"

_COMMAND_SECONDS = 120


class StageError(Exception):
    """The stage is not as it must be; the text is for people."""


class CommandFailed(StageError):
    """A program ended with an error; `said` is its standard error."""

    def __init__(self, command: Sequence[str], said: str) -> None:
        self.said = said.strip()
        super().__init__(f"{Path(command[0]).name} {' '.join(command[1:])}: {self.said}")


class Late(StageError):
    """Something has not happened in time."""


@dataclass(frozen=True, slots=True)
class Change:
    """One state of a watched object; `gone` when it is the last one before its end."""

    obj: Object
    gone: bool


def run(command: Sequence[str], variables: dict[str, str], *, stdin: str | None = None) -> str:
    """Standard output of a program. Raises CommandFailed."""
    completed = subprocess.run(
        command, input=stdin, capture_output=True, text=True, env=variables, timeout=_COMMAND_SECONDS
    )
    if completed.returncode != 0:
        raise CommandFailed(command, completed.stderr or completed.stdout)
    return completed.stdout


def environment(kubeconfig: Path) -> dict[str, str]:
    """The caller's environment without proxies (the cluster may be on this machine alone) and with our kubeconfig."""
    return {**settings.environment(), "KUBECONFIG": str(kubeconfig)}


class Kubectl:
    """kubectl with one kubeconfig. `namespace` None means that of the object, or none."""

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self.program = program
        self.variables = environment(kubeconfig)

    def __call__(self, *arguments: str, namespace: str | None = None, stdin: str | None = None) -> str:
        return run(self.command(*arguments, namespace=namespace), self.variables, stdin=stdin)

    def command(self, *arguments: str, namespace: str | None = None) -> list[str]:
        where = [f"--namespace={namespace}"] if namespace else []
        return [str(self.program), *where, *arguments]

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None when there is none."""
        text = self("get", kind, name, "--ignore-not-found", "--output=json", namespace=namespace)
        return json.loads(text) if text.strip() else None

    def must_get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """The object; raises StageError when there is none."""
        found = self.get(kind, name, namespace)
        if found is None:
            raise StageError(f"there is no {kind} {name}")
        return found

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        """All objects of a kind in a namespace, or those with the labels of `selector`."""
        text = self("get", kind, f"--selector={selector}", "--output=json", namespace=namespace)
        items: list[Object] = json.loads(text)["items"]
        return items

    def apply(self, manifest: str | Object, namespace: str | None = None) -> None:
        """Apply with strict field validation: an unknown or doubled field is an error."""
        text = manifest if isinstance(manifest, str) else json.dumps(manifest)
        self("apply", "--validate=strict", "--filename=-", namespace=namespace, stdin=text)

    def patch(self, kind: str, name: str, namespace: str, patch: Object) -> None:
        """A JSON merge patch."""
        self("patch", kind, name, "--type=merge", f"--patch={json.dumps(patch)}", namespace=namespace)

    def delete(self, kind: str, name: str, namespace: str | None = None, *, wait: bool = True) -> None:
        """Delete it; what is gone already is no error."""
        waiting = "--wait=true" if wait else "--wait=false"
        self("delete", kind, name, "--ignore-not-found", waiting, "--timeout=110s", namespace=namespace)

    def until(
        self,
        kind: str,
        name: str,
        test: Callable[[Object], bool],
        *,
        namespace: str | None = None,
        seconds: float,
        what: str,
    ) -> Object:
        """The first state for which `test` holds. Raises Late, naming `what` and the last state seen."""
        deadline = time.monotonic() + seconds
        last: Object | None = None
        with self.watching((kind, f"metadata.name={name}", ""), namespace=namespace) as changes:
            while (left := deadline - time.monotonic()) > 0:
                with suppress(queue.Empty):
                    change = changes.get(timeout=left)
                    last = None if change.gone else change.obj
                    if last is not None and test(last):
                        return last
        seen = summary(last) if last is not None else "it does not exist"
        raise Late(f"{kind} {name} is not {what} after {seconds:.0f} s; last state: {seen}")

    def until_gone(self, kind: str, name: str, namespace: str | None = None, *, seconds: float) -> None:
        """Return when the object does not exist. Raises CommandFailed after `seconds`."""
        self("wait", "--for=delete", f"{kind}/{name}", f"--timeout={seconds:.0f}s", namespace=namespace)

    @contextmanager
    def watching(
        self, *streams: tuple[str, str, str], namespace: str | None = None
    ) -> Iterator["queue.SimpleQueue[Change]"]:
        """Changes of several kinds in one queue, from the states that are there now. A stream is (kind, field selector,
        label selector).
        """
        changes: queue.SimpleQueue[Change] = queue.SimpleQueue()
        readers = [_Stream(self, namespace, stream, changes) for stream in streams]
        try:
            yield changes
        finally:
            for reader in readers:
                reader.close()


class _Stream:
    """One `kubectl get --watch`, started anew whenever the API server ends it."""

    def __init__(
        self,
        kubectl: Kubectl,
        namespace: str | None,
        stream: tuple[str, str, str],
        changes: "queue.SimpleQueue[Change]",
    ) -> None:
        kind, fields, labels = stream
        self._command = kubectl.command(
            "get",
            kind,
            f"--field-selector={fields}",
            f"--selector={labels}",
            "--watch",
            "--output-watch-events",
            "--output=json",
            namespace=namespace,
        )
        self._variables = kubectl.variables
        self._changes = changes
        self._closed = False
        self._process = self._start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        self._closed = True
        self._process.kill()
        self._reader.join()

    def _start(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self._variables, text=True
        )

    def _read(self) -> None:
        while True:
            with self._process as process:
                assert process.stdout is not None
                for line in process.stdout:  # with events around them, kubectl writes one object in a line
                    event = json.loads(line)
                    self._changes.put(Change(event["object"], event["type"] == "DELETED"))
            if self._closed:
                return
            time.sleep(0.5)  # the API server is not there, or the kind is not served yet
            if self._closed:
                return
            self._process = self._start()
