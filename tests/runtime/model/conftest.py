"""Small random models of every served family, pools, and packed batches over scattered pages.

In: loaders, attention, the draft head, inspection and the tokenizer, on tiny models that are made here and on the
built-in pair. Out: scheduling, caching and the engine's loop, which have their own folders.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.model.attention import AttentionBatch, Segment
from speccache_runtime.model.target import Target, TargetOutput

PAGE_SIZE = 16
SHAPE = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0},
    "llama_tied_biased": {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "head_dim": 16},
    "llama3_rope": {
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "heads_not_grouped": {"model_type": "llama", "num_key_value_heads": 4},
}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
FAMILIES |= {
    "v2_lite": LATENT
    | {"model_type": "deepseek_v2", "q_lora_rank": None, "rope_parameters": YARN, "n_shared_experts": 2},
    "v2": LATENT | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
    "v3": LATENT | {"model_type": "deepseek_v3", "rope_parameters": YARN},
    "v3_halves": LATENT | {"model_type": "deepseek_v3", "rope_interleave": False, "topk_group": 2, "q_lora_rank": None},
    "v3_biased": LATENT | {"model_type": "deepseek_v3", "attention_bias": True, "norm_topk_prob": False},
}
"""The last five have multi-head latent attention and experts."""


def make_model(path: Path, family: str, *, seed: int = 0, **changes: Any) -> Path:
    """Saves a random model of `family` to `path` in bfloat16, as checkpoints are published."""
    settings = SHAPE | FAMILIES[family] | changes
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Larger than the usual start values, so that attention is far from uniform and errors show.
            parameter.copy_(torch.randn_like(parameter) * 0.15 + (1.0 if parameter.ndim == 1 else 0.0))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.2)
    model.to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a random model by family name; made once per session, never written to afterwards."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_model(tmp_path_factory.mktemp(family), family)
        return made[family]

    return get


def make_pool(facts: Any, pages: int = 64, page_size: int = PAGE_SIZE) -> KVPool:
    """A pool filled with garbage: whatever a test did not write must never matter."""
    pool = KVPool(PoolShape(facts.geometry, page_size, "float32"), pages, torch.device("cpu"))
    generator = torch.Generator().manual_seed(5)
    for layer in range(facts.geometry.layers):
        for buffer in pool.layer(layer):
            buffer.normal_(generator=generator).mul_(3)
    return pool


@dataclass
class Sequence_:
    """One sequence of a packed test: its tokens, how many are computed already, and its pages in order."""

    tokens: list[int]
    pages: list[int]
    done: int = 0
    hidden: list[torch.Tensor] = field(default_factory=list)
    features: list[torch.Tensor] = field(default_factory=list)


class Packer:
    """Runs packed forwards of several sequences whose pages are scattered over one pool."""

    def __init__(self, target: Target, pool: KVPool, *, page_size: int = PAGE_SIZE, seed: int = 3) -> None:
        self.target = target
        self.pool = pool
        self.page_size = page_size
        self.free = list(range(pool.num_pages))
        random.Random(seed).shuffle(self.free)

    def sequence(self, tokens: Sequence[int]) -> Sequence_:
        count = -(-len(tokens) // self.page_size)
        pages, self.free = self.free[:count], self.free[count:]
        return Sequence_(list(tokens), pages)

    def step(self, work: Sequence[tuple[Sequence_, int]]) -> TargetOutput:
        """Computes the next n tokens of each (sequence, n) in one pass and keeps the rows."""
        batch, tokens, positions = pack([(s.tokens, s.done, n, s.pages) for s, n in work], self.page_size)
        out = self.target.forward(tokens, positions, self.pool, batch)
        row = 0
        for sequence, count in work:
            sequence.hidden.append(out.hidden[row : row + count])
            if out.features is not None:
                sequence.features.append(out.features[row : row + count])
            sequence.done += count
            row += count
        return out

    def logits(self, sequence: Sequence_) -> torch.Tensor:
        return self.target.logits(torch.cat(sequence.hidden))


def pack(
    work: Sequence[tuple[Sequence[int], int, int, Sequence[int]]], page_size: int
) -> tuple[AttentionBatch, torch.Tensor, torch.Tensor]:
    """(tokens, done, count, pages) of each sequence to a batch, its tokens and its positions."""
    slots: list[int] = []
    rows: list[int] = []
    positions: list[int] = []
    segments = []
    for tokens, done, count, pages in work:
        span = range(done, done + count)
        segments.append(Segment(len(rows), count, torch.tensor(pages), done + count))
        slots += [pages[i // page_size] * page_size + i % page_size for i in span]
        rows += [tokens[i] for i in span]
        positions += span
    return AttentionBatch(torch.tensor(slots), tuple(segments)), torch.tensor(rows), torch.tensor(positions)


def random_tokens(count: int, vocab: int = 96, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def edit_json(path: Path, **changes: Any) -> None:
    """Writes changed keys into a JSON file; a value of None removes the key."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """The helpers of this file: test modules cannot import a conftest by name."""
    return SimpleNamespace(
        make_model=make_model,
        make_pool=make_pool,
        Packer=Packer,
        pack=pack,
        random_tokens=random_tokens,
        edit_json=edit_json,
        write_json=write_json,
        FAMILIES=FAMILIES,
        SHAPE=SHAPE,
        PAGE_SIZE=PAGE_SIZE,
    )
