"""`spec.model` and `spec.speculative`: which weights are served, and which draft proposes tokens for them."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from speccache_api import drafts
from speccache_api.fields import ModelUri, ServedName
from speccache_api.geometry import KVGeometry
from speccache_api.rules import Rule, SpecModel
from speccache_api.uris import BUILTIN_SCHEME, builtin_name

DEFAULT_STEPS = 7


def _together(field: str, other: str) -> Rule:
    """The two fields of one form: `field` is missing where only `other` is given."""
    return Rule(
        cel=f"!has(self.{other}) || has(self.{field})",
        message=f"{other} needs {field}; give both",
        check=lambda geometry: not geometry.given(other) or geometry.given(field),
        at=f".{field}",
    )


class DeclaredGeometry(SpecModel):
    """The KV shape of a model, for sizing without reading its files. The pod checks it against the real model and
    refuses to start when it is wrong. Two forms: kvHeads and headDim where K and V are kept, or kvLoraRank and
    qkRopeHeadDim with multi-head latent attention (MLA).
    """

    layers: Annotated[int, Field(ge=1, le=1024)]
    """Number of layers that keep KV. `num_hidden_layers` in config.json; 1 for most EAGLE-3 heads."""
    kv_heads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Number of KV heads of a layer. `num_key_value_heads` in config.json."""
    head_dim: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Numbers of one head. `head_dim` in config.json, or hidden_size / num_attention_heads."""
    kv_lora_rank: Annotated[int, Field(ge=1, le=65536)] | None = None
    """MLA: numbers of the latent that is kept instead of K and V. `kv_lora_rank` in config.json."""
    qk_rope_head_dim: Annotated[int, Field(ge=1, le=4096)] | None = None
    """MLA: numbers of the rotated key that all heads share. `qk_rope_head_dim` in config.json."""
    parameters: Annotated[int, Field(ge=1, le=10**13)] | None = None
    """Number of weights. Needed only without a GPU, where weights live in the pod's memory (4 bytes each)."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        _together("kvHeads", "headDim"),
        _together("headDim", "kvHeads"),
        _together("kvLoraRank", "qkRopeHeadDim"),
        _together("qkRopeHeadDim", "kvLoraRank"),
        Rule(
            cel="(has(self.kvHeads) || has(self.headDim)) != (has(self.kvLoraRank) || has(self.qkRopeHeadDim))",
            message="give exactly one form: kvHeads and headDim, or kvLoraRank and qkRopeHeadDim for MLA",
            check=lambda g: (
                (g.given("kvHeads") or g.given("headDim")) != (g.given("kvLoraRank") or g.given("qkRopeHeadDim"))
            ),
        ),
    )

    def to_geometry(self) -> KVGeometry:
        """The same as the description that sizes follow from."""
        if self.kv_heads is not None and self.head_dim is not None:
            return KVGeometry.heads(self.layers, self.kv_heads, self.head_dim)
        assert self.kv_lora_rank is not None, "RULES let exactly one whole form through"
        assert self.qk_rope_head_dim is not None
        return KVGeometry.latent(self.layers, self.kv_lora_rank, self.qk_rope_head_dim)


_SHAPE_IS_KNOWN = Rule(
    cel=f"!has(self.kvGeometry) || !self.uri.startsWith('{BUILTIN_SCHEME}')",
    message="the shape of a built-in model is known; remove kvGeometry",
    check=lambda model: model.kv_geometry is None or builtin_name(model.uri) is None,
    at=".kvGeometry",
)
"""Of the target and of the draft."""


def _needs_model(algorithm: str) -> Rule:
    return Rule(
        cel=f"self.algorithm != '{algorithm}' || has(self.draftModel)",
        message=f"algorithm {algorithm} needs draftModel.uri; give one, or set algorithm: None",
        check=lambda speculative: speculative.algorithm != algorithm or speculative.draft_model is not None,
        at=".draftModel",
    )


def _refuses(algorithm: str, field: str, why: str, what: str, others: str) -> Rule:
    return Rule(
        cel=f"self.algorithm != '{algorithm}' || !has(self.{field})",
        message=f"algorithm {algorithm} {why}; remove {what}, or set algorithm: {others}",
        check=lambda speculative: speculative.algorithm != algorithm or not speculative.given(field),
        at=f".{field}",
    )


