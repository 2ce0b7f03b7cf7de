"""Choosing tokens: greedy is the most probable one, draws follow the distribution, a seed repeats its draws."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.core import Sampling
from speccache_runtime.engine.sampler import choose

# Chi-square at a chance of 1e-4 that a right sampler fails; the draws are the same on every run.
CHI_SQUARE = {2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88, 8: 31.83}
DRAWS = 3000


def params(temperature: float = 1.0, top_p: float = 1.0, seed: int = 1) -> Sampling:
    return Sampling(temperature, top_p, seed)


def distribution(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """The definition: tempered, cut to the smallest set of most probable tokens that reaches top_p, normed again."""
    probs = torch.softmax(logits.double() / temperature, dim=-1)
    kept, mass = torch.zeros_like(probs), 0.0
    for token in probs.argsort(descending=True).tolist():
        if mass >= top_p:
            break
        kept[token] = probs[token]
        mass += float(probs[token])
    return kept / kept.sum()


@given(st.lists(st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5), min_size=1, max_size=4))
def test_greedy_is_the_most_probable_token(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    chosen = choose(logits, [params(temperature=0.0)] * len(rows), range(len(rows)))
    assert torch.equal(chosen, logits.argmax(dim=-1))


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.5, 1.0), (2.0, 0.8), (1.0, 0.6), (1.5, 0.95)])
def test_draws_follow_the_distribution_as_torch_draws_do(temperature: float, top_p: float) -> None:
    logits = torch.tensor([2.0, 1.5, 1.0, 0.0, -0.5, -1.0, 0.7, 0.2])
    probs = distribution(logits, temperature, top_p)
    rows = logits.expand(DRAWS, -1)
    ours = Counter(choose(rows, [params(temperature, top_p, seed=11)] * DRAWS, range(DRAWS)).tolist())
    drawn = torch.multinomial(probs, DRAWS, replacement=True, generator=torch.Generator().manual_seed(5))
    torchs = Counter(drawn.tolist())
    support = [token for token in range(len(logits)) if probs[token] > 0]
    assert set(ours) <= set(support), "a token outside of top_p was drawn"
    for counts in (ours, torchs):
        chi = sum((counts[t] - DRAWS * float(probs[t])) ** 2 / (DRAWS * float(probs[t])) for t in support)
        assert chi < CHI_SQUARE[len(support) - 1]


def test_neighbouring_positions_and_seeds_draw_independently() -> None:
    """Pairs of draws at positions n and n+1, and of seeds s and s+1, fill all nine cells alike."""
    rows = torch.zeros(DRAWS + 1, 3)
    one = choose(rows, [params(seed=3)] * (DRAWS + 1), range(DRAWS + 1)).tolist()
    other = choose(rows, [params(seed=4)] * (DRAWS + 1), range(DRAWS + 1)).tolist()
    for pairs in (itertools.pairwise(one), zip(one[1:], other[1:], strict=True)):
        cells = Counter(pairs)
        chi = sum((cells[a, b] - DRAWS / 9) ** 2 / (DRAWS / 9) for a in range(3) for b in range(3))
        assert chi < CHI_SQUARE[8]


@given(st.integers(0, 2**63), st.integers(0, 5000), st.integers(0, 3))
def test_a_draw_depends_on_seed_and_position_and_not_on_its_batch(seed: int, position: int, row: int) -> None:
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    alone = choose(logits[row : row + 1], [params(seed=seed)], [position])
    everybody = [params(seed=seed + n) for n in range(4)]
    everybody[row] = params(seed=seed)
    positions = [7, 7, 7, 7]
    positions[row] = position
    assert choose(logits, everybody, positions)[row] == alone[0]


def test_greedy_and_drawn_rows_mix_in_one_batch() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]] * 3)
    chosen = choose(logits, [params(0.0), params(1.0, top_p=1e-6), params(1e-9)], [1, 2, 3])
    assert chosen.tolist() == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-38, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    logits = torch.tensor([[-30.0, 12.0, 90.0, 89.0]])
    assert choose(logits, [params(temperature)], [5]).tolist() == [2]


@pytest.mark.parametrize("top_p", [1e-300, 1e-46, 1e-12, 0.3])
def test_the_most_probable_token_always_stays(top_p: float) -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.25]).expand(50, -1)
    assert set(choose(logits, [params(1.0, top_p)] * 50, range(50)).tolist()) <= ({2} if top_p < 0.2 else {2, 3})


def test_a_large_vocabulary_is_drawn_from_to_its_end() -> None:
    vocab = 50_000
    chosen = choose(torch.zeros(60, vocab), [params()] * 60, range(60))
    assert int(chosen.min()) >= 0
    assert vocab // 2 < int(chosen.max()) < vocab
