"""Wrong files and settings: exit code 2 and one line that names the thing and the remedy, never a traceback."""

from __future__ import annotations

import json

import pytest

from speccache_runtime.errors import ConfigError
from speccache_runtime.local import read_resource


def assert_one_line(answer, *words: str, code: int = 2) -> None:
    assert answer.returncode == code, answer.stderr
    assert answer.stderr.startswith("speccache-runtime: ")
    assert answer.stderr.count("\n") == 1
    assert "Traceback" not in answer.stderr
    for word in words:
        assert word in answer.stderr


def test_missing_resource_file(run_cli, tmp_path):
    assert_one_line(run_cli("serve", "-f", tmp_path / "no.yaml"), "no.yaml", "No such file")


def test_directory_as_resource(run_cli, tmp_path):
    assert_one_line(run_cli("serve", "-f", tmp_path), "Is a directory")


def test_not_yaml(run_cli, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("spec: [1, 2\nmetadata: {")
    assert_one_line(run_cli("serve", "-f", path), "a.yaml", "is not YAML")


def test_not_text(run_cli, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    assert_one_line(run_cli("serve", "-f", path), "a.yaml", "is not YAML")


WRONG_VALUES = [
    "2024-13-45",
    "0b_",
    "2001-01-01T99:99:99Z",
    "!!int abc",
    "!!float abc",
    "!!bool abc",
    "!!timestamp abc",
]


@pytest.mark.parametrize("value", [*WRONG_VALUES, "!!int ''", "{[a]: b}"])
def test_a_value_that_yaml_cannot_make(tmp_path, value):
    """Not only YAML's own errors: a name that has the form of a date may be no date."""
    path = tmp_path / "a.yaml"
    path.write_text(f"kind: SpecCacheDeployment\nmetadata:\n  name: {value}\n")
    with pytest.raises(ConfigError, match=r"a\.yaml is not YAML: .*line 3, column 9") as caught:
        read_resource(path)
    assert "\n" not in str(caught.value)


def test_a_wrong_value_ends_the_command_in_one_line(run_cli, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("metadata: {name: 2024-13-45}")
    assert_one_line(run_cli("serve", "-f", path), "'2024-13-45' is no value of type timestamp; put a text in quotes")


def test_nested_too_deeply(run_cli, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("x: " + "[" * 3000 + "]" * 3000)
    assert_one_line(run_cli("serve", "-f", path), "a.yaml", "nested too deeply")


def test_a_list_that_holds_itself(run_cli, resource, resource_file):
    resource["spec"]["model"] = holder = []
    holder.append(holder)
    assert_one_line(run_cli("serve", "-f", resource_file(resource)), "resource.yaml", "hold themselves")


@pytest.mark.parametrize("number", [0, 2])
def test_not_one_resource(run_cli, resource, resource_file, number):
    """Other documents in the file do no harm, but the resource must be the only one of its kind."""
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}}
    path = resource_file(service, *[resource] * number)
    assert_one_line(run_cli("serve", "-f", path), "exactly one SpecCacheDeployment", f"found {number}")


def test_invalid_resource(run_cli, resource, resource_file):
    """All problems at once, each with its field."""
    resource["spec"]["kvCache"]["pageSize"] = 17
    resource["spec"]["model"]["uri"] = "ftp://x"
    answer = run_cli("serve", "-f", resource_file(resource))
    assert_one_line(answer, "spec.kvCache.pageSize", "spec.model.uri")


def test_device_tier_smaller_than_a_page(run_cli, resource, resource_file):
    resource["spec"]["kvCache"]["device"] = {"size": "1Ki"}
    assert_one_line(run_cli("serve", "-f", resource_file(resource)), "spec.kvCache.device.size", "one page pair")


def test_claim_without_directory(run_cli, resource, resource_file):
    resource["spec"] |= {"model": {"uri": "pvc://models/llama"}, "speculative": {"algorithm": "None"}}
    answer = run_cli("serve", "-f", resource_file(resource))
    assert_one_line(answer, "pvc://models/llama", "--claim models=DIR")


def test_claim_with_a_missing_directory(run_cli, resource, resource_file, tmp_path):
    resource["spec"] |= {"model": {"uri": "pvc://models/llama"}, "speculative": {"algorithm": "None"}}
    answer = run_cli("serve", "-f", resource_file(resource), "--claim", f"models={tmp_path}")
    assert_one_line(answer, f"{tmp_path}/llama is not a directory")


@pytest.mark.parametrize("claim", ["models", "models=", "=/data"])
def test_malformed_claim(run_cli, resource, resource_file, claim):
    answer = run_cli("serve", "-f", resource_file(resource), "--claim", claim)
    assert_one_line(answer, f"--claim {claim}: write it as NAME=DIR")


def test_model_directory_without_a_model(run_cli, resource, resource_file, tmp_path):
    (tmp_path / "llama").mkdir()
    resource["spec"] |= {"model": {"uri": "pvc://models/llama"}, "speculative": {"algorithm": "None"}}
    answer = run_cli("serve", "-f", resource_file(resource), "--claim", f"models={tmp_path}")
    assert_one_line(answer, "config.json")


def test_storage_directory_without_a_storage_tier(run_cli, resource, resource_file, tmp_path):
    del resource["spec"]["kvCache"]["storage"]
    answer = run_cli("serve", "-f", resource_file(resource), "--storage-dir", tmp_path)
    assert_one_line(answer, "--storage-dir", "spec.kvCache.storage")


def test_storage_directory_that_is_a_file(run_cli, resource, resource_file, tmp_path):
    (tmp_path / "taken").write_text("")
    answer = run_cli("serve", "-f", resource_file(resource), "--storage-dir", tmp_path / "taken")
    assert_one_line(answer, "taken", "storage directory")


def test_local_options_with_a_wire_document(run_cli, tmp_path):
    assert_one_line(run_cli("serve", "--wire", tmp_path / "w.json", "--claim", "a=b"), "--claim", "-f")


def test_missing_wire_document(run_cli, tmp_path):
    assert_one_line(run_cli("serve", "--wire", tmp_path / "w.json"), "w.json", "No such file")


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"version": 1})])
def test_not_a_wire_document(run_cli, tmp_path, text):
    path = tmp_path / "w.json"
    path.write_text(text)
    assert_one_line(run_cli("serve", "--wire", path), "w.json", "not a wire document of version 2")


