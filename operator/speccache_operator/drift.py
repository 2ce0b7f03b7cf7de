"""Does a live object still say what we applied?

An unchanged object must cost no write, and the API server fills in hundreds of defaults, so equality is the wrong
question. Two checks are enough: the digest of what was last applied (an annotation) tells a changed plan, fields
removed from it included; "everything we planned is in there" tells drift. A false alarm is harmless: applying the
same again changes nothing.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from speccache_api import names
from speccache_operator.kinds import Object

ANNOTATION_PLAN_HASH = f"{names.API_GROUP}/plan-hash"


def stamped(obj: Object) -> Object:
    """`obj` with the digest of itself (an earlier stamp left out) as an annotation."""
    meta = obj["metadata"]
    annotations = {key: value for key, value in meta.get("annotations", {}).items() if key != ANNOTATION_PLAN_HASH}
    text = json.dumps({**obj, "metadata": {**meta, "annotations": annotations}}, sort_keys=True)
    annotations[ANNOTATION_PLAN_HASH] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {**obj, "metadata": {**meta, "annotations": annotations}}


def replanned(live: Object, planned: Object) -> bool:
    """True when `live` was made from another plan than the stamped object `planned`."""
    return _stamp(live) != _stamp(planned)


def drifted(live: Object, planned: Object) -> bool:
    """True when a field of `planned` is missing in `live` or differs."""
    return not _contains(live, planned)


def _stamp(obj: Object) -> str | None:
    value: str | None = obj["metadata"].get("annotations", {}).get(ANNOTATION_PLAN_HASH)
    return value


def _contains(live: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if not wanted and live is None:
            return True
        return isinstance(live, Mapping) and all(key in live and _contains(live[key], wanted[key]) for key in wanted)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _contains_items(live, wanted)
    return bool(live == wanted)


def _contains_items(live: Any, wanted: Sequence[Any]) -> bool:
    """Lists whose items have unique names are merged by name on the server, so extra items of others are not drift."""
    if not isinstance(live, Sequence) or isinstance(live, str):
        return not wanted and live is None
    keys = [item.get("name") if isinstance(item, Mapping) else None for item in wanted]
    if None not in keys and len(set(keys)) == len(keys):
        by_name = {item.get("name"): item for item in live if isinstance(item, Mapping)}
        return all(key in by_name and _contains(by_name[key], item) for key, item in zip(keys, wanted, strict=True))
    return len(live) == len(wanted) and all(map(_contains, live, wanted))
