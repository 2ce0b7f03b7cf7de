"""The two training loops. Both fit a wall-clock budget, whatever the machine's speed is."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tinypair.config import PairShape, Schedule, Unroll
from tinypair.model import Head, Target
from tinypair.rows import RowMaker
from tinypair.unrolled import Compile, HeadTrainer, Teacher

log = logging.getLogger(__name__)

Clock = Callable[[], float]

SYNC_EVERY = 10
LOG_EVERY_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Trained:
    """What a loop did. `curve` ends with the last averaged figures (loss, or agreement by step)."""

    parameters: int
    steps: int
    tokens: int
    seconds: float
    curve: tuple[float, ...]


def compiler_for(device: torch.device) -> Compile:
    """Compiles on the GPU; on the CPU (tests) plain calls are faster than compiling."""
    if device.type == "cuda":
        return lambda fn: torch.compile(fn, dynamic=False)
    return lambda fn: fn


def train_target(
    shape: PairShape, maker: RowMaker, schedule: Schedule, start: Target | None = None, clock: Clock = time.monotonic
) -> tuple[Target, Trained]:
    """Trains a new target, or goes on with `start`."""
    torch.manual_seed(0)
    device = maker.stream.device
    target = (start or Target(shape)).to(device)
    loss_of = compiler_for(device)(target.loss)

    def step(copy_share: float) -> tuple[Tensor, Tensor]:
        rows = maker.rows(schedule.rows, shape.max_positions + 1, copy_share)
        with _autocast(device):
            loss = loss_of(rows)
        return loss, loss.detach()[None]

    return target, _loop(target, schedule, step, schedule.rows * shape.max_positions, clock)


def train_head(
    target: Target,
    kept: Tensor,
    maker: RowMaker,
    schedule: Schedule,
    unroll: Unroll,
    start: Head | None = None,
    clock: Clock = time.monotonic,
) -> tuple[Head, Trained]:
    """Trains a head on the frozen target; `kept` are the sorted target ids of its vocabulary."""
    torch.manual_seed(2)
    shape, device = target.shape, maker.stream.device
    head = start or Head(shape)
    head.to(device)
    if start is None:
        head.warm_start(target, kept)
    compiler = compiler_for(device)
    teacher = Teacher(frozen_copy(target, torch.bfloat16 if device.type == "cuda" else torch.float32), kept, compiler)
    trainer = HeadTrainer(head, unroll, compiler)

    def step(copy_share: float) -> tuple[Tensor, Tensor]:
        lesson = teacher.teach(maker.rows(schedule.rows, shape.max_positions, copy_share))
        with _autocast(device):
            result = trainer.loss(lesson)
        return result.total, result.agreement

    return head, _loop(head, schedule, step, schedule.rows * shape.max_positions, clock)


def draft_vocabulary(stream: Tensor, shape: PairShape) -> tuple[Tensor, float]:
    """The sorted ids of the most frequent tokens, and the share of the stream they cover."""
    counts = torch.bincount(stream[:20_000_000].long(), minlength=shape.vocab).float()
    kept = counts.argsort(descending=True)[: shape.draft_vocab]
    return kept.sort().values, float(counts[kept].sum() / counts.sum())


def frozen_copy(target: Target, dtype: torch.dtype) -> Target:
    """A copy without gradients. Only parameters are cast: the rope tables stay in float32."""
    copy = Target(target.shape)
    copy.load_state_dict(target.state_dict())
    for parameter in copy.parameters():
        parameter.data = parameter.data.to(dtype)
        parameter.requires_grad_(False)
    return copy.to(next(target.parameters()).device)


@torch.no_grad()
def held_out_loss(target: Target, stream: Tensor, rows: int = 32) -> float:
    """Mean loss over fixed windows of a stream that was not trained on (nats a token)."""
    maker, total = RowMaker(stream, [[]], seed=7), 0.0
    count = max(1, rows // 4)
    for _ in range(count):
        with _autocast(stream.device):
            total += float(target.loss(maker.rows(4, min(target.shape.max_positions, stream.numel() - 2), 0.0)))
    return total / count


def _loop(
    module: nn.Module,
    schedule: Schedule,
    step: Callable[[float], tuple[Tensor, Tensor]],
    tokens_per_step: int,
    clock: Clock,
) -> Trained:
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = _optimizer(parameters, schedule.learning_rate)
    began = clock()
    step(schedule.copy_share)[0].backward()  # compiles outside the budget
    module.zero_grad(set_to_none=True)
    log.info("%s: first step took %.1f s", type(module).__name__, clock() - began)
    began = logged = clock()
    steps, average = 0, None
    while (spent := (clock() - began) / schedule.seconds) < 1:
        _set_rate(optimizer, schedule, steps, spent)
        loss, figures = step(schedule.copy_share if spent >= schedule.copy_from else 0.0)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average = figures if average is None else average.lerp(figures, 0.02)
        steps += 1
        if steps % SYNC_EVERY == 0 and loss.is_cuda:
            torch.cuda.synchronize()  # launches run ahead of the GPU, and would make the clock lie
        if clock() - logged > LOG_EVERY_SECONDS:
            logged = clock()
            log.info("step %d, %.0f %%, %s", steps, 100 * spent, [round(x, 3) for x in average.tolist()])
    seconds = clock() - began
    curve = tuple(round(x, 4) for x in average.tolist()) if average is not None else ()
    count = sum(p.numel() for p in parameters)
    log.info("%s: %.2f M parameters, %d steps in %.0f s, %s", type(module).__name__, count / 1e6, steps, seconds, curve)
    return Trained(count, steps, steps * tokens_per_step, round(seconds, 1), curve)


def _set_rate(optimizer: torch.optim.Optimizer, schedule: Schedule, steps: int, spent: float) -> None:
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * spent))
    for group in optimizer.param_groups:
        group["lr"] = schedule.learning_rate * min(1.0, (steps + 1) / schedule.warm_up_steps) * cosine


def _optimizer(parameters: list[nn.Parameter], rate: float) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=parameters[0].is_cuda)


def _autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
