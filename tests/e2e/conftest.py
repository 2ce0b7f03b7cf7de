"""The installed product on a real cluster: nothing here is faked, and every number comes from a pod.

In: what only a kubelet, a scheduler, controllers and real pods can show. Out: what a field or rule means (tests/api,
tests/apiserver) and what the engine computes (tests/runtime).

One installation serves all tests, and `tiny` is one resource that goes through its life in the order of the tests;
what is expensive (a pod's start, a run of all prompts) is a fixture that happens once, when the first test needs it.
The tests of `test_uninstall.py` take everything off, so they run last.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from speccache_api import names
from speccache_tools.cluster.settings import REPOSITORY
from speccache_tools.stage import release
from speccache_tools.stage.diagnosis import explain
from speccache_tools.stage.inventory import inventory
from speccache_tools.stage.kube import SCD, CommandFailed, Object
from speccache_tools.stage.objects import has_reason
from speccache_tools.stage.serving import wait_settled
from speccache_tools.stage.venue import Venue, make_venue

NAMESPACE = "speccache-e2e"
OTHER_NAMESPACES = ("speccache-demo",)
"""Where a demo may have been left on our own cluster."""

_TIMEOUT_SECONDS = 600
"""Of one test with its fixtures, such as a run of all prompts: for a machine that is busy with other things too."""


@dataclass
class Stage:
    """The cluster with our release on it. `before` is what was there without us."""

    venue: Venue
    before: frozenset[str]
    notes: list[str] = field(default_factory=list)
    namespace: str = NAMESPACE

    def note(self, text: str) -> None:
        """Something measured, shown after the run."""
        self.notes.append(text)

    @contextmanager
    def applied(self, *manifests: Object) -> Iterator[None]:
        """Objects of our namespace that exist for a while."""
        try:
            for manifest in manifests:
                self.venue.kubectl.apply(manifest, self.namespace)
            yield
        finally:
            for manifest in reversed(manifests):
                kind = SCD if manifest["kind"] == names.KIND else manifest["kind"]
                self.venue.kubectl.delete(kind, manifest["metadata"]["name"], self.namespace)

    def settled(self, name: str, seconds: float = 120) -> Object:
        """The resource, once it serves as its spec says and nothing is on its way."""
        return wait_settled(self.venue, self.namespace, name, seconds)

    def until(self, name: str, test: Callable[[Object], bool], what: str) -> Object:
        """The resource, once it is like that; no pod has to start for it."""
        return self.venue.kubectl.until(SCD, name, test, namespace=self.namespace, seconds=60, what=what)

    def refused(self, name: str, kind: str, reason: str) -> Object:
        """The resource, once the condition is False for this reason."""
        return self.until(name, lambda obj: has_reason(obj, kind, "False", reason), f"{kind}=False {reason}")

    def pods(self, name: str) -> list[Object]:
        """The served pods of the resource."""
        selector = ",".join(f"{key}={value}" for key, value in names.selector_labels(name).items())
        return self.venue.kubectl.list("pods", self.namespace, selector)


_STAGE = pytest.StashKey[Stage]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == "test_uninstall.py")
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(_TIMEOUT_SECONDS))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[misc]
    stage = item.config.stash.get(_STAGE, None)
    if report.failed and stage is not None:
        report.sections.append(("cluster", explain(stage.venue, stage.namespace)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    stage = config.stash.get(_STAGE, None)
    if stage is not None and stage.notes:
        terminalreporter.section("seen on the cluster")
        terminalreporter.write_line("\n".join(stage.notes))


@pytest.fixture(scope="session")
def venue(cluster: Path, kubectl: Path, helm: Path) -> Venue:
    found = make_venue(kubectl, helm, cluster)
    if found.ours:
        for image in (found.operator_image, found.runtime_image):
            if not found.has_image(image):
                pytest.skip(f"the cluster lacks {image}: run `make images`")
    return found


@pytest.fixture(scope="session")
def stage(venue: Venue, pytestconfig: pytest.Config) -> Iterator[Stage]:
    if venue.ours:
        release.uninstall(venue, NAMESPACE, *OTHER_NAMESPACES)
    elif release.deployed(venue):
        pytest.fail(f"there is a release in namespace {release.NAMESPACE} of your cluster: uninstall it first")
    made = Stage(venue, inventory(venue.kubectl))
    pytestconfig.stash[_STAGE] = made
    try:
        release.install(venue)
        release.make_namespace(venue, NAMESPACE)
        yield made
    finally:
        _take_down(made)


def _take_down(stage: Stage) -> None:
    try:
        release.uninstall(stage.venue, NAMESPACE)
    except CommandFailed as error:
        pytest.fail(f"cannot take the stage down: {error}\n{explain(stage.venue, NAMESPACE)}", pytrace=False)


@pytest.fixture(scope="session")
def sample() -> Callable[[str], Object]:
    """Reads one of the project's samples."""

    def read(name: str) -> Object:
        loaded: Object = yaml.safe_load((REPOSITORY / "samples" / name).read_text())
        return loaded

    return read


@pytest.fixture(scope="session")
def tiny(stage: Stage, sample: Callable[[str], Object]) -> Object:
    """samples/tiny.yaml, applied and serving. Its state is the one at that time: look again for a newer one."""
    stage.venue.kubectl.apply(sample("tiny.yaml"), stage.namespace)
    return stage.settled("tiny")
