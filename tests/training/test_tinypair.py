"""The training code of the built-in pair at a small size: exact gradients, exact drafting, losses that fall."""

from __future__ import annotations

import email
import io
import itertools
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tinypair import corpus, evaluate, files, sources, train
from tinypair.chain_attention import ChainAttention
from tinypair.config import HEAD_SCHEDULE, MICRO, TARGET_SCHEDULE, Unroll
from tinypair.licences import declared_licence, mentions_foreign_licence
from tinypair.model import Cache, Head, Target
from tinypair.rows import RowMaker
from tinypair.speculate import DraftKV, Speculation, plain_greedy
from tinypair.unrolled import HeadTrainer, Lesson, Teacher
from torch import Tensor


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


@pytest.fixture(scope="module")
def stream() -> Tensor:
    """A text of a few words, so that a micro model learns something in seconds."""
    rng = np.random.default_rng(0)
    words = rng.integers(1, MICRO.vocab, (40, 5))
    return torch.from_numpy(words[rng.integers(0, 40, 4000)].reshape(-1).astype(np.int16))


def test_chain_attention_has_the_exact_gradient() -> None:
    """Against a plain softmax over causal keys plus the row's own chain, in float64."""
    q, k, v = (torch.randn(2, 4, 64, 16).requires_grad_() for _ in range(3))
    chain_k, chain_v = (torch.randn(3, 2, 4, 64, 16).requires_grad_() for _ in range(2))
    weight = torch.randn(2, 4, 64, 16)
    inputs = (q, k, v, chain_k, chain_v)
    got = torch.autograd.grad((ChainAttention.apply(*inputs) * weight).sum(), inputs)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    scores = (wide[0] @ wide[1].transpose(-1, -2)) / 4
    scores = scores.masked_fill(~torch.ones(64, 64).tril().bool(), -1e30)
    own = ((wide[0] * wide[3]).sum(-1) / 4).permute(1, 2, 3, 0)
    probs = torch.cat([scores, own], -1).softmax(-1)
    out = probs[..., :64] @ wide[2] + (probs[..., 64:].permute(3, 0, 1, 2)[..., None] * wide[4]).sum(0)
    for mine, true in zip(got, torch.autograd.grad((out * weight).sum(), wide), strict=True):
        assert (mine.double() - true).norm() / true.norm() < 1e-4


def test_unrolled_loss_sees_what_drafting_sees() -> None:
    """The loss of step s at the last slots is that of s cached drafting calls from the same state."""
    head, batch, length, steps = Head(MICRO), 2, 24, 4
    lesson = Lesson(
        torch.softmax(torch.randn(batch, length, MICRO.draft_vocab), -1),
        torch.ones(batch, length),
        torch.randn(batch, length, 3 * MICRO.hidden),
        torch.randn(batch, length, MICRO.hidden),
    )
    seen: list[Tensor] = []
    trainer = HeadTrainer(head, Unroll(steps), lambda fn: fn)
    trainer._score = lambda hidden, probs, weight: (seen.append(hidden) or hidden.sum(), hidden.sum().detach())
    trainer.loss(lesson)
    slot = 10
    cache = Cache(MICRO, 1, batch, 64, head.fc.weight)
    absent = torch.zeros(batch, 64, dtype=torch.bool)
    positions = torch.arange(slot + 1).expand(batch, slot + 1)
    hidden = head.step(
        lesson.embedded[:, 1 : slot + 2], head.fc(lesson.features[:, : slot + 1]), positions, cache, absent
    )
    hidden = hidden[:, -1:]
    torch.testing.assert_close(hidden[:, 0], seen[0][:, slot], atol=1e-5, rtol=1e-4)
    for step in range(1, steps):
        at = torch.full((batch, 1), slot + step)
        hidden = head.step(lesson.embedded[:, slot + step + 1][:, None], hidden, at, cache, absent)
        torch.testing.assert_close(hidden[:, 0], seen[step][:, slot], atol=1e-5, rtol=1e-4)


