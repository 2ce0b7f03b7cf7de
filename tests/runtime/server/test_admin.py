"""The admin port: who may ask, what is asked of the engine, and what is answered. The engine is scripted."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from speccache_api import names
from speccache_api.storage_target import BucketTarget, VolumeTarget
from speccache_runtime.cache.storage.base import BackendError
from speccache_runtime.cache.storage.breaker import BreakerState
from speccache_runtime.cache.storage.store import StoreState
from speccache_runtime.config import AdminConfig, StorageConfig
from speccache_runtime.engine.storage_report import Flushed, StorageReport
from speccache_runtime.errors import BadRequest, Conflict, EngineFailed, Overloaded, StorageError
from speccache_runtime.server.admin import create_admin_app
from speccache_runtime.server.app import create_app
from speccache_runtime.server.early import listen
from speccache_runtime.server.run import AdminPort, serve

TOKEN = "s3cr3t-Token"
BUCKET = BucketTarget(
    bucket="pages",
    prefix="a",
    endpoint="https://minio:9000",
    region=None,
    force_path_style=True,
    credentials_secret="keys",
    ca_bundle_config_map=None,
    service_account="runner",
)


@dataclass
class ScriptedStorage:
    """Keeps what it is told; `error` is raised by every change."""

    attached: StorageConfig | None
    error: Exception | None = None
    flushes: list[float] = field(default_factory=list)

    def report(self) -> StorageReport:
        if self.attached is None:
            return StorageReport(None, None, 0, 1)
        state = StoreState(BreakerState.CLOSED, BreakerState.OPEN, 4096, 2, self.attached.capacity_bytes)
        return StorageReport(self.attached, state, 3, 0)

    def attach(self, storage: StorageConfig) -> None:
        self._fail()
        self.attached = storage

    def detach(self) -> None:
        self._fail()
        self.attached = None

    def flush(self, timeout: float) -> Flushed:
        self._fail()
        self.flushes.append(timeout)
        return Flushed(7, 1)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class Port:
    http: httpx.Client
    storage: ScriptedStorage
    token: Path
    mount: Path
    engine: Any

    def ask(self, method: str, path: str = "/admin/storage", **more: Any) -> httpx.Response:
        return self.http.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"}, **more)

    def refusal(self, body: object) -> tuple[int, str | None, str]:
        """Status, field and message of a refused PUT; nothing has changed."""
        before = self.storage.attached
        answer = self.ask("PUT", json=body)
        assert self.storage.attached is before
        error = answer.json()["error"]
        return answer.status_code, error["param"], error["message"]


@pytest.fixture
def at_start(tmp_path: Path) -> StorageConfig | None:
    """What the resource names: a volume, whose mount point is in a temporary folder here."""
    mount = tmp_path / "mount"
    mount.mkdir()
    return StorageConfig(VolumeTarget(claim="pages", path=str(mount)), "Degrade", 10_000)


@pytest.fixture
def port(
    listening: Any, engine_config: Any, make_engine: Any, make_tokenizer: Any, tmp_path: Path, at_start: Any
) -> Iterator[Port]:
    swappable, number = listening
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    engine, storage = make_engine(), ScriptedStorage(at_start)
    state = create_app(engine, make_tokenizer(), engine_config, CollectorRegistry()).state.server
    swappable.app = create_admin_app(state, lambda: storage, AdminConfig(1, token), at_start)
    with httpx.Client(base_url=f"http://127.0.0.1:{number}", timeout=10, verify=False) as http:
        yield Port(http, storage, token, tmp_path / "mount", engine)


# ---- who may ask


EVERYTHING = [
    ("GET", "/admin/storage"),
    ("PUT", "/admin/storage"),
    ("DELETE", "/admin/storage"),
    ("POST", "/admin/storage/flush"),
    ("GET", "/nothing"),
    ("GET", "/metrics"),
]


@pytest.mark.parametrize(("method", "path"), EVERYTHING)
@pytest.mark.parametrize(
    "authorization",
    [None, "", TOKEN, "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer s3cr3t-token", "Bearer \xe9"],
)
def test_without_the_token_nobody_gets_anything(port: Port, method: str, path: str, authorization: str | None) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    answer = port.http.request(method, path, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthorized")
    assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert TOKEN not in answer.text
    assert port.storage.flushes == []
    assert port.storage.attached is not None


def test_two_tokens_are_none(port: Port) -> None:
    answer = port.http.get("/admin/storage", headers=[("Authorization", f"Bearer {TOKEN}"), ("Authorization", "no")])
    assert answer.status_code == 401


def test_a_changed_token_counts_at_once(port: Port) -> None:
    assert port.ask("GET").status_code == 200
    port.token.write_text("another")
    assert port.ask("GET").status_code == 401
    assert port.http.get("/admin/storage", headers={"Authorization": "bearer another"}).status_code == 200


@pytest.mark.parametrize("content", [None, "", " \n", "x" * 4097])
def test_without_a_token_to_compare_everybody_is_refused(
    port: Port, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    port.token.unlink()
    if content is not None:
        port.token.write_text(content)
    for value in ("Bearer", f"Bearer {TOKEN}", f"Bearer {content}".strip()):
        answer = port.http.get("/admin/storage", headers={"Authorization": value})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_token")
    assert "the admin port refuses everybody" in caplog.text


# ---- what is attached


def test_what_is_attached(port: Port) -> None:
    assert port.ask("GET").json() == {
        "attached": {
            "kind": "Volume",
            "place": str(port.mount),
            "usedBytes": 4096,
            "objects": 2,
            "capacityBytes": 10_000,
            "breakers": {"read": "closed", "write": "open"},
            "unstoredPages": 3,
        },
        "endingStorages": 0,
    }
    port.storage.attached = StorageConfig(BUCKET, "Recompute")
    assert port.ask("GET").json()["attached"]["place"] == "s3://pages/a at https://minio:9000"
    assert "keys" not in port.ask("GET").text


def test_detached(port: Port) -> None:
    answer = port.ask("DELETE")
    assert (answer.status_code, answer.json()) == (200, {"attached": None, "endingStorages": 1})
    assert port.ask("GET").json() == answer.json()


def test_a_volume_is_attached_below_the_mount_point(port: Port) -> None:
    for path in (port.mount, port.mount / "deep" / "er"):
        body = {"kind": "Volume", "path": str(path), "claim": "pages", "capacityBytes": 5000}
        answer = port.ask("PUT", json=body)
        assert (answer.status_code, answer.json()["attached"]["place"]) == (200, str(path))
        wanted = VolumeTarget(claim="pages", path=str(path))
        assert port.storage.attached == StorageConfig(wanted, "Degrade", 5000), "the resource says what a lost half is"


@pytest.mark.parametrize(
    "path", ["/", "/etc", "relative", "", "{mount}/../other", "{mount}x", "{mount}/link", "{mount}/link/x", 7, None]
)
def test_no_other_path_is_reached(port: Port, path: object) -> None:
    """Not by a link on the volume either."""
    (port.mount / "link").symlink_to("/etc")
    wanted = path.format(mount=port.mount) if isinstance(path, str) else path
    status, param, message = port.refusal({"kind": "Volume", "path": wanted})
    assert (status, param) == (400, "path")
    assert message.startswith("path: ")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "kind"),
        ({"kind": "Disk"}, "kind"),
        ({"kind": "Volume"}, "path"),
        ({"kind": "Volume", "path": "{mount}", "claim": "other"}, "claim"),
        ({"kind": "Volume", "path": "{mount}", "capacityBytes": 0}, "capacityBytes"),
        ({"kind": "Volume", "path": "{mount}", "capacityBytes": "1"}, "capacityBytes"),
        ({"kind": "Volume", "path": "{mount}", "size": 1}, "size"),
        ({"kind": "Bucket"}, "bucket"),
        ({"kind": "Bucket", "bucket": "No"}, "bucket"),
        ({"kind": "Bucket", "bucket": "pages", "prefix": "a/../b"}, "prefix"),
        ({"kind": "Bucket", "bucket": "pages", "endpoint": "https://me:pw@minio"}, "endpoint"),
        ({"kind": "Bucket", "bucket": "pages", "credentialsSecret": "keys"}, "credentialsSecret"),
        ({"kind": "Bucket", "bucket": "pages", "caBundleConfigMap": "ca"}, "caBundleConfigMap"),
        ({"kind": "Bucket", "bucket": "pages", "serviceAccount": "me"}, "serviceAccount"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(port: Port, body: dict[str, Any], param: str) -> None:
    if "path" in body:
        body = body | {"path": str(port.mount)}
    status, named, message = port.refusal(body)
    assert (status, named) == (400, param)
    assert message.startswith(f"{param}: ")


def test_a_bucket_with_the_pods_own_identity(port: Port) -> None:
    answer = port.ask("PUT", json={"kind": "Bucket", "bucket": "pages", "prefix": "a"})
    assert answer.status_code == 200
    assert port.storage.attached is not None
    target = port.storage.attached.target
    assert isinstance(target, BucketTarget)
    assert (target.url, target.credentials_secret, target.service_account) == ("s3://pages/a", None, None)


class TestWithBucket:
    """A resource that names a bucket: its credentials are mounted, and no volume is."""

    @pytest.fixture
    def at_start(self) -> StorageConfig:
        return StorageConfig(BUCKET, "Recompute")

    def test_the_mounted_credentials_are_used(self, port: Port) -> None:
        body = BUCKET.model_dump(mode="json", by_alias=True) | {"prefix": "b"}
        assert port.ask("PUT", json=body).status_code == 200
        assert port.storage.attached == StorageConfig(BUCKET.model_copy(update={"prefix": "b"}), "Recompute")

    def test_no_others_can_be_named(self, port: Port) -> None:
        body = BUCKET.model_dump(mode="json", by_alias=True) | {"credentialsSecret": "others"}
        assert port.refusal(body)[:2] == (400, "credentialsSecret")

    def test_volumes_are_where_they_would_be_mounted(self, port: Port) -> None:
        status, param, message = port.refusal({"kind": "Volume", "path": str(port.token.parent)})
        assert (status, param) == (400, "path")
        assert names.STORAGE_PATH in message


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (BackendError("ENOENT", "no such folder: mount it"), 422, "ENOENT"),
        (StorageError("has not answered"), 422, "storage_unusable"),
        (Conflict("2 ranks serve", "several_ranks"), 409, "several_ranks"),
        (BadRequest("capacityBytes", "too small"), 400, "invalid_value"),
        (Overloaded("busy"), 503, "overloaded"),
    ],
    ids=str,
)
def test_why_it_was_not_possible(port: Port, error: Exception, status: int, code: str) -> None:
    port.storage.error = error
    before = port.storage.attached
    for answer in (
        port.ask("PUT", json={"kind": "Volume", "path": str(port.mount)}),
        port.ask("DELETE"),
        port.ask("POST", "/admin/storage/flush"),
    ):
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
        assert str(error) in answer.json()["error"]["message"]
    assert port.storage.attached is before


# ---- flush


def test_a_flush_says_what_was_written(port: Port) -> None:
    assert port.ask("POST", "/admin/storage/flush").json() == {"writtenPages": 7, "leftPages": 1}
    assert port.ask("POST", "/admin/storage/flush", json={"timeoutSeconds": 5}).status_code == 200
    assert port.storage.flushes == [60, 5]


@pytest.mark.parametrize("body", [{"timeoutSeconds": 0}, {"timeoutSeconds": 3601}, {"timeoutSeconds": "5"}])
def test_a_wrong_time_limit(port: Port, body: dict[str, Any]) -> None:
    answer = port.ask("POST", "/admin/storage/flush", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeoutSeconds")


# ---- the port


def test_a_large_body_and_broken_json(port: Port) -> None:
    assert port.ask("PUT", content=b"x" * 70_000).status_code == 413
    assert port.ask("PUT", content=b"{").json()["error"]["code"] == "invalid_json"
    assert port.ask("GET", "/nothing").json()["error"]["code"] == "unknown_url"


def test_nothing_is_asked_before_the_model_is_loaded(port: Port) -> None:
    port.engine.ready = False
    for method, path in EVERYTHING[:1] + EVERYTHING[2:4]:
        answer = port.ask(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "loading")


def test_the_two_ports_have_nothing_in_common(
    engine_config: Any, make_engine: Any, make_tokenizer: Any, tmp_path: Path
) -> None:
    """One process serves both, and ends both."""
    token = tmp_path / "token"
    token.write_text(TOKEN)
    engine, config = make_engine(), AdminConfig(0, token)
    found: dict[str, int] = {}
    with listen("127.0.0.1", 0) as listener, listen("127.0.0.1", 0) as admin_listener:
        serving, admin = (each.getsockname()[1] for each in (listener, admin_listener))

        def ask() -> None:
            with httpx.Client(timeout=10, verify=False, headers={"Authorization": f"Bearer {TOKEN}"}) as http:
                for name, port in (("serving", serving), ("admin", admin)):
                    for path in ("/admin/storage", "/health", "/v1/models"):
                        found[name + path] = http.get(f"http://127.0.0.1:{port}{path}").status_code
            engine.failed = "over"
            engine.over.set()

        asking = threading.Thread(target=ask)
        asking.start()
        port = AdminPort(admin_listener, config, lambda: ScriptedStorage(None))
        with pytest.raises(EngineFailed, match="over"):
            serve(listener, engine, make_tokenizer(), engine_config, CollectorRegistry(), lambda text: None, 4, port)
        asking.join(10)
    assert found == {
        "serving/admin/storage": 404,
        "serving/health": 200,
        "serving/v1/models": 200,
        "admin/admin/storage": 200,
        "admin/health": 404,
        "admin/v1/models": 404,
    }


def test_the_token_is_never_logged(port: Port, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        port.ask("GET")
        port.ask("PUT", json={"kind": "Volume", "path": str(port.mount)})
        port.http.get("/admin/storage", headers={"Authorization": "Bearer wrong-guess"})
    assert "attached" in caplog.text
    assert TOKEN not in caplog.text
    assert "wrong-guess" not in caplog.text
