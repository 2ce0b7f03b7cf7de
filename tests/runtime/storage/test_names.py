"""Names in storage: made of digests and numbers only, and found again in a listing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccache_runtime.cache.storage.base import PARENT_DIGITS, NoteName, ObjectName, fingerprint_path, parent_digits
from speccache_runtime.cache.storage.codec import Half

DIGEST = "99" * 32
PARENT = "5e" * 8
NAME = ObjectName(DIGEST, Half.TARGET, "ab" * 32, "cd" * 32, "5e" * 8)
digests = st.binary(min_size=32, max_size=32).map(bytes.hex)


@given(digests, st.sampled_from(Half), digests, digests, digests)
def test_a_path_is_the_name(fingerprint: str, half: Half, namespace: str, key: str, parent: str) -> None:
    name = ObjectName(fingerprint, half, namespace, key, parent_digits(bytes.fromhex(parent)))
    assert ObjectName.parse(name.path) == name
    assert name.path.startswith(f"{fingerprint_path(fingerprint)}/")


@pytest.mark.parametrize(
    "path",
    [
        "",
        NAME.path.upper(),
        f"/{NAME.path}",
        f"{NAME.path}/",
        f"{NAME.path}\n",
        f"other/{NAME.path}",
        NAME.path.replace("v2/", "v1/"),
        NAME.path.replace("/t/", "/n/"),
        NAME.path.replace("/cd/", "/ce/"),
        NAME.path[:-1],
        NAME.path.replace("-", "/"),
    ],
)
def test_no_other_text_is_a_name(path: str) -> None:
    assert ObjectName.parse(path) is None


@pytest.mark.parametrize("wrong", ["../" + "a" * 61, "A" * 64, "a" * 63, "a" * 63 + "\n", ""])
def test_only_digests_become_names(wrong: str) -> None:
    for parts in ((wrong, DIGEST, DIGEST), (DIGEST, wrong, DIGEST), (DIGEST, DIGEST, wrong)):
        with pytest.raises(ValueError, match="digests"):
            ObjectName(parts[0], Half.TARGET, parts[1], parts[2], PARENT)
    with pytest.raises(ValueError, match="digests"):
        NoteName(wrong, "lease", "0")


@pytest.mark.parametrize(
    "parent", ["", "5e" * 7, "5e" * 9, "5E" * 8, "../" + "a" * 13, "a" * (PARENT_DIGITS - 1) + "\n"]
)
def test_only_digits_become_parents(parent: str) -> None:
    with pytest.raises(ValueError, match="parent"):
        ObjectName(DIGEST, Half.TARGET, DIGEST, DIGEST, parent)


@pytest.mark.parametrize(
    ("kind", "id_"), [("Lease", "0"), ("", "0"), ("a" * 17, "0"), ("lease", ""), ("lease", "g"), ("lease", "../0")]
)
def test_notes_are_named_by_letters_and_digits(kind: str, id_: str) -> None:
    with pytest.raises(ValueError, match="note"):
        NoteName(DIGEST, kind, id_)
