"""The ConfigMap that keeps what an inspection found.

Deleting it makes the operator inspect again: that is the way to say that the files behind an unchanged `pvc://` URI are
others now.
"""

from speccache_api import names
from speccache_operator.children import inquiry
from speccache_operator.children.answer import Built
from speccache_operator.children.context import BuildContext

RECORD_KEY = "inspection.json"


def build(ctx: BuildContext) -> Built:
    """Wanted once there is a result."""
    return inquiry.record(ctx, ctx.inspection, names.COMPONENT_INSPECTION, RECORD_KEY)