def test_bench_needs_speculation_and_storage(run_cli, resource, resource_file):
    del resource["spec"]["kvCache"]["storage"]
    answer = run_cli("bench", "restart", "-f", resource_file(resource))
    assert_one_line(answer, "spec.kvCache.storage", "spec.speculative.draftModel")


def test_bench_in_a_file(run_cli, resource, resource_file, tmp_path):
    (tmp_path / "taken").write_text("")
    answer = run_cli("bench", "restart", "-f", resource_file(resource), "--storage-dir", tmp_path / "taken")
    assert_one_line(answer, "taken", "storage directory")


def test_inspect_nothing(run_cli, tmp_path):
    """Exit code 1, as a failed Job; the same line goes to the termination message, where the operator reads it."""
    message = tmp_path / "message"
    answer = run_cli("inspect", "--target", tmp_path / "no", "--termination-message", message)
    assert_one_line(answer, str(tmp_path / "no"), code=1)
    assert "speccache-runtime: " + message.read_text() == answer.stderr
    assert answer.stdout == ""


def test_inspect_into_a_file_that_cannot_be_written(run_cli, tmp_path):
    answer = run_cli("inspect", "--target", tmp_path, "--termination-message", tmp_path / "no" / "message")
    assert answer.returncode == 2
    assert "cannot write" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_inspect_builtin_takes_no_draft(run_cli, tmp_path):
    assert_one_line(run_cli("inspect", "--builtin", "--draft", tmp_path), "--builtin")
