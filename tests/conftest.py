"""Shared by every test: a clean environment, real API servers, and no silent skips where it counts.

Fixtures: `apiserver` (etcd and the API server alone, private to this run), `s3_server` (a real S3 server, likewise),
`cluster` (a whole cluster that is already up), `kubectl` and `helm` (the pinned programs). Tests under e2e/ carry the
marker `cluster`; those that start the program itself, as a user does, carry `program` and are left out of `make check`.

`pytest -n 3 --dist loadfile` runs in three processes, each with an API server of its own.

Without the programs or the cluster such tests are skipped and the summary says what to run; under `CI=true` any skip
is a failure, so that nothing can be green by not running.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from speccache_tools.cluster import binaries, state
from speccache_tools.cluster.s3_server import S3Server
from speccache_tools.cluster.settings import KUBECONFIG

_TESTS = Path(__file__).parent
_UNDER_CI = os.environ.get("CI") == "true"
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: needs a whole Kubernetes cluster with the project's images")
    config.addinivalue_line("markers", "program: starts the whole program, whose imports alone take seconds")
    # Or pytest-asyncio asks for "the" loop, which Python 3.11 then makes and nobody closes: a warning, so an error.
    asyncio.set_event_loop(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_TESTS / "e2e"):
            item.add_marker(pytest.mark.cluster)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if _UNDER_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"CI must run everything, but this was skipped: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if _UNDER_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"CI must run everything, but this was skipped: {report.longrepr}"
    return report


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """No test talks through a proxy, and no test reaches a cluster that it did not ask for."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [*_PROXY_VARIABLES, *(name.upper() for name in _PROXY_VARIABLES)]:
            patch.delenv(name, raising=False)
        patch.setenv("KUBECONFIG", os.devnull)
        yield


@pytest.fixture(scope="session")
def apiserver() -> Iterator[Path]:
    """Kubeconfig of an empty API server with its own etcd. No controllers, no nodes: objects are kept, nothing runs."""
    for program in binaries.API_PROGRAMS:
        _built(program)
    command = [sys.executable, "-m", "speccache_tools.cluster", "api"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        announced = server.stdout.readline().strip()  # empty when it failed; standard error then says why
        assert announced.startswith("export KUBECONFIG="), "the API server did not start"
        yield Path(announced.partition("=")[2])
        server.stdin.close()


@pytest.fixture(scope="session")
def cluster() -> Path:
    """Kubeconfig of a whole cluster: the one of `make cluster`, or with CLUSTER=existing that of KUBECONFIG."""
    if os.environ.get("CLUSTER") == "existing":
        return Path(_KUBECONFIG_OF_CALLER)
    if not state.look().ready:
        pytest.skip("no cluster is up: run `make cluster`")
    return KUBECONFIG


@pytest.fixture(scope="session")
def s3_program() -> Path:
    """The pinned S3 server."""
    return _built(binaries.VERSITYGW)


@pytest.fixture(scope="session")
def s3_server(s3_program: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server without buckets; tests make theirs, and none of them stops it."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def s3_environment(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials of `s3_server` where S3 clients look for them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)


@pytest.fixture(scope="session")
def kubectl() -> Path:
    """The pinned kubectl."""
    return _built(binaries.KUBECTL)


@pytest.fixture(scope="session")
def helm() -> Path:
    """The pinned helm."""
    return _built(binaries.HELM)


_KUBECONFIG_OF_CALLER = os.environ.get("KUBECONFIG", str(Path.home() / ".kube" / "config"))


def _built(program: binaries.Program) -> Path:
    if not program.path.exists():
        target = "bucket-server" if program is binaries.VERSITYGW else "programs"
        pytest.skip(f"{program.name} is not built: run `make {target}`")
    return program.path
