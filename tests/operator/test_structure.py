"""The shape of the package: what may know what, and that the rule book is kept."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import speccache_operator

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
    assert used == {"kopf.on.startup", "kopf.on.login", "kopf.on.event"}


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
