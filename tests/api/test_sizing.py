"""Memory of a pod: exact identities for each term, whatever the geometry; nothing about Kubernetes here."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_api.geometry import Inspection, KVGeometry, ModelFacts, builtin_facts
from speccache_api.quantity import MIB, parse_bytes
from speccache_api.resource import SpecCacheDeployment
from speccache_api.sizing import (
    DEFAULT_OVERHEAD,
    RANK_OVERHEAD,
    SHARED_MEMORY_PER_RANK,
    MemoryPlan,
    SizingError,
    known_inspection,
    kv_dtype,
    shortfall,
    size_memory,
)
from speccache_api.spec import Parallelism, Spec

_LLAMA = ModelFacts(KVGeometry.heads(32, 8, 128), 8_030_261_248, 4096, 128256, 131072, "a" * 64, "llama")
_EAGLE = ModelFacts(KVGeometry.heads(1, 8, 128), 424_000_000, 4096, 128256, 131072, "b" * 64, "eagle3")
_GPU = {"limits": {"nvidia.com/gpu": "1"}}

counts = st.integers(min_value=1, max_value=10**9)
page_sizes = st.sampled_from([16, 32, 64, 128, 256])
shapes = st.tuples(st.integers(1, 128), st.integers(1, 64), st.integers(1, 512))
latents = st.builds(KVGeometry.latent, st.integers(1, 128), st.integers(1, 1024), st.integers(1, 128))
geometries = shapes.map(lambda shape: KVGeometry.heads(*shape)) | latents
facts = st.builds(ModelFacts, geometries, st.integers(0, 10**12), identity=st.just("c" * 64))
inspections = st.builds(Inspection, facts, facts)


def _spec(
    *,
    host: dict[str, Any] | None = None,
    device: dict[str, Any] | None = None,
    page_size: int = 64,
    speculative: bool | dict[str, Any] = True,
    storage: bool | dict[str, Any] = False,
    gpu: bool = True,
    **more: Any,
) -> Spec:
    spec: dict[str, Any] = {
        "model": {"uri": "pvc://models/llama"},
        "kvCache": {"pageSize": page_size, "device": device or {"tokens": 4096}, "host": host or {"tokens": 4096}},
        **more,
    }
    if gpu:
        spec["resources"] = _GPU
    if speculative:
        plain = {"algorithm": "EAGLE3", "draftModel": {"uri": "pvc://models/eagle"}}
        spec["speculative"] = plain if speculative is True else speculative
    if storage:
        claim = {"persistentVolumeClaim": {"claimName": "kv"}}
        spec["kvCache"]["storage"] = claim if storage is True else {**claim, **storage}
    resource = {"apiVersion": "speccache.io/v1alpha1", "kind": "SpecCacheDeployment", "metadata": {"name": "x"}}
    return SpecCacheDeployment.parse({**resource, "spec": spec}).spec


def test_llama_8b_on_a_gpu_by_hand() -> None:
    plan = size_memory(_spec(host={"tokens": 1_000_000}, storage=True), Inspection(_LLAMA, _EAGLE))
    assert plan.target_bytes_per_token == 128 * 1024
    assert plan.draft_bytes_per_token == 4 * 1024
    assert plan.host_pages == 15625
    assert plan.host_target == 1_000_000 * 128 * 1024
    assert plan.host_draft == 1_000_000 * 4 * 1024
    assert (plan.shared_memory, plan.overhead, plan.device) == (0, 6 * 2**30, 0)
    assert plan.limit == 135_051 * MIB


def test_the_builtin_pair_on_the_cpu_by_hand() -> None:
    pair = builtin_facts("tiny")
    assert pair.draft is not None
    plan = size_memory(_spec(page_size=16, gpu=False, device={"tokens": 65536}), pair)
    assert (plan.target_bytes_per_token, plan.draft_bytes_per_token) == (6 * 2 * 64 * 2 * 4, 2 * 64 * 2 * 4)
    assert plan.overhead == 2 * 2**30
    assert plan.device == 4 * (pair.target.parameters + pair.draft.parameters) + 4096 * 16 * 7168


@given(inspections, counts, page_sizes, st.booleans(), st.booleans(), st.booleans())
def test_the_terms(pair: Inspection, tokens: int, page: int, speculative: bool, storage: bool, gpu: bool) -> None:
    spec = _spec(host={"tokens": tokens}, page_size=page, speculative=speculative, storage=storage, gpu=gpu)
    plan = size_memory(spec, pair)
    dtype = "bfloat16" if gpu else "float32"
    assert pair.draft is not None
    assert plan.target_bytes_per_token == pair.target.geometry.bytes_per_token(dtype)
    assert plan.draft_bytes_per_token == (pair.draft.geometry.bytes_per_token(dtype) if speculative else 0)
    assert plan.host_target == plan.host_pages * plan.target_bytes_per_page
    assert plan.host_draft == plan.host_pages * plan.draft_bytes_per_page
    pair_bytes = plan.target_bytes_per_page + plan.draft_bytes_per_page
    weights = pair.target.parameters + (pair.draft.parameters if speculative else 0)
    assert plan.device_pages == 4096 // page
    assert plan.device == (0 if gpu else 4 * weights + plan.device_pages * pair_bytes)
    total = plan.host_target + plan.host_draft + plan.shared_memory + plan.overhead + plan.device
    assert plan.limit % MIB == 0
    assert total <= plan.limit < total + MIB


@given(inspections, st.integers(min_value=1, max_value=2**48), page_sizes)
def test_a_size_is_the_total_and_is_never_exceeded(pair: Inspection, size: int, page: int) -> None:
    spec = _spec(host={"size": size}, page_size=page)
    one = size_memory(_spec(host={"tokens": 1}, page_size=page), pair)
    if size < one.host_target + one.host_draft:
        with pytest.raises(SizingError, match=r"spec\.kvCache\.host\.size: one page pair takes"):
            size_memory(spec, pair)
        return
    plan = size_memory(spec, pair)
    pair_bytes = plan.target_bytes_per_page + plan.draft_bytes_per_page
    assert plan.host_target + plan.host_draft == plan.host_pages * pair_bytes
    assert plan.host_pages * pair_bytes <= size < (plan.host_pages + 1) * pair_bytes


@given(counts, page_sizes)
def test_tokens_are_whole_pages(tokens: int, page: int) -> None:
    spec = _spec(host={"tokens": tokens}, device={"tokens": tokens}, page_size=page)
    plan = size_memory(spec, Inspection(_LLAMA, _EAGLE))
    assert plan.host_pages == plan.device_pages
    assert (plan.host_pages - 1) * page < tokens <= plan.host_pages * page


@given(counts, page_sizes, st.integers(min_value=1, max_value=9_999))
def test_a_ratio_counts_device_tokens(tokens: int, page: int, tenths: int) -> None:
    ratio = f"{tenths // 10}.{tenths % 10}"
    plan = size_memory(
        _spec(host={"ratio": ratio}, device={"tokens": tokens}, page_size=page), Inspection(_LLAMA, _EAGLE)
    )
    assert plan.device_pages is not None
    assert (plan.host_pages - 1) * 10 < plan.device_pages * tenths <= plan.host_pages * 10


def test_a_ratio_of_a_device_tier_given_as_size() -> None:
    spec = _spec(host={"ratio": "1.5"}, device={"size": "1Gi"})
    plan = size_memory(spec, Inspection(_LLAMA, _EAGLE))
    assert plan.device_pages == 2**30 // (64 * 132 * 1024)
    assert plan.device_pages == 124
    assert plan.host_pages == 186


@given(inspections, counts, counts, page_sizes, st.booleans())
def test_more_tokens_never_take_less(pair: Inspection, one: int, other: int, page: int, gpu: bool) -> None:
    less, more = sorted((one, other))
    for tier in ("host", "device"):
        small, large = (
            size_memory(_spec(**{tier: {"tokens": n}}, page_size=page, gpu=gpu), pair) for n in (less, more)
        )
        assert small.limit <= large.limit


@given(inspections, st.integers(1, 128), st.integers(1, 64), st.booleans())
def test_a_larger_model_never_takes_less(pair: Inspection, layers: int, wider: int, gpu: bool) -> None:
    assert pair.draft is not None
    for part in ("target", "draft"):
        old = getattr(pair, part)
        first, *rest = old.geometry.buffers
        grown = KVGeometry(
            max(old.geometry.layers, layers),
            (replace(first, shape=(*first.shape[:-1], first.shape[-1] + wider)), *rest),
        )
        larger = replace(pair, **{part: replace(old, geometry=grown, parameters=old.parameters + 1)})
        assert size_memory(_spec(gpu=gpu), pair).limit <= size_memory(_spec(gpu=gpu), larger).limit


@given(inspections, counts, page_sizes)
def test_a_draft_adds_its_own_bytes_and_no_more(pair: Inspection, tokens: int, page: int) -> None:
    plain = size_memory(_spec(host={"tokens": tokens}, page_size=page, speculative=False), pair)
    paired = size_memory(_spec(host={"tokens": tokens}, page_size=page), pair)
    assert plain.host_pages == paired.host_pages
    assert plain.host_draft == 0
    assert paired.host_target == plain.host_target
    assert 0 <= paired.limit - plain.limit - paired.host_draft + MIB < 2 * MIB


@pytest.mark.parametrize("gpu", [True, False])
def test_overhead(gpu: bool) -> None:
    pair = Inspection(_LLAMA, _EAGLE)
    assert size_memory(_spec(gpu=gpu), pair).overhead == DEFAULT_OVERHEAD["cuda" if gpu else "cpu"]
    assert size_memory(_spec(gpu=gpu, memory={"overhead": "3Gi"}), pair).overhead == 3 * 2**30


def test_a_fraction_of_the_gpu_leaves_the_device_pages_to_the_pod() -> None:
    plan = size_memory(_spec(device={"memoryFraction": "0.85"}), Inspection(_LLAMA, _EAGLE))
    assert plan.device_pages is None
    assert "devicePages" not in plan.to_status()


def test_number_format_follows_the_device() -> None:
    assert kv_dtype(_spec(gpu=True)) == "bfloat16"
    assert kv_dtype(_spec(gpu=False)) == "float32"


def test_a_device_tier_below_one_page() -> None:
    with pytest.raises(SizingError, match=r"spec\.kvCache\.device\.size: one page pair takes 8448Ki; .* found 1Mi"):
        size_memory(_spec(device={"size": "1Mi"}), Inspection(_LLAMA, _EAGLE))


@pytest.mark.parametrize("capacity", ["8448Ki", None])
def test_a_capacity_holds_at_least_one_page_pair(capacity: str | None) -> None:
    size_memory(_spec(storage={"capacity": capacity} if capacity else True), Inspection(_LLAMA, _EAGLE))
    with pytest.raises(SizingError, match=r"storage\.capacity: one page pair takes 8448Ki; .* found 8447Ki"):
        size_memory(_spec(storage={"capacity": "8447Ki"}), Inspection(_LLAMA, _EAGLE))


def test_an_inspection_without_the_draft() -> None:
    with pytest.raises(SizingError, match="the inspection did not read the draft"):
        size_memory(_spec(), Inspection(_LLAMA))


def test_shortfall_under_the_manual_policy() -> None:
    plan = size_memory(_spec(), Inspection(_LLAMA, _EAGLE))
    assert shortfall(plan, plan.limit) == 0
    assert shortfall(plan, plan.limit + 1) == 0
    assert shortfall(plan, plan.limit - 5) == 5


def test_a_declared_geometry_stands_above_the_inspected_one() -> None:
    declared = {"layers": 16, "kvHeads": 8, "headDim": 128, "parameters": 10}
    spec = _spec(gpu=False, model={"uri": "pvc://models/llama", "kvGeometry": declared})
    plan = size_memory(spec, Inspection(_LLAMA, _EAGLE))
    assert plan.target_bytes_per_token == 16 * 8 * 128 * 2 * 4
    assert plan.device == 4 * (10 + _EAGLE.parameters) + 64 * (plan.target_bytes_per_page + plan.draft_bytes_per_page)


def test_a_declared_latent() -> None:
    """DeepSeek-V2-Lite's, with a head that keeps K and V."""
    shape = {"layers": 27, "kvLoraRank": 512, "qkRopeHeadDim": 64}
    spec = _spec(model={"uri": "pvc://models/deepseek", "kvGeometry": shape}, host={"tokens": 64_000})
    plan = size_memory(spec, Inspection(_LLAMA, _EAGLE))
    assert plan.target == KVGeometry.latent(27, 512, 64)
    assert plan.target_bytes_per_token == 27 * (512 + 64) * 2
    assert plan.host_target == 64_000 * 27 * 576 * 2
    assert plan.host_draft == 64_000 * 4 * 1024


