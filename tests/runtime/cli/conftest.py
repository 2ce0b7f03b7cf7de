"""The command line, configuration and local serving, up to the point where a model would be loaded.

In: arguments, resource files, wire documents. Out: exit codes, what is printed, the EngineConfig. Left out: serving
itself (server), the models (model). `run_cli` runs the real command in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

RESOURCE = {
    "apiVersion": "speccache.io/v1alpha1",
    "kind": "SpecCacheDeployment",
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"uri": "builtin://tiny"},
        "speculative": {"algorithm": "EAGLE3", "draftModel": {"uri": "builtin://tiny"}, "numSteps": 5},
        "kvCache": {
            "pageSize": 16,
            "device": {"tokens": 1000},
            "host": {"tokens": 2000},
            "storage": {"persistentVolumeClaim": {"claimName": "kv"}, "missingDraft": "Degrade"},
        },
    },
}


@pytest.fixture
def resource() -> dict:
    """A right resource, to be changed."""
    return yaml.safe_load(yaml.safe_dump(RESOURCE))


@pytest.fixture
def resource_file(tmp_path: Path) -> Callable[..., Path]:
    def write(*documents: dict) -> Path:
        path = tmp_path / "resource.yaml"
        path.write_text(yaml.safe_dump_all(documents))
        return path

    return write


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "speccache_runtime", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "COLUMNS": "120"},
        )

    return run
