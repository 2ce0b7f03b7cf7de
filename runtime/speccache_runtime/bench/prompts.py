"""The held-out prompts of the restart benchmark: half natural text, half *copy* prompts.

A copy prompt is a text, a separator and the beginning of the text again, so that its continuation quotes the prompt.
There the draft needs its KV of the whole prompt, and losing it shows most. The texts are this project's own and none of
the built-in pair's training data; `make_prompts.py` has made them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Kind = Literal["natural", "copy"]

PROMPTS_FILE = "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `name` is unique."""

    name: str
    kind: Kind
    text: str


def load_prompts() -> tuple[Prompt, ...]:
    """The packaged prompts, in the order in which they are sent."""
    text = resources.files(__package__).joinpath(PROMPTS_FILE).read_text(encoding="utf-8")
    return tuple(Prompt(**json.loads(line)) for line in text.splitlines())
