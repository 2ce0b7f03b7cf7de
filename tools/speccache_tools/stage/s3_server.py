"""An S3 server on the cluster: versitygw in a restricted pod, behind a Service, on a claim that outlives the pod.

Beside it in the pod is a shell that sees the same files: a folder is a bucket, a file in it an object. So buckets are
made, looked into and emptied without a client of S3.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from speccache_tools.stage.kube import Object
from speccache_tools.stage.manifests import USER, claim, restricted, secret
from speccache_tools.stage.venue import Venue

PORT = 9000
_NAME = "s3"
LABELS = {"app.kubernetes.io/name": _NAME}
_FOLDER = "/buckets"
_START_SECONDS = 100


@dataclass(frozen=True, slots=True)
class S3Server:
    """The server of a namespace. `endpoint` is where clients find it; `keys` are the credentials that it takes, by the
    names that a credentials Secret has. The Secret `secret_name` of its namespace has them.
    """

    venue: Venue
    namespace: str
    endpoint: str
    keys: dict[str, str]
    secret_name: str = _NAME

    def make_bucket(self, name: str) -> None:
        """An empty bucket, unless it is there."""
        self._shell(f"mkdir -p {_FOLDER}/{name}")

    def objects(self, bucket: str) -> dict[str, int]:
        """Size of each object by its key."""
        # What begins with a dot is the server's own.
        found = self._shell(f"find {_FOLDER}/{bucket} -name '.*' -prune -o -type f -printf '%s %P\\n'")
        sizes = (line.split(" ", 1) for line in found.splitlines())
        return {key: int(size) for size, key in sizes}

    def pages(self, bucket: str) -> dict[str, int]:
        """The same without what pods keep there for themselves: stored halves only."""
        return {key: size for key, size in self.objects(bucket).items() if {"d", "t"} & set(PurePosixPath(key).parts)}

    def withhold_drafts(self, bucket: str) -> int:
        """Delete every draft's half; answers how many there were."""
        return len(self._shell(f"find {_FOLDER}/{bucket} -path '*/d/*' -type f -print -delete").splitlines())

    def go_away(self) -> None:
        """End its pod without much ado: nobody listens at the endpoint any more. What is stored stays."""
        self.venue.kubectl("scale", f"deployment/{_NAME}", "--replicas=0", namespace=self.namespace)
        selector = ",".join(f"{key}={value}" for key, value in LABELS.items())
        self.venue.kubectl("wait", "--for=delete", "pod", f"--selector={selector}", namespace=self.namespace)

    def come_back(self) -> None:
        """Start a pod on what is stored; returns when it answers."""
        self.venue.kubectl("scale", f"deployment/{_NAME}", "--replicas=1", namespace=self.namespace)
        _wait_serving(self.venue, self.namespace)

    def _shell(self, script: str) -> str:
        command = ("exec", f"deployment/{_NAME}", "--container=shell", "--", "sh", "-euc", script)
        return self.venue.kubectl(*command, namespace=self.namespace)


@contextmanager
def s3_server(venue: Venue, namespace: str) -> Iterator[S3Server]:
    """A server without buckets, in a namespace that may admit restricted pods only; all of it goes afterwards."""
    kubectl = venue.kubectl
    keys = {"AWS_ACCESS_KEY_ID": "speccache", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(16)}
    parts = (secret(_NAME, keys), claim(_NAME, size="1Gi"), _service(), _deployment(venue))
    try:
        for part in parts:
            kubectl.apply(part, namespace)
        _wait_serving(venue, namespace)
        address = kubectl.must_get("service", _NAME, namespace)["spec"]["clusterIP"]
        yield S3Server(venue, namespace, f"http://{address}:{PORT}", keys)
    finally:
        for part in reversed(parts):
            kubectl.delete(part["kind"], _NAME, namespace)


def _wait_serving(venue: Venue, namespace: str) -> None:
    command = ("rollout", "status", f"deployment/{_NAME}", f"--timeout={_START_SECONDS}s")
    venue.kubectl(*command, namespace=namespace)


def _service() -> Object:
    spec = {"selector": LABELS, "ports": [{"port": PORT}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": _NAME}, "spec": spec}


def _deployment(venue: Venue) -> Object:
    mounts = [{"name": "buckets", "mountPath": _FOLDER}]
    server = {
        "name": "server",
        "image": venue.s3_image,
        "args": ["--quiet", "--keep-alive", "--port", f":{PORT}", "posix", _FOLDER],
        "env": [
            _variable("ROOT_ACCESS_KEY", "AWS_ACCESS_KEY_ID"),
            _variable("ROOT_SECRET_KEY", "AWS_SECRET_ACCESS_KEY"),
        ],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "volumeMounts": mounts,
    }
    shell = {
        "name": "shell",
        "image": venue.runtime_image,
        "command": ["sleep", "infinity"],
        "volumeMounts": mounts,
    }
    volumes = [{"name": "buckets", "persistentVolumeClaim": {"claimName": _NAME}}]
    pod = {**restricted([server, shell], volumes, user=USER), "terminationGracePeriodSeconds": 1}
    template = {"metadata": {"labels": LABELS}, "spec": pod}
    spec = {"replicas": 1, "strategy": {"type": "Recreate"}, "selector": {"matchLabels": LABELS}, "template": template}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": _NAME}, "spec": spec}


def _variable(name: str, key: str) -> Object:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": _NAME, "key": key}}}
