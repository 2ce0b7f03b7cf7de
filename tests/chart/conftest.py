"""The charts as helm renders them. What an API server makes of the rights is tests/apiserver/operator's matter."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from speccache_tools.cluster.settings import KUBERNETES_VERSION

CHARTS = Path(__file__).parents[2] / "charts"

Helm = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_helm(helm: Path, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Runs the pinned helm with folders of its own; the caller judges how it ended."""
    home = str(tmp_path_factory.mktemp("helm"))
    environment = {**os.environ, **{f"HELM_{name}_HOME": home for name in ("CACHE", "CONFIG", "DATA")}}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(helm), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)

    return run


@pytest.fixture(scope="session")
def template(run_helm: Helm) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`template("speccache", "a=b", ..., release=..., namespace=...)`: helm's own answer, errors included."""

    def run(chart: str, *values: str, release: str = "speccache", namespace: str = "system") -> Any:
        sets = [word for value in values for word in ("--set", value)]
        where = ("--namespace", namespace, "--kube-version", KUBERNETES_VERSION)
        return run_helm("template", release, str(CHARTS / chart), *where, *sets)

    return run


@pytest.fixture(scope="session")
def rendered(template: Any) -> Callable[..., list[dict[str, Any]]]:
    """The objects of a rendering that must work."""

    def run(chart: str, *values: str, **where: str) -> list[dict[str, Any]]:
        done = template(chart, *values, **where)
        assert done.returncode == 0, done.stderr
        return [obj for obj in yaml.safe_load_all(done.stdout) if obj]

    return run


@pytest.fixture(scope="session")
def deployment(rendered: Any) -> Callable[..., dict[str, Any]]:
    """The operator's Deployment."""

    def run(*values: str, **where: str) -> dict[str, Any]:
        (found,) = [obj for obj in rendered("speccache", *values, **where) if obj["kind"] == "Deployment"]
        result: dict[str, Any] = found
        return result

    return run
