"""Models split over ranks: every rank's part together is the whole model, and no part is held twice.

In: ranks as threads that meet at a barrier. Out: processes, messages, pages (tests/runtime/engine/test_parallel*.py).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from speccache_api.geometry import KVGeometry
from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.errors import ModelError
from speccache_runtime.model.draft import load_eagle3
from speccache_runtime.model.inspect import inspect
from speccache_runtime.model.split import Split
from speccache_runtime.model.target import load_target

CPU = torch.device("cpu")
BOUND = 2e-5
"""Ranks add partial sums in another order. In float32 that moves a logit by less than this share of the largest one."""
PATIENCE_S = 60
LOADING = threading.Lock()
"""transformers changes torch's default dtype for all threads while it makes a model."""

T = TypeVar("T")


class Meeting:
    """Where the ranks of a test, one thread each, exchange tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=PATIENCE_S)
        self._parts: list[Any] = [None] * size

    def exchange(self, rank: int, part: Any) -> list[Any]:
        """What all ranks gave, in their order."""
        self._parts[rank] = part
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        return parts

    def run(self, work: Callable[[ThreadRank], T]) -> list[T]:
        """Each rank's result of the same work."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(work, [ThreadRank(self, rank) for rank in range(self.size)]))


class ThreadRank:
    """A `Collective` of threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        self.rank = rank
        self.size = meeting.size

    def sum(self, part: Tensor) -> Tensor:
        first, *others = self._meeting.exchange(self.rank, part.clone())
        for other in others:
            first = first + other
        return first

    def gather(self, part: Tensor) -> Tensor | None:
        parts = self._meeting.exchange(self.rank, part)
        return torch.cat(parts, dim=-1) if self.rank == 0 else None

    def from_first(self, values: Tensor) -> Tensor:
        first: Tensor = self._meeting.exchange(self.rank, values)[0].clone()
        return first


def rank_pool(geometry: KVGeometry, ranks: int, pages: int = 64) -> KVPool:
    pool = KVPool(PoolShape(geometry.for_rank(ranks), 16, "float32"), pages, CPU)
    for layer in range(geometry.layers):
        for buffer in pool.layer(layer):
            buffer.fill_(7.0)
    return pool


def run_target(path: Path, ranks: Any, tokens: list[int], tools: SimpleNamespace) -> SimpleNamespace:
    """Prefill in two chunks on one rank: what it holds and what it says."""
    with LOADING:
        layers = inspect(path, None).target.geometry.layers
        aux = (0, layers // 2, layers - 1)
        target = load_target(path, device=CPU, dtype=torch.float32, aux_layers=aux, ranks=ranks)
    pool = rank_pool(target.facts.geometry, ranks.size)
    packer = tools.Packer(target, pool)
    sequence = packer.sequence(tokens)
    packer.step([(sequence, 33)])
    packer.step([(sequence, len(tokens) - 33)])
    held = {parameter.data_ptr(): parameter.numel() for parameter in target.model.parameters()}
    return SimpleNamespace(
        logits=packer.logits(sequence), features=torch.cat(sequence.features), held=sum(held.values()), pool=pool
    )


KV_HEADS = ["llama", "llama_tied_biased", "mistral", "qwen2", "qwen3", "heads_not_grouped"]
LATENTS = ["v2_lite", "v2", "v3", "v3_halves", "v3_biased"]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", KV_HEADS + LATENTS)
def test_ranks_together_compute_what_one_does(
    family: str, size: int, model_dir: Callable[[str], Path], tools: SimpleNamespace
) -> None:
    """Four ranks of a model with two KV heads repeat each head on two of them."""
    path, tokens = model_dir(family), tools.random_tokens(70)
    (whole,) = Meeting(1).run(lambda rank: run_target(path, rank, tokens, tools))
    parts = Meeting(size).run(lambda rank: run_target(path, rank, tokens, tools))
    assert [part.logits is None for part in parts] == [False] + [True] * (size - 1)
    limit = BOUND * float(whole.logits.abs().max())
    torch.testing.assert_close(parts[0].logits, whole.logits, atol=limit, rtol=0)
    assert torch.equal(parts[0].logits.argmax(-1), whole.logits.argmax(-1))
    for part in parts:
        assert torch.equal(part.features, parts[0].features), "ranks disagree about the hidden state"
        limit = BOUND * float(whole.features.abs().max())
        torch.testing.assert_close(part.features, whole.features, atol=limit, rtol=0)


@pytest.mark.parametrize("family", ["llama", "llama_tied_biased"])
def test_a_rank_holds_no_more_than_its_share(
    family: str, model_dir: Callable[[str], Path], tools: SimpleNamespace
) -> None:
    """Only norms and output biases are whole on every rank."""
    path, tokens = model_dir(family), tools.random_tokens(40)
    (whole,) = Meeting(1).run(lambda rank: run_target(path, rank, tokens, tools))
    parts = Meeting(2).run(lambda rank: run_target(path, rank, tokens, tools))
    alike = (2 * 5 + 1) * 48 + (5 * 48 if "biased" in family else 0)
    for part in parts:
        assert part.held == (whole.held - alike) // 2 + alike
        assert part.pool.layout.page_bytes * 2 == whole.pool.layout.page_bytes


@pytest.mark.parametrize("family", LATENTS)
def test_every_rank_has_all_latents_and_a_share_of_what_reads_them(
    family: str, model_dir: Callable[[str], Path], tools: SimpleNamespace
) -> None:
    path, tokens = model_dir(family), tools.random_tokens(70)
    (whole,) = Meeting(1).run(lambda rank: run_target(path, rank, tokens, tools))
    parts = Meeting(2).run(lambda rank: run_target(path, rank, tokens, tools))
    alike = sum(
        tensor.numel()
        for name, tensor in load_file(path / "model.safetensors").items()
        if re.search(r"norm|q_a_proj|kv_a_proj|mlp\.gate\.weight|o_proj\.bias", name)
    )
    biases = 3 * 48 if family == "v3_biased" else 0
    for number, part in enumerate(parts):
        assert part.held == (whole.held - alike) // 2 + alike - (biases if number else 0), "a bias counts once"
        assert part.pool.layout.page_bytes == whole.pool.layout.page_bytes
        for layer in range(3):
            for ours, other, alone in zip(*(each.pool.layer(layer) for each in (part, parts[0], whole)), strict=True):
                assert torch.equal(ours, other), "ranks keep other latents than rank 0, which writes them"
                torch.testing.assert_close(ours, alone, atol=BOUND * float(alone.abs().max()), rtol=0)


@pytest.mark.parametrize("vocabulary", [96, 97])
def test_a_vocabulary_that_does_not_divide_is_padded(vocabulary: int, tmp_path: Path, tools: SimpleNamespace) -> None:
    path = tools.make_model(tmp_path / "odd", "llama", vocab_size=vocabulary)
    tokens = [vocabulary - 1, 0, 1, *tools.random_tokens(40, vocabulary)]
    (whole,) = Meeting(1).run(lambda rank: run_target(path, rank, tokens, tools))
    parts = Meeting(4).run(lambda rank: run_target(path, rank, tokens, tools))
    assert parts[0].logits.shape == (len(tokens), vocabulary)
    torch.testing.assert_close(parts[0].logits, whole.logits, atol=BOUND * float(whole.logits.abs().max()), rtol=0)


def run_pair(target_path: Path, head_path: Path, ranks: Any, tools: SimpleNamespace) -> Any:
    """A target with its head on one rank: logits and choices of the head behind a prefill and a draft step."""
    with LOADING:
        target = load_target(target_path, device=CPU, dtype=torch.float32, aux_layers=(0, 2, 3), ranks=ranks)
        head = load_eagle3(head_path, target, device=CPU, dtype=torch.float32)
    pool = rank_pool(head.facts.geometry, ranks.size, pages=8)
    features = torch.randn(20, 3 * 48, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    tokens = tools.random_tokens(21, seed=4)
    batch, rows, positions = tools.pack([(tokens, 0, 20, [5, 2])], 16)
    hidden = head.forward(rows, head.fuse(features), positions, pool, batch)
    chosen = head.best(hidden)
    batch, rows, positions = tools.pack([(tokens, 20, 1, [5, 2])], 16)
    last = head.forward(chosen[-1:], hidden[-1:], positions, pool, batch)
    return hidden, chosen, head.logits(last), head.best(last)


@pytest.mark.parametrize("biased", [False, True])
def test_ranks_of_a_head_propose_what_one_does(biased: bool, tmp_path: Path, tools: SimpleNamespace) -> None:
    target_path = tools.make_model(tmp_path / "target", "llama", num_hidden_layers=6)
    draw = torch.Generator().manual_seed(3)
    rand = lambda *shape: torch.randn(*shape, generator=draw) * 0.2  # noqa: E731
    head_path = tmp_path / "head"
    head_path.mkdir()
    tensors = {
        "fc.weight": rand(48, 144),
        "midlayer.self_attn.q_proj.weight": rand(48, 96),
        "midlayer.self_attn.k_proj.weight": rand(24, 96),
        "midlayer.self_attn.v_proj.weight": rand(24, 96),
        "midlayer.self_attn.o_proj.weight": rand(48, 48),
        "midlayer.mlp.gate_proj.weight": rand(80, 48),
        "midlayer.mlp.up_proj.weight": rand(80, 48),
        "midlayer.mlp.down_proj.weight": rand(48, 80),
        "lm_head.weight": rand(61, 48),
        "d2t": torch.arange(61) % 30,
    }
    if biased:
        tensors |= {"fc.bias": rand(48), "midlayer.self_attn.o_proj.bias": rand(48)}
        tensors |= {"midlayer.mlp.down_proj.bias": rand(48)}
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = rand(48) + 1
    save_file(tensors, head_path / "model.safetensors")
    config = tools.SHAPE | {"num_hidden_layers": 1, "draft_vocab_size": 61, "rms_norm_eps": 1e-6, "head_dim": 12}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}
    tools.write_json(head_path / "config.json", config)
    (whole,) = Meeting(1).run(lambda rank: run_pair(target_path, head_path, rank, tools))
    parts = Meeting(2).run(lambda rank: run_pair(target_path, head_path, rank, tools))
    for hidden, chosen, logits, last in parts:
        torch.testing.assert_close(hidden, whole[0], atol=BOUND * float(whole[0].abs().max()), rtol=0)
        assert torch.equal(chosen, whole[1])
        assert torch.equal(last, whole[3])
        if logits is not None:
            torch.testing.assert_close(logits, whole[2], atol=BOUND * float(whole[2].abs().max()), rtol=0)
    assert [part[2] is None for part in parts] == [False, True]


def test_no_more_is_read_of_a_file_than_a_rank_needs(model_dir: Callable[[str], Path]) -> None:
    """Slices, not whole tensors that are cut afterwards; the shape that is checked is the whole one's."""
    from speccache_runtime.model.weights import stream_weights

    path = model_dir("llama")
    whole = load_file(path / "model.safetensors")
    for stored in stream_weights(path, Split(1, 2, 2)):
        full = whole[stored.name]
        assert stored.shape == tuple(full.shape)
        if stored.name.endswith("norm.weight"):
            assert torch.equal(stored.part, full)
        elif stored.name.endswith(("o_proj.weight", "down_proj.weight")):
            assert torch.equal(stored.part, full[:, full.shape[1] // 2 :])
        else:
            assert torch.equal(stored.part, full[len(full) // 2 :])


@pytest.mark.parametrize(("ranks", "changes"), [(4, {"intermediate_size": 82}), (2, {"hidden_act": "gelu"})])
def test_a_model_that_does_not_divide_is_refused(
    ranks: int, changes: dict[str, Any], tmp_path: Path, tools: SimpleNamespace
) -> None:
    path = tools.make_model(tmp_path / "model", "llama", **changes)
    shares = inspect(path, None).target.shares
    assert shares % ranks
    with pytest.raises(ModelError, match=f"split over {ranks} ranks.*divisors of {shares}.*parallelism.tensor"):
        load_target(path, device=CPU, dtype=torch.float32, aux_layers=(), ranks=ThreadRank(Meeting(ranks), 0))