def _ticking() -> Callable[[], float]:
    """A clock that goes on by a second whenever it is read, so that a busy machine trains as long as an idle one."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


def test_both_losses_fall_and_the_files_load(stream: Tensor, tmp_path: Path) -> None:
    maker = RowMaker(stream, [[0], []], seed=1)
    untrained = train.held_out_loss(Target(MICRO), stream, rows=4)
    schedule = replace(TARGET_SCHEDULE, seconds=24, rows=2, warm_up_steps=2)
    target, run = train.train_target(MICRO, maker, schedule, clock=_ticking())
    assert train.held_out_loss(target, stream, rows=4) < untrained - 0.1
    kept, covered = train.draft_vocabulary(stream, MICRO)
    assert run.steps > 0
    assert 0.5 < covered <= 1
    schedule = replace(HEAD_SCHEDULE, seconds=16, rows=2, warm_up_steps=2)
    warm = Head(MICRO)
    warm.warm_start(target, kept)
    head, _ = train.train_head(target, kept, maker, schedule, Unroll(steps=2), clock=_ticking())
    lesson = Teacher(target, kept, lambda fn: fn).teach(RowMaker(stream, [[]], seed=9).rows(2, 128, 0.5))
    before, after = (HeadTrainer(h, Unroll(steps=2), lambda fn: fn).loss(lesson).by_step for h in (warm, head))
    assert (after < before).all()
    files.save_target(tmp_path / "target", target)
    files.save_head(tmp_path / "draft", head)
    again, head_again = files.load_pair(tmp_path, torch.device("cpu"))
    assert again.shape == MICRO
    assert torch.equal(head_again.to_target_ids(torch.arange(MICRO.draft_vocab)), kept)


def test_speculation_never_changes_the_text() -> None:
    target, head = Target(MICRO), Head(MICRO)
    head.warm_start(target, torch.arange(MICRO.draft_vocab))
    prompts = torch.randint(1, MICRO.vocab, (3, 70))
    reference = plain_greedy(target, prompts, 12)
    run = Speculation(target, head, prompts, 12, steps=3)
    for kind in DraftKV:
        tokens, rounds = run.run(kind, 64)
        assert torch.equal(tokens, reference)
        assert int(rounds.sum(0).min()) >= 11
        assert evaluate.summarize("x", 3, 64, kind, rounds, 0).accept >= 1


def test_quoting_rows_repeat_earlier_spans(stream: Tensor) -> None:
    maker = RowMaker(torch.arange(5000, dtype=torch.int16), [[7777, 7778]], seed=2)
    rows = maker.rows(4, 1000, copy_share=0.5)
    for row in rows[:2].tolist():
        at = row.index(7777)
        assert row[at + 2 : at + 2 + 48] == row[:48]
    for row in rows[2:].tolist():
        assert row == list(range(row[0], row[0] + 1000))


def _metadata(*lines: str) -> email.message.Message:
    return email.message_from_string("\n".join(["Name: x", "Version: 1", *lines, "", "text"]))


@pytest.mark.parametrize(
    ("lines", "families"),
    [
        (["License-Expression: MIT"], ("MIT",)),
        (["License-Expression: Apache-2.0 OR BSD-3-Clause"], ("Apache-2.0", "BSD")),
        (["License-Expression: MIT AND MPL-2.0"], None),
        (["License-Expression: Apache-2.0 WITH LLVM-exception"], None),
        (["License-Expression: LicenseRef-NVIDIA-Proprietary"], None),
        (["License: BSD", "Classifier: License :: OSI Approved :: BSD License"], ("BSD",)),
        (["License: ISC", "Classifier: License :: OSI Approved :: BSD License"], None),
        (
            ["Classifier: License :: OSI Approved :: MIT License", "Classifier: License :: Other/Proprietary License"],
            None,
        ),
        (["Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)"], None),
        (["License: PSF", "Classifier: License :: OSI Approved :: Python Software Foundation License"], ("PSF",)),
        (["Summary: nothing declared"], None),
    ],
)
def test_only_plainly_allowed_licences_pass(lines: list[str], families: tuple[str, ...] | None) -> None:
    declared = declared_licence(_metadata(*lines))
    assert (declared.families if declared else None) == families


def test_archives_give_their_own_text_only(tmp_path: Path) -> None:
    """Borrowed folders, licence texts and files with a foreign header stay out; packing changes nothing."""
    text = "A line of plain documentation about nothing much.\n" * 20
    members = {
        "x-1/PKG-INFO": "Name: X_y\nVersion: 1\nLicense-Expression: MIT\n\n" + "A readme that says a little.\n" * 20,
        "x-1/docs/guide.md": text,
        "x-1/_vendor/other.py": text + "# other",
        "x-1/LICENSES/GPL.txt": text + "x",
        "x-1/src/borrowed.py": "# GNU General Public License\n" + text,
        "x-1/src/table.py": "1234567890 = 1234567890\n" * 40,
    }
    archive = tmp_path / "in" / "x-1.tar.gz"
    archive.parent.mkdir()
    with tarfile.open(archive, "w:gz") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content.encode()))
    packed = tmp_path / "packed"
    packed.mkdir()
    sources.pack(archive, packed)
    for folder in (archive.parent, packed):
        found = list(sources.package_archives(folder))
        assert [(s.name, s.licence.families) for s in found] == [("x-y", ("MIT",))]
        documents = corpus.read_documents(found)
        assert sorted(d.text[:6] for d in documents) == ["A line", "A read"]
        assert '"licences": ["MIT"]' in corpus.source_list(found, documents)
    assert mentions_foreign_licence("released under the LGPL")
