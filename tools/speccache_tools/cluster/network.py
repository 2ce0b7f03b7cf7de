"""Keeps everything that a test sends on this machine, and takes the rules away again.

The ranges of nodes, pods and services exist nowhere else. Without rules, a packet for a service that kube-proxy does
not (yet) know would follow the default route to whoever answers to that address outside. So each range ends here: by
its own route or as unreachable, and packets that come from a pod reach nothing but the local ranges.
"""

import json
import subprocess

from speccache_tools.cluster.settings import BRIDGE, NODE_IP, NODE_RANGE, POD_RANGE, SERVICE_RANGE

_LOCAL_ROUTES_RULE = 1088
_NOTHING_ELSE_RULE = 1089
_OUTSIDE = "203.0.113.1"  # an address reserved for documentation; only looked up, never sent to


class FenceError(Exception):
    """A packet of the cluster could leave the machine."""


def fence() -> None:
    """Adds address, routes and rules; does nothing to what is there already. Raises `FenceError` when they fail."""
    if f"{NODE_IP}/32" not in _ip("-4", "address", "show", "dev", "lo"):
        _ip("address", "add", f"{NODE_IP}/32", "dev", "lo")
    _ip("route", "replace", SERVICE_RANGE, "dev", "lo", "src", NODE_IP)
    _ip("route", "replace", "unreachable", POD_RANGE)
    _ip("route", "replace", "unreachable", NODE_RANGE)
    present = {rule["priority"] for rule in json.loads(_ip("-json", "rule", "show"))}
    if _LOCAL_ROUTES_RULE not in present:  # the main table, but not its default route
        main_table = ("lookup", "main", "suppress_prefixlength", "0")
        _ip("rule", "add", "pref", str(_LOCAL_ROUTES_RULE), "from", POD_RANGE, *main_table)
    if _NOTHING_ELSE_RULE not in present:
        _ip("rule", "add", "pref", str(_NOTHING_ELSE_RULE), "from", POD_RANGE, "unreachable")
    check()


def check() -> None:
    """Asks the kernel where packets would go; raises `FenceError` unless all of them stay."""
    service = SERVICE_RANGE.replace("0.0/16", "255.254")
    if " dev lo " not in _ip("route", "get", service):
        raise FenceError(f"packets to the service address {service} can leave the machine")
    for address in (POD_RANGE.replace("0.0/16", "254.254"), NODE_RANGE.replace("0.0/16", "254.254")):
        if not _unreachable("route", "get", address):
            raise FenceError(f"packets to {address}, which no pod or node has, can leave the machine")
    from_pod = ("from", POD_RANGE.replace("0.0/16", "1.254"), "iif", "lo")
    if not _unreachable("route", "get", _OUTSIDE, *from_pod):
        raise FenceError("packets from pods can leave the machine")


def remove() -> None:
    """Takes away all that `fence`, the pods' bridge and kube-proxy added; what is gone already is no error."""
    for family in ("ip", "ip6"):
        subprocess.run(["nft", "delete", "table", family, "kube-proxy"], capture_output=True)
    for priority in (_LOCAL_ROUTES_RULE, _NOTHING_ELSE_RULE):
        _run("rule", "delete", "pref", str(priority))
    _run("route", "delete", "unreachable", POD_RANGE)
    _run("route", "delete", "unreachable", NODE_RANGE)
    _run("route", "delete", SERVICE_RANGE, "dev", "lo")
    _run("address", "delete", f"{NODE_IP}/32", "dev", "lo")
    _run("link", "delete", BRIDGE)


def _ip(*arguments: str) -> str:
    completed = _run(*arguments)
    if completed.returncode != 0:
        raise FenceError(f"ip {' '.join(arguments)}: {completed.stderr.strip()}")
    return completed.stdout


def _unreachable(*arguments: str) -> bool:
    """Which of the two answers comes depends on whether a route or a rule said no."""
    answer = _run(*arguments).stderr
    return "No route to host" in answer or "Network is unreachable" in answer


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True)
