"""A long run of the engine on the built-in pair with everything too small, slow and faulty: `make soak`.

64 natural-text requests are always under way, on a device tier and a host tier far too small for them, over storage
that is slow, fails, loses, tears and damages pages, stops for seconds, and is swept because it may hold less than half
of what is written. Every output must be what plain transformers says without any cache; every request must end; at each
pause every page is counted once, and memory must not grow.

Environment: SOAK_SECONDS (600 when not given), SOAK_SEED. Ends with 0 when all was well. Memory is the resident set at
the pauses, one a minute: the largest of the second half may be 5 % above the largest of the first half.
"""

from __future__ import annotations

import gc
import os
import queue
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from speccache_api.storage_target import VolumeTarget
from speccache_runtime.bench.prompts import load_prompts
from speccache_runtime.cache.pool import PoolShape
from speccache_runtime.cache.storage import registry
from speccache_runtime.cache.storage.base import BackendError, Note, NoteName, ObjectName, Read, StoredObject
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Bytes
from speccache_runtime.cache.storage.file import FileBackend
from speccache_runtime.cache.storage.outcome import Outcome
from speccache_runtime.config import EngineConfig, StorageConfig
from speccache_runtime.core import Finish, Output, Request, SamplingParams
from speccache_runtime.engine.service import EngineService
from speccache_runtime.local import LocalOptions, parse_resource, plan_locally, read_resource

SAMPLE = Path(__file__).parents[2] / "samples" / "tiny.yaml"
TOGETHER, NEW = 64, 24
NEAR_TIE = 1e-3
"""Two best logits closer than this could swap by rounding; such a prompt says nothing about caches."""
PAUSE_EVERY_S = 60.0
PATIENCE_S = 120.0
GROWTH = 1.05
PAIRS = 300
"""What storage may hold."""


