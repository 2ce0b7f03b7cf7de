"""The ConfigMap with the wire document: everything a pod is told."""

from speccache_api import names
from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext
from speccache_operator.children.meta import metadata
from speccache_operator.kinds import CONFIG_MAP


def build(ctx: BuildContext) -> Built:
    """Unknown until the memory is sized."""
    if ctx.sized is None:
        return Answer.UNKNOWN
    return {
        "apiVersion": CONFIG_MAP.api_version,
        "kind": CONFIG_MAP.name,
        "metadata": metadata(ctx, names.config_map_name(ctx.resource.name)),
        "data": {names.WIRE_KEY: ctx.sized.wire.to_json()},
    }
