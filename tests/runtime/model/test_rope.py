"""Angles and rotation against transformers, with and without a table, for every served kind of rope."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from speccache_runtime.model.rope import MAX_TABLE_BYTES, Rope, rotate

KINDS: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
]
HEAD_DIM = 64
LONG = MAX_TABLE_BYTES // (8 * HEAD_DIM) + 1


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind["rope_type"]))
@pytest.mark.parametrize("positions", [4096, LONG], ids=["table", "no_table"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rotation_equals_transformers(kind: dict[str, Any], positions: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters=kind)
    module = LlamaRotaryEmbedding(config)
    rope = Rope.of_module(module, positions)
    assert (rope._table is None) == (positions == LONG)
    at = torch.tensor([0, 1, 77, 2049, 4095])
    x = torch.randn(5, 3, HEAD_DIM, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = module(x[None], at[None])
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(rotate(x, *rope(at, dtype)), expected[0].transpose(0, 1), atol=tolerance, rtol=tolerance)
