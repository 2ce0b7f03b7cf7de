"""Makes and deletes the volumes of the default storage class: the cluster's whole storage system.

Each claim of the class gets a folder on this machine as a `local` volume. The controller manager's own host-path
provisioner would not do: it leaves its folders to root alone, and the kubelet never changes a host path's owner, so a
pod that is not root could not write. A `local` volume is treated like one of a real storage system: the kubelet gives
it to the pod's `fsGroup`, and a pod without one finds a folder of root's.

The folder goes when the claim has gone and the volume's policy is Delete.
"""

import base64
import json
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from speccache_tools.cluster.settings import NODE_NAME, STORAGE_CLASS

PROVISIONER = "speccache.test/folders"
STORAGE_CLASS_OBJECT = {
    "apiVersion": "storage.k8s.io/v1",
    "kind": "StorageClass",
    "metadata": {"name": STORAGE_CLASS, "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}},
    "provisioner": PROVISIONER,
    "reclaimPolicy": "Delete",
    "volumeBindingMode": "Immediate",
}

_PERIOD_SECONDS = 0.5
_Object = dict[str, Any]


class Api:
    """The few requests that are needed, by a kubeconfig made in credentials.py."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = json.loads(kubeconfig.read_text())
        cluster = configuration["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._server: str = cluster["server"]
        self._token: str = configuration["users"][0]["user"]["token"]
        tls = urllib.request.HTTPSHandler(context=ssl.create_default_context(cadata=authority))
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), tls)

    def send(self, method: str, path: str, body: _Object | None = None) -> _Object:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._server}/api/v1/{path}", data, headers, method=method)
        with self._opener.open(request, timeout=30) as response:
            answer: _Object = json.load(response)
        return answer


def step(api: Api, folder: Path) -> None:
    """Looks at all claims and volumes once and does what is missing."""
    claims = api.send("GET", "persistentvolumeclaims")["items"]
    volumes = api.send("GET", "persistentvolumes")["items"]
    known = {volume["metadata"]["name"] for volume in volumes}
    for claim in claims:
        if _waits(claim) and _volume_name(claim) not in known:
            path = folder / _volume_name(claim)
            path.mkdir(parents=True, exist_ok=True)
            api.send("POST", "persistentvolumes", _volume(claim, path))
    for volume in volumes:
        if _abandoned(volume):
            shutil.rmtree(volume["spec"]["local"]["path"], ignore_errors=True)
            api.send("DELETE", f"persistentvolumes/{volume['metadata']['name']}")


def _waits(claim: _Object) -> bool:
    spec = claim["spec"]
    deleted = "deletionTimestamp" in claim["metadata"]
    return spec.get("storageClassName") == STORAGE_CLASS and not spec.get("volumeName") and not deleted


def _abandoned(volume: _Object) -> bool:
    spec = volume["spec"]
    return (
        volume["metadata"].get("annotations", {}).get("pv.kubernetes.io/provisioned-by") == PROVISIONER
        and volume["status"]["phase"] == "Released"
        and spec["persistentVolumeReclaimPolicy"] == "Delete"
        and "deletionTimestamp" not in volume["metadata"]
    )


def _volume_name(claim: _Object) -> str:
    return f"pvc-{claim['metadata']['uid']}"


def _volume(claim: _Object, path: Path) -> _Object:
    here = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE_NAME]}
    identity = {key: claim["metadata"][key] for key in ("name", "namespace", "uid")}
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {
            "name": _volume_name(claim),
            "annotations": {"pv.kubernetes.io/provisioned-by": PROVISIONER},
        },
        "spec": {
            "accessModes": claim["spec"]["accessModes"],
            "capacity": {"storage": claim["spec"]["resources"]["requests"]["storage"]},
            "claimRef": {"apiVersion": "v1", "kind": "PersistentVolumeClaim", **identity},
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": STORAGE_CLASS,
            "volumeMode": "Filesystem",
            "local": {"path": str(path)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
        },
    }


def main(kubeconfig: Path, folder: Path) -> None:
    api = Api(kubeconfig)
    while True:
        try:
            step(api, folder)
        except OSError as error:  # refused, conflicting or unreachable: the next look sees what is true then
            sys.stderr.write(f"{error}\n")
        time.sleep(_PERIOD_SECONDS)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
