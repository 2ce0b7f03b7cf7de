"""Text that arrives bit by bit is the text of the whole: any script, any chunks, every kind of tokenizer.

In: real tokenizers, made here: byte-level BPE (Llama 3, Qwen, Mistral's Tekken), also one whose tokens never end where
a character ends, and words with byte fallback (Llama 2, Mistral v0.x). Out: what is shown step by step.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from speccache_runtime.model.tokenizer import Tokenizer

BROKEN = "\N{REPLACEMENT CHARACTER}"
SPECIAL = ["<unk>", "<s>", "</s>"]
RUSSIAN = "Съешь же ещё этих мягких французских булок, да выпей чаю. "
SCRIPTS = [
    RUSSIAN,
    "The quick brown fox jumps over the lazy dog, and nobody minds. ",
    "नमस्ते दुनिया, यह एक वाक्य है। ",
    "いろはにほへと ちりぬるを 日本語の文章です。",
    "مرحبا بالعالم هذه جملة. ",
    "👩‍👩‍👧‍👦 😀🏴󠁧󠁢󠁥󠁮󠁧󠁿 é e\u0301 \u200d ",
]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def learned(letters: pre_tokenizers.PreTokenizer, alphabet: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a BPE that has seen all scripts but the second half of each."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = letters
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + 150, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    backend.train_from_iterator([text[: len(text) // 2] for text in SCRIPTS], trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [(first, second) for first, second in model["merges"]]


def bytewise() -> Backend:
    """Byte-level BPE as it is trained: a token may hold a part of a character."""
    vocab, merges = learned(pre_tokenizers.ByteLevel(add_prefix_space=False), ALPHABET)
    backend = Backend(models.BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def straddling() -> Backend:
    """Byte-level BPE whose merges join the end of one Russian letter and the beginning of the next."""
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    merges = set()
    for pair in map("".join, itertools.pairwise(RUSSIAN)):
        ((letters, _),) = whole.pre_tokenize_str(pair)
        if len(letters) == 4:
            merges.add((letters[1], letters[2]))
    words = [*SPECIAL, *ALPHABET, *(first + second for first, second in sorted(merges))]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, sorted(merges)))
    backend.pre_tokenizer = whole
    backend.decoder = decoders.ByteLevel()
    return backend


def spelling() -> Backend:
    """The SentencePiece kind: marks for blanks, bytes for what no word holds, and no blank before the first word."""
    vocab, merges = learned(pre_tokenizers.Metaspace(), list("abcdefghijklmnopqrstuvwxyz▁,."))
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(word for word in vocab if word not in SPECIAL)]
    backend = Backend(
        models.BPE(
            {word: i for i, word in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


KINDS = {"bytewise": bytewise, "straddling": straddling, "spelling": spelling}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return loaded(KINDS[request.param](), tmp_path_factory.mktemp(request.param))


def loaded(backend: Backend, path: Path) -> Tokenizer:
    """As a model directory has it, with an ordinary added token and a special one beside those of the model."""
    backend.add_special_tokens([*SPECIAL, "<|end|>"])
    backend.add_tokens([AddedToken("plain added", normalized=False)])
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(path)
    return Tokenizer.from_dir(path)


def shown(tokenizer: Tokenizer, after: Sequence[int], ids: Sequence[int], sizes: Sequence[int]) -> str:
    """What is shown in all when the tokens come in steps of `sizes`, over and over."""
    detokenizer = tokenizer.detokenizer(after)
    text, at = "", 0
    for size in itertools.cycle([*sizes, 1]):
        if at >= len(ids):
            return text + detokenizer.flush()
        text += detokenizer.push(ids[at : at + size])
        at += size
    raise AssertionError


def tail(tokenizer: Tokenizer, after: Sequence[int], ids: Sequence[int]) -> str:
    """The text of the whole behind the text of the prompt."""
    return tokenizer.decode([*after, *ids])[len(tokenizer.decode(after)) :]


scripts = st.lists(
    st.one_of(st.sampled_from([c for text in SCRIPTS for c in text]), st.characters(codec="utf-8")), max_size=80
).map("".join)
chunks = st.lists(st.integers(0, 12), max_size=6)


@settings(max_examples=200, deadline=None)
@given(text=scripts, before=scripts, sizes=chunks)
def test_streamed_is_whole(tokenizer: Tokenizer, text: str, before: str, sizes: list[int]) -> None:
    """Behind any prompt, however long and however its last tokens fall."""
    prompt, ids = tokenizer.encode(f"x{before}".replace(BROKEN, "?")), tokenizer.encode(text.replace(BROKEN, "?"))
    assert shown(tokenizer, prompt, ids, sizes) == tail(tokenizer, prompt, ids)
    assert shown(tokenizer, [], ids, sizes) == tokenizer.decode(ids)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 1000])
@pytest.mark.parametrize("text", SCRIPTS)
def test_long_texts(tokenizer: Tokenizer, text: str, size: int) -> None:
    """Hundreds of tokens, none of whose steps needs to end where a character ends."""
    for shift in range(3):
        ids = tokenizer.encode("a" * shift + text * 12)
        assert shown(tokenizer, [], ids, [size] * 1000) == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), sizes=chunks)
def test_any_tokens_are_shown_alike_however_they_come(tokenizer: Tokenizer, data: st.DataObject, sizes: list[int]):
    """A model may print bytes that are no text, unknown ids and special tokens."""
    size = tokenizer.backend.get_vocab_size() + 3
    ids = data.draw(st.lists(st.integers(0, size), max_size=60))
    prompt = tokenizer.encode("x")
    together = shown(tokenizer, prompt, ids, [len(ids)])
    assert shown(tokenizer, prompt, ids, sizes) == together
    whole = tail(tokenizer, prompt, ids)
    # The library takes back whole characters when the next byte token is wrong; what has been shown cannot be.
    if BROKEN not in whole or "ByteLevel" in str(tokenizer.backend.decoder):
        assert together == whole


def bytes_of(tokenizer: Tokenizer, character: str) -> list[int]:
    """A token for each byte of the character."""
    vocab = tokenizer.backend.get_vocab()
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(character)[0][0]
    return [
        vocab.get(f"<0x{byte:02X}>", vocab.get(letter))
        for byte, letter in zip(character.encode(), letters, strict=True)
    ]


@pytest.mark.parametrize("character", ["é", "€", "😀"])
def test_bytes_that_stay_incomplete(tokenizer: Tokenizer, character: str) -> None:
    """Held back until the text or the character ends; then shown as the whole would have them."""
    before, word = tokenizer.encode("ok"), tokenizer.encode(" ab")
    for kept in range(1, len(character.encode())):
        ids = bytes_of(tokenizer, character)[:kept]
        detokenizer = tokenizer.detokenizer(before)
        assert "".join(detokenizer.push([token]) for token in ids) == ""
        assert detokenizer.flush() == tail(tokenizer, before, ids) != ""
        assert shown(tokenizer, before, [*ids, *word], []) == tail(tokenizer, before, [*ids, *word])


def test_whole_characters_are_not_taken_back(tokenizer: Tokenizer) -> None:
    """Each is shown with its last byte, whatever comes behind it."""
    ids = bytes_of(tokenizer, "😀")
    detokenizer = tokenizer.detokenizer(tokenizer.encode("x"))
    assert [detokenizer.push([token]) for token in [*ids, *ids[:3]]] == ["", "", "", "😀", "", "", ""]
    assert set(detokenizer.flush()) == {BROKEN}


def test_a_prompt_may_end_inside_a_character(tokenizer: Tokenizer) -> None:
    """Token ids can say so. The character is shown when its last byte comes."""
    ids = [*tokenizer.encode("x"), *bytes_of(tokenizer, "😀")]
    assert shown(tokenizer, ids[:-1], [ids[-1], *bytes_of(tokenizer, "€")], []) == "😀€"


def test_added_tokens(tokenizer: Tokenizer) -> None:
    """An ordinary one is text; a special one is nothing, also in the middle of a character."""
    vocab = tokenizer.backend.get_vocab()
    plain, special = vocab["plain added"], vocab["<|end|>"]
    x, euro = tokenizer.encode("x"), bytes_of(tokenizer, "€")
    ids = [*euro[:2], special, *euro[2:], plain, special, *x, plain]
    assert "plain added" in tail(tokenizer, x, ids)
    for size in (1, 2, 9):
        assert shown(tokenizer, x, ids, [size]) == tail(tokenizer, x, ids)


def test_text_is_shown_without_delay(tokenizer: Tokenizer) -> None:
    """No word waits for the next one, no character for the end of its word."""
    detokenizer, ids = (
        tokenizer.detokenizer(tokenizer.encode("x")),
        [*tokenizer.encode("the"), *bytes_of(tokenizer, "é")],
    )
    text = ""
    for number, token in enumerate(ids, 1):
        text += detokenizer.push([token])
        assert text == tail(tokenizer, tokenizer.encode("x"), ids[:number]).rstrip(BROKEN)
