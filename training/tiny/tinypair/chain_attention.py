"""Attention of an unrolled draft step, exact and as cheap as plain causal attention.

At unrolled step s the query of slot i sees the verified keys of slots <= i, and of the steps since then only its own
chain: one key per step. Flash attention gives the verified part as (output, log-sum-exp); the few chain keys are merged
into it. For the gradient, the flash backward pass runs with the *merged* output and log-sum-exp, as ring attention
does, so no mask tensor and no repeated keys are ever built.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ChainAttention(torch.autograd.Function):
    """`apply(q, k, v, chain_k, chain_v)`: all [B, H, T, D], the chain [n, B, H, T, D]. Returns [B, H, T, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chain_k: Tensor, chain_v: Tensor) -> Tensor:
        verified, verified_lse, ctx.flash_state = _flash(q, k, v)
        scores = (q.float() * chain_k.float()).sum(-1) * q.shape[-1] ** -0.5
        lse = torch.logaddexp(verified_lse, torch.logsumexp(scores, 0))
        merged = verified.float() * (verified_lse - lse).exp()[..., None]
        for step in range(chain_k.shape[0]):
            merged += (scores[step] - lse).exp()[..., None] * chain_v[step]
        out = merged.to(q.dtype)
        ctx.save_for_backward(q, k, v, chain_k, chain_v, out, lse, scores)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, chain_k, chain_v, out, lse, scores = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, ctx.flash_state)
        wide = grad.float()
        shared = (wide * out.float()).sum(-1)
        weights = (scores - lse).exp()
        d_scores = weights * ((wide * chain_v.float()).sum(-1) - shared) * q.shape[-1] ** -0.5
        dq = dq.float() + (d_scores[..., None] * chain_k.float()).sum(0)
        d_chain_k = (d_scores[..., None] * q.float()).to(chain_k.dtype)
        return dq.to(q.dtype), dk, dv, d_chain_k, (weights[..., None] * wide).to(chain_v.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Any]:
    """Causal attention and its log-sum-exp [B, H, T]; the third value is what the CUDA backward pass needs."""
    if q.is_cuda:
        result = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        return result[0], result[1], result[2:8]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
    return out, lse, None


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if q.is_cuda:
        cum_q, cum_k, max_q, max_k, seed, offset = state
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
        )
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(grad, q, k, v, out, lse, 0.0, True)
