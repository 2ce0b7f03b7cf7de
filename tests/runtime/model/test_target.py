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


@pytest.fixture(params=[(name, fuse) for name in FAMILY_NAMES for fuse in (True, False)], ids=str)
def pair(request: pytest.FixtureRequest, model_dir: Callable[[str], Path]) -> SimpleNamespace:
    """The same directory loaded by transformers and by us, with our fused layers and with transformers' modules."""
    name, fuse = request.param
    path = model_dir(name)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    ours = load_target(path, device=CPU, dtype=torch.float32, aux_layers=AUX, fuse=fuse)
    return SimpleNamespace(plain=plain, ours=ours)


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


def test_layers_wait_in_order_before_their_pool_is_touched(
    model_dir: Callable[[str], Path], tools: SimpleNamespace
) -> None:
    """`before_layer` may still fill a layer's pool: what it brings is attended."""
    target = load_target(model_dir("llama"), device=CPU, dtype=torch.float32, aux_layers=())
    tokens = tools.random_tokens(40)
    packer = tools.Packer(target, tools.make_pool(target.facts))
    sequence = packer.sequence(tokens)
    packer.step([(sequence, 32)])
    expected = packer.step([(sequence, 8)]).hidden.clone()

    late = tools.make_pool(target.facts)
    calls: list[int] = []

    def load(layer: int) -> None:
        calls.append(layer)
        for late_buffer, buffer in zip(late.layer(layer), packer.pool.layer(layer), strict=True):
            late_buffer.copy_(buffer)

    batch, rows, positions = tools.pack([(tokens, 32, 8, sequence.pages)], tools.PAGE_SIZE)
    waiting = type(batch)(batch.slots, batch.segments, load)
    torch.testing.assert_close(target.forward(rows, positions, late, waiting).hidden, expected)
    assert calls == list(range(5))


def test_facts_and_end_tokens(model_dir: Callable[[str], Path], tools: SimpleNamespace, tmp_path: Path) -> None:
    """eos ids come from generation_config.json, else from config.json; one or several."""
    path = tools.make_model(tmp_path / "m", "llama")
    load = lambda: load_target(path, device=CPU, dtype=torch.float32, aux_layers=())  # noqa: E731
    assert load().eos_token_ids == {2}
    tools.edit_json(path / "generation_config.json", eos_token_id=[2, 7])
    assert load().eos_token_ids == {2, 7}
    (path / "generation_config.json").unlink()
    assert load().eos_token_ids == {2}
    tools.edit_json(path / "config.json", eos_token_id=None)
    assert load().eos_token_ids == frozenset()


def test_weights_do_not_refer_to_the_files(tools: SimpleNamespace, tmp_path: Path) -> None:
    """A model stays right when its files are overwritten in place, as a volume under it may be."""
    path = tools.make_model(tmp_path / "m", "llama_tied_biased")
    target = load_target(path, device=CPU, dtype=torch.bfloat16, aux_layers=())
    before = {name: p.clone() for name, p in target.model.named_parameters()}
    file = path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(-4096, 2)
        stream.write(b"\0" * 4096)
    for name, parameter in target.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_rope_tables_stay_float32_in_bfloat16(model_dir: Callable[[str], Path]) -> None:
    """The common trap: casting the whole module rounds the angles of far positions."""
    for fuse in (True, False):
        target = load_target(model_dir("llama3_rope"), device=CPU, dtype=torch.bfloat16, aux_layers=(), fuse=fuse)
        assert target.embed.weight.dtype == torch.bfloat16
        assert target.model.get_decoder().rotary_emb.inv_freq.dtype == torch.float32
        cos, _ = target._rope(torch.tensor([500]), torch.float32)
        inv_freq = target.model.get_decoder().rotary_emb.inv_freq
        torch.testing.assert_close(cos.flatten()[: len(inv_freq)], (500 * inv_freq).cos())
