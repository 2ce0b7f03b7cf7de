"""The README's commands, as somebody types them who has cloned the project and has what the README asks for: no uv.

In: the lines of its shell blocks, run as they stand. Left to others: those that need a cluster of one's own (e2e), the
benchmark's numbers (runtime/bench) and what `make` builds.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.program

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
OF_THE_CLUSTERS_USER = {"helm", "kubectl"}
OF_THIS_RUN = {"VIRTUAL_ENV", "PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"}
START_SECONDS = 180


def commands() -> list[str]:
    """Each command of the README on one line, without its comment."""
    text = "\n".join(BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))).replace("\\\n", " ")
    return [shlex.join(words) for line in text.splitlines() if (words := shlex.split(line, comments=True))]


def of(program: str) -> list[str]:
    return [command for command in commands() if shlex.split(command)[0] == program]


@pytest.fixture(scope="module")
def without_uv(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine that has every program of this one but uv."""
    programs = tmp_path_factory.mktemp("programs")
    for folder in map(Path, os.environ["PATH"].split(":")):
        for program in folder.iterdir() if folder.is_dir() and folder != ROOT / ".venv" / "bin" else ():
            link = programs / program.name
            if program.name not in ("uv", "uvx") and not link.is_symlink():
                link.symlink_to(program)
    own = tmp_path_factory.mktemp("own")
    kept = {name: value for name, value in os.environ.items() if name not in OF_THIS_RUN}
    return {**kept, "PATH": str(programs), "XDG_CACHE_HOME": str(own)}


def run(command: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )


def test_every_program_is_there(without_uv: dict[str, str]) -> None:
    """On PATH, or in the folder that `make setup` makes."""
    programs = {shlex.split(command)[0] for command in commands()} - OF_THE_CLUSTERS_USER
    missing = [name for name in sorted(programs) if run(f"command -v {shlex.quote(name)}", without_uv).returncode]
    assert missing == []


def test_setup_works_without_uv(without_uv: dict[str, str]) -> None:
    """It finds the one that it keeps in the project's cache, or fetches it; with all in place it takes a moment."""
    assert "make setup" in commands()
    answer = run("make setup", without_uv)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("command", of("make"))
def test_make_knows_what_to_do(command: str, without_uv: dict[str, str]) -> None:
    """Down to the last command of each target."""
    answer = run(f"{command} --dry-run", without_uv)
    assert (answer.returncode, answer.stderr) == (0, "")


def test_benchmark_starts(without_uv: dict[str, str]) -> None:
    (command,) = [command for command in of(".venv/bin/speccache-runtime") if " bench " in command]
    answer = run(f"{command} --new-tokens 0", without_uv)
    assert "'0' is not a whole number above 0" in answer.stderr
    assert run(f"{command} --help", without_uv).returncode == 0


@pytest.fixture
def served(without_uv: dict[str, str]) -> Iterator[str]:
    """The README's server, on a port that is free here: its address."""
    (command,) = [command for command in of(".venv/bin/speccache-runtime") if " serve " in command]
    with subprocess.Popen(
        [*shlex.split(command), "--port", "0"],
        cwd=ROOT,
        env=without_uv,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        alarm = threading.Timer(START_SECONDS, process.kill)
        alarm.start()
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            found = re.search(r"curl (http://\S+?)/v1", line)
            if found:
                yield found[1]
                break
        else:
            pytest.fail(f"the server did not start: {said}")
        process.terminate()
        process.stdout.read()
        assert process.wait(60) == 0
        alarm.cancel()


def test_serve_and_curl(served: str, without_uv: dict[str, str]) -> None:
    """The request of the README is answered with text."""
    (command,) = of("curl")
    answer = run(command.replace("http://127.0.0.1:8000", served), without_uv)
    assert '"finish_reason"' in answer.stdout, answer.stderr
