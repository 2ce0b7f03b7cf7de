"""The one table of drafts: what it says, and that all who spell algorithms spell these."""

import typing

import pytest

from speccache_api import drafts
from speccache_api.crd import build_crd
from speccache_api.drafts import DRAFTS, Algorithm, Draft
from speccache_api.fingerprint import draft_namespace, fingerprint
from speccache_api.wire import WireSpeculative


def test_the_resource_and_the_wire_know_the_algorithms_of_the_table() -> None:
    known = {"None", *DRAFTS}
    assert set(typing.get_args(Algorithm)) == known
    schema = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    assert set(schema["spec"]["properties"]["speculative"]["properties"]["algorithm"]["enum"]) == known
    assert WireSpeculative.model_fields["algorithm"].annotation == Algorithm


def test_what_follows_from_the_facts() -> None:
    assert drafts.names(lambda draft: draft.model) == ("EAGLE3", "Standalone")
    assert drafts.any_of(lambda draft: draft.model) == "EAGLE3 or Standalone"
    assert [name for name, draft in DRAFTS.items() if draft.rebuilds] == ["Standalone"]
    for draft in DRAFTS.values():
        assert draft.pool <= draft.model, "KV without a model"
        assert (draft.needs == "nothing") != draft.model


def test_a_draft_that_looks_ahead_is_local() -> None:
    with pytest.raises(ValueError, match="must be local"):
        Draft(model=True, pool=True, needs="features", lookahead=1, local=False)


def test_the_same_files_as_another_kind_of_draft_have_another_place() -> None:
    """An EAGLE head's KV and a standalone draft's are never taken for each other."""
    digest = fingerprint("a" * 64, "float32", 16)
    places = {draft_namespace(digest, "0of1", "b" * 64, DRAFTS[name].lookahead) for name in ("EAGLE3", "Standalone")}
    assert len(places) == 2
