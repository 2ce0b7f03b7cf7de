"""Command lines of etcd, the API server and the two control loops, and how each is known to be ready."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from speccache_tools.cluster import binaries
from speccache_tools.cluster.process import Processes
from speccache_tools.cluster.settings import (
    APISERVER_PORT,
    ETCD_CLIENT_PORT,
    ETCD_PEER_PORT,
    NODE_IP,
    SERVICE_RANGE,
    environment,
)


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where etcd and the API server listen."""

    address: str
    apiserver: int
    etcd_client: int
    etcd_peer: int

    @property
    def server(self) -> str:
        return f"https://{self.address}:{self.apiserver}"


CLUSTER_ENDPOINTS = Endpoints(NODE_IP, APISERVER_PORT, ETCD_CLIENT_PORT, ETCD_PEER_PORT)


def etcd_command(data: Path, endpoints: Endpoints) -> list[str]:
    client, peer = (f"http://127.0.0.1:{port}" for port in (endpoints.etcd_client, endpoints.etcd_peer))
    return [
        str(binaries.ETCD.path),
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--unsafe-no-fsync",  # nothing here must survive a crash of the machine
        "--log-level=warn",
    ]


def apiserver_command(credentials: Path, endpoints: Endpoints) -> list[str]:
    return [
        str(binaries.APISERVER.path),
        f"--etcd-servers=http://127.0.0.1:{endpoints.etcd_client}",
        f"--bind-address={endpoints.address}",
        f"--advertise-address={NODE_IP}",
        f"--secure-port={endpoints.apiserver}",
        f"--tls-cert-file={credentials}/apiserver.crt",
        f"--tls-private-key-file={credentials}/apiserver.key",
        f"--client-ca-file={credentials}/ca.crt",
        f"--token-auth-file={credentials}/tokens.csv",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={credentials}/service-account.key",
        f"--service-account-signing-key-file={credentials}/service-account.key",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--authorization-mode=Node,RBAC",
        f"--kubelet-client-certificate={credentials}/apiserver-to-kubelet.crt",
        f"--kubelet-client-key={credentials}/apiserver-to-kubelet.key",
        f"--kubelet-certificate-authority={credentials}/ca.crt",
        "--kubelet-preferred-address-types=InternalIP",
    ]


def controller_manager_command(credentials: Path) -> list[str]:
    return [
        str(binaries.CONTROLLER_MANAGER.path),
        f"--kubeconfig={credentials}/controller-manager.kubeconfig",
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        f"--service-account-private-key-file={credentials}/service-account.key",
        f"--root-ca-file={credentials}/ca.crt",
        "--horizontal-pod-autoscaler-sync-period=5s",
    ]


def scheduler_command(credentials: Path) -> list[str]:
    kubeconfig = f"--kubeconfig={credentials}/scheduler.kubeconfig"
    return [str(binaries.SCHEDULER.path), kubeconfig, "--bind-address=127.0.0.1", "--leader-elect=false"]


def start(processes: Processes, folder: Path) -> None:
    """Starts what of the control plane is not running, and returns when the API server answers."""
    credentials = folder / "credentials"
    processes.start("etcd", etcd_command(folder / "etcd", CLUSTER_ENDPOINTS))
    processes.start("apiserver", apiserver_command(credentials, CLUSTER_ENDPOINTS))
    processes.wait("apiserver", lambda: ready(credentials), seconds=120)
    processes.start("controller-manager", controller_manager_command(credentials))
    processes.start("scheduler", scheduler_command(credentials))


def ready(credentials: Path) -> bool:
    return kubectl(credentials, "get", "--raw", "/readyz").returncode == 0


def kubectl(credentials: Path, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs our kubectl as the cluster's administrator; the caller decides what a failure means."""
    command = [str(binaries.KUBECTL.path), f"--kubeconfig={credentials}/admin.kubeconfig", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment(), timeout=120)
