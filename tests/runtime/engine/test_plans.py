"""A step as integers: the plans of an engine say everything that another runner needs to do the same."""

import dataclasses
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speccache_api.drafts import DRAFTS
from speccache_runtime.cache.loads import Loads
from speccache_runtime.cache.pool import KVPool
from speccache_runtime.core import Sampling
from speccache_runtime.engine.runner import Runner
from speccache_runtime.engine.sampler import choose
from speccache_runtime.steps import NO_ROWS, Group, StepPlan

NEW = 20


class Recorder:
    """Stands in front of a runner and notes what it is told and what it answers."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.calls: list[tuple[StepPlan, frozenset[int], Any, tuple[int, ...]]] = []

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan
        self._runner.submit(plan)

    def result(self) -> Any:
        return self._runner.result()

    def propose(self, ended: frozenset[int]) -> tuple[int, ...]:
        proposed = self._runner.propose(ended)
        self.calls.append((self._plan, ended, self._runner.result(), proposed))
        return proposed


def atoms(value: Any) -> Iterator[Any]:
    """Everything that a plan is made of."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from atoms(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from atoms(item)
    else:
        yield value


@pytest.fixture(params=sorted(DRAFTS))
def recorded(pair: Any, tools: SimpleNamespace, request: pytest.FixtureRequest) -> tuple[Any, Recorder]:
    """A life with mixed steps, preemptions and sampled requests; without a host tier all bytes are computed.

    Draft halves that can be made anew are lost now and then, so that drafts fall behind."""
    life = tools.Life(pair, device_pages=18, host_pages=0, budget=24, max_running=4, algorithm=request.param)
    life.algorithm = request.param
    recorder = life.engine._runner = Recorder(life.engine._runner)
    names = [life.add(tools.random_tokens(20 + 7 * n, seed=80 + n), NEW, temperature=n % 2 * 0.8) for n in range(5)]
    while life.engine.num_requests:
        life.step()
        for entry in life.cache.index.entries():
            entry.draft_on_device &= entry.device_pins > 0 or not life.cache._rebuilds
    assert life.engine.scheduler.preemptions
    assert all(len(life.tokens(name)) == NEW for name in names)
    life.end()
    return life, recorder


def test_a_plan_is_made_of_numbers_and_cannot_change(recorded: tuple[Any, Recorder]) -> None:
    _, recorder = recorded
    assert any(plan.decode and plan.extend for plan, *_ in recorder.calls), "no step has both passes"
    for plan, *_ in recorder.calls:
        assert {type(atom) for atom in atoms(plan)} <= {int, float, bool}
        assert hash(plan) == hash(dataclasses.replace(plan))
        with pytest.raises(dataclasses.FrozenInstanceError):
            plan.decode = ()  # type: ignore[misc]


def test_the_same_plans_do_the_same_in_another_runner(pair: Any, recorded: tuple[Any, Recorder]) -> None:
    """This is what the ranks of a replica do. Page tables arrive in pieces, proposals stay where they were made."""
    life, recorder = recorded
    pools = []
    for pool in filter(None, (life.cache._target, life.cache._draft)):
        pools.append(KVPool(pool.shape, pool.num_pages, pool.device))
        for layer in range(pool.layout.num_layers):
            for tensor in pools[-1].layer(layer):
                tensor.fill_(math.nan if tensor.device.type == "cpu" else 0.0)
    other = Runner(
        target=pair.target,
        pool=pools[0],
        proposer=pair.draft(life.algorithm, lambda facts: pools[1]).proposer,
        loads=Loads(None),  # type: ignore[arg-type]
        rows=4,
        num_steps=3,
    )
    for plan, ended, result, proposed in recorder.calls:
        other.submit(plan)
        assert other.result() == result
        assert other.propose(ended) == proposed


def test_proposing_needs_nothing_from_the_host(pair: Any, recorded: tuple[Any, Recorder]) -> None:
    """Without knowing who has ended, at most more is proposed: the next step can be planned while one runs."""
    _, recorder = recorded
    for plan, ended, result, proposed in recorder.calls:
        for group, chosen, count in zip(plan.groups(), result.chosen, proposed, strict=True):
            want = max(0, min(group.propose, group.left - len(chosen.tokens) - 1)) if group.chooses else 0
            on_device = group.draft != NO_ROWS
            assert count == (0 if group.row in ended or not on_device else want)


def test_plans_say_where_proposals_come_from(recorded: tuple[Any, Recorder]) -> None:
    """What the host proposes travels as tokens; what the device proposes stays there."""
    life, recorder = recorded
    decode = [group for plan, *_ in recorder.calls for group in plan.decode]
    on_device = DRAFTS[life.algorithm].pool
    assert any(group.held for group in decode) == on_device
    assert any(len(group.tokens) > 1 for group in decode) != on_device
    groups = [group for plan, *_ in recorder.calls for group in plan.groups()]
    assert any(group.draft != NO_ROWS for group in groups) == on_device
    behind = [g for g in groups if g.draft != NO_ROWS and g.chooses and not g.draft.follows]
    assert bool(behind) == DRAFTS[life.algorithm].rebuilds, "no draft was ever behind, or one was that must not be"
    assert all(group.propose == 0 for group in behind)


def test_proposals_that_are_no_chain_are_refused(pair: Any, tools: SimpleNamespace) -> None:
    life = tools.Life(pair)
    group = Group(0, 0, (1,), 2, (0, 0), True, Sampling(), NO_ROWS, 0, 5)
    with pytest.raises(ValueError, match="no chain"):
        life.engine._runner.submit(StepPlan((), (group,), ()))


class CountSyncs(TorchDispatchMode):
    """Counts reads of single numbers, each of which would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += "_local_scalar_dense" in str(func) or "nonzero" in str(func)
        return func(*args, **(kwargs or {}))


def test_drawing_reads_nothing_back_from_the_device() -> None:
    sampling = [Sampling(temperature, 0.9, seed) for seed, temperature in enumerate((0.0, 0.5, 1.0, 1e-9) * 4)]
    with CountSyncs() as count:
        choose(torch.randn(16, 50), sampling, range(16))
    assert count.found == 0
    with CountSyncs() as count:
        int(torch.ones(1) + 1)
    assert count.found == 1, "this test would not see a read"
