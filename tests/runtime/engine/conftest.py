"""Tests of the engine: scheduling, models, cache and storage together, against plain transformers.

In: small made-up pairs whose draft is right about half of the time and depends on its KV, and the built-in pair. Out:
HTTP (server/), single parts (their own folders).
"""

import dataclasses
import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from speccache_api.drafts import DRAFTS
from speccache_api.geometry import ModelFacts
from speccache_api.storage_target import VolumeTarget
from speccache_runtime.cache.paired import PairedCache
from speccache_runtime.cache.policy import MissingDraft
from speccache_runtime.cache.pool import KVPool, PoolShape
from speccache_runtime.cache.storage.base import Backend
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.store import PairStore
from speccache_runtime.cache.storage_metrics import StorageMetrics
from speccache_runtime.config import EngineConfig, StorageConfig
from speccache_runtime.core import Output, Request, SamplingParams, Tier, Usage
from speccache_runtime.engine.build import Built, build_engine
from speccache_runtime.engine.engine import Engine
from speccache_runtime.engine.runner import Runner
from speccache_runtime.metrics import Metrics
from speccache_runtime.model.draft import Eagle3Head, load_eagle3
from speccache_runtime.model.standalone import load_standalone
from speccache_runtime.model.target import Target, load_target
from speccache_runtime.speculative.kinds import KINDS, HostKind, ReadyDraft

DEVICE = torch.device(os.environ.get("SPECCACHE_TEST_DEVICE", "cpu"))
"""Where the engines of these tests compute, always in float32. On a GPU: SPECCACHE_TEST_DEVICE=cuda."""
PATIENCE_S = 60.0
NEW = 24
"""Tokens that most requests ask for."""
VOCAB, DRAFT_VOCAB, HIDDEN, HEADS, HEAD_DIM, LAYERS = 48, 44, 32, 4, 8, 3
NEAR_TIE = 1e-4
"""Two best logits closer than this could swap by rounding; such a prompt says nothing about caches."""


