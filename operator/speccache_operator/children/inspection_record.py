"""The ConfigMap that keeps what an inspection found, under the name of its Job, so that the Job can go.

Another model or image has another name, hence another record; the old one is deleted. Deleting a record by hand makes
the operator inspect again: that is the way to say that the files behind an unchanged `pvc://` URI are others now.
"""

from speccache_api import names
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.kinds import CONFIG_MAP

RECORD_KEY = "inspection.json"


def build(ctx: BuildContext) -> Built:
    """Wanted once there is a result."""
    if ctx.inspection is None or ctx.inspection.result is None:
        return Answer.ABSENT
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.name,
        "metadata": metadata(ctx, ctx.inspection.name, names.COMPONENT_INSPECTION),
        "data": {RECORD_KEY: ctx.inspection.result},
    }
