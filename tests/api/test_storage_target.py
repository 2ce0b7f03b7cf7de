"""Where pages go: one value from either kind of storage, the same after a journey as text."""

from typing import Any

import pytest

from speccache_api import names
from speccache_api.resource import SpecCacheDeployment
from speccache_api.storage_target import BadStorageTarget, BucketTarget, VolumeTarget, from_json, resolve


def _resource(storage: dict[str, Any] | None) -> SpecCacheDeployment:
    tiers: dict[str, Any] = {"device": {"tokens": 64}, "host": {"tokens": 64}}
    return SpecCacheDeployment.parse(
        {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {"name": "chat"},
            "spec": {
                "model": {"uri": "builtin://tiny"},
                "kvCache": tiers if storage is None else {**tiers, "storage": storage},
            },
        }
    )


def _bucket(**s3: Any) -> BucketTarget:
    target = resolve(_resource({"s3": {"bucket": "pages", **s3}}))
    assert isinstance(target, BucketTarget)
    return target


def test_without_a_storage_tier() -> None:
    assert resolve(_resource(None)) is None


@pytest.mark.parametrize(("claim", "name"), [({"size": "1Gi"}, "chat-kv"), ({"claimName": "kv"}, "kv")])
def test_a_claim_is_created_or_named(claim: dict[str, Any], name: str) -> None:
    target = resolve(_resource({"persistentVolumeClaim": claim}))
    assert target == VolumeTarget(claim=name, path=names.STORAGE_PATH)
    assert target.place == f"storage path {names.STORAGE_PATH}"


def test_a_bucket_has_all_that_is_said_of_it() -> None:
    target = _bucket(
        prefix="team/chat",
        endpoint="https://minio:9000",
        region="eu",
        forcePathStyle=True,
        credentialsSecret="keys",
        caBundleConfigMap="authorities",
        serviceAccountName="pages",
    )
    assert target == BucketTarget(
        bucket="pages",
        prefix="team/chat",
        endpoint="https://minio:9000",
        region="eu",
        force_path_style=True,
        credentials_secret="keys",
        ca_bundle_config_map="authorities",
        service_account="pages",
    )
    assert (target.url, target.place) == ("s3://pages/team/chat", "bucket pages at https://minio:9000")


def test_what_is_not_said_is_left_to_the_client_library() -> None:
    target = _bucket()
    assert (target.prefix, target.force_path_style, target.url, target.place) == (
        "",
        False,
        "s3://pages",
        "bucket pages",
    )
    assert {target.endpoint, target.region, target.credentials_secret, target.service_account} == {None}


@pytest.mark.parametrize("storage", [{"persistentVolumeClaim": {"claimName": "kv"}}, {"s3": {"bucket": "pages"}}])
def test_the_target_survives_a_journey_as_text(storage: dict[str, Any]) -> None:
    target = resolve(_resource(storage))
    assert target is not None
    assert from_json(target.to_json()) == target


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "(target)"),
        ("{}", "(target)"),
        ('{"kind": "Tape"}', "(target)"),
        ('{"kind": "Volume", "path": "/x"}', "claim"),
        ('{"kind": "Volume", "claim": null, "path": "/x", "bucket": "b"}', "bucket"),
        ('{"kind": "Bucket", "bucket": 5}', "bucket"),
    ],
)
def test_a_text_that_is_no_target_names_the_field(text: str, said: str) -> None:
    with pytest.raises(BadStorageTarget, match="not a storage target: ") as caught:
        from_json(text)
    assert said in str(caught.value)


def test_nothing_of_a_pasted_password_is_repeated() -> None:
    with pytest.raises(ValueError, match="credentialsSecret") as caught:
        _bucket(endpoint="https://me:hunter2@minio:9000")
    assert "hunter2" not in str(caught.value)
