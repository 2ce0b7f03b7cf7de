"""Digests under which the storage tier keeps its pages.

    fingerprint                target, number format, page size       all that one kind of page has in storage
      ├─ target namespace      shard                                  the target's halves
      └─ draft namespace       shard, draft, lookahead                the halves of one draft

Everything that changes the meaning of stored bytes is part of a digest, so another model, dtype or page size reads and
writes elsewhere: a rollout can neither poison the old cache nor lose it. Another draft keeps the target's pages.
"""

from __future__ import annotations

import hashlib
import json

LAYOUT_VERSION = 2
"""Raise when the bytes of a stored page change meaning: their order, the header, or the rule that makes page keys. It
is part of every digest here, of every header and of every object's path in a storage backend.
"""


def fingerprint(target_identity: str, kv_dtype: str, page_size: int) -> str:
    """SHA-256 hex that names the pages of one target. `kv_dtype` is the wire document's word (`float32`, `bfloat16`),
    `page_size` is in tokens.
    """
    return _digest(
        {"layoutVersion": LAYOUT_VERSION, "target": target_identity, "kvDtype": kv_dtype, "pageSize": page_size}
    )


def target_namespace(fingerprint: str, shard: str) -> str:
    """SHA-256 hex that names the target's halves below `fingerprint`; `shard` says which part of them they are
    (`KVGeometry.shard`).
    """
    return _digest({"fingerprint": fingerprint, "shard": shard})


def draft_namespace(fingerprint: str, shard: str, draft_identity: str, lookahead: int) -> str:
    """SHA-256 hex that names one draft's halves below `fingerprint`; `shard` is theirs, which need not be the target's.
    `lookahead` is how many following tokens the draft's KV of a position depends on (1 for EAGLE heads, 0 for a draft
    that reads only the past).
    """
    return _digest({"fingerprint": fingerprint, "shard": shard, "draft": draft_identity, "lookahead": lookahead})


def _digest(fields: dict[str, str | int]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
