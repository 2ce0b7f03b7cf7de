"""The restart benchmark: its prompts, its client, its report, and the servers it starts.

In: answers as they come from the wire. Out: tables and JSON. Left out: the numbers themselves, which need the real
engine and the built-in pair (`test_restart.py` runs them once).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from speccache_runtime.bench.client import Answer
from speccache_runtime.bench.prompts import Prompt
from speccache_runtime.bench.report import Run


def answer(text: str = "abc", tokens: int = 64, steps: int = 16, cached: int = 0, seconds: float = 1.0) -> Answer:
    usage = {
        "prompt_tokens": 1000,
        "completion_tokens": tokens,
        "prompt_tokens_details": {"cached_tokens": cached, "device": 0, "host": 0, "storage": cached},
        "speculation": {
            "verify_steps": steps,
            "tokens_first64": tokens // 2,
            "verify_steps_first64": steps,
            "accepted_by_step": [tokens // steps] * steps,
        },
    }
    return Answer(text, first_token=seconds / 2, total=seconds, usage=usage)


@pytest.fixture(name="answer")
def _answer() -> Callable[..., Answer]:
    return answer


@pytest.fixture
def run() -> Callable[..., Run]:
    """A run with two natural prompts and one copy prompt."""
    prompts = [Prompt("n-1", "natural", "a"), Prompt("n-2", "natural", "b"), Prompt("c-1", "copy", "c")]

    def make(name: str, answers: Sequence[Answer]) -> Run:
        return Run(name, prompts, answers)

    return make
