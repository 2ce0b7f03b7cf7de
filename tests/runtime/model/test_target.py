"""The packed, paged target against plain transformers on the same files: logits and features, in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from speccache_runtime.model.target import load_target

FAMILY_NAMES = ["llama", "llama_tied_biased", "llama3_rope", "mistral", "qwen2", "qwen3", "heads_not_grouped"]
CPU = torch.device("cpu")
AUX = (0, 2, 4)


@pytest.fixture(params=FAMILY_NAMES)
def pair(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> SimpleNamespace:
    """The same directory loaded by us and by transformers."""
    path = model_dir(request.param)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    return SimpleNamespace(plain=plain, ours=load_target(path, device=CPU, dtype=torch.float32, aux_layers=AUX))


@torch.inference_mode()
def expect(plain: torch.nn.Module, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' logits, and the outputs of AUX taken by hooks of our own."""
    kept: dict[int, torch.Tensor] = {}
    hooks = [
        plain.model.layers[layer].register_forward_hook(lambda _m, _i, out, layer=layer: kept.update({layer: out}))
        for layer in AUX
    ]
    logits = plain(torch.tensor([tokens])).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, torch.cat([kept[layer] for layer in AUX], dim=-1)[0]


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-5)


def test_single_prompt(pair: SimpleNamespace, tools: SimpleNamespace) -> None:
    """One prompt in one pass over pages in random order."""
    tokens = tools.random_tokens(70)
    packer = tools.Packer(pair.ours, tools.make_pool(pair.ours.facts))
    sequence = packer.sequence(tokens)
    packer.step([(sequence, 70)])
    logits, features = expect(pair.plain, tokens)
    close(packer.logits(sequence), logits)
    close(torch.cat(sequence.features), features)
    assert packer.logits(sequence).dtype == torch.float32


def test_chunked_prefill_then_decode(pair: SimpleNamespace, tools: SimpleNamespace) -> None:
    """Uneven chunks, then single tokens, then a verify-like step of eight rows."""
    tokens = tools.random_tokens(90, seed=1)
    packer = tools.Packer(pair.ours, tools.make_pool(pair.ours.facts))
    sequence = packer.sequence(tokens)
    for count in (33, 16, 1, 30, 1, 1, 8):
        packer.step([(sequence, count)])
    logits, features = expect(pair.plain, tokens)
    close(packer.logits(sequence), logits)
    close(torch.cat(sequence.features), features)


def test_mixed_requests_share_a_pass(pair: SimpleNamespace, tools: SimpleNamespace) -> None:
    """Prefill, chunked prefill, verify and decode of different requests in the same packed forwards."""
    prompts = [tools.random_tokens(n, seed=n) for n in (64, 41, 23, 9)]
    packer = tools.Packer(pair.ours, tools.make_pool(pair.ours.facts))
    a, b, c, d = (packer.sequence(tokens) for tokens in prompts)
    packer.step([(a, 40), (c, 20)])
    packer.step([(b, 17), (a, 1), (c, 1), (d, 4)])
    packer.step([(d, 1), (a, 8), (b, 16)])
    packer.step([(a, 1), (b, 1), (c, 1), (d, 1)])
    packer.step([(b, 7), (c, 1), (d, 3), (a, 14)])
    for sequence in (a, b, c, d):
        assert sequence.done == len(sequence.tokens)
        logits, features = expect(pair.plain, sequence.tokens)
        close(packer.logits(sequence), logits)
        close(torch.cat(sequence.features), features)
