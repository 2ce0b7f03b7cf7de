"""A bucket that cannot be used: each fault has one code and one line with a remedy, costs a bounded time, and is over
when its cause is. Real servers, where they can be made to fail so; where not, small ones of `servers.py`."""

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from speccache_api.storage_target import BucketTarget
from speccache_runtime.cache.storage import s3_client
from speccache_runtime.cache.storage.base import BackendError, NoteName, ObjectName
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Half
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.s3 import S3Backend
from speccache_tools.cluster.s3_server import S3Server

from .places import BUCKET, bucket_target
from .servers import Answer, ScriptedServer, closed_port, done, error, found, silent_server

NAME = ObjectName("0f" * 32, Half.TARGET, "ab" * 32, "cd" * 32, "5e" * 8)
NOTE = NoteName("0f" * 32, "lease", "1")
HEADER = bytes(HEADER_SIZE)
PAYLOAD = bytes(20_000)
ACCESS_KEY, SECRET_KEY, TOKEN = "AKIATESTTESTTESTTEST", "secret/secret+secret", "token//token=="


def read(backend: S3Backend) -> Outcome:
    return backend.read(NAME, bytearray(HEADER_SIZE), memoryview(bytearray(len(PAYLOAD)))).outcome


OPERATIONS: dict[str, Callable[[S3Backend], object]] = {
    "probe": lambda backend: backend.probe(),
    "exists": lambda backend: backend.exists([NAME]),
    "exists-many": lambda backend: backend.exists([NAME] * 16),
    "read": read,
    "write": lambda backend: backend.write(NAME, HEADER, PAYLOAD),
    "touch": lambda backend: backend.touch(NAME),
    "delete": lambda backend: backend.delete([NAME]),
    "delete-many": lambda backend: backend.delete([NAME, NAME]),
    "objects": lambda backend: list(backend.objects(NAME.fingerprint)),
    "create_note": lambda backend: backend.create_note(NOTE, b"x"),
    "write_note": lambda backend: backend.write_note(NOTE, b"x"),
    "read_note": lambda backend: backend.read_note(NOTE),
    "list_notes": lambda backend: backend.list_notes(NOTE.fingerprint, NOTE.kind),
    "delete_note": lambda backend: backend.delete_note(NOTE),
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "CONNECT_S", 1.0)
    monkeypatch.setattr(s3_client, "ANSWER_S", 0.5)


@pytest.fixture
def opened() -> Iterator[Callable[..., S3Backend]]:
    made: list[S3Backend] = []

    def make(*arguments: object, **more: object) -> S3Backend:
        backend = S3Backend(*arguments, **more)  # type: ignore[arg-type]
        made.append(backend)
        return backend

    yield make
    for backend in made:
        backend.close()


@pytest.fixture
def some_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


@pytest.fixture
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the machine's own is found either."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def target(s3_server: S3Server, s3_environment: None) -> BucketTarget:
    s3_server.make_bucket(BUCKET)
    return bucket_target(s3_server.endpoint)


def refusal(backend: S3Backend, operation: str) -> BackendError:
    with pytest.raises(BackendError) as caught:
        OPERATIONS[operation](backend)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("bucket ")
    assert not any(secret in message for secret in (SECRET_KEY, TOKEN, os.environ.get("AWS_SECRET_ACCESS_KEY", "?")))
    return caught.value


def refusals(backend: S3Backend) -> set[str]:
    """Codes of all operations, each of which must fail."""
    return {refusal(backend, operation).code for operation in OPERATIONS}


# -- what a real server says


def test_a_missing_bucket(opened, s3_server: S3Server, s3_environment: None) -> None:
    backend = opened(bucket_target(s3_server.endpoint, bucket="not-there"))
    assert refusals(backend) == {"BucketNotFound"}
    place = f"bucket not-there at {s3_server.endpoint}"
    assert str(refusal(backend, "probe")) == f"{place} does not exist: create it or correct the name"


def test_a_bucket_that_vanishes_and_returns(opened, s3_server: S3Server, s3_environment: None) -> None:
    folder = s3_server.make_bucket("comes-and-goes")
    backend = opened(bucket_target(s3_server.endpoint, bucket="comes-and-goes"))
    backend.probe()
    backend.write(NAME, HEADER, PAYLOAD)
    hidden = folder.rename(s3_server.directory / "hidden-from-us")
    assert refusals(backend) == {"BucketNotFound"}
    hidden.rename(folder)
    assert backend.exists([NAME]) == [True]
    assert read(backend) is Outcome.HIT
    backend.probe()


