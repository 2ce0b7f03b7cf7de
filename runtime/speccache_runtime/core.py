"""The nouns that the server, the scheduler and the engine share: requests, outputs, and what a request cost.

Nothing here touches torch or I/O, so every other module may import it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from speccache_runtime.errors import BadRequest

TOO_LONG = "context_length_exceeded"
"""OpenAI's code for a prompt, or a prompt and its new tokens, that do not fit the context."""


class Tier(enum.StrEnum):
    """Where a cached page was found; the order is from fast to slow."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


class Finish(enum.StrEnum):
    """Why a request ended. Values are OpenAI's, plus `abort` and `error`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a token is drawn: see `SamplingParams`, of which it is the part that a runner needs."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens.

    `temperature` 0 is greedy. `top_p` is in (0, 1]. `seed` makes a sampled request repeatable: a token depends only on
    the seed, its position and the target's distribution, so it is the same with and without speculation.
    `max_tokens` counts new tokens. A request stops at any of `stop_token_ids`; the stopping token is reported.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def sampling(self) -> Sampling:
        """How each token is drawn."""
        return Sampling(self.temperature, self.top_p, self.seed)


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue; `prompt` is never empty. It shares cached pages with requests of the same `salt` only,
    which is shown nowhere."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request must stay within: facts of the loaded model and of the device tier.

    `max_context` counts the tokens of one request, prompt and new ones; token ids are in [0, `vocab_size`); with any of
    `eos_token_ids` the model ends a text.
    """

    max_context: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def room(self, prompt: Sequence[int]) -> int:
        """New tokens that fit behind the prompt; below 1 when it is too long itself."""
        return self.max_context - len(prompt)

    def check(self, request: Request) -> None:
        """Raises BadRequest that says which of `prompt` and `max_tokens` is wrong, and what would fit."""
        prompt, new, room = request.prompt, request.params.max_tokens, self.room(request.prompt)
        if not prompt:
            raise BadRequest("prompt", "the prompt is empty; send at least one token")
        if room < 1:
            text = f"{len(prompt)} tokens; the context is {self.max_context} tokens, new tokens included"
            raise BadRequest("prompt", text, TOO_LONG)
        outside = [token for token in (min(prompt), max(prompt)) if not 0 <= token < self.vocab_size]
        if outside:
            text = f"token id {outside[0]} is outside the vocabulary (0 to {self.vocab_size - 1})"
            raise BadRequest("prompt", text)
        if new > room:
            text = f"{len(prompt)} prompt tokens and {new} new ones exceed the context of {self.max_context} tokens"
            raise BadRequest("max_tokens", f"{text}; at most {room} new ones fit", TOO_LONG)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one request used.

    `cached_tokens` counts prompt tokens whose target KV was not computed, by the tier they were found in.
    `draft_absent_tokens` counts those of them whose draft half was missing: it is masked, or made anew from the tokens.
    `verify_steps` counts target passes after the prefill, each of which accepts proposals and adds one token of its
    own; without speculation a verify step is a plain decode step. Accept length = completion_tokens / verify_steps.
    `verify_steps_first64` and `tokens_first64` are the same two counts up to the last verify step that began before
    the 64th new token, where a lost draft half shows most. `accepted_by_step` has one number per verify step: how
    many proposals the target accepted.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: dict[Tier, int] = field(default_factory=dict)
    draft_absent_tokens: int = 0
    verify_steps: int = 0
    tokens_first64: int = 0
    verify_steps_first64: int = 0
    accepted_by_step: tuple[int, ...] = ()

    @property
    def accept_length(self) -> float:
        """Generated tokens per verify step; 0.0 before the first step."""
        return self.completion_tokens / self.verify_steps if self.verify_steps else 0.0

    @property
    def accept_length_first64(self) -> float:
        """Accept length over the verify steps that began before the 64th new token."""
        return self.tokens_first64 / self.verify_steps_first64 if self.verify_steps_first64 else 0.0


@dataclass(frozen=True, slots=True)
class Output:
    """New tokens of one request. The last one carries `finish` and `usage`; with `finish == ERROR` also `error`."""

    request_id: str
    tokens: tuple[int, ...]
    finish: Finish | None = None
    usage: Usage | None = None
    error: str | None = None
