"""Storage keys: another model, dtype, page size, shard or draft is another place; the same ones are the same place."""

import itertools

from speccache_api.fingerprint import draft_digest, namespace_digest

_TARGETS = ("a" * 64, "b" * 64)


def test_everything_that_changes_bytes_changes_the_digest() -> None:
    digests = {
        namespace_digest(target, dtype, page_size, shard)
        for target, dtype, page_size, shard in itertools.product(
            _TARGETS, ("float32", "bfloat16"), (16, 64), ("0of1", "0of2", "1of2")
        )
    }
    assert len(digests) == 2 * 2 * 2 * 3
    drafts = {draft_digest(digest, draft, ahead) for digest in digests for draft in _TARGETS for ahead in (0, 1)}
    assert len(drafts) == len(digests) * 4
    assert not digests & drafts


def test_digests_never_change() -> None:
    """Stored caches are found by these: a change loses every cache, so it needs another LAYOUT_VERSION."""
    namespace = namespace_digest("a" * 64, "float32", 16)
    assert namespace == "aab181bd6f2a9fc1da1d6abf25b60d4d793b0cdadb1e14194697cce913e67009"
    assert draft_digest(namespace, "b" * 64, 1) == "f0c9ecbdfc858d47a4e5b2429a0e784b19b64b5f5a455d616b2abad0f87241ef"
