"""What the tests of this folder share: kubectl against a real API server that knows the CRD. Nothing runs there."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Kubectl = Callable[..., subprocess.CompletedProcess[str]]
_CRD = Path(__file__).parents[2] / "crds" / "speccachedeployments.speccache.io.yaml"


@pytest.fixture(scope="session")
def kubectl_run(apiserver: Path, kubectl: Path) -> Kubectl:
    """Runs kubectl with the arguments; `stdin` is its input. Returns the finished process, whatever its exit status."""

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [str(kubectl), f"--kubeconfig={apiserver}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=60)

    return run


@pytest.fixture(scope="session")
def api(kubectl_run: Kubectl) -> Kubectl:
    """`kubectl_run` once the CRD is served."""
    installed = kubectl_run("apply", "--server-side", "-f", str(_CRD))
    assert installed.returncode == 0, installed.stderr
    deadline = time.monotonic() + 30
    while True:  # `kubectl wait` fails at once while the API server has not written any condition yet
        served = kubectl_run("wait", "--for=condition=Established", "--timeout=30s", "-f", str(_CRD))
        if served.returncode == 0:
            return kubectl_run
        assert time.monotonic() < deadline, served.stderr


@pytest.fixture(scope="session")
def apply(api: Kubectl) -> Kubectl:
    """Applies the manifest given as `stdin`, as users do: server-side, unknown fields are errors."""

    def run(*arguments: str, stdin: str) -> subprocess.CompletedProcess[str]:
        return api("apply", "--server-side", "--validate=strict", *arguments, "-f", "-", stdin=stdin)

    return run
