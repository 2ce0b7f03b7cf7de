"""A page's key names the whole prefix that ends with it, and nothing else."""

import hashlib
import struct

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from speccache_runtime.cache.keys import ROOT, KeyChain, pack_tokens, salted_root

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
PAGES = st.integers(1, 5)
SALTS = st.none() | st.text(min_size=1, max_size=20)


def keys_of(tokens: list[int], page_size: int, salt: str | None = None) -> list[bytes]:
    chain = KeyChain(page_size, salted_root(salt))
    chain.extend(tokens, len(tokens) // page_size)
    return chain.keys


@given(TOKENS, TOKENS, TOKENS, PAGES)
def test_equal_prefixes_have_equal_keys(prefix: list[int], one: list[int], other: list[int], page_size: int) -> None:
    shared = len(prefix) // page_size
    assert keys_of(prefix + one, page_size)[:shared] == keys_of(prefix + other, page_size)[:shared]


@given(st.data(), st.lists(st.integers(0, 50), min_size=1, max_size=40), PAGES)
def test_one_other_token_changes_its_page_and_all_later_keys(
    data: st.DataObject, tokens: list[int], page_size: int
) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    changed = list(tokens)
    changed[at] = data.draw(st.integers(0, 50).filter(lambda token: token != tokens[at]))
    before, after = keys_of(tokens, page_size), keys_of(changed, page_size)
    first = at // page_size
    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after)


@given(st.lists(TOKENS, min_size=2, max_size=6), PAGES)
def test_no_two_prefixes_share_a_key(prompts: list[list[int]], page_size: int) -> None:
    prefixes = {
        tuple(prompt[: (page + 1) * page_size]) for prompt in prompts for page in range(len(prompt) // page_size)
    }
    keys = {key for prompt in prompts for key in keys_of(prompt, page_size)}
    assert len(keys) == len(prefixes)


@given(TOKENS, PAGES, st.data())
def test_a_chain_that_grows_in_steps_is_the_chain_made_at_once(
    tokens: list[int], page_size: int, data: st.DataObject
) -> None:
    total = len(tokens) // page_size
    chain = KeyChain(page_size)
    for upto in [*sorted(data.draw(st.lists(st.integers(0, total), max_size=4))), total]:
        chain.extend(tokens[: max(upto, len(chain.keys)) * page_size], upto)
    assert chain.keys == keys_of(tokens, page_size)
    assert b"".join(chain.packed) == pack_tokens(tokens[: total * page_size])
    pages = [chain.page(number) for number in range(total)]
    assert [page.parent for page in pages] == [ROOT, *chain.keys][:total]
    assert [(page.key, page.packed, page.depth) for page in pages] == [
        *zip(chain.keys, chain.packed, range(total), strict=True)
    ]


@given(TOKENS, PAGES)
def test_page_size_is_not_part_of_a_key_but_its_tokens_are(tokens: list[int], page_size: int) -> None:
    assume(len(tokens) >= page_size)
    first = keys_of(tokens, page_size)[0]
    assert first == hashlib.sha256(bytes(32) + struct.pack(f"<{page_size}I", *tokens[:page_size])).digest()


@given(st.lists(st.tuples(SALTS, TOKENS), min_size=2, max_size=6), PAGES)
def test_other_salts_have_no_page_in_common(requests: list[tuple[str | None, list[int]]], page_size: int) -> None:
    """Neither by key nor by what a name in storage says of the parent; the same salt shares as without one."""
    prefixes = {
        (salt, tuple(prompt[: (page + 1) * page_size]))
        for salt, prompt in requests
        for page in range(len(prompt) // page_size)
    }
    keys = {key for salt, prompt in requests for key in keys_of(prompt, page_size, salt)}
    assert len(keys) == len(prefixes)
    salts = {salt for salt, _ in requests}
    assert len({salted_root(salt) for salt in salts}) == len(salts)


@given(TOKENS, PAGES, st.text(min_size=1, max_size=20))
def test_a_chain_with_a_salt_begins_at_its_digest(tokens: list[int], page_size: int, salt: str) -> None:
    root = hashlib.sha256(b"speccache cache_salt\0" + salt.encode()).digest()
    chain = KeyChain(page_size, salted_root(salt))
    chain.extend(tokens, len(tokens) // page_size)
    parents = [chain.page(number).parent for number in range(len(chain.keys))]
    assert parents == [root, *chain.keys][: len(chain.keys)]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_ids_that_are_no_tokens_are_refused(token: int) -> None:
    with pytest.raises(struct.error):
        pack_tokens([token])
