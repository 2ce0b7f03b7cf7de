"""How much text one token can stand for, and what is refused by its length alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from speccache_runtime.server.lengths import (
    ASSUMED_CHARACTERS,
    MAX_BODY_BYTES,
    MIN_BODY_BYTES,
    body_limit,
    characters_per_token,
    most_characters,
)


def bytewise(*merges: tuple[str, str]) -> Tokenizer:
    """A byte-level tokenizer that knows every byte, and these merges of bytes."""
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def spelling(**changes: Any) -> Tokenizer:
    """A tokenizer of the SentencePiece kind: words with blanks in them, unknown characters spelt in bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "▁"]
    settings: dict[str, Any] = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True}
    backend = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], **(settings | changes)))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def changed(part: str, value: Any) -> Tokenizer:
    backend = bytewise()
    setattr(backend, part, value)
    return backend


def with_token(token: AddedToken) -> Tokenizer:
    backend = bytewise()
    backend.add_special_tokens([token])
    return backend


def truncating() -> Tokenizer:
    backend = bytewise()
    backend.enable_truncation(8)
    return backend


@pytest.mark.parametrize(
    ("backend", "bound"),
    [
        (bytewise(), 1),
        (bytewise(("a", "b"), ("ab", "ab")), 4),
        (with_token(AddedToken("<|end|>")), len("<|end|>")),
        (spelling(), len("<0x00>")),
        (spelling(fuse_unk=False, byte_fallback=False), len("<0x00>")),
        (changed("normalizer", normalizers.NFC()), 4),
        (changed("normalizer", normalizers.Replace("abc", "d")), 3),
        (changed("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Replace("ab", "c")])), 8),
    ],
)
def test_bound(backend, bound):
    """The longest entry, added tokens included, times what the normaliser may draw together."""
    assert characters_per_token(backend) == bound


@pytest.mark.parametrize(
    "backend",
    [
        spelling(byte_fallback=False),
        spelling(unk_token=None, byte_fallback=False),
        Tokenizer(models.BPE({"a": 0}, [])),
        Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>")),
        Tokenizer(models.Unigram([("a", 0.0)])),
        with_token(AddedToken("<|end|>", rstrip=True)),
        changed("normalizer", normalizers.Strip()),
        changed("normalizer", normalizers.Replace(Regex(" +"), " ")),
        changed("normalizer", normalizers.Replace("a", "")),
        changed("pre_tokenizer", pre_tokenizers.WhitespaceSplit()),
        changed("pre_tokenizer", pre_tokenizers.Split(" ", "removed")),
        truncating(),
    ],
)
def test_no_bound(backend):
    """Where text can vanish, any bound would refuse a prompt that fits; a generous one is assumed."""
    assert characters_per_token(backend) == ASSUMED_CHARACTERS


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet=st.one_of(st.sampled_from("ab e\u0301\u0323\u1100\u1161\u11a8é"), st.characters(codec="utf-8")))
)
def test_no_text_is_longer_than_its_tokens_allow(text):
    """What the bound promises, for tokenizers of both kinds and a normaliser that shortens."""
    composing = bytewise(("a", "b"))
    composing.normalizer = normalizers.NFKC()
    for backend in (bytewise(("a", "b"), ("ab", "ab")), spelling(), composing):
        assert len(text) <= len(backend.encode(text).ids) * characters_per_token(backend)


def test_body_limit():
    """Enough for the longest prompt that fits, as ids or as escaped text, and never more than can be afforded."""
    small, large = (SimpleNamespace(max_context=n, vocab_size=100_000) for n in (4096, 10**6))
    as_ids = len(str([99_999] * small.max_context))
    as_text = len("\\u0020") * most_characters(small.max_context, 32)
    assert max(as_ids, as_text) + MIN_BODY_BYTES <= body_limit(small, 32) < 2 * MIN_BODY_BYTES
    assert len(str([99_999] * small.max_context)) <= body_limit(small, 1)
    assert body_limit(large, 128) == MAX_BODY_BYTES


@pytest.mark.parametrize("chat", [False, True])
def test_text_that_cannot_fit(wire, monkeypatch, chat):
    """Refused with the field's name, without being tokenised."""
    monkeypatch.setattr(wire.app.state.server.tokenizer, "encode", None)
    text = "x" * (999 * ASSUMED_CHARACTERS + 1)
    answer = wire.say(messages=[{"role": "user", "content": text}]) if chat else wire.complete(prompt=text)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["param"] == ("messages" if chat else "prompt")
    assert f"{999 * ASSUMED_CHARACTERS}" in error["message"]


def test_text_that_a_template_leaves_out(wire, monkeypatch):
    """Counts for nothing: only the rendered prompt has to fit."""
    monkeypatch.setattr(wire.app.state.server.tokenizer, "render_chat", lambda messages: messages[-1]["content"])
    long, short = ({"role": "user", "content": "x" * size} for size in (999 * ASSUMED_CHARACTERS + 1, 5))
    assert wire.say(messages=[long, short]).json()["usage"]["prompt_tokens"] == 5