@pytest.mark.parametrize(
    ("variable", "told"),
    [("AWS_SECRET_ACCESS_KEY", "SignatureDoesNotMatch"), ("AWS_ACCESS_KEY_ID", "XAdminUserNotFound")],
)
def test_wrong_keys(opened, target: BucketTarget, monkeypatch: pytest.MonkeyPatch, variable: str, told: str) -> None:
    monkeypatch.setenv(variable, "wrong" * 5)
    backend = opened(target)
    assert refusals(backend) == {"AccessDenied"}
    assert f"refuses us ({told}): check the keys" in str(refusal(backend, "exists"))


def test_a_region_that_is_not_the_buckets(opened, s3_server: S3Server, s3_environment: None) -> None:
    s3_server.make_bucket(BUCKET)
    backend = opened(bucket_target(s3_server.endpoint, region="eu-west-7"))
    assert refusals(backend) == {"WrongRegion"}
    assert str(refusal(backend, "probe")).endswith("lies in region us-east-1: set region to that")


def test_no_region_is_needed(opened, target: BucketTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    opened(target).probe()


def test_a_server_that_is_not_up_yet_and_then_is_restarted(
    opened, s3_program: Path, s3_environment: None, s3_server: S3Server, tmp_path: Path
) -> None:
    """The connections that the client keeps are dead then, and it must notice."""
    server = S3Server(tmp_path / "s3")
    server.access_key, server.secret_key = s3_server.access_key, s3_server.secret_key
    server.make_bucket(BUCKET)
    backend = opened(bucket_target(server.endpoint))
    assert refusal(backend, "probe").code == "EndpointUnreachable"
    with server:
        backend.probe()
        backend.write(NAME, HEADER, PAYLOAD)
        assert backend.exists([NAME] * 16) == [True] * 16
        server.stop()
        assert refusals(backend) == {"EndpointUnreachable"}
        server.start()
        assert backend.exists([NAME] * 16) == [True] * 16
        assert read(backend) is Outcome.HIT


# -- the connection


def test_nobody_listens(opened, some_keys: None) -> None:
    backend = opened(bucket_target(closed_port()))
    assert refusals(backend) == {"EndpointUnreachable"}
    assert "cannot be reached (Connection refused): check the endpoint" in str(refusal(backend, "probe"))


def test_no_such_host(opened, some_keys: None) -> None:
    assert refusal(opened(bucket_target("http://nowhere.invalid")), "read").code == "EndpointUnreachable"


@pytest.mark.parametrize("operation", ["read", "write", "exists", "touch"])
def test_a_server_that_never_answers(opened, some_keys: None, operation: str) -> None:
    with silent_server() as endpoint:
        begun = time.monotonic()
        assert refusal(opened(bucket_target(endpoint)), operation).code == "Timeout"
        assert time.monotonic() - begun < 12.0


def test_a_body_that_stalls(opened, some_keys: None) -> None:
    stopped = threading.Event()
    stalling = found(HEADER_SIZE + len(PAYLOAD), sent=9000, then=lambda: stopped.wait(20.0))
    with ScriptedServer(stalling, found(HEADER_SIZE + len(PAYLOAD))) as server:
        backend = opened(bucket_target(server.endpoint))
        assert refusal(backend, "read").code == "Timeout"
        assert read(backend) is Outcome.HIT
        stopped.set()


def test_a_body_that_ends_early(opened, some_keys: None) -> None:
    with ScriptedServer(found(HEADER_SIZE + len(PAYLOAD), sent=9000), found(HEADER_SIZE + len(PAYLOAD))) as server:
        backend = opened(bucket_target(server.endpoint))
        error = refusal(backend, "read")
        assert (error.code, "the connection was lost" in str(error)) == ("EndpointUnreachable", True)
        assert read(backend) is Outcome.HIT


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """Signed by itself, for 127.0.0.1."""
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subject = ["-subj", "/CN=s3", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


def test_tls(
    opened, s3_program: Path, tmp_path: Path, certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The authority is the one of the bundle, which may come or be replaced under a running pod."""
    with S3Server(tmp_path / "s3", certificate=certificate) as server:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
        server.make_bucket(BUCKET)
        untrusting = opened(bucket_target(server.endpoint))
        for operation in ("read", "write", "exists"):
            assert refusal(untrusting, operation).code == "TlsFailed"
        message = str(refusal(untrusting, "probe"))
        assert "certificate" in message
        assert "caBundleConfigMap" in message

        bundle = tmp_path / "ca.crt"
        trusting = opened(bucket_target(server.endpoint, ca_bundle_config_map="ca"), ca_bundle=bundle)
        assert refusal(trusting, "probe").code == "TlsFailed"
        bundle.write_bytes(certificate[0].read_bytes())
        trusting.probe()
        assert trusting.write(NAME, HEADER, PAYLOAD)
        assert read(trusting) is Outcome.HIT

        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate[0]))
        opened(bucket_target(server.endpoint)).probe()


def test_tls_to_a_server_that_speaks_none(opened, target: BucketTarget) -> None:
    plain = str(target.endpoint).replace("http:", "https:")
    assert refusal(opened(bucket_target(plain)), "read").code == "TlsFailed"


# -- what only some servers say, and only sometimes

ANSWERS: list[tuple[Answer, str, str]] = [
    (error(403, "AccessDenied"), "AccessDenied", "refuses us (AccessDenied): check the keys"),
    (error(403, "InvalidAccessKeyId"), "AccessDenied", "refuses us (InvalidAccessKeyId): check the keys"),
    (error(400, "ExpiredToken"), "CredentialsExpired", "have expired: renew them"),
    (error(403, "RequestTimeTooSkewed"), "ClockSkew", "clock is wrong: set it right"),
    (error(503, "SlowDown"), "Throttled", "is throttled (SlowDown)"),
    (error(503, ""), "Throttled", "is throttled (status 503)"),
    (error(500, "InternalError"), "ServerError", "has failed (InternalError)"),
    (error(502, "<html>"), "ServerError", "has failed (status 502)"),
    (
        error(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-north-9"}),
        "WrongRegion",
        "region eu-north-9:",
    ),
    (error(400, "AuthorizationHeaderMalformed", "<Region>eu-north-9</Region>"), "WrongRegion", "region eu-north-9:"),
    (error(301, "PermanentRedirect"), "WrongRegion", "another region, which the server does not name"),
    (error(400, "QuotaExceeded"), "QuotaExceeded", "answers QuotaExceeded: see the server's documentation"),
    (error(418, "what is this"), "Http418", "answers status 418"),
]


@pytest.mark.parametrize(("answer", "code", "text"), ANSWERS, ids=lambda value: value if isinstance(value, str) else "")
@pytest.mark.parametrize("operation", ["probe", "exists", "read", "write", "touch", "delete-many", "objects"])
def test_each_answer_has_a_code_and_a_remedy(
    opened, some_keys: None, monkeypatch: pytest.MonkeyPatch, answer: Answer, code: str, text: str, operation: str
) -> None:
    """The server sends back all that it was sent in its message: none of it may be told on."""
    monkeypatch.setattr(s3_client, "ATTEMPTS", 1)
    with ScriptedServer(answer) as server:
        refused = refusal(opened(bucket_target(server.endpoint)), operation)
    assert refused.code == code
    if operation != "exists" or code not in ("Throttled", "ServerError"):  # HEAD has no text
        assert text in str(refused)


def test_throttled_for_a_moment_is_no_failure(opened, some_keys: None) -> None:
    with ScriptedServer(*[error(503, "SlowDown")] * 2, found(HEADER_SIZE + len(PAYLOAD))) as server:
        assert read(opened(bucket_target(server.endpoint))) is Outcome.HIT
        assert len(server.requests) == 3


def test_a_write_is_sent_again_from_its_start(opened, some_keys: None) -> None:
    with ScriptedServer(error(500, "InternalError"), done) as server:
        assert opened(bucket_target(server.endpoint)).write(NAME, HEADER, PAYLOAD)
        assert len(server.requests) == 2


def test_a_write_that_somebody_else_is_making_is_tried_once_more(opened, some_keys: None) -> None:
    conflict = error(409, "ConditionalRequestConflict")
    with ScriptedServer(conflict, done) as server:
        assert opened(bucket_target(server.endpoint)).write(NAME, HEADER, PAYLOAD)
    with ScriptedServer(conflict) as server:
        assert not opened(bucket_target(server.endpoint)).write(NAME, HEADER, PAYLOAD)
        assert not opened(bucket_target(server.endpoint)).create_note(NOTE, b"x")
        assert len(server.requests) == 4


def test_what_is_there_is_not_sent(opened, some_keys: None) -> None:
    """The server refuses when it has seen the header of the put, and reads no further."""
    with ScriptedServer(error(412, "PreconditionFailed")) as server:
        backend = opened(bucket_target(server.endpoint))
        begun = time.monotonic()
        assert not backend.write(NAME, HEADER, bytes(64 << 20))
        assert time.monotonic() - begun < 5.0
        assert len(server.requests) == 1


def test_little_is_sent_without_asking(opened, some_keys: None) -> None:
    """It would cost a round trip more than it could save."""
    expected: list[str | None] = []

    def note(request) -> None:
        expected.append(request.headers.get("Expect"))
        error(412, "PreconditionFailed")(request)

    with ScriptedServer(note) as server:
        backend = opened(bucket_target(server.endpoint))
        assert not backend.write(NAME, HEADER, bytes(256 << 10))
        assert not backend.write(NAME, HEADER, bytes(8 << 20))
    assert expected == [None, "100-continue"]


def test_a_server_that_cannot_put_on_condition(opened, some_keys: None) -> None:
    with ScriptedServer(error(501, "NotImplemented")) as server:
        refused = refusal(opened(bucket_target(server.endpoint)), "write")
    assert refused.code == "Unsupported"
    assert "it must honour a put with If-None-Match" in str(refused)


# -- credentials


def write_keys(folder: Path, access: str, secret: str, token: str | None = None) -> None:
    """As the kubelet does it: a new folder, then a link to it in one step."""
    fresh = folder / f"..{time.monotonic_ns()}"
    fresh.mkdir(parents=True)
    keys = {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret, "AWS_SESSION_TOKEN": token}
    for name, value in keys.items():
        if value is not None:
            (fresh / name).write_text(value + "\n")
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..new").symlink_to(fresh.name)
    (folder / "..new").rename(folder / "..data")


def test_keys_in_files_come_and_are_replaced_under_a_running_pod(
    opened, s3_server: S3Server, no_keys: None, tmp_path: Path
) -> None:
    s3_server.make_bucket(BUCKET)
    folder = tmp_path / "secret"
    backend = opened(bucket_target(s3_server.endpoint, credentials_secret="keys"), credentials=folder)
    assert refusals(backend) == {"NoCredentials"}
    assert "credentialsSecret" in str(refusal(backend, "probe"))
    write_keys(folder, s3_server.access_key, "old")
    assert refusal(backend, "read").code == "AccessDenied"
    write_keys(folder, s3_server.access_key, s3_server.secret_key)
    backend.probe()
    assert backend.write(NAME, HEADER, PAYLOAD)
    write_keys(folder, "", "")
    assert refusal(backend, "read").code == "NoCredentials"
    write_keys(folder, s3_server.access_key, s3_server.secret_key)
    assert read(backend) is Outcome.HIT


def test_a_session_token_is_sent(opened, no_keys: None, tmp_path: Path) -> None:
    """And no more when the next keys have none."""
    sent: list[str | None] = []

    def note(request) -> None:
        sent.append(request.headers.get("X-Amz-Security-Token"))
        error(404, "NoSuchKey")(request)

    with ScriptedServer(note) as server:
        backend = opened(bucket_target(server.endpoint, credentials_secret="keys"), credentials=tmp_path)
        write_keys(tmp_path, ACCESS_KEY, SECRET_KEY, TOKEN)
        assert read(backend) is Outcome.MISS
        write_keys(tmp_path, ACCESS_KEY, SECRET_KEY)
        assert read(backend) is Outcome.MISS
    assert sent == [TOKEN, None]


def test_an_identity_that_comes_late(
    opened, s3_server: S3Server, no_keys: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an instance's or a web identity does: looked up again after some seconds without one."""
    monkeypatch.setattr(s3_client, "RENEW_S", 0.0)
    s3_server.make_bucket(BUCKET)
    backend = opened(bucket_target(s3_server.endpoint))
    assert refusal(backend, "read").code == "NoCredentials"
    assert refusal(backend, "exists-many").code == "NoCredentials"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    backend.probe()
