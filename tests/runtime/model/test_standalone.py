"""A draft that is a model of its own: which ones fit a target, and that it is the model that transformers loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from speccache_api.drafts import DRAFTS
from speccache_runtime.errors import ModelError
from speccache_runtime.model.inspect import DRAFT_READERS, inspect, target_facts
from speccache_runtime.model.standalone import load_standalone
from speccache_runtime.model.target import load_target

CPU = torch.device("cpu")
VOCAB = {f"t{number}": number for number in range(96)}


def write_tokenizer(directory: Path, vocab: Any = VOCAB, added: list[dict[str, Any]] | None = None) -> None:
    data = {"model": {"type": "BPE", "vocab": vocab}, "added_tokens": added or []}
    (directory / "tokenizer.json").write_text(json.dumps(data))


@pytest.fixture
def two(tmp_path: Path, model_dir: Callable[[str], Path], tools: SimpleNamespace) -> tuple[Path, Path]:
    """A target and a smaller model of another family, with the same tokenizer."""
    target = tmp_path / "target"
    shutil.copytree(model_dir("llama"), target)
    draft = tools.make_model(tmp_path / "draft", "qwen3", num_hidden_layers=2, max_position_embeddings=64)
    for directory in (target, draft):
        write_tokenizer(directory)
    return target, draft


def test_every_draft_with_a_model_can_be_inspected() -> None:
    assert set(DRAFT_READERS) == {name for name, draft in DRAFTS.items() if draft.model}


def test_a_smaller_model_of_any_family_is_inspected_as_itself(two: tuple[Path, Path]) -> None:
    target, draft = two
    found = inspect(target, draft, "Standalone")
    assert found.draft == target_facts(draft)
    assert found.draft is not None
    assert found.draft.geometry.layers == 2


def test_it_reaches_as_far_as_the_target_and_says_what_transformers_says(
    two: tuple[Path, Path], tools: SimpleNamespace
) -> None:
    """Its own positions end at 64; the requests of its target do not."""
    target = load_target(two[0], device=CPU, dtype=torch.float32, aux_layers=())
    model = load_standalone(two[1], target, device=CPU, dtype=torch.float32)
    packer = tools.Packer(model, tools.make_pool(model.facts))
    sequence = packer.sequence(tools.random_tokens(200))
    packer.step([(sequence, 200)])
    plain = AutoModelForCausalLM.from_pretrained(two[1], dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        expected = plain(torch.tensor([sequence.tokens])).logits[0]
    torch.testing.assert_close(packer.logits(sequence), expected, atol=1e-4, rtol=1e-4)


def other_word(draft: Path) -> None:
    write_tokenizer(draft, {**{k: v for k, v in VOCAB.items() if v != 7}, "other": 7})


def fewer_words(draft: Path) -> None:
    write_tokenizer(draft, {k: v for k, v in VOCAB.items() if v < 90})


def added_word(draft: Path) -> None:
    write_tokenizer(draft, added=[{"id": 95, "content": "<|end|>"}])


def no_vocabulary(draft: Path) -> None:
    (draft / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            other_word,
            "token 7 is 'other' to the draft and 't7' to the target; a standalone draft needs the target's own",
        ),
        (fewer_words, "token 90 is None to the draft and 't90' to the target"),
        (added_word, "token 95 is '<|end|>' to the draft"),
        (no_vocabulary, "tokenizer.json: holds no vocabulary: KeyError"),
        (lambda draft: (draft / "tokenizer.json").unlink(), "draft has no tokenizer.json to compare"),
        (lambda draft: (draft / "config.json").unlink(), "no config.json found"),
    ],
    ids=["another word", "fewer words", "an added word", "no vocabulary", "no tokenizer", "no model"],
)
def test_a_draft_with_another_tokenizer_is_refused_in_one_line(
    change: Callable[[Path], None], message: str, two: tuple[Path, Path]
) -> None:
    change(two[1])
    with pytest.raises(ModelError) as refused:
        inspect(*two, "Standalone")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    target = load_target(two[0], device=CPU, dtype=torch.float32, aux_layers=())
    with pytest.raises(ModelError) as stopped:
        load_standalone(two[1], target, device=CPU, dtype=torch.float32)
    assert str(stopped.value) == str(refused.value)


def test_a_draft_with_another_vocabulary_size_is_refused(
    two: tuple[Path, Path], tmp_path: Path, tools: SimpleNamespace
) -> None:
    draft = tools.make_model(tmp_path / "larger", "llama", vocab_size=128)
    write_tokenizer(draft)
    with pytest.raises(ModelError, match="the draft's vocab_size is 128, the target has 96"):
        inspect(two[0], draft, "Standalone")


def test_a_unigram_vocabulary_is_compared_by_the_order_of_its_words(two: tuple[Path, Path]) -> None:
    for directory in two:
        write_tokenizer(directory, [[word, -1.0] for word in VOCAB])
    inspect(*two, "Standalone")
    write_tokenizer(two[1], [[word, -1.0] for word in reversed(VOCAB)])
    with pytest.raises(ModelError, match="token 0 is 't95' to the draft and 't0' to the target"):
        inspect(*two, "Standalone")


def test_a_head_is_no_standalone_draft_and_a_model_no_head(two: tuple[Path, Path]) -> None:
    with pytest.raises(ModelError):
        inspect(*two, "EAGLE3")
