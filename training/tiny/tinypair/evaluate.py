"""Measures accept lengths on packages that the pair never saw, with the draft KV of the prompt kept and withheld."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tinypair.config import END_OF_TEXT_ID
from tinypair.corpus import Document, read_documents
from tinypair.model import Head, Target
from tinypair.sources import package_archives
from tinypair.speculate import DraftKV, Speculation, plain_greedy

log = logging.getLogger(__name__)

PROMPT_TOKENS = 1000
QUOTED_TOKENS = 700
EARLY_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Tokens per verify step over all rows: in the whole continuation, and in its first 64 tokens."""

    prompts: str
    steps: int
    page: int
    draft_kv: str
    accept: float
    accept_first64: float
    lowest_row: float
    by_step: tuple[float, ...]
    rows: int
    rows_differing: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """How to measure: draft `steps` per round, and which of the prompt's whole pages of `pages` tokens are restored."""

    new_tokens: int
    steps: int
    pages: tuple[int, ...]
    kinds: tuple[DraftKV, ...]


def held_out_documents(folder: Path) -> list[Document]:
    """Usable documents of the package archives in `folder`, shuffled in a fixed order."""
    documents = read_documents(list(package_archives(folder)))
    random.Random(5).shuffle(documents)
    return documents


def text_file_documents(folder: Path) -> list[Document]:
    """Every Markdown, Python and YAML file under `folder`, for a look at text of one's own."""
    paths = sorted(p for p in folder.rglob("*") if p.suffix in {".md", ".py", ".yaml"} and ".venv" not in p.parts)
    documents = [Document(0, p.read_text(), p.suffix == ".md") for p in paths]
    random.Random(5).shuffle(documents)
    return documents


def prompt_sets(tokenizer: Tokenizer, documents: list[Document], count: int) -> dict[str, Tensor]:
    """Prompts [count, 1000] by name, half of them documentation where there is enough.

    *copy*: 700 tokens, the end-of-text token, then the first 299 again. *copy_text*: with a blank line in between.
    *copy_words*: with the words "Here it is again:" in between. *natural*: just text.
    """
    long = [d for d in documents if len(d.text) > 5 * PROMPT_TOKENS]
    prose, code = [d for d in long if d.prose], [d for d in long if not d.prose]
    half = min(len(prose), count // 2)
    chosen = [*prose[:half], *code[: count - half]]
    rng = random.Random(6)
    slices = list(_slices(tokenizer, chosen, rng))
    blank = tokenizer.encode("\n\n", add_special_tokens=False).ids
    words = tokenizer.encode("\n\nHere it is again:\n\n", add_special_tokens=False).ids
    return {
        "copy": torch.tensor([_quote(s, [END_OF_TEXT_ID]) for s in slices]),
        "copy_text": torch.tensor([_quote(s, blank) for s in slices]),
        "copy_words": torch.tensor([_quote(s, words) for s in slices]),
        "natural": torch.tensor(slices),
    }


def _slices(tokenizer: Tokenizer, documents: list[Document], rng: random.Random) -> Iterator[list[int]]:
    for document in documents:
        ids = tokenizer.encode(document.text, add_special_tokens=False).ids
        if len(ids) >= PROMPT_TOKENS:
            start = rng.randrange(len(ids) - PROMPT_TOKENS + 1)
            yield ids[start : start + PROMPT_TOKENS]


def _quote(tokens: list[int], separator: list[int]) -> list[int]:
    again = PROMPT_TOKENS - QUOTED_TOKENS - len(separator)
    return [*tokens[:QUOTED_TOKENS], *separator, *tokens[:again]]


def copied_length(prompt: Tensor, continuation: Tensor, separator: int) -> float:
    """Mean tokens copied before the first slip, for a set of copy prompts with `separator` tokens in between."""
    done = PROMPT_TOKENS - QUOTED_TOKENS - separator
    true = prompt[:, done:QUOTED_TOKENS][:, : continuation.shape[1]]
    return float((true == continuation[:, : true.shape[1]]).long().cumprod(1).sum(1).float().mean())


def measure(target: Target, head: Head, name: str, prompts: Tensor, how: Measurement) -> list[Acceptance]:
    """Accept lengths of one set of prompts; also counts the rows whose tokens differ from plain greedy ones."""
    reference = plain_greedy(target, prompts, how.new_tokens)
    if name == "copy":
        log.info("copied before the first slip: %.1f", copied_length(prompts, reference, 1))
    run = Speculation(target, head, prompts, how.new_tokens, how.steps)
    results = []
    for page in how.pages:
        for kind in how.kinds:
            tokens, rounds = run.run(kind, (PROMPT_TOKENS - 1) // page * page)
            differing = int((tokens != reference).any(1).sum())
            results.append(summarize(name, how.steps, page, kind, rounds, differing))
            log.info("%s", asdict(results[-1]))
    return results


def summarize(name: str, steps: int, page: int, kind: DraftKV, rounds: Tensor, differing: int) -> Acceptance:
    """`rounds` [N, B] are tokens gained per verify step, 0 once a row is done."""
    gained = rounds.float()
    ran = gained > 0
    early = ran & (gained.cumsum(0) - gained < EARLY_TOKENS)
    by_step = [float((gained > i + 1).sum() / max(1, int((gained > i).sum()))) for i in range(steps)]
    return Acceptance(
        name,
        steps,
        page,
        kind.value,
        round(float(gained.sum() / ran.sum()), 3),
        round(float(gained[early].sum() / early.sum()), 3),
        round(float((gained.sum(0) / ran.sum(0)).min()), 2),
        tuple(round(x, 3) for x in by_step),
        rounds.shape[1],
        differing,
    )
