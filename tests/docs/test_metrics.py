"""docs/metrics.md and the code name the same metrics with the same types and labels."""

import re
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from speccache_operator.metrics import Metrics as OperatorMetrics
from speccache_runtime.metrics import Metrics as RuntimeMetrics

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(speccache_\w+)` \| (\w+) \| ([\w, ]*) ?\|", re.MULTILINE)

Described = dict[str, tuple[str, tuple[str, ...]]]


def documented() -> Described:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    return {
        name: (kind, tuple(label.strip() for label in labels.split(",") if label.strip()))
        for name, kind, labels in rows
    }


def in_code() -> Described:
    found: Described = {}
    for owner in (RuntimeMetrics(CollectorRegistry()), OperatorMetrics()):
        for metric in vars(owner).values():
            if isinstance(metric, MetricWrapperBase):
                found[metric._name] = (metric._type, tuple(metric._labelnames))
    operator = OperatorMetrics()
    operator.set_resource("key", "True", "Serving")
    for family in operator.collect():
        labels = {name for sample in family.samples for name in sample.labels}
        found[family.name] = (family.type, tuple(sorted(labels)))
    return found


def test_the_page_and_the_code_agree() -> None:
    assert documented() == in_code()


def test_every_reason_for_a_dropped_page_is_explained() -> None:
    sources = (Path(__file__).parents[2] / "runtime").rglob("*.py")
    reasons = {r for path in sources for r in re.findall(r'dropped_pages\.labels\(reason="(\w+)"', path.read_text())}
    assert reasons
    text = PAGE.read_text(encoding="utf-8")
    assert [reason for reason in sorted(reasons) if f"`{reason}`" not in text] == []
