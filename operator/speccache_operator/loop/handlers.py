"""Every kopf decorator, and nothing else: the table of contents of what this operator reacts to.

kopf only watches here. A handler never looks at what happened, it says "this may have changed" and the controller
looks for itself. With `on.event` alone kopf writes nothing (no finalizer, no annotations), so a resource can be
deleted while no operator runs.
"""

from typing import Any

import kopf

from speccache_operator.kinds import CLAIM, RESOURCE
from speccache_operator.loop import watching


@kopf.on.startup()
async def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
    """Before anything is watched."""
    watching.configure(settings)


@kopf.on.login()
async def login(settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:
    """At the start, and again when the server no longer takes the token."""
    return watching.login(settings)


@watching.on_event(RESOURCE)
async def resource_changed(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    """A SpecCacheDeployment was made, changed or deleted, or is there at the start."""
    memo.wakeups.resource(event["object"])


@watching.on_event(*watching.LABELLED)
async def child_changed(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    """An object with our labels changed: its status moved on, or somebody else's hand was on it."""
    memo.wakeups.child(event["object"])


@watching.on_event(CLAIM)
async def claim_changed(event: kopf.RawEvent, memo: Any, **_: Any) -> None:
    """Any claim changed: resources name claims that are not ours, and wait for ones that do not exist yet."""
    memo.wakeups.claim(event["object"])
