"""A program that tests start and kill: writes, replaces and deletes pairs without end in the directory given.

Prints one line when its first pair is stored. Arguments: directory, seed, target bytes, draft bytes, number of pages.
The content of a page's half is `hash_bytes(key, half)`, so any reader can tell whole from torn.
"""

import hashlib
import random
import sys
from pathlib import Path

from speccache_runtime.cache.storage.base import ObjectName
from speccache_runtime.cache.storage.codec import Half
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.cache.storage.store import PairStore

FINGERPRINT = "99" * 32
SPACES = {Half.TARGET: b"\x11" * 32, Half.DRAFT: b"\x22" * 32}


def main() -> None:
    """Run until killed; a page is deleted before it is written again, or nothing would be written twice."""
    root, (seed, target_bytes, draft_bytes, pages) = Path(sys.argv[1]), map(int, sys.argv[2:])
    backend = FileBackend(root)
    backend.probe()
    store = PairStore(backend, FINGERPRINT, SPACES[Half.TARGET], SPACES[Half.DRAFT], target_bytes, draft_bytes)
    keys = [bytes([number]) * 32 for number in range(pages)]
    target = {key: hashlib.shake_128(key + b"target").digest(target_bytes) for key in keys}
    draft = {key: hashlib.shake_128(key + b"draft").digest(draft_bytes) for key in keys}
    chance = random.Random(seed)
    announced = False
    while True:
        key = chance.choice(keys)
        for half in chance.sample([Half.TARGET, Half.DRAFT], chance.randint(1, 2)):
            backend.delete([ObjectName(FINGERPRINT, half, SPACES[half].hex(), key.hex(), "0" * 16)])
        result = store.write_pair(key, bytes(32), target[key], draft[key] if chance.random() < 0.9 else None, (1,))
        if Outcome.ERROR in (result.target, result.draft):
            raise SystemExit(f"a write failed: {result}")
        if not announced:
            sys.stdout.write("writing\n")
            sys.stdout.flush()
            announced = True


main()
