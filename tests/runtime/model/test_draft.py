"""The EAGLE-3 head against a straightforward reference, in every checkpoint form; and heads that do not load.

The reference recomputes everything from the beginning with plain attention over all rows: no cache, no pages, no fused
weights, angles written out by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from speccache_runtime.errors import ModelError
from speccache_runtime.model.draft import eagle3_aux_layers, load_eagle3
from speccache_runtime.model.target import Target, load_target

CPU = torch.device("cpu")
HIDDEN, INNER, VOCAB, DRAFT_VOCAB, EPS = 48, 72, 96, 40, 1e-5
LAYER = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": EPS,
    "rope_theta": 5000.0,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
}


def head_tensors(aux: int = 3, *, seed: int = 0, qk_norm: bool = False, bias: bool = False) -> dict[str, torch.Tensor]:
    """Random weights under SafeAILab's names, in bfloat16, with d2t and t2d of an uneven draft vocabulary."""
    g = torch.Generator().manual_seed(seed)
    new = lambda *shape: torch.randn(*shape, generator=g) * 0.15  # noqa: E731
    norm = lambda size: 1 + new(size)  # noqa: E731
    tensors = {
        "fc.weight": new(HIDDEN, aux * HIDDEN),
        "midlayer.hidden_norm.weight": norm(HIDDEN),
        "midlayer.input_layernorm.weight": norm(HIDDEN),
        "midlayer.post_attention_layernorm.weight": norm(HIDDEN),
        "midlayer.self_attn.q_proj.weight": new(64, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": new(32, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": new(32, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": new(HIDDEN, 64),
        "midlayer.mlp.gate_proj.weight": new(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": new(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": new(HIDDEN, INNER),
        "norm.weight": norm(HIDDEN),
        "lm_head.weight": new(DRAFT_VOCAB, HIDDEN),
    }
    if qk_norm:
        tensors |= {f"midlayer.self_attn.{x}_norm.weight": norm(16) for x in "qk"}
    if bias:
        tensors |= {f"midlayer.self_attn.{x}_proj.bias": new(64 if x == "q" else 32) for x in "qkv"}
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}
    kept = torch.randperm(VOCAB, generator=g)[:DRAFT_VOCAB].sort().values
    return tensors | {"d2t": kept - torch.arange(DRAFT_VOCAB), "t2d": torch.isin(torch.arange(VOCAB), kept)}


def save_head(path: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, pickled: bool = False) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, path / "pytorch_model.bin")
    else:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


class Reference:
    """An EAGLE-3 head by the book: one call computes all rows from nothing."""

    def __init__(self, tensors: dict[str, torch.Tensor], embed: torch.Tensor, **flags: bool) -> None:
        self.w = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
        self.embed, self.flags = embed, flags

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if "input_norm.weight" in self.w:
            features = rms(features, self.w["input_norm.weight"])
        if "fc_norm.0.weight" in self.w:
            parts = features.split(HIDDEN, -1)
            features = torch.cat([rms(part, self.w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        return features @ self.w["fc.weight"].T

    def heads(self, x: torch.Tensor, name: str) -> torch.Tensor:
        w = self.w
        y = x @ w[f"midlayer.self_attn.{name}_proj.weight"].T + w.get(f"midlayer.self_attn.{name}_proj.bias", 0)
        y = y.view(len(x), -1, 16)
        if f"midlayer.self_attn.{name}_norm.weight" in w:
            y = rms(y, w[f"midlayer.self_attn.{name}_norm.weight"])
        if name == "v":
            return y
        out = torch.empty_like(y)
        for position in range(len(x)):
            for i in range(8):
                angle = position / 5000.0 ** (2 * i / 16)
                a, b = y[position, :, i], y[position, :, i + 8]
                out[position, :, i] = a * math.cos(angle) - b * math.sin(angle)
                out[position, :, i + 8] = b * math.cos(angle) + a * math.sin(angle)
        return out

    def forward(self, tokens: list[int], hidden: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Row i attends rows j <= i, those with visible[j] only (and itself)."""
        w = self.w
        normed = rms(hidden, w["midlayer.hidden_norm.weight"])
        x = torch.cat([rms(self.embed[torch.tensor(tokens)], w["midlayer.input_layernorm.weight"]), normed], -1)
        q, k, v = (self.heads(x, name) for name in "qkv")
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) / 4.0
        seen = torch.ones(len(x), len(x)).tril().bool()
        if visible is not None:
            seen &= visible[None] | torch.eye(len(x)).bool()
        attended = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -math.inf).softmax(-1), v).flatten(1)
        residual = normed if self.flags.get("norm_before_residual") else hidden
        y = residual + attended @ w["midlayer.self_attn.o_proj.weight"].T
        z = rms(y, w["midlayer.post_attention_layernorm.weight"])
        gate, up = z @ w["midlayer.mlp.gate_proj.weight"].T, z @ w["midlayer.mlp.up_proj.weight"].T
        y = y + (gate * gate.sigmoid() * up) @ w["midlayer.mlp.down_proj.weight"].T
        return rms(y, w["norm.weight"]) if self.flags.get("norm_output") else y

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = hidden if self.flags.get("norm_output") else rms(hidden, self.w["norm.weight"])
        return normed @ self.w["lm_head.weight"].T


SAFEAILAB = LAYER | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": DRAFT_VOCAB}
SPECFORGE = SAFEAILAB | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "target_hidden_size": HIDDEN,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3], "use_aux_hidden_state": True},
}
SPECULATORS = {
    "architectures": ["Eagle3DraftModel"],
    "speculators_model_type": "eagle3",
    "transformer_layer_config": LAYER,
    "draft_vocab_size": DRAFT_VOCAB,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    "target_hidden_size": None,
}


def as_speculators(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def full_vocab(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(9)
    kept = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    return kept | {"lm_head.weight": (torch.randn(VOCAB, HIDDEN, generator=g) * 0.15).to(torch.bfloat16)}


def norms(names: list[str], size: int = HIDDEN) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(8)
    return {name: (1 + 0.2 * torch.randn(size, generator=g)).to(torch.bfloat16) for name in names}


def case(
    name: str,
    config: dict[str, Any],
    stored: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    aux: Any,
    **kw: Any,
) -> Any:
    return pytest.param(SimpleNamespace(config=config, stored=stored, aux=aux, **kw), id=name)


FC_NORMS = ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]
CASES = [
    # The default takes the inputs of layers 2, N/2 and N-3 of six: outputs 1, 2, 2.
    case("safeailab", SAFEAILAB, lambda t: t, (1, 2, 2)),
    case("safeailab_pickled", SAFEAILAB, lambda t: t, (1, 2, 2), pickled=True),
    case("specforge", SPECFORGE, lambda t: t, (0, 2, 3)),
    case("specforge_same_vocab", SPECFORGE | {"draft_vocab_size": VOCAB}, full_vocab, (0, 2, 3), extra=full_vocab),
    case("biased_qkv", SPECFORGE, lambda t: t, (0, 2, 3), made={"bias": True}),
    case("speculators", SPECULATORS, as_speculators, (0, 2, 3)),
    case(
        "speculators_norm_before_residual",
        SPECULATORS | {"norm_before_residual": True},
        as_speculators,
        (0, 2, 3),
        flags={"norm_before_residual": True},
    ),
    case(
        "speculators_qwen3_31",
        SPECULATORS | {"norm_output": True, "fc_norm": True},
        as_speculators,
        (0, 2, 3),
        made={"qk_norm": True},
        flags={"norm_output": True},
        extra=lambda t: t | norms(FC_NORMS),
    ),
    case(
        "renamed_tensors",
        SPECULATORS | {"fc_norm": True},
        lambda t: {
            {
                "fc_norm.0.weight": "aux_norm_low.weight",
                "fc_norm.1.weight": "aux_norm_mid.weight",
                "fc_norm.2.weight": "aux_norm_high.weight",
                "d2t": "draft_id_to_target_id",
            }.get(name, name): tensor
            for name, tensor in as_speculators(t).items()
        },
        (0, 2, 3),
        extra=lambda t: t | norms(FC_NORMS),
    ),
    case(
        "speculators_norm_before_fc",
        SPECULATORS | {"norm_before_fc": True},
        as_speculators,
        (0, 2, 3),
        extra=lambda t: t | norms(["input_norm.weight"], 3 * HIDDEN),
    ),
    case(
        "own_embedding",
        SPECFORGE,
        lambda t: t,
        (0, 2, 3),
        extra=lambda t: t | {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN).to(torch.bfloat16)},
    ),
]


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory, tools: SimpleNamespace) -> Path:
    path: Path = tools.make_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=6)
    return path


def load_pair(target_dir: Path, head_dir: Path) -> tuple[Target, Any]:
    aux = eagle3_aux_layers(head_dir, 6)
    target = load_target(target_dir, device=CPU, dtype=torch.float32, aux_layers=aux)
    return target, load_eagle3(head_dir, target, device=CPU, dtype=torch.float32)


@pytest.fixture(params=CASES)
def loaded(request: pytest.FixtureRequest, target_dir: Path, tmp_path: Path) -> SimpleNamespace:
    c = request.param
    tensors = getattr(c, "extra", lambda t: t)(head_tensors(**getattr(c, "made", {})))
    save_head(tmp_path / "head", c.config, c.stored(tensors), pickled=getattr(c, "pickled", False))
    target, head = load_pair(target_dir, tmp_path / "head")
    embed = tensors.get("embed_tokens.weight", target.embed.weight).float()
    reference = Reference(tensors, embed, **getattr(c, "flags", {}))
    return SimpleNamespace(case=c, target=target, head=head, reference=reference, tensors=tensors)


def test_form_equals_reference(loaded: SimpleNamespace, tools: SimpleNamespace) -> None:
    """Prefill in two chunks, then draft steps that feed back the head's own output, all against a full recompute."""
    head, reference = loaded.head, loaded.reference
    assert loaded.target.aux_layers == loaded.case.aux == head.aux_layers(6)
    pool = tools.make_pool(head.facts, pages=12)
    pages = [7, 2, 11]
    features = torch.randn(37, 3 * HIDDEN, generator=torch.Generator().manual_seed(1))
    tokens = tools.random_tokens(37, seed=4)
    fused = head.fuse(features)
    torch.testing.assert_close(fused, reference.fuse(features), atol=1e-5, rtol=1e-5)

    outs = []
    for done, count in ((0, 21), (21, 16)):
        batch, rows, positions = tools.pack([(tokens, done, count, pages)], 16)
        outs.append(head.forward(rows, fused[done : done + count], positions, pool, batch))
    hidden = torch.cat(outs)
    inputs = reference.fuse(features)
    torch.testing.assert_close(hidden, reference.forward(tokens, inputs), atol=1e-4, rtol=1e-4)

    last = hidden[-1:]
    for _ in range(4):
        logits = head.logits(last)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits, reference.logits(last), atol=1e-4, rtol=1e-4)
        tokens.append(int(head.to_target_ids(logits.argmax(-1))))
        inputs = torch.cat([inputs, last])
        batch, rows, positions = tools.pack([(tokens, len(tokens) - 1, 1, pages)], 16)
        last = head.forward(rows, last, positions, pool, batch)
        torch.testing.assert_close(last, reference.forward(tokens, inputs)[-1:], atol=1e-4, rtol=1e-4)


def test_target_ids_invert_the_mask(loaded: SimpleNamespace) -> None:
    """Draft ids map onto exactly the tokens that t2d marks, in order; without tables they are the target's."""
    size = loaded.tensors["lm_head.weight"].shape[0]
    ids = loaded.head.to_target_ids(torch.arange(size))
    mask = loaded.tensors.get("t2d")
    assert ids.tolist() == (list(range(VOCAB)) if mask is None else mask.nonzero().flatten().tolist())


def test_absent_pages_equal_masked_slots(target_dir: Path, tmp_path: Path, tools: SimpleNamespace) -> None:
    """Leaving pages out of a segment is the same as masking their slots: never zeros, never what lies in the pool."""
    tensors = head_tensors()
    save_head(tmp_path / "head", SPECFORGE, tensors)
    target, head = load_pair(target_dir, tmp_path / "head")
    reference = Reference(tensors, target.embed.weight.float())
    pool = tools.make_pool(head.facts, pages=12)
    pages = [5, 9, 1, 3]
    tokens = tools.random_tokens(64, seed=2)
    hidden = torch.randn(64, HIDDEN, generator=torch.Generator().manual_seed(3))
    batch, rows, positions = tools.pack([(tokens, 0, 53, pages)], 16)
    head.forward(rows, hidden[:53], positions, pool, batch)

    # Pages 1 and 2 of four are absent; the last rows are computed with what is left.
    batch, rows, positions = tools.pack([(tokens, 53, 11, pages)], 16)
    (segment,) = batch.segments
    kept = type(segment)(0, 11, torch.tensor([pages[0], pages[3]]), 32)
    out = head.forward(rows, hidden[53:], positions, pool, type(batch)(batch.slots, (kept,)))
    visible = torch.ones(64, dtype=torch.bool)
    visible[16:48] = False
    expected = reference.forward(tokens, hidden, visible)[53:]
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_repeated_target_embedding_is_not_kept_twice(target_dir: Path, tmp_path: Path) -> None:
    target = load_target(target_dir, device=CPU, dtype=torch.float32, aux_layers=(0, 2, 3))
    copy = {"embed_tokens.weight": target.embed.weight.to(torch.bfloat16)}
    save_head(tmp_path / "head", SPECFORGE, head_tensors() | copy)
    head = load_eagle3(tmp_path / "head", target, device=CPU, dtype=torch.float32)
    assert head._w.embed.data_ptr() == target.embed.weight.data_ptr()


def test_missing_output_head_is_the_targets(target_dir: Path, tmp_path: Path) -> None:
    tensors = full_vocab(head_tensors())
    del tensors["lm_head.weight"]
    save_head(tmp_path / "head", {k: v for k, v in SPECFORGE.items() if k != "draft_vocab_size"}, tensors)
    target, head = load_pair(target_dir, tmp_path / "head")
    rows = torch.randn(2, HIDDEN)
    torch.testing.assert_close(head.logits(rows), F.linear(rms(rows, tensors["norm.weight"].float()), target.lm_head))


def without(name: str) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda t: {key: tensor for key, tensor in t.items() if key != name}


def with_(**tensors: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda t: t | {name.replace("__", "."): tensor for name, tensor in tensors.items()}


BROKEN = [
    ("hidden_size", {"hidden_size": 64}, None, r"hidden_size is 64, the target has 48"),
    ("target_hidden_size", {"target_hidden_size": 96}, None, r"target_hidden_size is 96, the target has 48"),
    ("vocab_size", {"vocab_size": 128}, None, r"vocab_size is 128, the target has 96"),
    ("draft_vocab", {"draft_vocab_size": 100}, None, r"draft_vocab_size 100 .* vocabulary of 96"),
    ("layers", {"num_hidden_layers": 2}, None, r"has 1 layer, .*num_hidden_layers 2"),
    (
        "aux_beyond",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 6]}},
        None,
        r"\[0, 2, 6\].*has 6 layers",
    ),
    (
        "aux_text",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}},
        None,
        r"must be a list of layer numbers",
    ),
    ("eagle_config", {"eagle_config": [1]}, None, r"eagle_config in config.json must be an object"),
    ("speculators_kind", {"speculators_model_type": "hydra"}, None, r"'hydra' is not served; supported: eagle3"),
    ("speculators_layer", {"speculators_model_type": "eagle3"}, None, r"transformer_layer_config is missing"),
    ("activation", {"hidden_act": "gelu"}, None, r"hidden_act 'gelu' is not served"),
    ("rope", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, None, r"rope type dynamic is not served"),
    ("rope_incomplete", {"rope_scaling": {"rope_type": "linear"}}, None, r"rope settings cannot be used"),
    ("rope_theta", {"rope_theta": 0}, None, r"rope_theta in config.json must be a number above 0, found 0"),
    ("eps", {"rms_norm_eps": "x"}, None, r"rms_norm_eps in config.json must be a number above 0, found 'x'"),
    ("rope_number", {"rope_parameters": 0, "rope_scaling": None}, None, r"rope settings cannot be used"),
    ("quantised", {"quantization_config": {"bits": 4}}, None, r"quantised draft heads"),
    ("flag", {"norm_output": "yes"}, None, r"norm_output in config.json must be true or false"),
    ("head_dim", {"head_dim": 0}, None, r"head_dim in config.json must be a whole number above 0"),
    ("endless_head_dim", {"head_dim": 10**400}, None, r"head_dim in config.json must be a whole number above 0"),
    ("unknown", {}, with_(surprise__weight=torch.zeros(2)), r"tensor surprise.weight is not part of an EAGLE-3 head"),
    ("missing", {}, without("fc.weight"), r"tensor fc.weight is missing; is this an EAGLE-3 head"),
    ("shape", {"intermediate_size": 80}, None, r"has shape \[72, 48\], the config says \[80, 48\]"),
    (
        "integers",
        {},
        with_(fc__weight=torch.zeros(HIDDEN, 3 * HIDDEN).to(torch.int8)),
        r"stored as torch.int8; quantised",
    ),
    ("no_d2t", {}, without("d2t"), r"tensor d2t is missing, .* of 40 differs .* of 96"),
    ("bad_d2t", {}, with_(d2t=torch.full((DRAFT_VOCAB,), 90)), r"outside the target's vocabulary of 96"),
    ("no_lm_head", {}, without("lm_head.weight"), r"tensor lm_head.weight is missing"),
    ("embedding", {}, with_(embed_tokens__weight=torch.zeros(5, HIDDEN)), r"has shape \[5, 48\], .* has \[96, 48\]"),
]


