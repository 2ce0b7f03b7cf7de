"""The tokenizer: round trips, text that arrives bit by bit, chat templates, and files that do not load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import speccache_runtime
from speccache_runtime.errors import BadRequest, ModelError
from speccache_runtime.model.tokenizer import Tokenizer

TINY = Path(speccache_runtime.__file__).parent / "builtin" / "tiny" / "target"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(TINY)


def sentence_pieces(path: Path) -> Tokenizer:
    """A tokenizer of the SentencePiece kind: word-start marks, byte tokens for the rest, a start token."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁Hello", "▁world", "▁a", "b", "▁"]
    backend = Backend(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(path)
    return Tokenizer.from_dir(path)


def pieces(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> list[str]:
    """What the detokenizer shows when the tokens come in groups of these sizes, then one by one."""
    detokenizer = tokenizer.detokenizer()
    out, at = [], 0
    for size in [*sizes, *([1] * len(ids))]:
        out.append(detokenizer.push(ids[at : at + size]))
        at += size
    return [*out, detokenizer.flush()]


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40), st.lists(st.integers(0, 9), max_size=6))
def test_text_comes_back_whole_and_never_by_halves(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    text = text.replace("\ufffd", "?").replace("<|", "<")
    shown = pieces(tokenizer, tokenizer.encode(text), sizes)
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_character_is_held_until_its_last_byte(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a😀b")
    assert len(ids) > 3
    shown = pieces(tokenizer, ids, [])
    assert [piece for piece in shown if piece] == ["a", "😀", "b"]


def test_unfinished_character_at_the_end_is_flushed_as_such(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 😀")[:-1]
    shown = pieces(tokenizer, ids, [])
    assert "".join(shown[:-1]) == "ok "
    assert shown[-1].strip("\ufffd") == ""
    assert shown[-1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2047), max_size=150), st.lists(st.integers(0, 9), max_size=6))
def test_any_tokens_give_the_text_of_all_of_them(tokenizer: Tokenizer, ids: list[int], sizes: list[int]) -> None:
    """Models may print bytes that are no text: nothing is lost, repeated or changed by streaming."""
    assert "".join(pieces(tokenizer, ids, sizes)) == tokenizer.decode(ids)


def test_broken_bytes_do_not_hold_text_for_ever(tokenizer: Tokenizer) -> None:
    (stray,) = {i for i in tokenizer.encode("é") if tokenizer.decode([i]) == "\ufffd"} - {tokenizer.encode("é")[0]}
    detokenizer = tokenizer.detokenizer()
    shown = "".join(detokenizer.push([stray]) for _ in range(192))
    assert len(shown) >= 128


def test_sentence_pieces_keep_spaces_and_bytes(tmp_path: Path) -> None:
    tokenizer = sentence_pieces(tmp_path)
    vocab = tokenizer.backend.get_vocab()
    euro = [vocab[f"<0x{byte:02X}>"] for byte in "€".encode()]
    ids = [vocab["▁Hello"], *euro, *euro, vocab["▁world"], vocab["b"]]
    for sizes in ([], [2], [3, 4], [9]):
        assert "".join(pieces(tokenizer, ids, sizes)) == "Hello€€ worldb"
    # Text that continues a prompt keeps the space before its first word.
    detokenizer = tokenizer.detokenizer([vocab["<s>"], vocab["▁Hello"]])
    assert detokenizer.push([vocab["▁world"]]) + detokenizer.flush() == " world"


def test_start_token_is_added_once(tmp_path: Path) -> None:
    """Who writes it into a prompt means this one."""
    tokenizer = sentence_pieces(tmp_path)
    assert tokenizer.encode("Hello") == tokenizer.encode("<s>Hello")
    assert tokenizer.encode("Hello").count(1) == 1


def test_special_tokens_are_not_shown(tokenizer: Tokenizer) -> None:
    end = tokenizer.encode("<|endoftext|>")
    assert len(end) == 1
    assert "".join(pieces(tokenizer, [*tokenizer.encode("done"), *end], [])) == "done"


def test_chat_ends_where_the_answer_begins(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "What is a page?"}])
    assert "What is a page?" in text
    assert tokenizer.encode(text)


def test_chat_without_template_is_the_clients_problem(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no chat template; use /v1/completions") as caught:
        sentence_pieces(tmp_path).render_chat([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("template", ["{{ raise_exception('roles must alternate') }}", "{{ messages[7].content }}"])
def test_messages_that_the_template_refuses(template: str, tmp_path: Path) -> None:
    tokenizer = sentence_pieces(tmp_path)
    tokenizer._tokenizer.chat_template = template
    with pytest.raises(BadRequest, match="chat template refuses them") as caught:
        tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    """JSON can write what no text can hold."""
    with pytest.raises(BadRequest, match=r"not valid Unicode.* character 2"):
        tokenizer.encode("ab\ud83d")
    with pytest.raises(BadRequest, match="not valid Unicode") as caught:
        tokenizer.render_chat([{"role": "user", "content": "\udc00"}])
    assert caught.value.field == "messages"


@pytest.mark.parametrize("content", ["{", '{"version": "1.0"}', "[]"])
def test_broken_tokenizer_is_a_model_error(content: str, tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "m" / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded") as caught:
        Tokenizer.from_dir(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_without_a_model_says_so(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the tokenizer cannot be loaded: tokenizer.json: .*Model"):
        Tokenizer.from_dir(tmp_path / "m")


def test_the_tokenizer_is_not_blamed_for_a_wrong_config(tmp_path: Path) -> None:
    """transformers reads config.json for the tokenizer too. The whole reason must be there, in one line."""
    shutil.copytree(TINY, tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"attention_bias": "x"}))
    with pytest.raises(ModelError, match=r"config.json .* 'attention_bias'.*'x'") as caught:
        Tokenizer.from_dir(tmp_path / "m")
    assert "the tokenizer" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer.json found"):
        Tokenizer.from_dir(tmp_path)
