"""How many cores a process may keep busy."""

import os
from pathlib import Path

import pytest

from speccache_runtime.engine.threads import usable_cores

ALLOWED = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [
        ("max 100000\n", ALLOWED),
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        (f"{ALLOWED * 2}00000 100000\n", ALLOWED),
    ],
)
def test_a_pods_cpu_limit_counts(tmp_path: Path, cpu_max: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max)
    assert usable_cores(tmp_path) == cores


def test_of_a_fraction_the_whole_part_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text("390000 100000\n")
    assert usable_cores(tmp_path) == 3


def test_without_a_cgroup_there_is_no_quota(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == ALLOWED
