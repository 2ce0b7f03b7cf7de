"""The StatefulSet that earlier operators made: it goes when the Deployment of its name serves in its place."""

from speccache_operator.children.answer import Answer, Built
from speccache_operator.children.context import BuildContext


def build(ctx: BuildContext) -> Built:
    """Never wanted, and left alone while its pods are the ones that serve.

    A volume that cannot be shared has to be let go first. Its pods drain as they would have: nothing stored is lost.
    """
    replaced = ctx.sized is not None and (ctx.serving or not ctx.shared)
    if replaced or ctx.resource.spec.wanted_replicas == 0:
        return Answer.ABSENT
    return Answer.UNKNOWN
