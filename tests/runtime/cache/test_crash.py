"""A process killed in the middle of its writes: the next one never sees half a page, and finds what was whole."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from speccache_runtime.cache.storage.codec import Half


def serve_until_killed(folder: Path, prompts: int) -> None:
    """Runs the process until it has served this many prompts, then kills it at once."""
    script = Path(__file__).with_name("crash_process.py")
    with subprocess.Popen([sys.executable, str(script), str(folder)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            for _ in range(prompts):
                assert process.stdout.readline(), "the process ended by itself"
        finally:
            process.kill()


def test_a_killed_process_leaves_whole_pages_only(
    tmp_path: Path, rig: Callable[..., Any], volume: Any, tools: SimpleNamespace
) -> None:
    serve_until_killed(tmp_path, prompts=30)
    cache = rig(backend=volume, device_pages=64, host_pages=64)
    number = pages = 0
    while True:
        prompt = tools.numbered_prompt(number)
        keys = cache.keys(prompt)
        # The target is stored after the draft, so a pair whose target is there is whole.
        stored = next((n for n, key in enumerate(keys) if not volume.has(key, Half.TARGET)), len(keys))
        assert all(volume.has(key, Half.DRAFT) for key in keys[:stored])
        hit = cache.run(prompt)  # compares every byte
        cache.settle()
        assert hit.tokens == stored * tools.PAGE
        assert hit.draft_absent == 0
        if not stored:
            break
        number, pages = number + 1, pages + stored
    assert pages >= 3 * 24, "the killed process had stored that much"
    for half in ("target", "draft"):
        assert cache.value("page_lookups", tier="storage", half=half, result="corrupt") == 0
        assert cache.value("page_lookups", tier="storage", half=half, result="hit") == pages
