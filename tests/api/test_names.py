"""Names fit into Kubernetes' limits for every resource name that is accepted."""

import re

import pytest

from speccache_api import names

_LONGEST = "a" * names.MAX_NAME_LENGTH
_SUFFIX_OF_PODS = "-abcde"
_SUFFIX_OF_REPLICA_SETS = "-0123456789"


@pytest.mark.parametrize(
    "name",
    [
        names.workload_name(_LONGEST) + _SUFFIX_OF_REPLICA_SETS + _SUFFIX_OF_PODS,
        names.service_name(_LONGEST),
        names.headless_service_name(_LONGEST),
        names.config_map_name(_LONGEST),
        names.service_account_name(_LONGEST),
        names.claim_name(_LONGEST),
        names.pod_disruption_budget_name(_LONGEST),
        names.network_policy_name(_LONGEST),
        names.inspection_job_name(_LONGEST, "0123456789abcdef") + _SUFFIX_OF_PODS,
    ],
)
def test_every_name_is_a_label_and_a_service_name(name: str) -> None:
    assert len(name) <= 63
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)


def test_another_digest_is_another_job() -> None:
    assert names.inspection_job_name("tiny", "a" * 64) == "tiny-inspect-aaaaaaaa"
    assert names.inspection_job_name("tiny", "b" * 64) != names.inspection_job_name("tiny", "a" * 64)


def test_labels() -> None:
    assert names.selector_labels("tiny").items() <= names.object_labels("tiny").items()
    assert names.selector_labels("tiny") != names.selector_labels("tiny", names.COMPONENT_INSPECTION)
    assert names.object_labels("tiny")["app.kubernetes.io/managed-by"] == "speccache"
