"""The numbers of the pair and of its training, in one place, so that the model card can quote them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PairShape:
    """Sizes of the target and its one-layer head. `aux_layers` are the 0-based layers whose output feeds the head."""

    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    intermediate: int = 640
    vocab: int = 2048
    draft_vocab: int = 1664
    max_positions: int = 4096
    aux_layers: tuple[int, ...] = (1, 3, 4)
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


MICRO = PairShape(64, 4, 2, 1, 160, 512, 384, 256, (0, 1, 2))
"""A pair small enough to train a few steps on a CPU in a test."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How one model is trained. Time is a wall-clock budget: the learning rate follows a cosine over it, so the same
    recipe fits any machine. `copy_share` of the rows quote themselves once `copy_from` of the budget is spent."""

    seconds: float
    learning_rate: float
    warm_up_steps: int
    copy_from: float
    copy_share: float
    rows: int = 8


@dataclass(frozen=True, slots=True)
class Unroll:
    """The head is trained on its own outputs for `steps` steps; step s weighs `decay ** s`."""

    steps: int = 7
    decay: float = 0.9


TARGET_SCHEDULE = Schedule(seconds=200, learning_rate=3e-3, warm_up_steps=200, copy_from=0.45, copy_share=0.45)
HEAD_SCHEDULE = Schedule(seconds=160, learning_rate=1.5e-3, warm_up_steps=100, copy_from=0.0, copy_share=0.5)

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0
