"""`--help` teaches, and is quick because it imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest


@pytest.mark.parametrize(
    "command",
    [[], ["serve"], ["inspect"], ["check-storage"], ["empty-storage"], ["bench", "restart"], ["bench", "storage"]],
)
def test_help_has_examples(run_cli, command):
    """Each command shows itself in use."""
    answer = run_cli(*command, "--help")
    assert answer.returncode == 0
    assert "examples:\n" in answer.stdout
    assert f"speccache-runtime {' '.join(command)}" in answer.stdout
    assert max(map(len, answer.stdout.splitlines())) <= 120


def test_help_imports_nothing_heavy():
    """Neither torch nor the web framework is needed to explain an option."""
    code = (
        "import sys; from speccache_runtime.cli import _parser; _parser().format_help(); "
        "heavy = {'torch', 'transformers', 'fastapi', 'pydantic', 'numpy', 'yaml'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (answer.returncode, answer.stderr) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["swerve"],
        ["serve"],
        ["serve", "-f", "a.yaml", "--wire", "b.json"],
        ["serve", "-f", "a.yaml", "--port", "70000"],
        ["serve", "-f", "a.yaml", "--port", "http"],
        ["inspect"],
        ["inspect", "--target", "a", "--builtin"],
        ["check-storage"],
        ["empty-storage", "--target", "{}"],
        ["bench"],
        ["bench", "restart"],
        ["bench", "restart", "-f", "a.yaml", "--new-tokens", "0"],
    ],
)
def test_wrong_command_line(run_cli, arguments):
    """Exit code 2 and the usage; nothing else happens."""
    answer = run_cli(*arguments)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert "usage: speccache-runtime" in answer.stderr


@pytest.mark.parametrize("command", [[], ["serve"], ["inspect"], ["bench"], ["bench", "restart"]])
def test_a_command_line_that_is_too_short_teaches(run_cli, command):
    """What to write instead, with a file that is there."""
    said = run_cli(*command).stderr
    assert "error: " in said
    example = f"  speccache-runtime {' '.join([*command, ''])}"
    assert example in said.partition("examples:\n")[2]
    assert command == ["inspect"] or "-f samples/tiny.yaml" in said


def test_version(run_cli):
    answer = run_cli("--version")
    assert (answer.returncode, answer.stdout) == (0, f"speccache-runtime {metadata.version('speccache')}\n")
