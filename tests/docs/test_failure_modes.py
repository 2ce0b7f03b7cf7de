"""docs/failure-modes.md: every row about the tiers names a test, and that test exists."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "failure-modes.md"
ROW = re.compile(r"^\| (?!what |-)(.+) \|$", re.MULTILINE)
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> list[str]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## The tiers\n")[2].partition("\n## ")[0]
    return [row for row in ROW.findall(section) if not row.startswith("--")]


def defined(path: Path) -> set[str]:
    """Tests of a file: functions, and state machines that are assigned."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {ast.unparse(target) for target in node.targets}
    return found


def test_the_page_knows_enough_of_the_tiers() -> None:
    assert len(rows()) >= 40


def test_every_row_of_the_tiers_names_a_test_that_exists() -> None:
    for row in rows():
        named = NAMED.findall(row.rpartition(" | ")[2])
        assert named, f"no test is named: {row}"
        for file, name in named:
            assert (TESTS / file).is_file(), f"no such file: {file}"
            assert name in defined(TESTS / file), f"no such test: {file}::{name}"
