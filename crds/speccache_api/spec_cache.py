"""`spec.kvCache`: the page format and the three tiers that pages live in."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from speccache_api.fields import Fraction, Ratio, Size
from speccache_api.rules import Rule, SpecModel, exactly_one
from speccache_api.spec_storage import Storage

Tokens = Annotated[int, Field(ge=1, le=10**10)]


class DeviceTier(SpecModel):
    """The device tier: pages the models compute on. In GPU memory with a GPU, otherwise in the pod's memory.
    Exactly one of memoryFraction, size, tokens.
    """

    memory_fraction: Fraction | None = None
    """Share of the GPU's memory for weights, activations and pages together, as text: "0.85". Only with a GPU."""
    size: Size | None = None
    """Bytes for pages, target and draft together: `4Gi`. Rounded down to whole page pairs."""
    tokens: Tokens | None = None
    """Tokens to hold, rounded up to whole pages. All running requests together cannot be longer than this."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one("memoryFraction", "size", "tokens"),
        Rule(
            cel="!has(self.memoryFraction)"
            " || (double(self.memoryFraction) >= 0.1 && double(self.memoryFraction) <= 0.95)",
            message='give a share from "0.1" to "0.95"; above, activations do not fit',
            check=lambda d: d.memory_fraction is None or 0.1 <= float(d.memory_fraction) <= 0.95,
            at=".memoryFraction",
        ),
    )


class HostTier(SpecModel):
    """The host tier: pages in the pod's memory, beside the device tier. They count into its memory limit.
    Exactly one of size, tokens, ratio.
    """

    size: Size | None = None
    """Bytes for pages, the TOTAL of the pod with the draft's half included: `40Gi`. Rounded down to whole page pairs.
    """
    tokens: Tokens | None = None
    """Tokens to hold, rounded up to whole pages. The memory follows from the geometry of both models."""
    ratio: Ratio | None = None
    """Tokens to hold as a multiple of the device tier's, as text: "2" or "1.5". Not with `device.memoryFraction`."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one("size", "tokens", "ratio"),
        Rule(
            cel="!has(self.ratio) || double(self.ratio) > 0.0",
            message='give a ratio above 0, such as "2"',
            check=lambda h: h.ratio is None or float(h.ratio) > 0,
            at=".ratio",
        ),
    )


class KVCache(SpecModel):
    """The KV cache: page format and tiers."""

    dtype: Literal["Auto", "Float32", "BFloat16"] = "Auto"
    """Number format of KV. `Auto` (default) is BFloat16 on a GPU (2 bytes) and Float32 on the CPU (4 bytes); these are
    also the only ones served there.
    """
    page_size: Literal[16, 32, 64, 128, 256] = 64
    """Tokens of a page. Default 64. Only whole pages are cached: smaller pages lose less at a prompt's end, larger ones
    move with less work. Another size starts a new cache in storage.
    """
    device: DeviceTier
    host: HostTier
    storage: Storage | None = None
    require_cache_salt: bool = False
    """True refuses requests without `cache_salt`. Requests with different salts never share pages, so nobody can tell
    from an answer's speed what somebody else has asked. A salt is a secret: long and random, one for all who may share.
    Default: false; requests without a salt share with each other.
    """
