"""`spec.kvCache`: the page format and the three tiers that pages live in."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from speccache_api.fields import Fraction, ObjectName, Ratio, Size
from speccache_api.rules import Rule, SpecModel, Transition, exactly_one

Tokens = Annotated[int, Field(ge=1, le=10**10)]
AccessMode = Literal["ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"]


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


class StorageClaim(SpecModel):
    """The volume of the storage tier: one that exists (`claimName`), or one that the operator creates (`size`)."""

    claim_name: ObjectName | None = None
    """Name of an existing PersistentVolumeClaim in this namespace. It is never deleted by the operator."""
    size: Size | None = None
    """Size of the PersistentVolumeClaim that the operator creates: `100Gi`."""
    storage_class_name: ObjectName | None = None
    """StorageClass of the created claim. Default: the cluster's default class."""
    access_modes: Annotated[list[AccessMode], Field(min_length=1, max_length=3)] | None = None
    """Access modes of the created claim. Default: [ReadWriteOnce]. More than one replica needs ReadWriteMany."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        exactly_one("claimName", "size"),
        Rule(
            cel="!has(self.claimName) || !(has(self.storageClassName) || has(self.accessModes))",
            message="storageClassName and accessModes belong to a claim that is created; remove them beside claimName",
            check=lambda c: c.claim_name is None or (c.storage_class_name is None and c.access_modes is None),
        ),
        Rule(
            cel="!has(self.accessModes) || !('ReadWriteOncePod' in self.accessModes) || self.accessModes.size() == 1",
            message="ReadWriteOncePod cannot be one mode of several; give it alone, or remove it",
            check=lambda c: "ReadWriteOncePod" not in (c.access_modes or ()) or len(c.access_modes) == 1,
            at=".accessModes",
        ),
    )

    @property
    def created(self) -> bool:
        """True when the operator creates the claim."""
        return self.claim_name is None

    @property
    def modes(self) -> tuple[AccessMode, ...]:
        """Access modes of the created claim, with the default filled in."""
        return tuple(self.access_modes or ["ReadWriteOnce"])

    TRANSITIONS: ClassVar[tuple[Transition, ...]] = (
        Transition(
            cel="self == oldSelf",
            message="the claim of the storage tier cannot change while it is in use; create another SpecCacheDeployment"
            " with the new claim, or remove kvCache.storage first",
        ),
    )


class Storage(SpecModel):
    """The storage tier: pages in files on a volume. They outlive the pod, and every replica reads them.
    Without it, cached pages are lost with the pod.
    """

    persistent_volume_claim: StorageClaim
    """The volume. Pages are kept in a folder whose name is a digest of model, dtype and page size, so models can share
    it.
    """
    missing_draft: Literal["Recompute", "Degrade"] = "Recompute"
    """What to do when storage has the target's half of a page but not the draft's; for EAGLE3. `Recompute` (default)
    uses only whole pairs and prefills the rest. `Degrade` uses the target's half and drafts without the missing part:
    less prefill, shorter accepts. Standalone does neither: its target's half is used, and its draft's half is made anew
    from the tokens while the target goes on. NGram and None have no draft's half.
    """
    retention: Literal["Retain", "Delete"] = "Retain"
    """What happens to the created claim when this resource is deleted. `Retain` (default) keeps it, `Delete` deletes
    it.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            cel="self.retention != 'Delete' || !has(self.persistentVolumeClaim.claimName)",
            message="retention Delete needs a claim that the operator creates; set Retain, or give size, not claimName",
            check=lambda s: s.retention != "Delete" or s.persistent_volume_claim.created,
            at=".retention",
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
