"""What only a GPU can show: page moves by the Triton kernel, loads that compute waits for, and the engine on CUDA.

Run by `make gpu`; CI machines have no GPU, so `make test` leaves this folder out.
"""

import os
import random
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry

from speccache_api.geometry import KVGeometry
from speccache_runtime.bench.gpu import GpuBench
from speccache_runtime.bench.random_pair import PairShape, write_pair
from speccache_runtime.cache.pool import HostArena, KVPool, PoolShape, shared_bytes
from speccache_runtime.cache.shared_memory import SharedMemory
from speccache_runtime.cache.transfer import Move
from speccache_runtime.cache.transfers import make_transfer
from speccache_runtime.core import Output, Request, SamplingParams
from speccache_runtime.engine.build import build_engine
from speccache_runtime.metrics import Metrics

DEVICE = torch.device("cuda")
SMALL = PairShape(256, 8, 4, 2, 64, 512, 1024, 512, 8192)


@pytest.fixture(autouse=True)
def _needs_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.fail("these tests need an NVIDIA GPU that torch can see")


def test_pages_come_back_byte_for_byte_in_both_pools_whatever_their_order() -> None:
    target = KVPool(PoolShape(KVGeometry.heads(4, 2, 64), 16, "bfloat16"), 64, DEVICE)
    draft = KVPool(PoolShape(KVGeometry.heads(1, 2, 64), 16, "bfloat16"), 64, DEVICE)
    tensors = [tensor for pool, layers in ((target, 4), (draft, 1)) for n in range(layers) for tensor in pool.layer(n)]
    for tensor in tensors:
        tensor.normal_()
    before = [view.clone() for view in [*target.page_bytes(), *draft.page_bytes()]]
    arena = HostArena.of(target, draft, 64)
    transfer = make_transfer(arena, target, draft)
    numbers = random.Random(0)
    away = [
        Move(device, host, draft=True)
        for device, host in zip(numbers.sample(range(64), 40), numbers.sample(range(64), 40), strict=True)
    ]
    transfer.backup(away)
    torch.cuda.synchronize()
    for tensor in tensors:
        tensor.zero_()
    back = [
        Move(device, move.host, draft=True) for device, move in zip(numbers.sample(range(64), 40), away, strict=True)
    ]
    job = transfer.load(back)
    job.wait_target_layer(3)
    job.wait_draft()
    sent = torch.tensor([move.device for move in away], device=DEVICE)
    landed = torch.tensor([move.device for move in back], device=DEVICE)
    after = [*target.page_bytes(), *draft.page_bytes()]
    assert all(torch.equal(new[landed], old[sent]) for new, old in zip(after, before, strict=True))
    torch.cuda.synchronize()
    assert job.done()
    assert job.seconds > 0
    arena.close()


def test_what_ranks_share_is_page_locked_by_each_and_filled_by_the_first() -> None:
    """Two mappings of one memory; the second rank's draft half is its own."""
    latents = PoolShape(KVGeometry.latent(4, 64, 16), 16, "bfloat16")
    heads = PoolShape(KVGeometry.heads(1, 2, 64), 16, "bfloat16")
    memory = SharedMemory.create(shared_bytes([latents, heads], 64))
    there = SharedMemory(os.dup(memory.fd), owner=False)
    ranks = []
    for each in (memory, there):
        target, draft = KVPool(latents, 64, DEVICE), KVPool(heads, 64, DEVICE)
        for tensor in (*(t for n in range(4) for t in target.layer(n)), *draft.layer(0)):
            tensor.normal_()
        arena = HostArena.of(target, draft, 64, each)
        ranks.append((target, draft, arena, make_transfer(arena, target, draft)))
    moves = [Move(page, 63 - page, draft=True) for page in range(64)]
    before = [[view.clone() for view in [*target.page_bytes(), *draft.page_bytes()]] for target, draft, *_ in ranks]
    for *_, transfer in ranks:  # the second would write other latents over the first's
        transfer.backup(moves)
        torch.cuda.synchronize()
    for target, draft, _, transfer in ranks:
        for view in [*target.page_bytes(), *draft.page_bytes()]:
            view.zero_()
        transfer.load(moves)
        torch.cuda.synchronize()
    latent_views = len(latents.layout.buffers)
    for (target, draft, *_), own in zip(ranks, before, strict=True):
        expected = before[0][:latent_views] + own[latent_views:]
        found = [*target.page_bytes(), *draft.page_bytes()]
        assert all(torch.equal(new, old) for new, old in zip(found, expected, strict=True))
    for _, _, arena, _ in ranks:
        arena.close()


@pytest.mark.parametrize("algorithm", ["EAGLE3", "None"])
def test_device_and_host_hits_give_the_cold_tokens(tmp_path: Path, algorithm: str) -> None:
    write_pair(SMALL, tmp_path, DEVICE)
    outputs: list[Output] = []
    config = GpuBench(SMALL, tmp_path, prompt_tokens=2000).config(algorithm)
    engine = build_engine(config, Metrics(CollectorRegistry()), outputs.append, lambda: None).engine
    generator = torch.Generator().manual_seed(1)
    prompt = tuple(torch.randint(0, SMALL.vocab, (2000,), generator=generator).tolist())

    def tokens_of(name: str) -> tuple[int, ...]:
        engine.add(Request(name, prompt, SamplingParams(max_tokens=48)))
        while engine.num_requests or engine.cache.busy:
            engine.step()
        engine.cache.check_integrity()
        return tuple(t for o in outputs if o.request_id == name for t in o.tokens)

    cold, device_hit = tokens_of("cold"), tokens_of("device")
    index = engine.cache.index
    index.give_device(index.take_device(index.device.num_available) or [])
    host_hit = tokens_of("host")
    usage = [o.usage.cached_tokens for o in outputs if o.usage]
    assert [sorted(tier.value for tier, tokens in found.items() if tokens) for found in usage] == [
        [],
        ["device"],
        ["host"],
    ]
    # In bfloat16 a prefix computed in other chunks rounds differently, so only loads are held to exact equality.
    assert device_hit == host_hit
    assert len(cold) == len(host_hit) == 48
    engine.cache.close()
