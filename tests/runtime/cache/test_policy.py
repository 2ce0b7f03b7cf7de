"""Which pages may be used, cached and published; what a page is made of; which slots a request's tokens have."""

import os
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speccache_api.drafts import DRAFTS
from speccache_api.geometry import KVBuffer, KVDtype, KVGeometry
from speccache_runtime.cache.layout import Layout
from speccache_runtime.cache.policy import MissingDraft, cacheable_pages, publishable_pages, usable_pages
from speccache_runtime.cache.pool import HostArena, KVPool, PoolShape, shared_bytes
from speccache_runtime.cache.shared_memory import SharedMemory
from speccache_runtime.errors import ConfigError

SIZES = st.integers(1, 8)


@given(st.lists(st.booleans(), max_size=12))
def test_recompute_uses_whole_pairs_up_to_the_first_gap_and_degrade_uses_all(present: list[bool]) -> None:
    use = usable_pages(present, MissingDraft.RECOMPUTE)
    assert all(present[:use])
    assert use == len(present) or not present[use]
    assert usable_pages(present, MissingDraft.DEGRADE) == len(present)
    assert usable_pages(present, MissingDraft.RECOMPUTE, rebuilds=True) == len(present)


@given(st.integers(0, 100), SIZES)
def test_a_hit_leaves_at_least_the_last_token_to_compute(num_tokens: int, page_size: int) -> None:
    covered = cacheable_pages(num_tokens, page_size) * page_size
    assert covered <= max(0, num_tokens - 1)
    assert num_tokens - covered <= page_size or num_tokens == 0


@given(st.integers(0, 100), st.integers(0, 100), SIZES, st.integers(0, 3))
def test_a_published_page_is_computed_and_its_successors_are_known(
    num_tokens: int, computed: int, page_size: int, lookahead: int
) -> None:
    pages = publishable_pages(num_tokens, computed, page_size, lookahead)
    assert pages >= 0
    if pages:
        assert pages * page_size <= computed
        assert pages * page_size + lookahead <= num_tokens
    more = (pages + 1) * page_size
    assert more > computed or more + lookahead > num_tokens


@given(SIZES, SIZES, SIZES, SIZES, st.sampled_from(["bfloat16", "float32"]))
def test_a_layout_covers_its_half_without_gap_or_overlap(
    layers: int, kv_heads: int, head_dim: int, page_size: int, dtype: KVDtype
) -> None:
    layout = Layout.of(KVGeometry.heads(layers, kv_heads, head_dim), page_size, dtype)
    element = {"bfloat16": 2, "float32": 4}[dtype]
    at = 0
    for buffer, offset in zip(layout.buffers, layout.offsets, strict=True):
        assert offset == at
        at += buffer.page_bytes
    assert layout.page_bytes == at == layers * 2 * page_size * kv_heads * head_dim * element
    assert layout.num_layers == layers
    assert [(b.layer, b.name) for b in layout.buffers] == [(n, name) for n in range(layers) for name in ("k", "v")]


def fill(arena: HostArena, seed: int) -> None:
    for page in range(arena.num_pages):
        arena.target.page(page)[:] = bytes([seed + page]) * arena.target.rows.shape[1]
        arena.draft.page(page)[:] = bytes([seed + 100 + page]) * arena.draft.rows.shape[1]


def filled(arena: HostArena, seed: int) -> list[bool]:
    """Whether the target's rows hold what `fill` wrote, and the draft's."""
    rows = range(arena.num_pages)
    return [
        all(bool((half.rows[page] == seed + more + page).all()) for page in rows)
        for half, more in ((arena.target, 0), (arena.draft, 100))
    ]


def test_a_host_page_is_a_row_of_the_target_half_and_one_of_the_draft_half() -> None:
    target, draft = heads(2), heads(1)
    arena = HostArena(target, draft, 3, pinned=False)
    assert (arena.target.rows.nbytes, arena.draft.rows.nbytes) == (3 * target.layout.page_bytes, 192)
    assert arena.target.rows.data_ptr() % 4096 == arena.draft.rows.data_ptr() % 4096 == 0
    fill(arena, 10)
    assert filled(arena, 10) == [True, True]


