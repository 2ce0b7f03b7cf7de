"""The operator's own settings: flags first, environment second, and a wrong one stops the process.

Every setting has both forms because charts set environment variables and people type flags.
"""

import argparse
import os
import re
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccache_operator.errors import SettingsError

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_PULL_POLICIES = ("Always", "IfNotPresent", "Never")
_LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class Settings:
    """What `speccache-operator run` was told, checked."""

    runtime_image: str
    """Image of the served pods and of the Jobs beside them."""
    namespace: str | None
    """The one namespace to watch; None means all."""
    operator_namespace: str
    """Namespace of the Lease."""
    runtime_image_pull_policy: str = "IfNotPresent"
    runtime_image_pull_secrets: tuple[str, ...] = ()
    """Secret names put on the served pods' ServiceAccount, and on pods that run as another; they must exist in each
    resource's namespace.
    """
    lease_name: str = "speccache-operator"
    identity: str = ""
    """Who holds the Lease; unique for each process."""
    http_host: str = "0.0.0.0"
    http_port: int = 8080
    """Port of /healthz and /metrics; 0 takes a free one."""
    workers: int = 4
    """Resources reconciled at the same time."""
    resync_seconds: float = 300.0
    """Every resource is looked at again after this time even if nothing happened."""
    check_nodes: bool = True
    """Look at nodes and volumes: compare memory limits with the nodes' allocatable memory, and see which volumes two
    pods can mount. Needs the rights to list nodes and to get volumes.
    """
    log_level: str = "INFO"


def _text(value: str) -> str:
    if not value or value != value.strip() or any(c.isspace() for c in value):
        raise ValueError("must not be empty or contain blanks")
    return value


def _dns_label(value: str) -> str:
    if not _DNS_LABEL.fullmatch(value):
        raise ValueError("must be a Kubernetes name: lower-case letters, digits and '-', at most 63")
    return value


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return value

    return parse


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(value: str) -> int:
        if not re.fullmatch(r"\d{1,9}", value) or not low <= int(value) <= high:
            raise ValueError(f"must be an integer from {low} to {high}")
        return int(value)

    return parse


def _boolean(value: str) -> bool:
    if value not in ("true", "false"):
        raise ValueError("must be true or false")
    return value == "true"


def _names(value: str) -> tuple[str, ...]:
    return tuple(_dns_label(part) for part in value.split(",") if part)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "runtime_image": _text,
    "namespace": _dns_label,
    "operator_namespace": _dns_label,
    "runtime_image_pull_policy": _one_of(_PULL_POLICIES),
    "runtime_image_pull_secrets": _names,
    "lease_name": _dns_label,
    "identity": _text,
    "http_host": _text,
    "http_port": _integer(0, 65535),
    "workers": _integer(1, 64),
    "resync_seconds": _integer(5, 86400),
    "check_nodes": _boolean,
    "log_level": _one_of(_LOG_LEVELS),
}
_ENVIRONMENT = {field: field.upper() for field in _PARSERS} | {
    "namespace": "WATCH_NAMESPACE",
    "operator_namespace": "POD_NAMESPACE",
    "identity": "POD_NAME",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare one flag for each setting; values stay text until `load` checks them together with the environment."""
    for field in _PARSERS:
        flag = "--" + field.replace("_", "-")
        parser.add_argument(flag, metavar="VALUE", help=f"environment: {_ENVIRONMENT[field]}")
    parser.add_argument("--all-namespaces", action="store_true", help="watch all namespaces (or WATCH_NAMESPACE=*)")


def load(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, then environment, then defaults.

    Raises SettingsError, which names the flag and the variable, for the first value that cannot be used.
    """
    values: dict[str, Any] = {}
    given = {field: _given(field, arguments, environment) for field in _PARSERS}
    everywhere = arguments.all_namespaces or given["namespace"] == "*"
    if arguments.all_namespaces and arguments.namespace is not None:
        raise SettingsError("--all-namespaces and --namespace exclude each other")
    for field, parse in _PARSERS.items():
        raw = given[field]
        if raw == "" or (field == "namespace" and everywhere):
            continue
        try:
            values[field] = parse(raw)
        except ValueError as error:
            raise SettingsError(f"{_label(field)} {error}, not {raw!r}") from error
    if "runtime_image" not in values:
        raise SettingsError(f"{_label('runtime_image')} is required: the image that serves the models")
    # All namespaces only when that was said, never because nothing was.
    if "namespace" not in values and not everywhere:
        raise SettingsError(f"{_label('namespace')} or --all-namespaces is required: what to watch")
    values.setdefault("namespace", None)
    values.setdefault("operator_namespace", _own_namespace())
    values["identity"] = f"{values.get('identity') or socket.gethostname()}_{uuid.uuid4().hex[:8]}"
    return Settings(**values)


def _given(field: str, arguments: argparse.Namespace, environment: Mapping[str, str]) -> str:
    """The text of a setting: its flag's, else its variable's, else empty."""
    flag: str | None = getattr(arguments, field)
    return environment.get(_ENVIRONMENT[field], "") if flag is None else flag


def _own_namespace() -> str:
    return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"


def _label(field: str) -> str:
    return f"--{field.replace('_', '-')} ({_ENVIRONMENT[field]})"