@pytest.fixture(scope="session", autouse=True)
def _few_threads() -> Iterator[None]:
    """The models are so small that threads cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# ---- a pair


def write_target(path: Path) -> None:
    """A Llama in which the newest token decides most of the next one, and its context the rest."""
    draw = torch.Generator().manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=HEAD_DIM,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.19)
        embed = torch.randn(VOCAB, HIDDEN, generator=draw)
        model.model.embed_tokens.weight.copy_(embed)
        # Token t asks for token successor[t].
        successor = torch.randperm(VOCAB, generator=draw)
        model.lm_head.weight[successor] = embed
    path.mkdir()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)


LATENT = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 64,
}
LATENTS: dict[str, dict[str, Any]] = {
    "v2": {"model_type": "deepseek_v2", "q_lora_rank": None, "rope_parameters": YARN},
    "v3": {"model_type": "deepseek_v3", "q_lora_rank": 24, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 1.0},
}


def write_latent(path: Path, version: str) -> None:
    """Like the Llama of the other tests: the newest token decides most of the next one, its context the rest."""
    draw = torch.Generator().manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LATENT, **LATENTS[version]))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=draw) * 0.19)
        embed = torch.randn(48, 32, generator=draw)
        model.model.embed_tokens.weight.copy_(embed)
        model.lm_head.weight[torch.randperm(48, generator=draw)] = embed
    model.save_pretrained(path)


def write_standalone(path: Path, target: Path) -> None:
    """A smaller Llama that asks for the same successors, and whose context disturbs them in its own way."""
    draw = torch.Generator().manual_seed(9)
    config = LlamaConfig.from_pretrained(target, num_hidden_layers=2)
    model = LlamaForCausalLM(config)
    known = load_file(target / "model.safetensors")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.19)
        model.model.embed_tokens.weight.copy_(known["model.embed_tokens.weight"])
        model.lm_head.weight.copy_(known["lm_head.weight"])
    path.mkdir()
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, path / "model.safetensors")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(path)


def write_draft(path: Path, target: Path) -> None:
    """An EAGLE-3 head that looks mostly at its own token, through an attention that its context disturbs.

    So it is right now and then, and wrong KV shows in what it proposes.
    """
    draw = torch.Generator().manual_seed(8)
    rand = lambda *shape: torch.randn(*shape, generator=draw)  # noqa: E731
    known = torch.randperm(VOCAB, generator=draw)[:DRAFT_VOCAB].sort().values
    look = rand(HIDDEN, 2 * HIDDEN) * 0.3
    tensors = {
        "fc.weight": rand(HIDDEN, 3 * HIDDEN) * 0.02,
        "midlayer.self_attn.q_proj.weight": look,
        "midlayer.self_attn.k_proj.weight": look.clone(),
        "midlayer.self_attn.v_proj.weight": torch.cat([torch.eye(HIDDEN), rand(HIDDEN, HIDDEN) * 0.04], dim=1),
        "midlayer.self_attn.o_proj.weight": torch.eye(HIDDEN),
        "midlayer.mlp.gate_proj.weight": rand(48, HIDDEN) * 0.1,
        "midlayer.mlp.up_proj.weight": rand(48, HIDDEN) * 0.1,
        "midlayer.mlp.down_proj.weight": rand(HIDDEN, 48) * 0.1,
        "lm_head.weight": load_file(target / "model.safetensors")["lm_head.weight"][known],
        "d2t": known - torch.arange(DRAFT_VOCAB),
    }
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = torch.ones(HIDDEN)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    }
    path.mkdir()
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))


class Pair:
    """A loaded target and its drafts, and what plain transformers says with the same target."""

    def __init__(
        self, target_path: Path, draft_path: Path, aux: tuple[int, ...], standalone_path: Path | None = None
    ) -> None:
        """`standalone_path` is the draft of Standalone: without, the target is its own."""
        self.target_path, self.draft_path = target_path, draft_path
        self.standalone_path = standalone_path or target_path
        self.target: Target = load_target(target_path, device=DEVICE, dtype=torch.float32, aux_layers=aux)
        self.head: Eagle3Head = load_eagle3(draft_path, self.target, device=DEVICE, dtype=torch.float32)
        self._plain = AutoModelForCausalLM.from_pretrained(
            target_path, dtype=torch.float32, attn_implementation="eager"
        )
        self._plain.to(DEVICE)
        self._said: dict[tuple[int, ...], tuple[int, ...]] = {}

    @cached_property
    def standalone(self) -> Target:
        return load_standalone(self.standalone_path, self.target, device=DEVICE, dtype=torch.float32)

    def draft(self, algorithm: str, pool: Callable[[ModelFacts], KVPool]) -> ReadyDraft:
        """The draft of an algorithm, on a pool that `pool` makes of its facts."""
        kind, facts = KINDS[algorithm], DRAFTS[algorithm]
        if isinstance(kind, HostKind):
            return ReadyDraft(facts, lookup=kind.lookup)
        model: Any = {"EAGLE3": lambda: self.head, "Standalone": lambda: self.standalone}[algorithm]()
        made = pool(model.facts)
        return ReadyDraft(facts, made, kind.proposer(model, made))

    def greedy(self, prompt: Sequence[int], new: int) -> tuple[int, ...]:
        """The next `new` tokens by whole forward passes without any cache."""
        said = list(self._said.get(tuple(prompt), ()))
        with torch.inference_mode():
            while len(said) < new:
                logits = self._plain(torch.tensor([[*prompt, *said]], device=DEVICE), use_cache=False).logits[0, -1]
                best = logits.topk(2).values
                assert best[0] - best[1] > NEAR_TIE, (
                    "two tokens are so close that rounding decides; take another prompt"
                )
                said.append(int(logits.argmax()))
        self._said[tuple(prompt)] = tuple(said)
        return tuple(said[:new])


# ---- one life of an engine


class Life:
    """An engine from its start to its end, stepped by the test. `steps` 0 means no speculation. `draft` takes the place
    of the pair's own."""

    def __init__(
        self,
        pair: Pair,
        *,
        folder: Path | None = None,
        backend: Backend | None = None,
        page_size: int = 8,
        device_pages: int = 64,
        host_pages: int = 64,
        steps: int = 3,
        answer: MissingDraft = MissingDraft.RECOMPUTE,
        max_running: int = 8,
        budget: int = 64,
        algorithm: str = "EAGLE3",
        draft: Callable[[Callable[[ModelFacts], KVPool]], ReadyDraft] | None = None,
    ) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.outputs: dict[str, list[Output]] = {}
        self.woken = threading.Event()
        make_pool = lambda facts: KVPool(PoolShape(facts.geometry, page_size, "float32"), device_pages, DEVICE)  # noqa: E731
        pool = make_pool(pair.target.facts)
        self.cache = PairedCache(pool, host_pages=host_pages, answer=answer, metrics=self.metrics)
        ready = None
        if steps:
            ready = draft(make_pool) if draft else pair.draft(algorithm, make_pool)
        if ready is not None and ready.pool is not None:
            self.cache.register_draft(ready.pool, ready.facts)
        if folder is not None:
            backend = FileBackend(folder)
            backend.probe()
        store = _store(backend, pool, ready, algorithm, self.metrics) if backend else None
        self.cache.open(store, self.woken.set)
        runner = Runner(
            target=pair.target,
            pool=pool,
            proposer=ready.proposer if ready else None,
            loads=self.cache.loads,
            rows=max_running,
            num_steps=steps,
        )
        self.engine = Engine(
            runner=runner,
            cache=self.cache,
            num_steps=steps,
            max_running=max_running,
            prefill_budget=budget,
            metrics=self.metrics,
            emit=lambda output: self.outputs.setdefault(output.request_id, []).append(output),
            draft=ready.facts if ready else None,
            lookup=ready.lookup if ready else None,
        )
        self._numbers = itertools.count()

    def add(self, prompt: Sequence[int], new: int, salt: str | None = None, **params: Any) -> str:
        name = f"r{next(self._numbers)}"
        self.engine.add(Request(name, tuple(prompt), SamplingParams(max_tokens=new, **params), salt))
        return name

    def step(self) -> None:
        """One step, or a wait until storage has brought something."""
        self.woken.clear()
        if not self.engine.step() and self.engine.num_requests:
            assert self.woken.wait(PATIENCE_S), "nothing can be computed and nothing arrives"

    def run(self, prompts: Sequence[Sequence[int]], new: int, **params: Any) -> list[str]:
        """Serves prompts together; their request ids."""
        names = [self.add(prompt, new, **params) for prompt in prompts]
        while self.engine.num_requests:
            self.step()
        return names

    def tokens(self, name: str) -> tuple[int, ...]:
        """All tokens of a request that has ended, which it did exactly once."""
        outputs = self.outputs[name]
        assert [o.finish is not None for o in outputs] == [False] * (len(outputs) - 1) + [True]
        assert outputs[-1].usage is not None
        tokens = tuple(token for output in outputs for token in output.tokens)
        assert outputs[-1].usage.completion_tokens == len(tokens)
        return tokens

    def tokens_so_far(self, name: str) -> tuple[int, ...]:
        """All tokens of a request that may go on."""
        return tuple(token for output in self.outputs.get(name, []) for token in output.tokens)

    def usage(self, name: str) -> Usage:
        usage = self.outputs[name][-1].usage
        assert usage is not None
        return usage

    def settle(self) -> None:
        """Waits for all copies and storage operations."""
        deadline = time.monotonic() + PATIENCE_S
        self.cache.poll()
        while self.cache.busy:
            self.woken.clear()
            if not self.cache.poll():
                self.woken.wait(0.02)
            assert time.monotonic() < deadline, "nothing more happens"

    def check_idle(self) -> None:
        """Every page is counted once and nobody pins any."""
        self.settle()
        self.cache.check_integrity()
        for entry in self.cache.index.entries():
            assert (entry.device_pins, entry.host_pins) == (0, 0)

    def end(self) -> None:
        """Drains and closes."""
        self.check_idle()
        self.cache.store_all()
        self.check_idle()
        self.cache.close()

    def value(self, name: str, **labels: str) -> float:
        """A counter's value, 0 if it was never touched."""
        found = getattr(self.metrics, name)
        return float((found.labels(**labels) if labels else found)._value.get())

    def lose_the_device(self) -> None:
        """Leaves the host and storage tiers alone with what they have."""
        self.settle()
        pages = self.cache.index.take_device(self.cache.index.device.total)
        assert pages is not None
        self.cache.index.give_device(pages)


