"""The packaged pair `builtin://tiny` is whole, loads in other software, and does what it is there for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tinypair import files
from tinypair.config import PairShape
from tinypair.corpus import Document
from tinypair.evaluate import PROMPT_TOKENS, prompt_sets, summarize
from tinypair.licences import ALLOWED
from tinypair.speculate import DraftKV, Speculation, plain_greedy
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from speccache_runtime import builtin as package

PAIR = Path(package.__path__[0]) / "tiny"
REPOSITORY = Path(__file__).parents[2]
MAX_BYTES = 14 * 1024 * 1024
FILES = {
    "MODEL_CARD.md",
    "SOURCES.json",
    "target/config.json",
    "target/model.safetensors",
    "target/tokenizer.json",
    "target/tokenizer_config.json",
    "draft/config.json",
    "draft/model.safetensors",
}


def test_all_files_are_there_and_small() -> None:
    found = {str(p.relative_to(PAIR)): p.stat().st_size for p in PAIR.rglob("*") if p.is_file()}
    assert set(found) == FILES
    assert sum(found.values()) <= MAX_BYTES


def test_every_source_declares_an_allowed_licence() -> None:
    sources = json.loads((PAIR / "SOURCES.json").read_text())
    assert len(sources) > 100
    for source in sources:
        assert source["licences"], source
        assert set(source["licences"]) <= ALLOWED, source
        assert source["name"], source
        assert source["version"], source
        assert source["files"] > 0, source


@pytest.mark.parametrize("text", ["def f(x):\n    return x  # end\n", "naïve 世界 \t\r\n\n  ", "", "<|endoftext|>a"])
def test_tokenizer_round_trip(text: str) -> None:
    """Any text survives, and the three ways to load the tokenizer agree."""
    plain = Tokenizer.from_file(str(PAIR / "target/tokenizer.json"))
    ids = plain.encode(text).ids
    assert plain.decode(ids, skip_special_tokens=False) == text
    for loader in (AutoTokenizer, PreTrainedTokenizerFast):
        tokenizer = loader.from_pretrained(PAIR / "target")
        assert tokenizer(text).input_ids == ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.eos_token_id == 0


def test_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "system: Be short.\nuser: Hello\nassistant:"


def test_target_is_a_plain_llama() -> None:
    """transformers computes the logits and features that the head was trained on."""
    ours, _ = files.load_pair(PAIR, torch.device("cpu"))
    theirs = LlamaForCausalLM.from_pretrained(PAIR / "target", dtype=torch.float32).eval()
    tokens = torch.randint(0, ours.shape.vocab, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits, features = ours(tokens)
        result = theirs(tokens, output_hidden_states=True)
    torch.testing.assert_close(result.logits, logits, atol=1e-3, rtol=1e-4)
    captured = torch.cat([result.hidden_states[i + 1] for i in ours.shape.aux_layers], -1)
    torch.testing.assert_close(captured, features, atol=1e-3, rtol=1e-4)


def test_head_has_the_eagle3_layout() -> None:
    """SafeAILab's tensor names, and maps between the two vocabularies that agree."""
    shape = PairShape()
    tensors = load_file(PAIR / "draft/model.safetensors")
    config = json.loads((PAIR / "draft/config.json").read_text())
    mid = ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    mid += [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    names = {f"midlayer.{n}.weight" for n in mid} | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(tensors) == names
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == shape.draft_vocab == len(tensors["d2t"])
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(shape.aux_layers)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    target_ids = torch.arange(shape.draft_vocab) + tensors["d2t"]
    assert torch.equal(target_ids, tensors["t2d"].nonzero()[:, 0])
    weights = [t.dtype for n, t in tensors.items() if n not in {"d2t", "t2d"}]
    assert set(weights) == {torch.bfloat16}


def test_withheld_draft_kv_costs_most_of_the_acceptance() -> None:
    """On prompts that quote themselves, made from this repository's own text, which the pair never saw."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(PAIR / "target/tokenizer.json"))
    target, head = files.load_pair(PAIR, torch.device("cpu"))
    paths = [PAIR / "MODEL_CARD.md", REPOSITORY / "training/tiny/tinypair/speculate.py"]
    documents = [Document(0, path.read_text(), prose=False) for path in paths]
    prompts = prompt_sets(tokenizer, documents, len(documents))["copy_text"]
    run = Speculation(target, head, prompts, 40, steps=7)
    reference = plain_greedy(target, prompts, 40)
    accept = {}
    for kind in (DraftKV.COLD, DraftKV.MASKED):
        tokens, rounds = run.run(kind, (PROMPT_TOKENS - 1) // 64 * 64)
        assert torch.equal(tokens, reference)
        accept[kind] = summarize("copy_text", 7, 64, kind, rounds, 0).accept
    assert accept[DraftKV.COLD] >= 4.5
    assert accept[DraftKV.MASKED] <= 0.5 * accept[DraftKV.COLD]
