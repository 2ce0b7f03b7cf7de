"""`check-storage` and `empty-storage`: what the operator's Jobs run, on a volume and on a real S3 server."""

from __future__ import annotations

import json

import pytest

from speccache_api.storage_target import BucketTarget, VolumeTarget
from speccache_runtime.cache.storage.base import NoteName, ObjectName
from speccache_runtime.cache.storage.capacity.notes import LEASE
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Half
from speccache_runtime.cache.storage.registry import open_backend

FINGERPRINT, OTHER = "ab" * 32, "cd" * 32
BUCKET = BucketTarget(
    bucket="pages",
    prefix="",
    endpoint="http://127.0.0.1:1",
    region="eu",
    force_path_style=True,
    credentials_secret=None,
    ca_bundle_config_map=None,
    service_account=None,
)


@pytest.fixture
def volume(tmp_path):
    (tmp_path / "kv").mkdir()
    return VolumeTarget(claim=None, path=str(tmp_path / "kv"))


def test_a_place_that_can_be_used(run_cli, volume, tmp_path):
    """The answer is the pod's last message, and stands in its log."""
    message = tmp_path / "message"
    answer = run_cli("check-storage", "--target", volume.to_json(), "--termination-message", message)
    assert (answer.returncode, answer.stdout) == (0, message.read_text())
    assert json.loads(answer.stdout) == {"ok": True}


def test_a_place_that_cannot_be_used(run_cli, tmp_path):
    """A code for the condition's reason, and a line for people."""
    target = VolumeTarget(claim=None, path=str(tmp_path / "nowhere"))
    answer = run_cli("check-storage", "--target", target.to_json())
    assert answer.returncode == 1
    said = json.loads(answer.stdout)
    assert (said["ok"], said["code"]) == (False, "ENOENT")
    assert "nowhere" in said["message"]
    assert "\n" not in said["message"]


@pytest.mark.parametrize(
    ("missing", "code", "says"),
    [
        (
            {"credentials_secret": "keys"},
            "NoCredentials",
            "Secret keys with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        ),
        ({"ca_bundle_config_map": "authorities"}, "TlsFailed", "ConfigMap authorities with ca.crt is not there"),
    ],
)
def test_what_is_not_mounted_is_named(run_cli, missing, code, says):
    """The client library would only say that it has no credentials."""
    answer = run_cli("check-storage", "--target", BUCKET.model_copy(update=missing).to_json())
    said = json.loads(answer.stdout)
    assert said["code"] == code
    assert says in said["message"]


@pytest.fixture
def bucket(s3_server, s3_environment):
    """A target on the real server, with its credentials in the environment as on a user's machine."""
    s3_server.make_bucket("upkeep")
    place = {"bucket": "upkeep", "prefix": "a/b", "endpoint": s3_server.endpoint, "region": s3_server.region}
    return BUCKET.model_copy(update=place)


def test_a_bucket_that_can_be_used_is_left_as_it_was(run_cli, bucket, s3_server):
    answer = run_cli("check-storage", "--target", bucket.to_json())
    assert json.loads(answer.stdout) == {"ok": True}
    assert not [path for path in (s3_server.directory / "upkeep").rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ({"bucket": "nowhere"}, "BucketNotFound"),
        ({"region": "eu-central-1"}, "WrongRegion"),
        ({"endpoint": "http://127.0.0.1:1"}, "EndpointUnreachable"),
    ],
)
def test_a_bucket_that_cannot_be_used_has_a_code_and_a_remedy(run_cli, bucket, wrong, code):
    answer = run_cli("check-storage", "--target", bucket.model_copy(update=wrong).to_json())
    said = json.loads(answer.stdout)
    assert (answer.returncode, said["ok"], said["code"]) == (1, False, code)
    assert ": " in said["message"], "what is wrong, and what to do"


def test_keys_that_the_server_does_not_know(run_cli, bucket, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    said = json.loads(run_cli("check-storage", "--target", bucket.to_json()).stdout)
    assert said["code"] == "AccessDenied"
    assert "another" not in said["message"]


def test_a_bucket_is_emptied_below_one_fingerprint(run_cli, bucket, s3_server):
    backend = open_backend(bucket)
    for fingerprint in (FINGERPRINT, OTHER):
        name = ObjectName(fingerprint, Half.TARGET, "11" * 32, "22" * 32, "0" * 16)
        backend.write(name, b"h" * HEADER_SIZE, memoryview(b"page"))
        backend.write_note(NoteName(fingerprint, LEASE, "1"), b"held")
    backend.close()
    answer = run_cli("empty-storage", "--target", bucket.to_json(), "--fingerprint", FINGERPRINT)
    assert answer.stdout.startswith("removed 1 objects from bucket upkeep at ")
    left = [path for path in (s3_server.directory / "upkeep").rglob("*") if path.is_file()]
    for path in left:
        path.unlink()
    assert len(left) == 2
    assert all(OTHER in str(path) for path in left)


def test_what_is_no_target(run_cli):
    answer = run_cli("check-storage", "--target", "{}")
    assert answer.returncode == 2
    assert "--target: not a storage target" in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_emptying_removes_one_models_pages_and_nothing_else(run_cli, volume, tmp_path):
    """Of both halves and all namespaces."""
    backend = open_backend(volume)
    names = [
        ObjectName(fingerprint, half, namespace * 32, f"{number:02x}" * 32, "0" * 16)
        for fingerprint in (FINGERPRINT, OTHER)
        for half in Half
        for namespace in ("11", "22")
        for number in range(3)
    ]
    for name in names:
        backend.write(name, b"h" * HEADER_SIZE, memoryview(b"page"))
    notes = [NoteName(fingerprint, LEASE, "1") for fingerprint in (FINGERPRINT, OTHER)]
    for note in notes:
        backend.write_note(note, b"held")
    message = tmp_path / "message"
    arguments = ("--target", volume.to_json(), "--fingerprint", FINGERPRINT, "--termination-message", message)
    for count in (12, 0):
        answer = run_cli("empty-storage", *arguments)
        assert (answer.returncode, answer.stdout) == (0, "")
        assert message.read_text() == f"removed {count} objects from {volume.place} below {FINGERPRINT}\n"
    left = [name for name, there in zip(names, backend.exists(names), strict=True) if there]
    assert [backend.read_note(note) is not None for note in notes] == [False, True]
    backend.close()
    assert left == [name for name in names if name.fingerprint == OTHER]


@pytest.mark.parametrize("fingerprint", ["", "../../etc", "AB" * 32, "ab" * 31])
def test_what_is_no_fingerprint_names_nothing(run_cli, volume, fingerprint):
    answer = run_cli("empty-storage", "--target", volume.to_json(), "--fingerprint", fingerprint)
    assert answer.returncode == 1
    assert "--fingerprint" in answer.stderr


def test_what_cannot_be_emptied_says_why(run_cli, tmp_path):
    target = VolumeTarget(claim=None, path=str(tmp_path / "nowhere"))
    message = tmp_path / "message"
    answer = run_cli(
        "empty-storage", "--target", target.to_json(), "--fingerprint", FINGERPRINT, "--termination-message", message
    )
    assert answer.returncode == 1
    assert "nowhere" in message.read_text()
