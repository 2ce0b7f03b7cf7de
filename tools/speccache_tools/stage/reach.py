"""Ways to a served model: the Service's own address where this machine has a route to it, else a forwarded port."""

import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from speccache_tools.stage.kube import Late, Object, StageError
from speccache_tools.stage.venue import Venue

_HTTP_PORT = 8000
_FORWARDED = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@contextmanager
def service(venue: Venue, namespace: str, name: str) -> Iterator[str]:
    """`http://host:port` of a Service, from the moment on when a ready pod answers there."""
    with _way(venue, namespace, f"service/{name}", lambda: service_address(venue, namespace, name)) as url:
        yield url


@contextmanager
def pod(venue: Venue, pod: Object) -> Iterator[str]:
    """`http://host:port` of one served pod, which is ready: past the Service, which chooses among several."""
    meta, address = pod["metadata"], pod["status"]["podIP"]
    with _way(venue, meta["namespace"], f"pod/{meta['name']}", lambda: f"http://{address}:{_HTTP_PORT}") as url:
        yield url


@contextmanager
def _way(venue: Venue, namespace: str, to: str, address: Callable[[], str]) -> Iterator[str]:
    with nullcontext(address()) if venue.ours else _forwarded(venue, namespace, to) as url:
        wait_ready(url)
        yield url


def service_address(venue: Venue, namespace: str, name: str) -> str:
    """The cluster's own address of a Service."""
    found = venue.kubectl.must_get("service", name, namespace)
    return f"http://{found['spec']['clusterIP']}:{_HTTP_PORT}"


def fetch(url: str, seconds: float = 10) -> str:
    """The body of a page. Raises OSError."""
    with _opener.open(url, timeout=seconds) as response:
        text: str = response.read().decode()
    return text


def wait_ready(url: str, seconds: float = 30) -> None:
    """Return when /ready answers 200: a pod may be ready a little before its address is programmed. Raises Late."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fetch(f"{url}/ready", seconds=2)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise Late(f"{url}/ready does not answer 200 after {seconds:.0f} s: {error}") from error
        time.sleep(0.1)


@contextmanager
def _forwarded(venue: Venue, namespace: str, to: str) -> Iterator[str]:
    command = venue.kubectl.command("port-forward", "--address=127.0.0.1", to, f":{_HTTP_PORT}", namespace=namespace)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=venue.kubectl.variables, text=True
    ) as forwarder:
        try:
            assert forwarder.stdout is not None
            said = forwarder.stdout.readline()
            found = _FORWARDED.search(said)
            if found is None:
                raise StageError(f"kubectl port-forward: {said.strip() or 'ended'}")
            yield f"http://127.0.0.1:{found[1]}"
        finally:
            forwarder.kill()
