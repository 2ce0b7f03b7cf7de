"""The shape of the package: what may know what, and that the rule book is kept."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import speccache_operator
from speccache_operator.children import rights, table
from speccache_operator.kinds import CLAIM, POD, RESOURCE

PACKAGE = Path(speccache_operator.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize(
    ("library", "only"),
    [
        ("kubernetes", {"cluster.py"}),
        ("kopf", {"app.py", "loop/handlers.py", "loop/watching.py"}),
        ("aiohttp", {"cluster.py", "process/health.py"}),
        ("prometheus_client", {"process/health.py", "metrics.py"}),
    ],
)
def test_a_library_is_seen_only_where_it_belongs(library: str, only: set[str]) -> None:
    users = {_name(path) for path in MODULES if any(i.split(".")[0] == library for i in _imports(path))}
    assert users <= only


@pytest.mark.parametrize(
    "name",
    [_name(path) for folder in ("decide", "children") for path in (PACKAGE / folder).glob("*.py")]
    + ["observe/observed.py"],
)
def test_what_decides_does_no_io_and_asks_no_clock(name: str) -> None:
    forbidden = {"asyncio", "os", "time", "socket", "subprocess", "pathlib", "logging", "random"}
    path = PACKAGE / name
    assert not forbidden & _imports(path)
    text = path.read_text()
    assert "datetime.now" not in text
    assert "async def" not in text


def test_handlers_hold_decorated_functions_and_nothing_else() -> None:
    tree = ast.parse((PACKAGE / "loop/handlers.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.AsyncFunctionDef)]
    others = [node for node in tree.body if not isinstance(node, (ast.AsyncFunctionDef, ast.Import, ast.ImportFrom))]
    assert len(others) == 1  # the docstring
    for function in functions:
        assert function.decorator_list
        assert len(function.body) <= 3


def test_no_decorator_makes_kopf_write_to_objects() -> None:
    """Only on.event: others put finalizers and annotations on resources, which then cannot go without the operator."""
    tree = ast.parse((PACKAGE / "loop/handlers.py").read_text())
    used = {
        ast.unparse(d.func)
        for n in tree.body
        if isinstance(n, ast.AsyncFunctionDef)
        for d in n.decorator_list
        if isinstance(d, ast.Call)
    }
    assert used == {"kopf.on.startup", "kopf.on.login", "watching.on_event"}
    assert set(re.findall(r"kopf\.on\.(\w+)", (PACKAGE / "loop/watching.py").read_text())) == {"event"}


def test_what_the_table_says_is_watched_is_watched() -> None:
    code = (
        "import kopf, speccache_operator.loop.handlers as h\n"
        "found = kopf.get_default_registry()._watching.get_all_handlers()\n"
        "print(*sorted({handler.selector.any_name for handler in found}))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    wanted = {kind.plural for kind in (*table.watched_kinds(), POD, CLAIM, RESOURCE)}
    assert said.split() == sorted(wanted)


def test_the_charts_rights_are_those_of_the_table() -> None:
    path = PACKAGE.parents[1] / "charts/speccache/files/rights.yaml"
    assert path.read_text() == rights.to_yaml(), f"run: python -m speccache_operator.children.rights > {path}"


def test_the_operator_never_imports_the_runtime_or_torch() -> None:
    code = "import sys, speccache_operator.app; sys.exit(any(m in sys.modules for m in ('torch', 'speccache_runtime')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("path", MODULES, ids=_name)
def test_modules_and_functions_stay_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 40, node.name
