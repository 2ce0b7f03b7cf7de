"""The API server refuses every wrong resource by itself, and its message names the field and the remedy.

The table is the one of tests/api, so what Python refuses and what the API server refuses is the same.
"""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

_TABLE = yaml.safe_load((Path(__file__).parents[1] / "api" / "wrong_resources.yaml").read_text())


def _resource(case: dict[str, Any]) -> dict[str, Any]:
    resource = deepcopy(_TABLE["bases"][case.get("base", "cpu")])
    for path, value in case["set"].items():
        *parents, last = path.split(".")
        target = resource
        for parent in parents:
            target = target[parent]
        if value == "REMOVED":
            del target[last]
        else:
            target[last] = value
    return resource


@pytest.mark.parametrize("base", _TABLE["bases"].values(), ids=_TABLE["bases"])
def test_the_bases_are_accepted(base: dict[str, Any], apply: Any) -> None:
    answer = apply("--dry-run=server", stdin=yaml.safe_dump(base))
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("case", _TABLE["cases"], ids=lambda case: case["name"])
def test_refused_with_field_and_remedy(case: dict[str, Any], apply: Any) -> None:
    answer = apply("--dry-run=server", stdin=yaml.safe_dump(_resource(case)))
    assert answer.returncode != 0, answer.stdout
    # A key of a map is in brackets there.
    assert case["field"] in re.sub(r"\[([a-z]+)\]", r".\1", answer.stderr)
    assert case.get("says", "") in answer.stderr
