"""Response bodies of the completion endpoints, whole and as stream chunks, in OpenAI's shape.

`usage` carries two additions that only this project has: where the cached prompt tokens came from, and how well
speculation did.
"""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from speccache_runtime.core import Tier, Usage

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Completion:
    """Builds the bodies for one request of /v1/completions."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish: str, usage: Usage) -> Json:
        return self._envelope("text_completion", [self._choice(text, finish)]) | {"usage": usage_body(usage)}

    def opening(self) -> Json | None:
        """What a stream says before the first text."""
        return None

    def chunk(self, text: str, finish: str | None) -> Json:
        return self._envelope("text_completion", [self._choice(text, finish)])

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope("text_completion", []) | {"usage": usage_body(usage)}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    @staticmethod
    def _choice(text: str, finish: str | None) -> Json:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """Builds the bodies for one request of /v1/chat/completions."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish: str, usage: Usage) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._envelope("chat.completion", [choice]) | {"usage": usage_body(usage)}

    def opening(self) -> Json | None:
        """The first chunk names the role, as clients expect."""
        return self._delta({"role": "assistant", "content": ""}, None)

    def chunk(self, text: str, finish: str | None) -> Json:
        return self._delta({"content": text} if text else {}, finish)

    def usage_chunk(self, usage: Usage) -> Json:
        return self._envelope("chat.completion.chunk", []) | {"usage": usage_body(usage)}

    def _delta(self, delta: Json, finish: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._envelope("chat.completion.chunk", [choice])

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}


Answer = Completion | ChatCompletion


def usage_body(usage: Usage) -> Json:
    """Token counts as OpenAI reports them, the tiers behind `cached_tokens`, and the speculation of this request."""
    by_tier = {tier.value: usage.cached_tokens.get(tier, 0) for tier in Tier}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(by_tier.values()),
            **by_tier,
            "draft_absent": usage.draft_absent_tokens,
        },
        "speculation": {
            "verify_steps": usage.verify_steps,
            "accept_length": usage.accept_length,
            "accept_length_first64": usage.accept_length_first64,
            "verify_steps_first64": usage.verify_steps_first64,
            "tokens_first64": usage.tokens_first64,
            "accepted_by_step": list(usage.accepted_by_step),
        },
    }


def sse(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
"""The end of a stream that has everything; a stream that broke ends without it."""
