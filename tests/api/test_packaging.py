"""What the wheel promises and what the folder layout must not break."""

import importlib.metadata
import json
import operator
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^]]*\])?(?:>=([0-9.]+))?\s*(?:;\s*extra\s*==\s*['\"](\w+)['\"])?$")
_HEAVY = ("torch", "transformers", "kubernetes", "kopf", "fastapi", "numpy")


def _requirements() -> list[tuple[str, str | None]]:
    """(package, floor) of everything that the installed distribution requires."""
    found = []
    for line in importlib.metadata.requires("speccache") or []:
        match = _REQUIREMENT.match(line.replace(" ", ""))
        assert match is not None, f"not of the form NAME>=FLOOR: {line}"
        found.append((match.group(1), match.group(2)))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def test_every_dependency_has_a_floor_and_the_installed_one_is_above_it() -> None:
    """Without a floor a resolver may answer with a version of ten years ago and no complaint."""
    requirements = _requirements()
    assert len(requirements) > 10
    for package, floor in requirements:
        assert floor is not None, f"{package} has no floor"
        assert _numbers(importlib.metadata.version(package)) >= _numbers(floor), package


def test_the_installed_metadata_is_that_of_pyproject() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    assert sorted(declared) == sorted(
        re.sub(r"\s*;.*", "", line) for line in importlib.metadata.requires("speccache") or []
    )
    assert importlib.metadata.version("speccache") == project["version"]


def test_the_folder_called_operator_does_not_hide_the_module() -> None:
    assert operator.itemgetter(1)("ab") == "b"
    for launcher in (["-c", "import collections, operator; operator.itemgetter"], ["-m", "site"]):
        subprocess.run([sys.executable, *launcher], cwd=_ROOT, env={"PYTHONPATH": "."}, check=True, capture_output=True)


def test_no_package_files_where_they_break_imports() -> None:
    assert not (_ROOT / "operator" / "__init__.py").exists()
    assert list((_ROOT / "tests").rglob("__init__.py")) == []


def _imported(statement: str) -> set[str]:
    code = f"{statement}; import json, sys; sys.stdout.write(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return set(json.loads(output))


def test_the_api_package_is_light() -> None:
    modules = sorted(path.stem for path in (_ROOT / "crds" / "speccache_api").glob("*.py") if path.stem != "__init__")
    assert len(modules) > 10
    imported = _imported("import " + ", ".join(f"speccache_api.{name}" for name in modules))
    assert imported.isdisjoint(_HEAVY)


@pytest.mark.parametrize("module", ["speccache_runtime", "speccache_runtime.core", "speccache_runtime.errors"])
def test_the_runtime_nouns_need_no_torch(module: str) -> None:
    assert "torch" not in _imported(f"import {module}")


def test_the_table_of_builtin_models_and_the_type_marker_are_shipped() -> None:
    package = _ROOT / "crds" / "speccache_api"
    assert {"builtin.json", "py.typed"} <= {path.name for path in package.iterdir()}