_WITH_MODEL = drafts.any_of(lambda draft: draft.model)


class Model(SpecModel):
    """The target model: the one whose text is served."""

    uri: ModelUri
    """Where the model is: `pvc://CLAIM/PATH` is a directory of a PersistentVolumeClaim in this namespace (mounted
    read-only), `builtin://tiny` is the small model inside the runtime image.
    """
    served_name: ServedName | None = None
    """Name that clients give in the `model` field of a request. Default: the name of this resource."""
    kv_geometry: DeclaredGeometry | None = None
    """KV shape of the model. Default: read from the model's files by a short inspection Job (from a table for
    `builtin://`).
    """

    RULES: ClassVar[tuple[Rule, ...]] = (_SHAPE_IS_KNOWN,)


class DraftModel(SpecModel):
    """The draft: a small head or model that proposes tokens, which the target then verifies."""

    uri: ModelUri
    """Where the draft is, written like `model.uri`. `builtin://tiny` is the EAGLE-3 head of the built-in model; with
    Standalone it is the built-in model itself, as its own draft.
    """
    kv_geometry: DeclaredGeometry | None = None
    """KV shape of the draft. Default: read from the draft's files by the inspection Job (from a table for
    `builtin://`).
    """

    RULES: ClassVar[tuple[Rule, ...]] = (_SHAPE_IS_KNOWN,)


class Speculative(SpecModel):
    """Speculative decoding: a draft proposes tokens and one pass of the target verifies them. The text is the same
    without it. Default: algorithm None.
    """

    algorithm: drafts.Algorithm
    """How tokens are proposed. `EAGLE3`: by a trained EAGLE-3 head (`draftModel`). `Standalone`: by a small model with
    the target's tokenizer (`draftModel`). `NGram`: without a model, by what followed the same tokens earlier in the
    request. `None`: not at all, one token per pass.
    """
    draft_model: DraftModel | None = None
    """The head of EAGLE3 or the model of Standalone. Its KV counts in every tier: pages move, are stored and are
    evicted as pairs of target and draft.
    """
    num_steps: Annotated[int, Field(ge=1, le=15)] | None = None
    """The most tokens proposed at once; with a draft model as many passes of it per round. Default 7. More helps text
    that quotes its prompt.
    """
    num_draft_tokens: Annotated[int, Field(ge=2, le=16)] | None = None
    """Rows the target verifies per round: the proposed tokens and one more. Default, and only value served: numSteps +
    1.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        *(_needs_model(name) for name in drafts.names(lambda draft: draft.model)),
        *(
            _refuses(name, "draftModel", "uses no draftModel", "it", _WITH_MODEL)
            for name in ("None", *drafts.names(lambda draft: not draft.model))
        ),
        _refuses("None", "numSteps", "takes no steps", "numSteps", drafts.any_of()),
        _refuses("None", "numDraftTokens", "verifies nothing", "numDraftTokens", drafts.any_of()),
        Rule(
            cel="self.algorithm != 'EAGLE3' || !has(self.draftModel) || !has(self.draftModel.kvGeometry)"
            " || !has(self.draftModel.kvGeometry.kvLoraRank)",
            message="an EAGLE-3 head keeps K and V, also for a target with MLA; give kvHeads and headDim",
            check=lambda s: (
                s.algorithm != "EAGLE3"
                or s.draft_model is None
                or s.draft_model.kv_geometry is None
                or s.draft_model.kv_geometry.kv_lora_rank is None
            ),
            at=".draftModel.kvGeometry",
        ),
        Rule(
            cel="!has(self.numDraftTokens)"
            f" || self.numDraftTokens == (has(self.numSteps) ? self.numSteps : {DEFAULT_STEPS}) + 1",
            message="numDraftTokens must be numSteps + 1 (drafts are chains); change one, or leave numDraftTokens out",
            check=lambda s: s.num_draft_tokens is None or s.num_draft_tokens == s.steps + 1,
            at=".numDraftTokens",
        ),
    )

    @property
    def steps(self) -> int:
        """The most tokens proposed at once, with the default filled in."""
        return DEFAULT_STEPS if self.num_steps is None else self.num_steps

    @property
    def draft_tokens(self) -> int:
        """Rows verified per round, with the default filled in."""
        return self.steps + 1 if self.num_draft_tokens is None else self.num_draft_tokens
