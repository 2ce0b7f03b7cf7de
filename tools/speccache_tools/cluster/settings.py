"""Every pin, path, port and address of the test cluster, so that no other module invents one."""

import os
from pathlib import Path

KUBERNETES_VERSION = "v1.35.4"
ETCD_VERSION = "v3.6.8"
HELM_VERSION = "v3.21.4"
VERSITYGW_VERSION = "v1.8.0"

REPOSITORY = Path(__file__).resolve().parents[3]

CACHE = Path(os.environ.get("SPECCACHE_CACHE") or Path.home() / ".cache" / "speccache").resolve() / "cluster"
"""Built programs, images and containerd's image store: outside the repository, kept when the cluster goes down."""

RUN = CACHE / "run"
"""All state of the running cluster; gone after `down`."""

CREDENTIALS = RUN / "credentials"
KUBECONFIG = CREDENTIALS / "admin.kubeconfig"

# The node's address sits on the loopback device. None of these ranges ever leaves the machine (network.py).
NODE_NAME = "node1"
NODE_IP = "10.87.0.1"
NODE_RANGE = "10.87.0.0/16"
POD_RANGE = "10.88.0.0/16"
NODE_POD_RANGE = "10.88.1.0/24"
SERVICE_RANGE = "10.96.0.0/16"
KUBERNETES_SERVICE_IP = "10.96.0.1"
BRIDGE = "speccache0"

APISERVER_PORT = 6443
ETCD_CLIENT_PORT = 23790
ETCD_PEER_PORT = 23800
KUBELET_HEALTH_PORT = 10301
PROXY_HEALTH_PORT = 10256

CONTEXT = "speccache-test"
"""Name of the context in every kubeconfig made here; cluster tests refuse any other unless told otherwise."""

STORAGE_CLASS = "speccache-local"
PAUSE_IMAGE = "speccache.test/pause:1"
S3_IMAGE = f"speccache.test/versitygw:{VERSITYGW_VERSION}"
"""An S3 server and nothing else: its arguments are versitygw's."""


def environment() -> dict[str, str]:
    """The caller's environment without proxies: all traffic of the cluster stays on this machine."""
    proxies = {"http_proxy", "https_proxy", "all_proxy", "no_proxy"}
    return {name: value for name, value in os.environ.items() if name.lower() not in proxies}


def image(target: str) -> str:
    """Name under which the Dockerfile's `target` is built and known to the cluster."""
    return f"speccache.test/{target}:dev"
