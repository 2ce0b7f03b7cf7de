"""Text to tokens and back, with the tokenizer of a model directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from speccache_runtime.errors import BadRequest, ModelError, unicode_fault
from speccache_runtime.model.detokenizer import Detokenizer, Vocabulary
from speccache_runtime.model.files import CONFIG, reason
from speccache_runtime.model.hf_config import read_hf_config

TOKENIZER = "tokenizer.json"


class Tokenizer:
    """A model's tokenizer and chat template. Every method may be called from any thread."""

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        self.backend: Backend = tokenizer.backend_tokenizer
        self._vocabulary = Vocabulary(self.backend)
        self._bos: str | None = tokenizer.bos_token

    @classmethod
    def from_dir(cls, directory: Path) -> Tokenizer:
        """Loads the tokenizer of a model directory. Raises ModelError if there is none or it is broken."""
        if not (directory / TOKENIZER).is_file():
            raise ModelError(f"{directory}: no {TOKENIZER} found; a served model needs its tokenizer")
        if (directory / CONFIG).is_file():
            read_hf_config(directory)  # The tokenizer reads it too, and would be blamed for what is wrong in it.
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        # The tokenizers library raises plain Exception for a broken file.
        except Exception as error:
            raise ModelError(f"{directory}: the tokenizer cannot be loaded: {_fault(directory, error)}") from error
        return cls(directory, tokenizer)

    def encode(self, text: str, *, rendered: bool = False) -> list[int]:
        """Token ids of `text`.

        A text that `render_chat` has rendered holds all special tokens that it shall have. Any other gets those that
        the model puts around a text (a start token, as a rule), unless it begins with the start token already.

        Raises BadRequest if `text` is not valid Unicode.
        """
        _check_unicode("prompt", text)
        complete = rendered or (self._bos is not None and text.startswith(self._bos))
        # A batch of one: `encode` keeps the interpreter's lock, so that a long text would hold up every other request.
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=not complete)
        ids: list[int] = encoded.ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no character become replacement characters."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=True)
        return text

    def detokenizer(self, after: Sequence[int] = ()) -> Detokenizer:
        """A fresh detokenizer for text that follows the tokens `after` (the prompt's last few are enough)."""
        return Detokenizer(self._vocabulary, after)

    def render_chat(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt text of a conversation, ending where the model's answer begins; `encode` it as `rendered`.

        Each message has `role` and `content`. Raises BadRequest if the model has no chat template or its template does
        not take these messages.
        """
        for message in messages:
            _check_unicode("messages", message.get("content", ""))
        if not self._tokenizer.chat_template:
            raise BadRequest("messages", "this model has no chat template; use /v1/completions")
        try:
            text: str = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise BadRequest("messages", f"the model's chat template refuses them: {reason(error)}") from error
        return text


def _check_unicode(field: str, text: str) -> None:
    fault = unicode_fault(text)
    if fault is not None:
        raise BadRequest(field, fault)


def _fault(directory: Path, error: Exception) -> str:
    """What is wrong: said by the library that reads tokenizer.json, or, if that file is right, by transformers."""
    try:
        Backend.from_file(str(directory / TOKENIZER))
    except Exception as cause:  # noqa: BLE001 - it raises plain Exception
        return f"{TOKENIZER}: {reason(cause)}"
    return reason(error)
