"""The pages name things that exist: links, make targets, command lines, resources, condition reasons."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from speccache_api.resource import SpecCacheDeployment
from speccache_operator.decide.conditions import Reason
from speccache_runtime.cli import _parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "tools").rglob("README.md"))]
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [body for found, body in BLOCK.findall(page.read_text(encoding="utf-8")) if found == language]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_named_make_targets_exist() -> None:
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        name for page in PAGES for body in blocks(page, "sh") for name in re.findall(r"^make ([a-z-]+)", body, re.M)
    }
    assert named
    assert named - defined == set()


def test_command_lines_parse() -> None:
    lines = [line for page in PAGES for body in blocks(page, "sh") for line in body.splitlines()]
    commands = [line.partition("speccache-runtime ")[2] for line in lines if ".venv/bin/speccache-runtime " in line]
    assert commands
    for command in commands:
        arguments = shlex.split(command, comments=True)
        assert (ROOT / arguments[arguments.index("-f") + 1]).is_file()
        _parser().parse_args(arguments)


def test_resources_in_the_pages_are_valid() -> None:
    found = [body for page in PAGES for body in blocks(page, "yaml") if "kind: SpecCacheDeployment" in body]
    assert found
    for body in found:
        SpecCacheDeployment.parse(yaml.safe_load(body))


def test_every_condition_reason_is_explained() -> None:
    text = (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
    assert [reason.value for reason in Reason if f"{reason.value}" not in text] == []
