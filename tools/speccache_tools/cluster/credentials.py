"""One certificate authority, the certificates and tokens of every component, and the kubeconfigs that hold them."""

import json
import secrets
import shutil
import subprocess
from pathlib import Path

from speccache_tools.cluster.settings import CONTEXT, KUBERNETES_SERVICE_IP, NODE_IP, NODE_NAME

USERS = {
    "admin": "system:masters",
    "controller-manager": "system:masters",
    "scheduler": "system:masters",
    "proxy": "system:masters",
    "provisioner": "system:masters",
    "kubelet": "system:nodes",
}
APISERVER_NAMES = (
    "IP:127.0.0.1",
    f"IP:{NODE_IP}",
    f"IP:{KUBERNETES_SERVICE_IP}",
    "DNS:localhost",
    "DNS:kubernetes.default.svc",
)


def create(folder: Path, server: str) -> None:
    """Fills `folder` with credentials for the API server at `server` unless it is there: all of it or nothing."""
    if folder.exists():
        return
    unfinished = folder.with_name(folder.name + ".part")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True, mode=0o700)
    _openssl(unfinished, "genrsa", "-out", "service-account.key", "2048")
    _key(unfinished, "ca")
    self_signed = ["req", "-x509", "-new", "-key", "ca.key", "-subj", "/CN=test", "-days", "3650"]
    _openssl(unfinished, *self_signed, "-out", "ca.crt")
    _certificate(unfinished, "apiserver", "/CN=kube-apiserver", ",".join(APISERVER_NAMES))
    _certificate(unfinished, "kubelet", f"/CN={NODE_NAME}", f"IP:{NODE_IP}")
    _certificate(unfinished, "apiserver-to-kubelet", "/O=system:masters/CN=apiserver", "DNS:apiserver")
    _tokens(unfinished, server)
    unfinished.rename(folder)


def _tokens(folder: Path, server: str) -> None:
    lines = []
    for name, group in USERS.items():
        token = secrets.token_hex(16)
        user = f"system:node:{NODE_NAME}" if name == "kubelet" else name
        lines.append(f"{token},{user},{user},{group}")
        (folder / f"{name}.kubeconfig").write_text(json.dumps(_kubeconfig(folder, server, name, token), indent=2))
    (folder / "tokens.csv").write_text("\n".join(lines) + "\n")


def _kubeconfig(folder: Path, server: str, user: str, token: str) -> dict[str, object]:
    """Self-contained, so that a copy of the one file is all that another program needs."""
    authority = _openssl(folder, "base64", "-A", "-in", "ca.crt").strip()
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": CONTEXT,
        "clusters": [{"name": CONTEXT, "cluster": {"server": server, "certificate-authority-data": authority}}],
        "users": [{"name": user, "user": {"token": token}}],
        "contexts": [{"name": CONTEXT, "context": {"cluster": CONTEXT, "user": user}}],
    }


def _key(folder: Path, name: str) -> None:
    _openssl(folder, "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")


def _certificate(folder: Path, name: str, subject: str, names: str) -> None:
    _key(folder, name)
    _openssl(folder, "req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
    (folder / f"{name}.extensions").write_text(
        "basicConstraints=CA:FALSE\nkeyUsage=digitalSignature\n"
        f"extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName={names}\n"
    )
    sign = ["x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
    _openssl(folder, *sign, "-days", "3650", "-extfile", f"{name}.extensions", "-out", f"{name}.crt")


def _openssl(folder: Path, *arguments: str) -> str:
    completed = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True)
    if completed.returncode != 0:
        raise RuntimeError(f"openssl {arguments[0]}: {completed.stderr.strip()}")
    return completed.stdout
