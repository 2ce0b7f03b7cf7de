"""Shared by all tests of the runtime: how hard the property tests try.

As they stand they use the same examples on every run, so that a red run is red again. For a longer search with new
random examples each time, say how many: `SPECCACHE_HYPOTHESIS_EXAMPLES=1000 .venv/bin/pytest tests/runtime`.
"""

import os

from hypothesis import settings

# As the server does, and before anything imports torch: idle compute threads sleep instead of spinning, which on a busy
# machine makes every small operation wait for a core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_EXAMPLES = os.environ.get("SPECCACHE_HYPOTHESIS_EXAMPLES")

settings.register_profile("checked", max_examples=30, deadline=None, derandomize=True, print_blob=True)
settings.register_profile("search", max_examples=int(_EXAMPLES or 1), deadline=None, print_blob=True)
settings.load_profile("search" if _EXAMPLES else "checked")