_DEEPSEEK = ModelFacts(KVGeometry.latent(61, 512, 64), 671 * 10**9, 7168, 129280, 163840, "c" * 64, "deepseek_v3")


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_ranks_share_the_host_tier(ranks: int) -> None:
    """Each rank keeps its heads; beyond 8 ranks the heads are repeated. Latents are kept once for all."""
    spec = _spec(host={"tokens": 64_000})
    plan = size_memory(_over(ranks, spec), Inspection(_LLAMA, _EAGLE))
    assert plan.host_target == 64_000 * 128 * 1024 * max(1, ranks // 8)
    assert plan.host_draft == 64_000 * 4 * 1024 * max(1, ranks // 8)
    latent = size_memory(_over(ranks, spec), Inspection(_DEEPSEEK, _EAGLE))
    assert latent.host_target == 64_000 * 61 * 576 * 2
    assert latent.host_draft == plan.host_draft


def test_ranks_each_have_a_device_tier() -> None:
    """Without a GPU it is in the pod's memory, and there latents are on every rank."""
    spec = _spec(gpu=False, device={"tokens": 64_000})
    two = size_memory(_over(2, spec), Inspection(replace(_DEEPSEEK, parameters=0), replace(_EAGLE, parameters=0)))
    assert two.device == 64_000 * (2 * 61 * 576 * 4 + 8 * 1024)


def test_heads_that_do_not_divide_over_the_ranks() -> None:
    with pytest.raises(SizingError, match=r"spec\.model: 8 KV heads cannot be shared evenly by 3 ranks"):
        size_memory(_over(3, _spec()), Inspection(_LLAMA, _EAGLE))


@pytest.mark.parametrize("gpu", [False, True])
def test_a_further_rank_costs_a_process_and_on_gpus_the_memory_they_talk_by(gpu: bool) -> None:
    spec = _spec(gpu=gpu, device={"tokens": 64_000})
    one, two = (size_memory(_over(ranks, spec), Inspection(_LLAMA, _EAGLE)) for ranks in (1, 2))
    assert (two.host_target, two.host_draft, two.device) == (one.host_target, one.host_draft, one.device)
    assert two.overhead - one.overhead == RANK_OVERHEAD["cuda" if gpu else "cpu"]
    assert (one.shared_memory, two.shared_memory) == (0, 2 * SHARED_MEMORY_PER_RANK if gpu else 0)
    given = _over(2, _spec(gpu=gpu, device={"tokens": 64_000}, memory={"overhead": "5Gi"}))
    assert size_memory(given, Inspection(_LLAMA, _EAGLE)).overhead == 5 << 30, "what the user says is the pod's total"


def test_a_second_rank_costs_a_pod_with_latents_nothing_but_what_a_rank_costs() -> None:
    declared = {"layers": 27, "kvLoraRank": 512, "qkRopeHeadDim": 64}
    spec = _spec(model={"uri": "pvc://models/deepseek", "kvGeometry": declared}, host={"tokens": 64_000})
    one, two = (size_memory(_over(ranks, spec), Inspection(_LLAMA, _EAGLE)) for ranks in (1, 2))
    assert (two.host_target, two.host_draft) == (one.host_target, one.host_draft)
    assert two.limit - one.limit == RANK_OVERHEAD["cuda"] + 2 * SHARED_MEMORY_PER_RANK


@pytest.mark.parametrize("shares", [1, 3, 7])
def test_a_model_that_cannot_be_cut_into_so_many_parts(shares: int) -> None:
    facts = replace(_LLAMA, shares=shares)
    with pytest.raises(SizingError, match=rf"spec\.parallelism\.tensor: 2 ranks.*divide into {shares}"):
        size_memory(_over(2, _spec()), Inspection(facts, _EAGLE))
    with pytest.raises(SizingError, match=r"spec\.parallelism\.tensor"):
        size_memory(_over(2, _spec()), Inspection(_LLAMA, replace(_EAGLE, shares=shares)))
    assert size_memory(_over(1, _spec()), Inspection(facts, _EAGLE)).host_pages


def _over(ranks: int, spec: Spec) -> Spec:
    """The same over other ranks, also as many as the resource does not allow yet."""
    return spec.model_copy(update={"parallelism": Parallelism.model_construct(tensor=ranks)})


def test_what_is_known_without_reading_files() -> None:
    geometry = {"layers": 32, "kvHeads": 8, "headDim": 128}
    target = {"uri": "pvc://models/llama", "kvGeometry": geometry}
    draft = {
        "algorithm": "EAGLE3",
        "draftModel": {"uri": "pvc://models/eagle", "kvGeometry": {**geometry, "layers": 1}},
    }
    assert known_inspection(_spec()) is None
    assert known_inspection(_spec(model=target)) is None
    known = known_inspection(_spec(model=target, speculative=draft))
    assert known is not None
    assert known.draft is not None
    assert known.target.geometry == _LLAMA.geometry
    assert known.draft.geometry == _EAGLE.geometry
    assert known.target.declared
    assert known_inspection(_spec(model={"uri": "builtin://tiny"}, speculative=False)) == Inspection(
        builtin_facts("tiny").target
    )


@given(inspections, counts)
def test_status_says_the_same_in_quantities(pair: Inspection, tokens: int) -> None:
    plan: MemoryPlan = size_memory(_spec(host={"tokens": tokens}, storage=True), pair)
    status = plan.to_status()
    terms = ("hostTarget", "hostDraft", "sharedMemory", "overhead", "device")
    total = sum(parse_bytes(status[term]) for term in terms)
    assert parse_bytes(status["limit"]) == plan.limit
    assert total <= plan.limit < total + MIB
    assert status["hostPages"] * plan.page_size * status["targetBytesPerToken"] == parse_bytes(status["hostTarget"])