@pytest.mark.parametrize(("changes", "stored", "message"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken_head_is_one_clear_error(
    target_dir: Path, tmp_path: Path, changes: dict[str, Any], stored: Any, message: str
) -> None:
    tensors = head_tensors()
    save_head(tmp_path / "head", SPECFORGE | changes, stored(tensors) if stored else tensors)
    target = load_target(target_dir, device=CPU, dtype=torch.float32, aux_layers=(0, 2, 3))
    with pytest.raises(ModelError, match=message) as caught:
        load_eagle3(tmp_path / "head", target, device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value)


def test_features_of_other_layers_are_refused(target_dir: Path, tmp_path: Path) -> None:
    """The off-by-one between the conventions must not pass silently."""
    save_head(tmp_path / "head", SPECFORGE, head_tensors())
    target = load_target(target_dir, device=CPU, dtype=torch.float32, aux_layers=(1, 3, 4))
    with pytest.raises(ModelError, match=r"layers \[0, 2, 3\], the target was loaded for \[1, 3, 4\]"):
        load_eagle3(tmp_path / "head", target, device=CPU, dtype=torch.float32)


def test_pickle_that_runs_code_is_refused(target_dir: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    (tmp_path / "head").mkdir()
    (tmp_path / "head" / "config.json").write_text(json.dumps(SPECFORGE))
    torch.save({"fc.weight": Evil()}, tmp_path / "head" / "pytorch_model.bin")
    target = load_target(target_dir, device=CPU, dtype=torch.float32, aux_layers=(0, 2, 3))
    with pytest.raises(ModelError, match="plain tensors"):
        load_eagle3(tmp_path / "head", target, device=CPU, dtype=torch.float32)
    assert not (tmp_path / "ran").exists()