class TroubledBackend:
    """A directory behind a bad network and a bad disk."""

    def __init__(self, root: Path, seed: int) -> None:
        self._files = FileBackend(root)
        self._chance = random.Random(seed)
        self._begun = time.monotonic()
        self.troubles: Counter[str] = Counter()

    def _trouble(self) -> None:
        """Waits a little, sometimes long; fails now and then, and for 4 s of every 45."""
        time.sleep(self._chance.uniform(0.0, 0.01) if self._chance.random() < 0.999 else 2.0)
        if (time.monotonic() - self._begun) % 45.0 > 41.0:
            self.troubles["outage"] += 1
            raise BackendError("Timeout", "nothing answers")
        if self._chance.random() < 0.01:
            self.troubles["error"] += 1
            raise BackendError("EIO", "a bad sector")

    def probe(self) -> None:
        self._files.probe()

    def exists(self, names: Sequence[ObjectName]) -> list[bool]:
        self._trouble()
        return self._files.exists(names)

    def read(self, name: ObjectName, header: bytearray, payload: memoryview) -> Read:
        self._trouble()
        found = self._files.read(name, header, payload)
        if found.outcome is Outcome.HIT and self._chance.random() < 0.01:
            self.troubles["damaged"] += 1
            payload[self._chance.randrange(len(payload))] ^= 1 << self._chance.randrange(8)
        return found

    def write(self, name: ObjectName, header: bytes, payload: Bytes) -> bool:
        self._trouble()
        fate = self._chance.random()
        if fate < 0.01:
            self.troubles["torn"] += 1
            return self._files.write(name, header, bytes(payload)[: len(payload) // 2])
        written = self._files.write(name, header, payload)
        if fate < 0.02:
            self.troubles["lost"] += 1
            self._files.delete([name])
        elif fate < 0.03:
            self.troubles["late error"] += 1
            raise BackendError("Timeout", "no answer")
        return written

    def touch(self, name: ObjectName) -> bool:
        self._trouble()
        return self._files.touch(name)

    def delete(self, names: Sequence[ObjectName]) -> None:
        self._trouble()
        self._files.delete(names)

    def objects(self, fingerprint: str) -> Iterator[StoredObject]:
        self._trouble()
        return self._files.objects(fingerprint)

    def create_note(self, name: NoteName, body: bytes) -> bool:
        self._trouble()
        return self._files.create_note(name, body)

    def write_note(self, name: NoteName, body: bytes) -> None:
        self._trouble()
        self._files.write_note(name, body)

    def read_note(self, name: NoteName) -> Note | None:
        self._trouble()
        return self._files.read_note(name)

    def list_notes(self, fingerprint: str, kind: str) -> Sequence[NoteName]:
        self._trouble()
        return self._files.list_notes(fingerprint, kind)

    def delete_note(self, name: NoteName) -> None:
        self._trouble()
        self._files.delete_note(name)

    def now(self) -> float:
        return self._files.now()

    def close(self) -> None:
        self._files.close()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settings(folder: Path) -> tuple[EngineConfig, int]:
    """The sample's engine with tiers far too small, and the capacity of its storage."""
    resource = parse_resource(read_resource(SAMPLE), SAMPLE)
    config = plan_locally(resource, LocalOptions(storage_dir=folder)).config
    geometries = [each for each in (config.target_geometry, config.draft_geometry) if each]
    shapes = [PoolShape(each, config.page_size, config.kv_dtype) for each in geometries]
    pair = sum(shape.layout.page_bytes + HEADER_SIZE for shape in shapes)
    assert config.storage is not None
    storage: StorageConfig = replace(config.storage, capacity_bytes=PAIRS * pair)
    return replace(config, storage=storage, device_pages=128, host_pages=32, max_running=16), PAIRS * pair


def expected(config: EngineConfig) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What plain transformers says to each prompt, without the prompts where rounding could decide."""
    tokenizer = Tokenizer.from_file(str(config.target_path / "tokenizer.json"))
    model = AutoModelForCausalLM.from_pretrained(config.target_path, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    found = {}
    for prompt in load_prompts():
        tokens = tokenizer.encode(prompt.text).ids
        for length in (len(tokens), 3 * len(tokens) // 4, len(tokens) // 2):
            ids = tokens[: min(length, 700)]
            said: list[int] = []
            past, close = None, False
            with torch.inference_mode():
                while len(said) < NEW and not close:
                    feed = [said[-1]] if said else ids
                    out = model(torch.tensor([feed]), past_key_values=past, use_cache=True)
                    past = out.past_key_values
                    best = out.logits[0, -1].topk(2).values
                    close = bool(best[0] - best[1] < NEAR_TIE)
                    said.append(int(out.logits[0, -1].argmax()))
            if not close:
                found[tuple(ids)] = tuple(said)
    return found


class Run:
    """Requests on one service, TOGETHER of them at any time."""

    def __init__(self, service: EngineService, texts: dict[tuple[int, ...], tuple[int, ...]], seed: int) -> None:
        self._service = service
        self._texts = texts
        self._prompts = list(texts)
        self._chance = random.Random(seed)
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._open: dict[str, tuple[tuple[int, ...], list[int]]] = {}
        self.done = 0
        self.cached: Counter[str] = Counter()

    def until(self, end: float) -> None:
        """Serves until then, and waits for all."""
        while self._open or time.monotonic() < end:
            while len(self._open) < TOGETHER and time.monotonic() < end:
                self._submit()
            name = self._ended.get(timeout=PATIENCE_S)  # raises when none ends for so long: one is lost
            prompt, said = self._open.pop(name)
            wanted = self._texts[prompt]
            assert tuple(said) == wanted, f"{name}: {said} instead of {wanted}"
            self.done += 1

    def _submit(self) -> None:
        name = f"r{self.done + len(self._open)}-{self._chance.getrandbits(64):x}"
        prompt, said = self._chance.choice(self._prompts), list[int]()
        self._open[name] = (prompt, said)

        def take(output: Output) -> None:
            said.extend(output.tokens)
            if output.finish is not None:
                if output.finish is not Finish.LENGTH:
                    said.append(-1)  # no error may pass for a short answer
                elif output.usage is not None:
                    self.cached.update({tier.value: n for tier, n in output.usage.cached_tokens.items()})
                self._ended.put(name)

        params = SamplingParams(max_tokens=NEW)
        self._service.submit(Request(name, prompt, params), take)


def check(service: EngineService, folder: Path, capacity: int) -> None:
    """While nobody asks anything: every page is counted once, and storage keeps to its size."""
    assert service._built is not None
    cache = service._built.engine.cache
    end = time.monotonic() + PATIENCE_S
    while True:  # the engine thread goes on offering to storage what it has refused, so a look may come in between
        try:
            assert not cache.busy, "copies or storage operations never end"
            cache.check_integrity()
            pins = {(entry.device_pins, entry.host_pins) for entry in cache.index.entries()}
            assert pins <= {(0, 0)}, "a page is pinned by nobody"
            break
        except (AssertionError, RuntimeError):
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
    used = sum(path.stat().st_size for half in "td" for path in folder.glob(f"v2/*/{half}/*/*/*"))
    assert used <= 1.05 * capacity, f"{used} bytes are stored, {capacity} allowed"


def main() -> None:
    seconds, seed = float(os.environ.get("SOAK_SECONDS", "600")), int(os.environ.get("SOAK_SEED", "1"))
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, capacity = settings(folder)
        texts = expected(config)
        say(f"{len(texts)} prompts of up to {max(map(len, texts))} tokens")
        made: list[TroubledBackend] = []

        def troubled(target: VolumeTarget) -> TroubledBackend:
            made.append(TroubledBackend(Path(target.path), seed))
            return made[-1]

        registry.BACKENDS[VolumeTarget] = troubled
        service = EngineService(config, CollectorRegistry())
        service.start()
        run, sizes, begun = Run(service, texts, seed), list[int](), time.monotonic()
        while time.monotonic() - begun < seconds:
            run.until(min(begun + seconds, time.monotonic() + PAUSE_EVERY_S))
            check(service, folder, capacity)
            sizes.append(resident_bytes())
            say(
                f"{time.monotonic() - begun:6.0f} s: {run.done} requests, cached tokens {dict(run.cached)}, "
                f"{sizes[-1] >> 20} MiB resident, troubles {dict(made[0].troubles)}"
            )
        service.drain(PATIENCE_S, 15.0)  # storage that is full of new pages takes none for a minute
        service.stop()
        assert service.failed is None
    half = len(sizes) // 2
    if half:
        assert max(sizes[half:]) <= GROWTH * max(sizes[:half]), f"memory grows: {sizes}"
    say(f"all well: {run.done} requests")


if __name__ == "__main__":
    main()