def test_a_host_tier_may_have_no_pages_and_no_draft() -> None:
    assert len(HostArena(heads(1), None, 1, pinned=False).draft.page(0)) == 0
    HostArena(heads(1), None, 0, pinned=False).close()


@pytest.mark.parametrize("whose", ["target", "draft", "both"])
def test_what_ranks_share_is_there_once_and_what_they_do_not_is_their_own(whose: str) -> None:
    target = latents() if whose != "draft" else heads(2)
    draft = latents() if whose != "target" else heads(1)
    memory = SharedMemory.create(shared_bytes([target, draft], 3))
    assert memory.nbytes == 4096 * (target.geometry.shared + draft.geometry.shared), "whole blocks, here one each"
    first = HostArena(target, draft, 3, pinned=False, memory=memory)
    second = HostArena(target, draft, 3, pinned=False, memory=SharedMemory(os.dup(memory.fd), owner=False))
    shared = [shape.geometry.shared for shape in (target, draft)]
    assert [first.target.owned, first.draft.owned] == [True, True]
    assert [second.target.owned, second.draft.owned] == [not half for half in shared]
    fill(first, 10)
    assert filled(second, 10) == shared
    memory.close()
    fill(second, 50)
    assert filled(first, 50) == shared
    assert filled(second, 50) == [True, True]


def test_shared_memory_of_another_size_is_not_used() -> None:
    with pytest.raises(ValueError, match=r"shared halves take 4096 bytes, .* has 4095"):
        HostArena(latents(), heads(1), 3, pinned=False, memory=SharedMemory.create(4095))


def test_a_pool_shows_each_page_as_the_bytes_of_its_tensors() -> None:
    """Whatever they are: heads, latents, or a state that stays float32."""
    state = KVGeometry(2, (KVBuffer("latent", (6,)), KVBuffer("state", (2, 3), dtype="float32")))
    for geometry in (KVGeometry.heads(2, 2, 4), KVGeometry.latent(3, 8, 4), state):
        pool = KVPool(PoolShape(geometry, 4, "bfloat16"), 3, torch.device("cpu"))
        tensors = [buffer for layer in range(geometry.layers) for buffer in pool.layer(layer)]
        for seed, tensor in enumerate(tensors):
            tensor.normal_(generator=torch.Generator().manual_seed(seed))
        for view, spec, tensor in zip(pool.page_bytes(), pool.layout.buffers, tensors, strict=True):
            assert view.shape == (3, spec.page_bytes)
            for page in range(3):
                assert torch.equal(view[page].view(tensor.dtype), tensor[page].flatten())
        assert [(b.layer, b.name) for b in pool.layout.buffers] == [
            (layer, b.name) for layer in range(geometry.layers) for b in geometry.buffers
        ]


def test_a_draft_pool_that_cannot_share_page_numbers_stops_the_start(tools: SimpleNamespace) -> None:
    rig = tools.Rig(draft=False)
    shape = PoolShape(KVGeometry.heads(1, 1, 4), tools.PAGE, "float32")
    with pytest.raises(ConfigError, match="before the first request"):
        rig.cache.register_draft(KVPool(shape, 32, torch.device("cpu")), DRAFTS["EAGLE3"])
    fresh = type(rig.cache)(rig.target, host_pages=4, answer=MissingDraft.DEGRADE, metrics=rig.metrics)
    with pytest.raises(ConfigError, match="draft pool has 31 pages"):
        fresh.register_draft(KVPool(shape, 31, torch.device("cpu")), DRAFTS["EAGLE3"])
    rig.close()


def heads(layers: int) -> PoolShape:
    return PoolShape(KVGeometry.heads(layers, 1, 2), 4, "float32")


def latents() -> PoolShape:
    return PoolShape(KVGeometry.latent(1, 8, 4), 4, "float32")
