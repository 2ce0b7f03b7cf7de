"""Small objects to apply."""

from typing import Any

from speccache_api import names
from speccache_tools.stage.kube import Object

USER = 65532
"""User and group of the project's images."""


def resource(name: str, **spec: Any) -> Object:
    """A SpecCacheDeployment of the built-in model with small tiers, unless `spec` says otherwise."""
    cache = {"pageSize": 16, "device": {"tokens": 8192}, "host": {"tokens": 8192}, **spec.pop("kvCache", {})}
    body = {"model": {"uri": "builtin://tiny"}, "kvCache": cache, **spec}
    return {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": {"name": name}, "spec": body}


def claim(name: str, mode: str = "ReadWriteOnce", size: str = "64Mi") -> Object:
    """A claim of the default storage class."""
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": size}}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}


def secret(name: str, texts: dict[str, str]) -> Object:
    """A Secret with these texts by their keys."""
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": texts}


def restricted(containers: list[Object], volumes: list[Object], user: int | None = None) -> Object:
    """The spec of a pod under the *restricted* Pod Security Standard; its claims can be written. Without `user` the
    image's own counts.
    """
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        "securityContext": {"fsGroup": USER, **({} if user is None else {"runAsUser": user})},
        "containers": [{**container, "securityContext": dict(security)} for container in containers],
        "volumes": volumes,
    }


def shell_pod(name: str, image: str, script: str, claims: dict[str, str]) -> Object:
    """A restricted pod that runs a script once. `claims` maps a folder in it to a claim."""
    container = {
        "name": "shell",
        "image": image,
        "command": ["sh", "-euc", script],
        "volumeMounts": [{"name": claim_name, "mountPath": folder} for folder, claim_name in claims.items()],
    }
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": name}} for name in claims.values()]
    spec = {"restartPolicy": "Never", **restricted([container], volumes)}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}
