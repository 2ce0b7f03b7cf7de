"""First numbers on a GPU: an 8B-shaped pair with made-up weights, a long prompt, and where its time goes.

Made-up weights accept next to nothing, so this measures time to first token by cache source and the time of one target,
verify and draft step, never acceptance. The floors are measured in the same run: the copy engine for page moves, memory
reads for decode steps. It drives the engine below HTTP.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry

from speccache_api.geometry import KVGeometry
from speccache_runtime.bench.random_pair import PairShape, write_pair
from speccache_runtime.config import EngineConfig
from speccache_runtime.core import Output, Request, SamplingParams
from speccache_runtime.engine.build import build_engine
from speccache_runtime.engine.engine import Engine
from speccache_runtime.errors import ConfigError
from speccache_runtime.metrics import Metrics

PAGE_SIZE = 64
REPEATS = 3
STEPS = 30

Table = dict[str, float]


@dataclass(frozen=True, slots=True)
class GpuBench:
    """What to measure. `prompt_tokens` is the prompt's length; the pools hold three such prompts."""

    shape: PairShape
    directory: Path
    prompt_tokens: int
    device: str = "cuda"

    def run(self, say: Callable[[str], object]) -> dict[str, Table]:
        """All measurements, each a table of name -> number (times in ms, rates in GB/s)."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("bench gpu needs an NVIDIA GPU that torch can see; there is none")
        device = torch.device(self.device)
        say("writing made-up weights")
        write_pair(self.shape, self.directory, device)
        tables = {}
        for algorithm in ("EAGLE3", "None"):
            say(f"loading, algorithm {algorithm}")
            began = time.perf_counter()
            driver = _Driver(self.config(algorithm))
            loaded = time.perf_counter() - began
            say("time to first token")
            ttft = self._ttft(driver) | {"load_s": loaded}
            say("decode and transfers")
            tables[algorithm] = ttft | self._decode(driver) | driver.transfer_rates()
            driver.close()
        say("floors")
        tables["floor"] = floors(device)
        return tables

    def config(self, algorithm: str) -> EngineConfig:
        """The engine that is measured: "EAGLE3" or "None"."""
        shape = self.shape
        pages = 3 * -(-self.prompt_tokens // PAGE_SIZE)
        speculates = algorithm != "None"
        return EngineConfig(
            name="bench",
            namespace="bench",
            served_name="bench",
            device="cuda" if self.device == "cuda" else "cpu",
            kv_dtype="bfloat16" if self.device == "cuda" else "float32",
            target_uri="made-up",
            target_path=self.directory / "target",
            algorithm="EAGLE3" if speculates else "None",
            draft_uri="made-up" if speculates else None,
            draft_path=self.directory / "draft" if speculates else None,
            num_steps=7 if speculates else 0,
            page_size=PAGE_SIZE,
            device_pages=pages,
            device_memory_fraction=None,
            host_pages=pages,
            storage=None,
            target_geometry=KVGeometry.heads(shape.layers, shape.kv_heads, shape.head_dim),
            draft_geometry=KVGeometry.heads(1, shape.kv_heads, shape.head_dim) if speculates else None,
            request_timeout=0,
            flush_timeout=0,
            prefill_budget=4096,
        )

    def _prompt(self, seed: int, length: int) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(torch.randint(0, self.shape.vocab, (length,), generator=generator).tolist())

    def _ttft(self, driver: _Driver) -> Table:
        """Cold, device-hit and host-hit TTFT of the long prompt: median and best of the repeats, in ms."""
        driver.first_token(self._prompt(0, self.prompt_tokens))  # warm-up: kernels are chosen and compiled on first use
        times: dict[str, list[float]] = {"cold": [], "device_hit": [], "host_hit": []}
        for repeat in range(REPEATS):
            prompt = self._prompt(1 + repeat, self.prompt_tokens)
            times["cold"].append(driver.first_token(prompt))
            times["device_hit"].append(driver.first_token(prompt))
            driver.empty_device_tier()
            times["host_hit"].append(driver.first_token(prompt))
        out = {}
        for name, values in times.items():
            out[f"{name}_ttft_ms"] = statistics.median(values)
            out[f"{name}_ttft_best_ms"] = min(values)
        return out

    def _decode(self, driver: _Driver) -> Table:
        """Time of one engine step while decoding, at a short and at the full context, in ms."""
        out = {}
        for context in (1000, self.prompt_tokens):
            for name, value in driver.decode_times(self._prompt(1, context)).items():
                out[f"{name}_ms_at_{context}"] = value
        return out


class _Driver:
    """An engine without a server."""

    def __init__(self, config: EngineConfig) -> None:
        self._tokens = 0
        self._next_id = 0
        self._metrics = Metrics(CollectorRegistry())
        self._probe = _Probe()
        self._built = build_engine(config, self._metrics, self._count, lambda: None, timer=self._probe.time)
        self._engine: Engine = self._built.engine
        self._page_size = config.page_size

    def _count(self, output: Output) -> None:
        self._tokens += len(output.tokens)

    def first_token(self, prompt: tuple[int, ...]) -> float:
        """Milliseconds until the first token is on the host; then waits for write-through."""
        self._settle()
        began = time.perf_counter()
        self._start(prompt, new_tokens=2)
        while not self._tokens:
            self._engine.step()
        taken = (time.perf_counter() - began) * 1e3
        self._settle()
        return taken

    def decode_times(self, prompt: tuple[int, ...]) -> Table:
        """Median milliseconds of an engine step while decoding, and of its target and draft parts."""
        self._settle()
        self._start(prompt, new_tokens=10 * STEPS)
        while not self._tokens:
            self._engine.step()
        for _ in range(5):
            self._engine.step()
        self._probe.on = True
        for _ in range(STEPS):
            with self._probe.time("step"):
                self._engine.step()
        self._probe.on = False
        self._engine.abort(str(self._next_id))
        self._settle()
        return self._probe.take_medians()

    def empty_device_tier(self) -> None:
        """Evicts every page from the device; the host copies stay."""
        index = self._engine.cache.index
        pages = index.take_device(index.device.num_available)
        index.give_device(pages or [])

    def transfer_rates(self) -> Table:
        """GB/s that page moves reached: all bytes over the time that the jobs took."""
        out = {}
        for direction in ("device_to_host", "host_to_device"):
            moved = self._metrics.transfer_bytes.labels(direction=direction)._value.get()
            seconds = self._metrics.transfer_seconds.labels(direction=direction)._value.get()
            out[f"{direction}_gb_s"] = moved / seconds / 1e9 if seconds else 0.0
        return out

    def close(self) -> None:
        """Frees the tiers and the GPU's memory."""
        self._settle()
        self._engine.cache.check_integrity()
        self._built.close()
        del self._built, self._engine
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _start(self, prompt: tuple[int, ...], new_tokens: int) -> None:
        self._tokens = 0
        self._next_id += 1
        self._engine.add(Request(str(self._next_id), prompt, SamplingParams(max_tokens=new_tokens)))

    def _settle(self) -> None:
        while self._engine.num_requests or self._engine.cache.busy:
            self._engine.step()


class _Probe:
    """Times an engine's target passes and draft passes with the device idle before and after each, while it is on."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}
        self.on = False

    @contextlib.contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Keeps the milliseconds of what runs inside under `name`."""
        if not self.on:
            yield
            return
        _synchronize()
        began = time.perf_counter()
        yield
        _synchronize()
        self._times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)

    def take_medians(self) -> Table:
        """The median of each name since the last call."""
        medians = {name: statistics.median(values) for name, values in self._times.items()}
        self._times.clear()
        return medians


def floors(device: torch.device) -> Table:
    """What the machine gives: copy engine each way and memory reads, in GB/s."""
    if device.type != "cuda":
        return {}
    size = 1 << 30
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    numbers = torch.zeros(size, dtype=torch.float32, device=device)
    return {
        "copy_engine_host_to_device_gb_s": _rate(size, lambda: on_device.copy_(on_host, non_blocking=True)),
        "copy_engine_device_to_host_gb_s": _rate(size, lambda: on_host.copy_(on_device, non_blocking=True)),
        "memory_read_gb_s": _rate(4 * size, numbers.sum),
    }


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(8):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        times.append(float(began.elapsed_time(ended)))
    return nbytes / statistics.median(times[2:]) / 1e6


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
