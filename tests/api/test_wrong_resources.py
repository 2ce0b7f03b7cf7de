"""Every wrong resource is refused with the field and, where a rule decides, with the remedy.

The same table is put to a real API server in tests/apiserver: Python and the API server must agree.
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml

from speccache_api.resource import InvalidResource, SpecCacheDeployment

_TABLE = yaml.safe_load(Path(__file__).with_name("wrong_resources.yaml").read_text())


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
def test_the_bases_are_right(base: dict[str, Any]) -> None:
    SpecCacheDeployment.parse(base)


@pytest.mark.parametrize("case", _TABLE["cases"], ids=lambda case: case["name"])
def test_refused_with_field_and_remedy(case: dict[str, Any]) -> None:
    with pytest.raises(InvalidResource) as caught:
        SpecCacheDeployment.parse(_resource(case))
    assert [path for path, _ in caught.value.problems] == [case["field"]]
    assert case.get("says", "") in str(caught.value)
    assert str(caught.value).startswith(f"{case['field']}: ")


def test_the_table_is_large_and_has_no_twins() -> None:
    assert len(_TABLE["cases"]) >= 25
    assert len({case["name"] for case in _TABLE["cases"]}) == len(_TABLE["cases"])
