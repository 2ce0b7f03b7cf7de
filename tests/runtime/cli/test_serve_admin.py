"""The admin port of a real process, started from a wire document as a pod is: changed storage serves the next pod."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from speccache_api.geometry import builtin_facts
from speccache_api.sizing import size_memory
from speccache_api.wire import build_wire
from speccache_runtime.bench.client import complete
from speccache_runtime.bench.server import Server
from speccache_runtime.core import Tier
from speccache_runtime.local import parse_resource, read_resource

pytestmark = pytest.mark.program

SAMPLE = Path(__file__).parents[3] / "samples" / "tiny.yaml"
TOKEN = "of-the-secret"
PROMPT = "def restore(page: int) -> bytes:\n    return storage.read(page)\n" * 3


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """Where the volume of the resource is mounted, with a folder for another storage."""
    made = tmp_path / "storage"
    (made / "second").mkdir(parents=True)
    return made


@pytest.fixture
def admin_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def pod(tmp_path: Path, mount: Path, admin_port: int) -> Callable[[], Server]:
    """Starts what a pod of the sample runs, with an admin port and a mount point of its own, whose salt is demanded."""
    resource = parse_resource(read_resource(SAMPLE), SAMPLE)
    inspection = builtin_facts("tiny")
    document: dict[str, Any] = json.loads(
        build_wire(resource, inspection, size_memory(resource.spec, inspection)).to_json()
    )
    document["kvCache"]["storage"]["target"]["path"] = str(mount)
    document["kvCache"]["requireCacheSalt"] = True
    (tmp_path / "token").write_text(TOKEN)
    document["admin"] = {"port": admin_port, "tokenPath": str(tmp_path / "token")}
    wire = tmp_path / "wire.json"
    wire.write_text(json.dumps(document))
    return lambda: Server("--wire", wire, "--host", "127.0.0.1")


def cached(server: Server, salt: str) -> dict[str, int]:
    """Cached tokens of a request, by tier."""
    details = complete(server.url, "tiny", PROMPT, 8, salt=salt).usage["prompt_tokens_details"]
    return {tier: details[tier] for tier in Tier if details[tier]}


def test_storage_is_changed_and_flushed_while_a_pod_serves(
    pod: Callable[[], Server], mount: Path, admin_port: int
) -> None:
    url = f"http://127.0.0.1:{admin_port}/admin/storage"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    second = {"kind": "Volume", "path": str(mount / "second"), "capacityBytes": 2**30}
    with pod() as server, httpx.Client(headers=headers, timeout=60) as admin:
        assert httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 400
        assert httpx.get(url).status_code == 401
        assert httpx.get(f"{server.url}/admin/storage", headers=headers).status_code == 404
        assert cached(server, "alice") == {}
        assert cached(server, "bob") == {}
        assert set(cached(server, "alice")) == {"device"}

        assert admin.post(f"{url}/flush").json()["leftPages"] == 0
        pages = len(list(mount.glob("v2/*/t/*/*/*")))
        shutil.rmtree(mount / "v2")
        assert admin.post(f"{url}/flush", json={"timeoutSeconds": 30}).json() == {"writtenPages": pages, "leftPages": 0}
        assert len(list(mount.glob("v2/*/t/*/*/*"))) == pages

        refused = admin.put(url, json=second | {"path": str(mount / "third")})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "ENOENT")
        assert admin.get(url).json()["attached"]["place"] == str(mount)
        assert admin.put(url, json=second).json()["attached"]["capacityBytes"] == 2**30
        assert admin.get(url).json()["attached"]["unstoredPages"] == pages
        assert admin.post(f"{url}/flush").json() == {"writtenPages": pages, "leftPages": 0}
        shutil.rmtree(mount / "v2")
        assert admin.delete(url).json()["attached"] is None
        assert set(cached(server, "bob")) == {"device"}
        assert admin.post(f"{url}/flush").status_code == 409
    assert not list(mount.glob("v2/*/t/*/*/*")), "the drain had no storage to write to"

    with pod() as server, httpx.Client(headers=headers, timeout=60) as admin:
        assert admin.get(url).json()["attached"]["place"] == str(mount), "a new pod is told what the resource says"
        assert admin.put(url, json=second).status_code == 200
        assert cached(server, "carol") == {}
        assert set(cached(server, "alice")) == set(cached(server, "bob")) == {"storage"}
