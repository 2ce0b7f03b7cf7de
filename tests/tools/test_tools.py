"""The tools are what their pages say, and the cluster can be made and removed without the project's environment."""

import ast
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from speccache_tools.cluster.__main__ import parser
from speccache_tools.cluster.settings import REPOSITORY

TOOLS = REPOSITORY / "tools"
PACKAGES = [TOOLS / "speccache_tools" / name for name in ("cluster", "stage")]

IMPORT_ALL = """
import importlib, pkgutil, speccache_tools.cluster as package
for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    importlib.import_module(found.name)
"""


def page(package: Path) -> str:
    return (package / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [["-c", IMPORT_ALL], ["-m", "speccache_tools.cluster", "status", "--help"]])
def test_the_cluster_needs_the_standard_library_alone(arguments: list[str]) -> None:
    """As `make cluster-down` runs it: in the folder of the tools, by a Python without any installed package."""
    command = [sys.executable, "-S", "-E", *arguments]
    done = subprocess.run(command, cwd=TOOLS, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_the_page_names_every_file_and_no_other(package: Path) -> None:
    rows = [line.split("|")[1] for line in page(package).splitlines() if re.match(r"\| `[\w/]+\.\w+`", line)]
    named = [name for row in rows for name in re.findall(r"`([\w/]+\.\w+)`", row)]
    files = [path.relative_to(package).as_posix() for ending in ("py", "go") for path in package.rglob(f"*.{ending}")]
    assert sorted(named) == sorted(set(files) - {"__init__.py"})


def test_the_commands_of_the_page_parse() -> None:
    commands = re.findall(r"`python -m speccache_tools\.cluster (.*?)`", page(PACKAGES[0]))
    assert len(commands) >= 3
    for command in commands:
        parser().parse_args(shlex.split(command))


def test_an_s3_server_in_the_foreground_ends_with_its_caller(s3_program: Path, tmp_path: Path) -> None:
    arguments = ["s3", "--directory", str(tmp_path / "s3"), "--bucket", "pages"]
    command = [sys.executable, "-m", "speccache_tools.cluster", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        lines = [server.stdout.readline() for _ in range(4)]
        exported = dict(line.removeprefix("export ").strip().split("=", 1) for line in lines)
        address = urlsplit(exported["AWS_ENDPOINT_URL_S3"])
        assert {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"} < set(exported)
        socket.create_connection((address.hostname, address.port), timeout=10).close()
        assert (tmp_path / "s3" / "pages").is_dir()
        server.stdin.close()
        assert server.wait(timeout=20) == 0
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.hostname, address.port), timeout=10)


def test_the_example_of_the_stage_uses_what_exists() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", page(PACKAGES[1]), re.MULTILINE | re.DOTALL)
    tree = ast.parse(code)
    known: dict[str, object] = {}
    exec("\n".join(ast.unparse(line) for line in tree.body if isinstance(line, ast.ImportFrom)), known)
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) in known]
    assert used
    assert [ast.unparse(node) for node in used if not hasattr(known[ast.unparse(node.value)], node.attr)] == []
