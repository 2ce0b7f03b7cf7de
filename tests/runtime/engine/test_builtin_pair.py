"""The built-in pair, trained and real: what speculation loses without its draft KV, and what a restore gives back."""

import argparse
import heapq
import inspect
import string
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.config import builtin_directory
from speccache_runtime.core import Tier
from speccache_runtime.model.draft import eagle3_aux_layers

NEW = 64


@pytest.fixture(scope="module")
def tiny(tools: SimpleNamespace) -> Any:
    target, draft = builtin_directory("tiny", "target"), builtin_directory("tiny", "draft")
    return tools.Pair(target, draft, eagle3_aux_layers(draft, 6))


@pytest.fixture(scope="module")
def copies() -> list[tuple[int, ...]]:
    """Prompts of about 1,000 tokens whose continuation quotes the prompt."""
    tokenizer = Tokenizer.from_file(str(builtin_directory("tiny", "target") / "tokenizer.json"))
    out = []
    for module in (argparse, heapq, string, inspect):
        tokens = tokenizer.encode(inspect.getsource(module)).ids[:700]
        out.append((*tokens, *tokens[:299]))
    return out


def serve(life: Any, texts: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], float]:
    """Texts, accepted proposals per verify step, and accept length over all."""
    names = life.run(texts, NEW)
    usages = [life.usage(name) for name in names]
    length = sum(u.completion_tokens for u in usages) / sum(u.verify_steps for u in usages)
    return [life.tokens(name) for name in names], [u.accepted_by_step for u in usages], length


def test_a_restored_draft_accepts_as_before_and_a_lost_one_collapses(
    tiny: Any, tools: SimpleNamespace, copies: list[tuple[int, ...]], tmp_path: Path
) -> None:
    settings = {"folder": tmp_path, "page_size": 16, "device_pages": 300, "host_pages": 300, "steps": 7, "budget": 512}
    first = tools.Life(tiny, **settings)
    texts, cold, cold_length = serve(first, copies)
    first.end()

    restored = tools.Life(tiny, **settings)
    again, counts, _ = serve(restored, copies)
    assert (again, counts) == (texts, cold)
    assert restored.value("cached_tokens", tier=Tier.STORAGE) == 4 * 992
    restored.end()

    for path in tools.stored(tmp_path, "d"):
        path.unlink()
    withheld = tools.Life(tiny, answer=MissingDraft.DEGRADE, **settings)
    masked, _, masked_length = serve(withheld, copies)
    assert masked == texts
    assert withheld.value("cached_tokens", tier=Tier.STORAGE) == 4 * 992
    assert cold_length >= 4.1
    assert masked_length <= 0.6 * cold_length
    withheld.end()

    plain = tools.Life(tiny, **{**settings, "steps": 0})
    assert serve(plain, copies)[0] == texts
    plain.end()
