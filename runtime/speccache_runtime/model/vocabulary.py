"""Whether two models speak of the same tokens: the ids that one proposes are read by the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from speccache_api.geometry import ModelFacts
from speccache_runtime.errors import ModelError
from speccache_runtime.model.files import read_json

TOKENIZER = "tokenizer.json"


def check_same_tokens(target: ModelFacts, target_directory: Path, draft: ModelFacts, draft_directory: Path) -> None:
    """Raises ModelError, with the first difference, unless every token id means the same to both models."""
    misfit = f"draft {draft_directory} does not fit target {target_directory}: "
    if draft.vocab_size != target.vocab_size:
        raise ModelError(
            f"{misfit}the draft's vocab_size is {draft.vocab_size}, the target has {target.vocab_size}; "
            "a standalone draft needs the target's own tokenizer and vocabulary"
        )
    theirs, ours = _tokens(target_directory), _tokens(draft_directory)
    if theirs == ours:
        return
    if theirs is None or ours is None:
        where = target_directory if theirs is None else draft_directory
        raise ModelError(f"{misfit}{where} has no {TOKENIZER} to compare; put the one it was trained with there")
    token = min(number for number in theirs.keys() | ours.keys() if theirs.get(number) != ours.get(number))
    raise ModelError(
        f"{misfit}token {token} is {ours.get(token)!r} to the draft and {theirs.get(token)!r} to the target; "
        "a standalone draft needs the target's own tokenizer and vocabulary"
    )


def _tokens(directory: Path) -> dict[int, str] | None:
    """What each id stands for; None without a tokenizer. Raises ModelError if its file cannot be read so."""
    path = directory / TOKENIZER
    if not path.exists():
        return None
    data = read_json(path)
    try:
        tokens = _vocabulary(data["model"]["vocab"])
        tokens.update((added["id"], added["content"]) for added in data.get("added_tokens") or [])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: holds no vocabulary: {type(error).__name__}: {error}") from error
    return tokens


def _vocabulary(vocab: Any) -> dict[int, str]:
    """BPE and its like list ids by token; a unigram model lists [token, score] in the order of the ids."""
    if isinstance(vocab, dict):
        return {number: token for token, number in vocab.items()}
    return {number: token for number, (token, _) in enumerate(vocab)}
