"""Does a live object still say what we applied?

An unchanged object must cost no write, and the API server fills in hundreds of defaults, so equality is the wrong
question. Two checks are enough: the digest of what was last applied (an annotation) tells a changed plan, fields
removed from it included; "everything we planned is in there" tells drift. The API server writes amounts in its own
form and leaves out what is empty, which is no drift: a false alarm would be one in every pass.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from speccache_api import names
from speccache_api.quantity import parse_amount
from speccache_operator.kinds import SERVICE, Object, kind_of

ANNOTATION_PLAN_HASH = f"{names.API_GROUP}/plan-hash"

_AMOUNTS = ("requests", "limits")
_CLOSED = ("selector", "matchLabels", "podSelector", "namespaceSelector")
"""Maps to which nobody may add: one label more, and a Service finds no pod, or a policy protects none."""


def stamped(obj: Object) -> Object:
    """`obj` with the digest of itself (an earlier stamp left out) as an annotation."""
    meta = obj["metadata"]
    annotations = {key: value for key, value in meta.get("annotations", {}).items() if key != ANNOTATION_PLAN_HASH}
    text = json.dumps({**obj, "metadata": {**meta, "annotations": annotations}}, sort_keys=True)
    annotations[ANNOTATION_PLAN_HASH] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {**obj, "metadata": {**meta, "annotations": annotations}}


def replanned(live: Object, planned: Object) -> bool:
    """True when `live` was made from another plan than the stamped object `planned`."""
    return stamp(live) != stamp(planned)


def drifted(live: Object, planned: Object) -> bool:
    """True when a field of `planned` is missing in `live` or differs."""
    return not _contains(live, planned)


def spec_drifted(live: Object, planned: Object) -> bool:
    """The same of `spec` alone: a label that is put back changes nothing that runs."""
    return not _contains(live.get("spec"), planned.get("spec"))


def reset(live: Object, planned: Object) -> Object | None:
    """A merge patch that takes out of `live` what server-side apply leaves in; None when there is no such thing.

    Apply merges the ports of a Service by their numbers and its selector by keys, so that a changed port would be
    joined by the right one under the same name, which is refused, and a label more would stay.
    """
    if kind_of(planned) is not SERVICE or not spec_drifted(live, planned):
        return None
    wanted = planned["spec"]
    extra = {key: None for key in live["spec"].get("selector") or {} if key not in wanted["selector"]}
    return {"spec": {"selector": {**wanted["selector"], **extra}, "ports": wanted["ports"]}}


def stamp(obj: Object) -> str | None:
    """The digest of what was applied to `obj`; None when it was made by somebody else."""
    value: str | None = obj["metadata"].get("annotations", {}).get(ANNOTATION_PLAN_HASH)
    return value


def _contains(live: Any, wanted: Any) -> bool:
    if isinstance(wanted, Mapping):
        if not wanted and live is None:
            return True
        return isinstance(live, Mapping) and all(_contains_field(live, key, wanted[key]) for key in wanted)
    if isinstance(wanted, Sequence) and not isinstance(wanted, str):
        return _contains_items(live, wanted)
    return bool(live == wanted)


def _contains_field(live: Mapping[str, Any], key: str, wanted: Any) -> bool:
    if key not in live:
        return wanted in ({}, [])
    if (
        key in _CLOSED
        and isinstance(wanted, Mapping)
        and isinstance(live[key], Mapping)
        and len(live[key]) > len(wanted)
    ):
        return False
    if key in _AMOUNTS and isinstance(wanted, Mapping) and isinstance(live[key], Mapping):
        return all(name in live[key] and _same_amount(live[key][name], amount) for name, amount in wanted.items())
    return _contains(live[key], wanted)


def _same_amount(live: Any, wanted: Any) -> bool:
    try:
        return parse_amount(str(live)) == parse_amount(str(wanted))
    except ValueError:
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
