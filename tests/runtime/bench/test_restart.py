"""The whole restart benchmark on the built-in pair, once: what it promises about cache, text and acceptance.

Times are printed and not asserted: they depend on what else the machine does.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.program

SAMPLE = Path(__file__).parents[3] / "samples" / "tiny.yaml"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("bench") / "made" / "by the command"
    command = [sys.executable, "-m", "speccache_runtime", "bench", "restart", "-f", str(SAMPLE), "--json"]
    command += ["--storage-dir", str(scratch)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    assert list(scratch.iterdir()) == []
    return json.loads(answer.stdout)


@pytest.fixture(scope="module")
def runs(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in report["runs"]}


def test_shape(report, runs):
    """All prompts in all runs, 64 new tokens each (a text may end earlier)."""
    assert list(runs) == ["cold", "restored", "draft_withheld"]
    for run in [*runs.values(), report["plain"]]:
        assert run["prompts"] >= 24
        assert run["prompt_tokens"] == runs["cold"]["prompt_tokens"]
        assert run["completion_tokens"] == runs["cold"]["completion_tokens"]
    assert runs["cold"]["completion_tokens"] > 0.9 * 64 * runs["cold"]["prompts"]


def test_cold_is_cold(runs):
    """No prompt is a hit for another."""
    assert runs["cold"]["cached_tokens"] == {"device": 0, "host": 0, "storage": 0}


@pytest.mark.parametrize("name", ["restored", "draft_withheld"])
def test_restored_from_storage(runs, name):
    """At least nine tenths of the prompts."""
    assert runs[name]["cached_tokens"]["storage"] >= 0.9 * runs[name]["prompt_tokens"]


def test_same_text(report, runs):
    """Whatever the cache has, and with no draft at all."""
    assert [run["same_text"] for run in [*runs.values(), report["plain"]]] == [True] * 4


def test_a_restored_pair_accepts_as_cold(runs):
    """Step by step the same, in float32."""
    assert runs["restored"]["same_steps"]
    assert runs["restored"]["accept_length"] == runs["cold"]["accept_length"]


def test_a_withheld_draft_half_shows(runs):
    """Most on text that quotes its prompt, and there most in its beginning."""
    cold, withheld = (runs[name]["by_kind"]["copy"] for name in ("cold", "draft_withheld"))
    assert withheld["accept_length"] <= 0.6 * cold["accept_length"]
    assert withheld["accept_length_first64"] <= 0.6 * cold["accept_length_first64"]


def test_restored_pairs_pay(report, runs):
    """Per token, restored speculation beats plain decoding; without the draft's half it is slower than restored."""
    speed = report["decode_speed_over_plain"]
    sys.stdout.write(f"decode speed over plain: {speed}\n")
    assert speed["restored"] > speed["draft_withheld"]
