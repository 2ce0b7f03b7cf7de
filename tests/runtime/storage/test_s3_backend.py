"""What only a bucket's backend must do: no second copy of a page, few requests, few connections."""

import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import boto3
import pytest

from speccache_runtime.cache.storage import s3_bucket, s3_client
from speccache_runtime.cache.storage.base import BackendError, ObjectName
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Half
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.registry import open_backend
from speccache_runtime.cache.storage.s3 import LEFTOVER_AGE_S, S3Backend
from speccache_runtime.cache.storage.s3_body import SLICE_BYTES, Upload
from speccache_tools.cluster.s3_server import S3Server

from .places import BUCKET, bucket_target
from .servers import ScriptedServer, done, error, found

NAME = ObjectName("0f" * 32, Half.TARGET, "ab" * 32, "cd" * 32, "5e" * 8)
OTHER = ObjectName("0f" * 32, Half.TARGET, "ab" * 32, "ce" * 32, "5e" * 8)
HEADER = bytes(range(256)) * 16
PAGE = 8 << 20


@pytest.fixture
def backend(s3_server: S3Server, s3_environment: None) -> Iterator[S3Backend]:
    s3_server.make_bucket(BUCKET)
    made = S3Backend(bucket_target(s3_server.endpoint))
    made.probe()
    yield made
    made.close()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[ScriptedServer], S3Backend]]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    made: list[S3Backend] = []

    def make(server: ScriptedServer) -> S3Backend:
        made.append(S3Backend(bucket_target(server.endpoint)))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def test_a_target_is_opened_by_the_registry(s3_server: S3Server, s3_environment: None) -> None:
    s3_server.make_bucket(BUCKET)
    opened = open_backend(bucket_target(s3_server.endpoint))
    assert isinstance(opened, S3Backend)
    opened.close()
    with pytest.raises(BackendError, match=r"bucket nowhere at http:.* does not exist: create it"):
        open_backend(bucket_target(s3_server.endpoint, bucket="nowhere"))


def most_memory(action: Callable[[], object]) -> int:
    """Bytes that Python has taken at the worst moment of the action."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        action()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


def test_a_page_is_copied_nowhere(backend: S3Backend) -> None:
    """A read or a write of 8 MiB takes less than a thirtieth of that."""
    page = os.urandom(PAGE)
    header, into = bytearray(HEADER_SIZE), bytearray(PAGE)
    backend.write(OTHER, HEADER, page)  # what is made once is made now
    backend.read(OTHER, header, memoryview(into))

    assert most_memory(lambda: backend.write(NAME, HEADER, memoryview(page))) < PAGE // 30
    assert most_memory(lambda: backend.read(NAME, header, memoryview(into))) < PAGE // 30
    assert (header, into) == (HEADER, page)
    assert most_memory(lambda: bytes(into)) > PAGE  # the measure sees a copy


def test_an_upload_is_the_buffers_in_slices() -> None:
    """Slices of the callers' own memory, from the start as often as wanted."""
    page = bytearray(os.urandom(3 * SLICE_BYTES + 5))
    upload = Upload([memoryview(HEADER), memoryview(page)])
    assert len(upload) == HEADER_SIZE + len(page)
    for _ in range(2):
        slices = []
        while part := upload.read(16_384):
            assert isinstance(part, memoryview)
            assert part.obj in (HEADER, page)
            assert len(part) <= SLICE_BYTES
            slices.append(part)
        assert b"".join(slices) == HEADER + page
        assert upload.tell() == len(upload)
        assert upload.seek(0) == upload.tell() == 0
    with pytest.raises(OSError, match="start"):
        upload.seek(1)


def test_connections_are_used_again(scripted) -> None:
    ports: set[int] = set()

    def note(request) -> None:
        ports.add(request.client_address[1])
        found(HEADER_SIZE + 100)(request)

    with ScriptedServer(note) as server:
        backend = scripted(server)
        for _ in range(20):
            assert backend.read(NAME, bytearray(HEADER_SIZE), memoryview(bytearray(100))).outcome is Outcome.HIT
    assert len(ports) == 1


