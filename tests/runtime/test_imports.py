"""How large libraries are imported."""

import gc

import pytest

from speccache_runtime.imports import large_imports


def test_garbage_is_looked_for_again_whatever_the_imports_did() -> None:
    with large_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), large_imports():
        raise ImportError("broken")
    assert gc.isenabled()
