"""`cache_salt` in requests: handed on, never said again, and demanded where the resource says so."""

import dataclasses
import logging
from typing import Any

import pytest

from speccache_runtime.server.run import curl_line

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
SALT = "alice's own \u00e9"


@pytest.mark.parametrize("salt", [SALT, "x" * 512, None])
def test_the_engine_gets_the_salt(wire: Any, salt: str | None) -> None:
    assert wire.complete(cache_salt=salt).status_code == wire.say(cache_salt=salt).status_code == 200
    assert [request.salt for request in wire.engine.requests] == [salt, salt]
    assert all("salt" not in repr(request) for request in wire.engine.requests)


def test_a_salt_is_said_nowhere(wire: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Neither in an answer, nor in a log, nor in a metric, whether or not the request is a good one."""
    with caplog.at_level(logging.DEBUG):
        answers = [
            wire.complete(cache_salt=SALT),
            wire.complete(cache_salt=SALT, stream=True),
            wire.complete(cache_salt=SALT, prompt=7),
            wire.complete(cache_salt=SALT * 100),
            wire.http.get("/metrics"),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 400, 200]
    for said in [*(answer.text for answer in answers), caplog.text]:
        assert "alice" not in said


class TestDemanded:
    """A resource with `requireCacheSalt`."""

    @pytest.fixture
    def engine_config(self, engine_config: Any) -> Any:
        return dataclasses.replace(engine_config, require_cache_salt=True)

    @pytest.mark.parametrize("path", [CHAT, TEXT])
    def test_requests_without_are_refused(self, wire: Any, path: str) -> None:
        body = wire.chat if path == CHAT else wire.completion
        for missing in (body, body | {"cache_salt": None}):
            answer = wire.http.post(path, json=missing)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "cache_salt")
            assert "send a secret string of your own" in error["message"]
        assert wire.engine.requests == []
        assert wire.http.post(path, json=body | {"cache_salt": SALT}).status_code == 200

    def test_the_printed_request_has_one(self, engine_config: Any) -> None:
        assert '"cache_salt": "' in curl_line("127.0.0.1", 1, engine_config)


def test_the_printed_request_has_none_where_none_is_demanded(engine_config: Any) -> None:
    assert "cache_salt" not in curl_line("127.0.0.1", 1, engine_config)
