"""The one node: containerd, kubelet and kube-proxy, their configuration, and when the node counts as ready.

The configuration files are JSON, which is YAML too. A program whose file changed is restarted.
"""

import json
import os
import urllib.request
from pathlib import Path

from speccache_tools.cluster import binaries, cgroup, control_plane
from speccache_tools.cluster.containerd import SOCKET, ctr, put_pause_image
from speccache_tools.cluster.process import Processes
from speccache_tools.cluster.settings import (
    BRIDGE,
    CACHE,
    CREDENTIALS,
    KUBELET_HEALTH_PORT,
    NODE_IP,
    NODE_NAME,
    NODE_POD_RANGE,
    PAUSE_IMAGE,
    POD_RANGE,
    PROXY_HEALTH_PORT,
    RUN,
)

IMAGE_STORE = CACHE / "containerd"
"""containerd's images outlast the cluster: loading them again would be the longest part of every start."""

_EVICTION_RESERVE = 100 * 1024**2


def start(processes: Processes, node_memory: int | None) -> None:
    """Starts what of the node is not running. `node_memory`: allocatable bytes that the node claims (None: all)."""
    cgroup.create()
    _write_cni()
    _configure(processes, "containerd", RUN / "containerd.toml", _containerd_toml())
    processes.start("containerd", ["containerd", f"--config={RUN}/containerd.toml"])
    processes.wait("containerd", lambda: ctr("version").returncode == 0, seconds=60)
    put_pause_image()
    _configure(processes, "kubelet", RUN / "kubelet.json", json.dumps(_kubelet_configuration(node_memory)))
    # Without iptables on its path the kubelet leaves out some chains that only other proxies read, and that it never
    # takes away again.
    processes.start("kubelet", _kubelet_command(), {"PATH": "/usr/bin:/bin"})
    _configure(processes, "proxy", RUN / "proxy.json", json.dumps(_proxy_configuration()))
    processes.start("proxy", [str(binaries.PROXY.path), f"--config={RUN}/proxy.json"])


def wait_ready(processes: Processes) -> None:
    """Returns when pods can run: node Ready, service addresses served, default service account made."""
    # The node's own word first: the API server may still hold what a kubelet said that has ended since.
    processes.wait("kubelet", lambda: _healthy(KUBELET_HEALTH_PORT), seconds=60)
    ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    processes.wait(
        "kubelet",
        lambda: control_plane.kubectl(CREDENTIALS, "get", "node", NODE_NAME, "-o", ready).stdout == "True",
        seconds=90,
    )
    processes.wait("proxy", lambda: _healthy(PROXY_HEALTH_PORT), seconds=30)
    account = ("--namespace=default", "get", "serviceaccount", "default")
    processes.wait(
        "controller-manager",
        lambda: control_plane.kubectl(CREDENTIALS, *account).returncode == 0,
        seconds=30,
    )


def _healthy(port: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/healthz", timeout=5):
            return True
    except OSError:  # refused, or answered with an error
        return False


def _configure(processes: Processes, name: str, file: Path, content: str) -> None:
    if file.exists() and file.read_text() == content:
        return
    processes.stop(name)
    file.write_text(content)


def _write_cni() -> None:
    """Pods hang on one bridge. No masquerading and no way out: see network.py."""
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "dataDir": str(RUN / "ipam"),
            "ranges": [[{"subnet": NODE_POD_RANGE}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    folder = RUN / "cni"
    folder.mkdir(exist_ok=True)
    configuration = {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}
    (folder / "10-bridge.conflist").write_text(json.dumps(configuration))


def _containerd_toml() -> str:
    return f"""version = 2
root = "{IMAGE_STORE}"
state = "{RUN}/containerd"
grpc.address = "{SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  tolerate_missing_hugetlb_controller = true
  # Root of a machine inside a sandbox may lack the right to lower a score; the kubelet's values are then capped.
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true
  stream_server_address = "127.0.0.1"
  cni.bin_dir = "/usr/lib/cni"
  cni.conf_dir = "{RUN}/cni"
"""


def _kubelet_command() -> list[str]:
    return [
        str(binaries.KUBELET.path),
        f"--config={RUN}/kubelet.json",
        f"--kubeconfig={CREDENTIALS}/kubelet.kubeconfig",
        f"--root-dir={RUN}/kubelet",
        f"--hostname-override={NODE_NAME}",
        f"--node-ip={NODE_IP}",
    ]


def _kubelet_configuration(node_memory: int | None) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": KUBELET_HEALTH_PORT,
        "failCgroupV1": False,
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": cgroup.NAME,
        "oomScoreAdj": 0,  # lowering it needs a capability that root may lack here; the same for the open files
        "maxOpenFiles": 20000,
        "failSwapOn": False,
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        "podLogsDir": str(RUN / "pod-logs"),
        "tlsCertFile": f"{CREDENTIALS}/kubelet.crt",
        "tlsPrivateKeyFile": f"{CREDENTIALS}/kubelet.key",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{CREDENTIALS}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "clusterDNS": [NODE_IP],  # nobody answers there: a lookup in a pod fails at once instead of hanging
        "clusterDomain": "cluster.local",
        "enforceNodeAllocatable": ["pods"],
        "systemReserved": {"memory": str(_reserved(node_memory))},
        "evictionHard": {
            "memory.available": str(_EVICTION_RESERVE),
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        "imageGCHighThresholdPercent": 100,  # 100 = never: an image that nobody can pull must not be collected
        "imageGCLowThresholdPercent": 99,
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
    }


def _reserved(node_memory: int | None) -> int:
    if node_memory is None:
        return 0
    return max(0, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") - node_memory - _EVICTION_RESERVE)


def _proxy_configuration() -> dict[str, object]:
    untouched = "0s"  # of connection tracking, whose limits belong to the machine
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clusterCIDR": POD_RANGE,
        "oomScoreAdj": 0,
        "hostnameOverride": NODE_NAME,
        "healthzBindAddress": f"127.0.0.1:{PROXY_HEALTH_PORT}",
        "metricsBindAddress": "127.0.0.1:10249",
        "clientConnection": {"kubeconfig": f"{CREDENTIALS}/proxy.kubeconfig"},
        "conntrack": {
            "maxPerCore": 0,
            "min": 0,
            "tcpEstablishedTimeout": untouched,
            "tcpCloseWaitTimeout": untouched,
        },
    }
