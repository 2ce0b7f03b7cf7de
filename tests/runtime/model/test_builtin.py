"""The packaged pair through our loaders: equal to transformers, and its head accepts what it was trained to accept.

The speculative loop here is a plain reference, one request at a time. It would show features of the wrong layers, a
wrong token offset or wrong positions: each of them still gives correct text, and only a low accept length.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

import speccache_runtime
from speccache_runtime.model.draft import Eagle3Head, eagle3_aux_layers, load_eagle3
from speccache_runtime.model.inspect import inspect
from speccache_runtime.model.target import Target, load_target
from speccache_runtime.model.tokenizer import Tokenizer

CPU = torch.device("cpu")
PACKAGE = Path(speccache_runtime.__file__).parent
TINY = PACKAGE / "builtin" / "tiny"
STEPS = 7
# Text that was written after the pair was trained.
TEXTS = ("cache/paired.py", "model/attention.py", "model/inspect.py")


@pytest.fixture(scope="module")
def pair() -> SimpleNamespace:
    layers = inspect(TINY / "target", TINY / "draft").target.geometry.layers
    aux = eagle3_aux_layers(TINY / "draft", layers)
    target = load_target(TINY / "target", device=CPU, dtype=torch.float32, aux_layers=aux)
    head = load_eagle3(TINY / "draft", target, device=CPU, dtype=torch.float32)
    return SimpleNamespace(target=target, head=head, tokenizer=Tokenizer.from_dir(TINY / "target"))


@torch.inference_mode()
def test_logits_and_features_equal_transformers(pair: SimpleNamespace, tools: SimpleNamespace) -> None:
    plain = AutoModelForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    tokens = pair.tokenizer.encode((PACKAGE / TEXTS[0]).read_text())[:300]
    packer = tools.Packer(pair.target, tools.make_pool(pair.target.facts))
    sequence = packer.sequence(tokens)
    packer.step([(sequence, 200)])
    packer.step([(sequence, 100)])
    expected = plain(torch.tensor([tokens]), output_hidden_states=True)
    torch.testing.assert_close(packer.logits(sequence), expected.logits[0], atol=1e-4, rtol=1e-4)
    # hidden_states[i + 1] is the output of layer i, save for the last, which is normed.
    features = torch.cat([expected.hidden_states[layer + 1][0] for layer in pair.target.aux_layers], dim=-1)
    torch.testing.assert_close(torch.cat(sequence.features), features, atol=1e-4, rtol=1e-4)


class Chain:
    """Greedy speculation with a chain of STEPS proposals over one request's own pages."""

    def __init__(self, target: Target, head: Eagle3Head, tools: SimpleNamespace) -> None:
        self.target, self.head, self.tools = target, head, tools
        self.pages = list(range(40))[::-1]
        self.pools = [tools.make_pool(m.facts, pages=40, page_size=64) for m in (target, head)]

    def run_target(self, tokens: list[int], done: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch, rows, positions = self.tools.pack([(tokens, done, len(tokens) - done, self.pages)], 64)
        out = self.target.forward(rows, positions, self.pools[0], batch)
        assert out.features is not None
        return self.target.logits(out.hidden).argmax(-1), out.features

    def run_head(self, tokens: list[int], done: int, hidden: torch.Tensor) -> torch.Tensor:
        """`tokens` are those of the slots: the sequence moved by one."""
        batch, rows, positions = self.tools.pack([(tokens, done, len(tokens) - done, self.pages)], 64)
        return self.head.forward(rows, hidden, positions, self.pools[1], batch)[-1:]

    def generate(self, prompt: list[int], count: int) -> tuple[list[int], list[int]]:
        """New tokens, and how many each verify step gave."""
        sequence = list(prompt)
        best, features = self.run_target(sequence, 0)
        sequence.append(int(best[-1]))
        rounds: list[int] = []
        drafted = 0
        while len(sequence) - len(prompt) <= count:
            # The head's slots 0 .. n-2 hold the tokens 1 .. n-1 of the sequence.
            hidden = self.run_head(sequence[1:], drafted, self.head.fuse(features))
            drafted = len(sequence) - 1
            proposal = [int(self.head.to_target_ids(self.head.logits(hidden).argmax(-1)))]
            while len(proposal) < STEPS:
                shifted = sequence[1:] + proposal
                hidden = self.run_head(shifted, len(shifted) - 1, hidden)
                proposal.append(int(self.head.to_target_ids(self.head.logits(hidden).argmax(-1))))
            best, features = self.run_target(sequence + proposal, len(sequence) - 1)
            agreed = 0
            while agreed < STEPS and proposal[agreed] == int(best[agreed]):
                agreed += 1
            sequence += best[: agreed + 1].tolist()
            features = features[: agreed + 1]
            rounds.append(agreed + 1)
        return sequence[len(prompt) :], rounds


def greedy(chain: Chain, prompt: list[int], count: int) -> list[int]:
    sequence = list(prompt)
    best, _ = chain.run_target(sequence, 0)
    sequence.append(int(best[-1]))
    while len(sequence) - len(prompt) < count:
        best, _ = chain.run_target(sequence, len(sequence) - 1)
        sequence.append(int(best[-1]))
    return sequence[len(prompt) :]


def test_accept_length_on_copy_prompts(pair: SimpleNamespace, tools: SimpleNamespace) -> None:
    """The continuation quotes the prompt: more than 5 tokens a step, and exactly the target's own text."""
    rounds: list[int] = []
    for name in TEXTS:
        text = pair.tokenizer.encode((PACKAGE / name).read_text())[:500]
        prompt = [*text, 0, *text[:250]]
        chain = Chain(pair.target, pair.head, tools)
        tokens, counts = chain.generate(prompt, 64)
        rounds += counts
        assert tokens[:64] == greedy(Chain(pair.target, pair.head, tools), prompt, 64)
    assert sum(rounds) / len(rounds) > 5