def test_no_more_connections_than_allowed(scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_bucket, "CONNECTIONS", 5)
    monkeypatch.setattr(s3_client, "CONNECTIONS", 5)
    ports: set[int] = set()
    both, lock, full = [0, 0], threading.Lock(), threading.Event()

    def slow(request) -> None:
        with lock:
            ports.add(request.client_address[1])
            both[0] += 1
            both[1] = max(both)
            if both[0] == 5:
                full.set()
        full.wait(10.0)
        with lock:
            both[0] -= 1
        found(HEADER_SIZE + 100)(request)

    with ScriptedServer(slow) as server, ThreadPoolExecutor(20) as pool:
        backend = scripted(server)
        reads = [pool.submit(backend.read, NAME, bytearray(HEADER_SIZE), memoryview(bytearray(100))) for _ in range(40)]
        assert {read.result().outcome for read in reads} == {Outcome.HIT}
    assert both[1] == 5
    assert len(ports) == 5


def test_names_are_looked_for_at_the_same_time(scripted) -> None:
    """Sixteen, which is what is asked for at once: none is answered before all have come."""
    together = threading.Barrier(16, timeout=10.0)

    def wait(request) -> None:
        together.wait()
        found(0)(request)

    with ScriptedServer(wait) as server:
        assert scripted(server).exists([NAME] * 16) == [True] * 16


def test_requests_of_a_write_and_of_a_lookup(scripted) -> None:
    """Nothing is asked before a write. That all names are missing is believed for a while."""
    with ScriptedServer(done) as server:
        assert scripted(server).write(NAME, HEADER, b"p")
        assert [request.split()[0] for request in server.requests] == ["PUT"]
    with ScriptedServer(error(404, "NoSuchKey")) as server:
        backend = scripted(server)
        for _ in range(5):
            assert backend.exists([NAME, OTHER]) == [False, False]
        methods = [request.split()[0] for request in server.requests]
        assert (methods.count("HEAD"), methods.count("GET"), len(methods)) == (10, 1, 11)


def test_a_server_that_puts_although_there_is_one_is_refused(scripted) -> None:
    """It takes the condition and does not honour it: two writers of a lease would both have it."""

    def answer(request) -> None:
        if request.command == "GET":
            body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
            request.send_response(200)
            request.send_header("Content-Length", str(len(body)))
            request.end_headers()
            request.wfile.write(body)
        else:
            done(request)

    with ScriptedServer(answer) as server:
        with pytest.raises(BackendError) as caught:
            scripted(server).probe()
        assert caught.value.code == "Unsupported"
        assert server.requests[-1].startswith("DELETE ")


def test_leftovers_of_probes_go_when_they_are_old(
    backend: S3Backend, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bucket_target(s3_server.endpoint)
    client = boto3.client("s3", endpoint_url=s3_server.endpoint)
    folder = f"{target.prefix}/v2/tmp"
    old, young, foreign = f"{folder}/probe-{'0' * 32}", f"{folder}/probe-{'1' * 32}", f"{folder}/notes.txt"
    past = time.time() - LEFTOVER_AGE_S - 60
    for key in (old, young, foreign):
        client.put_object(Bucket=BUCKET, Key=key, Body=b"x")
    for key in (old, foreign):
        os.utime(s3_server.directory / BUCKET / key, (past, past))
    other = S3Backend(target)
    other.probe()
    other.close()
    left = [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=folder)["Contents"]]
    client.close()
    assert sorted(left) == sorted([young, foreign])


def test_a_touch_moves_no_page_where_copies_are_dated_anew(scripted) -> None:
    """As S3 does it, and versitygw does not: see the conformance suite for that."""

    def copy(request) -> None:
        assert request.headers["x-amz-metadata-directive"] == "REPLACE"
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        body = f"<CopyObjectResult><LastModified>{now}</LastModified><ETag>x</ETag></CopyObjectResult>".encode()
        request.send_response(200)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        request.wfile.write(body)

    with ScriptedServer(copy) as server:
        assert scripted(server).touch(NAME)
        assert len(server.requests) == 1


def test_the_library_is_imported_only_for_a_bucket() -> None:
    program = (
        "import sys, speccache_runtime.cache.storage.registry, speccache_runtime.cache.storage.file;"
        "assert not sys.modules.keys() & {'boto3', 'botocore'}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    program = "import sys, speccache_runtime.cache.storage.s3; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
