"""The packaged prompts: enough of them, about 1,000 tokens, all different, half of them quoting themselves."""

from __future__ import annotations

from itertools import pairwise

from speccache_runtime.bench.make_prompts import SEPARATOR
from speccache_runtime.bench.prompts import load_prompts
from speccache_runtime.config import builtin_directory
from speccache_runtime.model.tokenizer import Tokenizer


def test_enough_of_each_kind():
    """At least 24, half natural and half copy, with names of their own."""
    prompts = load_prompts()
    kinds = [prompt.kind for prompt in prompts]
    assert len(prompts) >= 24
    assert kinds.count("natural") == kinds.count("copy") == len(prompts) / 2
    assert len({prompt.name for prompt in prompts}) == len(prompts)


def test_length():
    """About 1,000 tokens of the built-in model."""
    tokenizer = Tokenizer.from_dir(builtin_directory("tiny", "target"))
    lengths = {prompt.name: len(tokenizer.encode(prompt.text)) for prompt in load_prompts()}
    assert all(900 <= length <= 1050 for length in lengths.values()), lengths


def test_no_shared_beginnings():
    """A page of one prompt must not be a hit for another, or the cold run would not be cold."""
    texts = sorted(prompt.text for prompt in load_prompts())
    assert all(a[:12] != b[:12] for a, b in pairwise(texts))


def test_copy_prompts_quote_themselves():
    """After the separator comes the text's own beginning, and there is more of it to quote."""
    for prompt in load_prompts():
        if prompt.kind == "copy":
            source, quoted = prompt.text.split(SEPARATOR)
            assert source.startswith(quoted)
            assert len(quoted) < len(source) / 2
