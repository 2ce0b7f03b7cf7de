"""A small OpenAI client for measuring: one streamed completion, timed as a client sees it.

Plain `http.client`, so that it runs wherever Python does: the restart benchmark and the cluster demo share it.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from speccache_runtime.errors import SpecCacheError


class ClientError(SpecCacheError):
    """The server refused, broke off, or could not be reached."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished completion. Times are in seconds, on this side of the wire.

    `first_token` is from sending to the first text, `total` to the end of the stream. `usage` is the server's.
    """

    text: str
    first_token: float
    total: float
    usage: dict[str, Any]

    @property
    def completion_tokens(self) -> int:
        return int(self.usage["completion_tokens"])

    @property
    def time_per_token(self) -> float | None:
        """Mean seconds per token after the first; None when there was only one."""
        later = self.completion_tokens - 1
        return (self.total - self.first_token) / later if later > 0 else None


def complete(
    base_url: str, model: str, prompt: str, max_tokens: int, timeout: float = 120, salt: str | None = None
) -> Answer:
    """Stream a greedy completion from `base_url` (`http://host:port`, a path before /v1 is kept), with `cache_salt` if
    there is a `salt`.

    Raises ClientError when the answer is an error, ends early, or does not come within `timeout` seconds.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": salt,
    }
    where = urlsplit(base_url)
    connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=timeout)
    try:
        # Connecting is not the server's time.
        connection.connect()
        begun = time.perf_counter()
        connection.request(
            "POST", f"{where.path.rstrip('/')}/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        return _read(connection.getresponse(), begun)
    except (OSError, http.client.HTTPException) as error:
        raise ClientError(f"{base_url}: {error or type(error).__name__}") from error
    finally:
        connection.close()


def _read(response: http.client.HTTPResponse, begun: float) -> Answer:
    if response.status != 200:
        raise ClientError(f"status {response.status}: {response.read(2000).decode(errors='replace')}")
    texts: list[str] = []
    first = last = None
    usage: dict[str, Any] | None = None
    for event in _events(response):
        if "error" in event:
            raise ClientError(f"the stream broke: {event['error']['message']}")
        last = time.perf_counter()
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            if choice["text"] and first is None:
                first = last
            texts.append(choice["text"])
    if usage is None or last is None:
        raise ClientError("the stream ended without usage")
    return Answer("".join(texts), (first or last) - begun, last - begun, usage)


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        data = line.strip()
        if data == b"data: [DONE]":
            return
        if data.startswith(b"data: "):
            yield json.loads(data[6:])
    raise ClientError("the stream ended early")
