"""charts/speccache-crds: the generated CRD, unchanged, kept when the release goes."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
NAME = "speccachedeployments.speccache.io.yaml"


def test_the_chart_holds_the_generated_file() -> None:
    ours, generated = ROOT / "charts/speccache-crds/files" / NAME, ROOT / "crds" / NAME
    assert ours.read_bytes() == generated.read_bytes(), f"run: cp {generated} {ours}"


def test_rendering_adds_metadata_and_nothing_else(rendered: Any) -> None:
    (crd,) = rendered("speccache-crds")
    generated = yaml.safe_load((ROOT / "crds" / NAME).read_text())
    assert {**crd, "metadata": {}} == {**generated, "metadata": {}}
    assert crd["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert crd["metadata"].pop("labels")["app.kubernetes.io/managed-by"] == "Helm"
    assert crd["metadata"] == generated["metadata"]


def test_keeping_it_can_be_turned_off(rendered: Any) -> None:
    (crd,) = rendered("speccache-crds", "keep=false")
    assert "annotations" not in crd["metadata"]


def test_wrong_values_are_refused(template: Any) -> None:
    for value in ("keep=maybe", "kepe=true"):
        assert template("speccache-crds", value).returncode != 0
