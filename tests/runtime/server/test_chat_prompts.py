"""A conversation becomes the tokens that the model's template says: no start or end token more, and none less.

The other side is transformers' own `apply_chat_template(tokenize=True)`, on real tokenizers of every habit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from speccache_runtime.model.tokenizer import Tokenizer
from speccache_runtime.server.openai import parse_chat, parse_completion
from speccache_runtime.server.prompts import Prompts

MARKS = ["<s>", "</s>", "<|user|>", "<|end|>"]
TURNS = "{% for m in messages %}<|user|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
TEMPLATES = {
    "says nothing of a start": TURNS + "{% if add_generation_prompt %}<|user|>assistant: {% endif %}",
    "begins with the start token": "{{ bos_token }}" + TURNS,
    "has the start token in the middle": TURNS + "{{ bos_token }}",
    "ends each turn": "{% for m in messages %}{{ bos_token }}[{{ m.content }}]{{ eos_token }}{% endfor %}",
    "begins with a blank": " " + TURNS,
}
HABITS = {"adds nothing": "$A", "adds a start": "<s> $A", "adds both": "<s> $A </s>", "adds an end": "$A </s>"}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is a page? <s>"},
    {"role": "assistant", "content": "Some tokens of KV. "},
    {"role": "user", "content": "名前は? 😀"},
]


@pytest.fixture(params=HABITS)
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    words = [*MARKS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.TemplateProcessing(
        single=HABITS[request.param], special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    backend.add_special_tokens(MARKS)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


async def tokens(tokenizer: Tokenizer, parse: Any, **body: Any) -> list[int]:
    async def here() -> bool:
        return False

    return await Prompts(tokenizer, 8).tokens(parse(json.dumps({"model": "m"} | body).encode()), 1000, here)


@pytest.mark.parametrize("template", TEMPLATES)
async def test_chat_is_what_the_template_says(directory: Path, template: str) -> None:
    """Whatever the tokenizer adds to other text."""
    tokenizer = Tokenizer.from_dir(directory)
    tokenizer._tokenizer.chat_template = TEMPLATES[template]
    expected = tokenizer._tokenizer.apply_chat_template(
        CONVERSATION, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert await tokens(tokenizer, parse_chat, messages=CONVERSATION) == expected


async def test_completions_get_the_models_special_tokens(directory: Path) -> None:
    """As transformers' own call: a text for /v1/completions has no template that could have written them."""
    tokenizer = Tokenizer.from_dir(directory)
    expected = tokenizer._tokenizer("What is a page?")["input_ids"]
    assert await tokens(tokenizer, parse_completion, prompt="What is a page?") == expected
