"""Small objects to apply."""

from typing import Any

from speccache_api import names
from speccache_tools.stage.kube import Object


def resource(name: str, **spec: Any) -> Object:
    """A SpecCacheDeployment of the built-in model with small tiers, unless `spec` says otherwise."""
    cache = {"pageSize": 16, "device": {"tokens": 8192}, "host": {"tokens": 8192}, **spec.pop("kvCache", {})}
    body = {"model": {"uri": "builtin://tiny"}, "kvCache": cache, **spec}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": body}


def claim(name: str, mode: str = "ReadWriteOnce") -> Object:
    """A claim of the default storage class."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": "64Mi"}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def shell_pod(name: str, image: str, script: str, claims: dict[str, str]) -> Object:
    """A restricted pod that runs a script once. `claims` maps a folder in it to a claim."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {
        "name": "shell",
        "image": image,
        "command": ["sh", "-euc", script],
        "securityContext": security,
        "volumeMounts": [{"name": claim_name, "mountPath": folder} for folder, claim_name in claims.items()],
    }
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims.values()]
    spec = {
        "restartPolicy": "Never",
        "securityContext": {"fsGroup": 65532},
        "containers": [container],
        "volumes": volumes,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
