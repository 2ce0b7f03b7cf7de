"""Storage keys: another model, dtype, page size, shard or draft is another place; the same ones are the same place."""

import itertools

from speccache_api.fingerprint import draft_namespace, fingerprint, target_namespace

_TARGETS = ("a" * 64, "b" * 64)
_SHARDS = ("0of1", "0of2", "1of2")


def test_everything_that_changes_bytes_changes_the_digest() -> None:
    digests = {
        fingerprint(target, dtype, page_size)
        for target, dtype, page_size in itertools.product(_TARGETS, ("float32", "bfloat16"), (16, 64))
    }
    assert len(digests) == 2 * 2 * 2
    targets = {target_namespace(digest, shard) for digest in digests for shard in _SHARDS}
    assert len(targets) == len(digests) * 3
    drafts = {
        draft_namespace(digest, shard, draft, ahead)
        for digest in digests
        for shard in _SHARDS
        for draft in _TARGETS
        for ahead in (0, 1)
    }
    assert len(drafts) == len(targets) * 4
    assert len(digests | targets | drafts) == len(digests) + len(targets) + len(drafts)


def test_digests_never_change() -> None:
    """Stored caches are found by these: a change loses every cache, so it needs another LAYOUT_VERSION."""
    digest = fingerprint("a" * 64, "float32", 16)
    assert digest == "6a4065c9fc947fa484e00f4473c20d906785fc5f38cc10b61b1792a435ca3066"
    assert target_namespace(digest, "0of1") == "54d27fcd7148e36e187ac245c7318bd14bc158220ea23dfcf71eaf846dd803c9"
    assert (
        draft_namespace(digest, "0of1", "b" * 64, 1)
        == "5880fab62c625a5754947b8f805f0463cecb872486d9696be58800e62bca3e76"
    )
