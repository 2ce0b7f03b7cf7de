"""Flags, environment, and what a wrong one says."""

import argparse
import json
import logging
import re
import sys
from typing import Any

import pytest

from speccache_operator import __main__, logs
from speccache_operator.errors import SettingsError
from speccache_operator.process import settings

GOOD = {"RUNTIME_IMAGE": "runtime:1", "WATCH_NAMESPACE": "demo"}


def _load(flags: list[str], environment: dict[str, str]) -> settings.Settings:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(flags), environment)


def test_the_environment_is_enough() -> None:
    loaded = _load([], GOOD)
    assert (loaded.runtime_image, loaded.namespace, loaded.workers, loaded.check_nodes) == (
        "runtime:1",
        "demo",
        4,
        True,
    )


def test_a_flag_stands_above_the_environment() -> None:
    loaded = _load(["--runtime-image", "other", "--namespace", "x"], GOOD)
    assert (loaded.runtime_image, loaded.namespace) == ("other", "x")


@pytest.mark.parametrize(
    ("flags", "environment"),
    [(["--all-namespaces"], {"RUNTIME_IMAGE": "i"}), ([], {**GOOD, "WATCH_NAMESPACE": "*"}), (["--namespace=*"], GOOD)],
)
def test_all_namespaces_are_watched_when_that_is_said(flags: list[str], environment: dict[str, str]) -> None:
    assert _load(flags, environment).namespace is None


def test_every_setting_has_a_flag_and_a_variable() -> None:
    environment = {
        **GOOD,
        "POD_NAMESPACE": "system",
        "POD_NAME": "pod-1",
        "RUNTIME_IMAGE_PULL_POLICY": "Always",
        "RUNTIME_IMAGE_PULL_SECRETS": "a,b",
        "LEASE_NAME": "lease",
        "HTTP_HOST": "127.0.0.1",
        "HTTP_PORT": "0",
        "WORKERS": "7",
        "RESYNC_SECONDS": "60",
        "CHECK_NODES": "false",
        "LOG_LEVEL": "DEBUG",
    }
    loaded = _load([], environment)
    assert loaded.identity.startswith("pod-1_")
    expected = settings.Settings(
        "runtime:1",
        "demo",
        "system",
        "Always",
        ("a", "b"),
        "lease",
        loaded.identity,
        "127.0.0.1",
        0,
        7,
        60,
        False,
        "DEBUG",
    )
    assert loaded == expected
    assert _load([], environment).identity != loaded.identity


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"RUNTIME_IMAGE": ""}, "--runtime-image (RUNTIME_IMAGE) is required"),
        ({"RUNTIME_IMAGE": "a b"}, "--runtime-image (RUNTIME_IMAGE)"),
        ({"WATCH_NAMESPACE": ""}, "--namespace (WATCH_NAMESPACE) or --all-namespaces is required"),
        ({"WATCH_NAMESPACE": "Demo"}, "--namespace (WATCH_NAMESPACE)"),
        ({"WATCH_NAMESPACE": "a,b"}, "--namespace (WATCH_NAMESPACE)"),
        ({"WATCH_NAMESPACE": "x" * 64}, "--namespace (WATCH_NAMESPACE)"),
        ({"WORKERS": "0"}, "--workers (WORKERS) must be an integer from 1 to 64, not '0'"),
        ({"WORKERS": "four"}, "--workers (WORKERS)"),
        ({"WORKERS": "4.0"}, "--workers (WORKERS)"),
        ({"HTTP_PORT": "65536"}, "--http-port (HTTP_PORT)"),
        ({"HTTP_PORT": "-1"}, "--http-port (HTTP_PORT)"),
        ({"RESYNC_SECONDS": "1"}, "--resync-seconds (RESYNC_SECONDS)"),
        ({"CHECK_NODES": "yes"}, "--check-nodes (CHECK_NODES) must be true or false, not 'yes'"),
        ({"LOG_LEVEL": "debug"}, "--log-level (LOG_LEVEL) must be one of DEBUG, INFO, WARNING, ERROR"),
        ({"RUNTIME_IMAGE_PULL_POLICY": "Sometimes"}, "--runtime-image-pull-policy (RUNTIME_IMAGE_PULL_POLICY)"),
        ({"RUNTIME_IMAGE_PULL_SECRETS": "a b"}, "--runtime-image-pull-secrets (RUNTIME_IMAGE_PULL_SECRETS)"),
        ({"LEASE_NAME": "Not_A_Name"}, "--lease-name (LEASE_NAME)"),
        ({"POD_NAMESPACE": "?"}, "--operator-namespace (POD_NAMESPACE)"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(change: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(named)):
        _load([], GOOD | change)


def test_namespace_and_all_namespaces_exclude_each_other() -> None:
    with pytest.raises(SettingsError, match="exclude each other"):
        _load(["--all-namespaces", "--namespace", "x"], GOOD)


def test_main_stops_with_one_clear_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_IMAGE", "runtime:1")
    monkeypatch.setenv("WATCH_NAMESPACE", "Wrong!")
    assert __main__.main(["run"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "--namespace (WATCH_NAMESPACE)" in printed


def test_main_names_an_unusable_kubeconfig(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        assert __main__.main(["run", "--runtime-image=i", "--namespace=n", "--http-port=0"]) == 2
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert "KUBECONFIG" in capsys.readouterr().err.splitlines()[-1]


def test_a_log_line_is_json_with_a_constant_message_and_fields() -> None:
    try:
        raise ValueError("oops")
    except ValueError:
        failure = sys.exc_info()
    record = logging.LogRecord("speccache.x", logging.WARNING, "f", 1, "it %s", ("failed",), failure)
    record.__dict__.update(logs.fields(key="a/b", seconds=1.5))
    line = json.loads(logs.Formatter().format(record))
    assert (line["message"], line["level"], line["key"], line["seconds"]) == ("it failed", "warning", "a/b", 1.5)
    assert "ValueError: oops" in line["traceback"]