def _store(backend: Backend, pool: KVPool, draft: ReadyDraft | None, algorithm: str, metrics: Metrics) -> PairStore:
    draft_pool = draft.pool if draft else None
    return PairStore(
        backend,
        hashlib.sha256(b"model").hexdigest(),
        hashlib.sha256(f"target {pool.page_size}".encode()).digest(),
        hashlib.sha256(f"{algorithm} {pool.page_size}".encode()).digest() if draft_pool else None,
        pool.layout.page_bytes,
        draft_pool.layout.page_bytes if draft_pool else 0,
        StorageMetrics(metrics),
    )


def random_tokens(count: int, seed: int, vocab: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def stored(folder: Path, half: str) -> list[Path]:
    """The stored objects of one half, "t" or "d"."""
    return sorted(path for path in folder.glob(f"v2/*/{half}/*/*/*") if path.is_file())


def settings(pair: Pair, folder: Path | None, **changes: Any) -> EngineConfig:
    """What a pod is told that serves the pair with EAGLE-3; a storage tier in `folder`, if there is one."""
    config = EngineConfig(
        name="pair",
        namespace="default",
        served_name="pair",
        device="cpu",
        kv_dtype="float32",
        target_uri="made-up",
        target_path=pair.target_path,
        algorithm="EAGLE3",
        draft_uri="made-up",
        draft_path=pair.draft_path,
        num_steps=3,
        page_size=8,
        device_pages=64,
        device_memory_fraction=None,
        host_pages=64,
        storage=StorageConfig(VolumeTarget(claim=None, path=str(folder)), "Recompute") if folder else None,
        target_geometry=pair.target.facts.geometry,
        draft_geometry=pair.head.facts.geometry,
        request_timeout=PATIENCE_S,
        flush_timeout=PATIENCE_S,
        prefill_budget=64,
    )
    return dataclasses.replace(config, **changes)


class Replica:
    """An engine over all its ranks, stepped by the test."""

    def __init__(self, config: EngineConfig) -> None:
        self.metrics = Metrics(CollectorRegistry())
        self.outputs: dict[str, list[Output]] = {}
        self.woken = threading.Event()
        self.built: Built = build_engine(config, self.metrics, self._keep, self.woken.set)
        self.engine = self.built.engine

    def _keep(self, output: Output) -> None:
        self.outputs.setdefault(output.request_id, []).append(output)

    def run(self, prompts: Sequence[Sequence[int]]) -> list[list[Output]]:
        for number, prompt in enumerate(prompts):
            self.outputs.pop(f"r{number}", None)
            self.engine.add(Request(f"r{number}", tuple(prompt), SamplingParams(max_tokens=NEW)))
        while self.engine.num_requests:
            self.woken.clear()
            if not self.engine.step():
                assert self.woken.wait(PATIENCE_S), "nothing can be computed and nothing arrives"
        return [self.outputs[f"r{number}"] for number in range(len(prompts))]

    def settle(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.engine.cache.busy:
            self.woken.clear()
            if not self.engine.cache.poll():
                self.woken.wait(0.05)
            assert time.monotonic() < deadline, "nothing more happens"
        self.engine.cache.check_integrity()

    def lose_the_device(self) -> None:
        self.settle()
        index = self.engine.cache.index
        index.give_device(index.take_device(index.device.total) or [])

    def end(self) -> None:
        self.settle()
        self.engine.cache.store_all()
        self.settle()
        self.built.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_unused: object) -> None:
        if kind is None:
            self.end()
        else:
            self.built.close()


def serve(life: Life, texts: list[list[int]], pair: Pair, tier: Tier | None) -> list[tuple[int, ...]]:
    """Serves all together, checks text and source, and returns the accepted proposals of every verify step."""
    names = life.run(texts, NEW)
    for name, text in zip(names, texts, strict=True):
        assert life.tokens(name) == pair.greedy(text, NEW)
        found = {t: n for t, n in life.usage(name).cached_tokens.items() if n}
        assert found == ({tier: (len(text) - 1) // 8 * 8} if tier else {})
        assert life.usage(name).draft_absent_tokens == 0
    life.check_idle()
    return [life.usage(name).accepted_by_step for name in names]


def follower_pids(parent: int | str = "self") -> list[int]:
    """Processes of other ranks that this one, or `parent`, has started and that run."""
    found = []
    for children in Path(f"/proc/{parent}/task").glob("*/children"):
        for pid in children.read_text().split():
            if "speccache_runtime.engine.parallel" in (Path("/proc") / pid / "cmdline").read_text():
                found.append(int(pid))
    return found


@pytest.fixture(scope="session")
def texts() -> list[list[int]]:
    """Prompts that share nothing, so that each alone decides what a run finds."""
    return [random_tokens(41 + n, seed=10 + n) for n in range(6)]


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    write_target(folder / "target")
    write_draft(folder / "draft", folder / "target")
    write_standalone(folder / "standalone", folder / "target")
    return Pair(folder / "target", folder / "draft", (0, 1, 2), folder / "standalone")


@pytest.fixture(scope="session")
def latent_pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A target that keeps latents, by DeepSeek's version, and a draft that keeps K and V."""

    @cache
    def get(version: str) -> Pair:
        folder = tmp_path_factory.mktemp(version)
        write_latent(folder / "target", version)
        write_draft(folder / "draft", folder / "target")
        return Pair(folder / "target", folder / "draft", (0, 1, 2))

    return get


@pytest.fixture(scope="session", params=LATENTS)
def latent_pair(request: pytest.FixtureRequest, latent_pairs: Callable[[str], Pair]) -> Pair:
    """One after the other."""
    return latent_pairs(request.param)


@pytest.fixture(scope="session")
def tools() -> SimpleNamespace:
    """The helpers of this file: test modules cannot import a conftest by name."""
    return SimpleNamespace(
        DEVICE=DEVICE,
        Life=Life,
        Pair=Pair,
        Replica=Replica,
        NEW=NEW,
        follower_pids=follower_pids,
        serve=serve,
        settings=settings,
        write_draft=write_draft,
        random_tokens=random_tokens,
        stored=stored,
        VOCAB=VOCAB,
    )
