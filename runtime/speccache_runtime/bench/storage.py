"""`bench storage`: how fast pages come to storage and back, beside the best that the place and the library give.

All ways take turns in one run, with as many threads and the same bytes, so that what else happens on the machine
happens to all of them. Pages are pairs: the draft's object, then the target's. CPU seconds are those of this process.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from speccache_api.storage_target import BucketTarget
from speccache_runtime.bench.server import BenchError
from speccache_runtime.bench.storage_ways import BackendWay, BotoWay, Buffers, DirectWay, FileBackendWay, SocketWay, Way
from speccache_runtime.cache.storage.base import ObjectName
from speccache_runtime.cache.storage.codec import HEADER_SIZE, Half
from speccache_runtime.errors import ConfigError

Action = Callable[[ObjectName, Buffers], None]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is moved in one turn: so many pages, each of two halves."""

    title: str
    target_bytes: int
    draft_bytes: int
    pages: int

    def nbytes(self, half: Half) -> int:
        return self.target_bytes if half is Half.TARGET else self.draft_bytes


SHAPES = (
    Shape("8B + EAGLE-3, 64 tokens: 8 MiB + 256 KiB", 8 << 20, 256 << 10, 48),
    Shape("built-in pair, 16 tokens: 96 KiB + 16 KiB", 96 << 10, 16 << 10, 512),
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One way's turn in one direction, over all pages."""

    gb_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the rounds. `over` is SpecCache's rate over this way's, `cpu_over` likewise for CPU seconds."""

    way: str
    direction: str
    gb_per_s: float
    over: float
    cpu_s_per_gb: float
    cpu_over: float


@dataclass(frozen=True, slots=True)
class Table:
    """One place and one shape."""

    place: str
    shape: str
    threads: int
    rounds: int
    rows: Sequence[Row]

    def to_text(self) -> str:
        """As Markdown."""
        lines = [f"{self.place}, {self.shape}, {self.threads} threads, medians of {self.rounds}", ""]
        lines += ["| | GB/s | SpecCache over it | CPU s/GB | SpecCache over it |", "|---|---|---|---|---|"]
        for row in self.rows:
            over, cpu_over = f"{row.over:.2f}", f"{row.cpu_over:.2f}"
            numbers = f"{row.gb_per_s:.2f} | {over} | {row.cpu_s_per_gb:.2f} | {cpu_over}"
            lines.append(f"| {row.direction}: {row.way} | {numbers} |")
        return "\n".join(lines) + "\n"


def run_storage_bench(
    directory: Path | None, target: BucketTarget | None, threads: int, rounds: int, shapes: Sequence[Shape] = SHAPES
) -> list[Table]:
    """Measure every shape in each place that is given. What is written is removed. Progress goes to standard error."""
    if directory is None and target is None:
        raise ConfigError("bench storage needs a place: --directory DIR, --bucket NAME or both")
    tables = []
    for shape in shapes:
        if directory is not None:
            tables.append(_bench_directory(directory, shape, threads, rounds))
        if target is not None:
            tables.append(_bench_bucket(target, shape, threads, rounds))
    return tables


def to_json(tables: Sequence[Table]) -> str:
    return json.dumps([asdict(table) for table in tables], indent=1) + "\n"


def _bench_directory(directory: Path, shape: Shape, threads: int, rounds: int) -> Table:
    try:
        with tempfile.TemporaryDirectory(prefix="speccache-bench-", dir=directory) as folder:
            ways: list[Way] = [FileBackendWay(Path(folder)), DirectWay(Path(folder))]
            return _table(f"directory {directory}", ways, shape, threads, rounds)
    except OSError as error:
        raise BenchError(f"cannot measure in {directory}: {error.strerror or error}") from error


def _bench_bucket(target: BucketTarget, shape: Shape, threads: int, rounds: int) -> Table:
    import boto3
    from botocore.config import Config

    from speccache_runtime.cache.storage.s3 import S3Backend

    prefix = f"{target.prefix}/speccache-bench-{secrets.token_hex(8)}".lstrip("/")
    target = target.model_copy(update={"prefix": prefix})
    style = {"addressing_style": "path" if target.force_path_style else "auto"}
    usual = Config(s3=style, max_pool_connections=threads, signature_version="s3v4")  # type: ignore[arg-type]
    light = usual.merge(
        Config(
            s3={**style, "payload_signing_enabled": False},  # type: ignore[arg-type]
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
    )
    clients = [
        boto3.client("s3", endpoint_url=target.endpoint, region_name=target.region, config=config)
        for config in (light, usual, light)
    ]
    ways: list[Way] = [
        BackendWay("SpecCache", S3Backend(target)),
        BotoWay(target, clients[0], "boto3, neither checksums nor signed bodies"),
        BotoWay(target, clients[1], "boto3 as it comes"),
        SocketWay(target, clients[2], os.environ.get("AWS_CA_BUNDLE")),
    ]
    return _table(f"bucket {target.bucket}", ways, shape, threads, rounds)


def _table(place: str, ways: Sequence[Way], shape: Shape, threads: int, rounds: int) -> Table:
    turns: dict[tuple[str, str], list[Turn]] = {}
    with ExitStack() as stack:
        for way in ways:
            stack.enter_context(closing(way))
        bench = _Bench(shape, threads)
        for number in range(rounds + 1):
            for index in range(len(ways)):
                way = ways[(index + number) % len(ways)]  # each is first, and each comes after each, about as often
                sys.stderr.write(f"{place}, {shape.title}: round {number} of {rounds}, {way.title}\n")
                write, read = bench.turn(way)
                if number:  # round 0 opens connections and makes folders
                    turns.setdefault((way.title, "write"), []).append(write)
                    turns.setdefault((way.title, "read"), []).append(read)
    ours = ways[0].title
    rows = [
        _row(way.title, direction, turns[way.title, direction], turns[ours, direction])
        for direction in ("write", "read")
        for way in ways
    ]
    return Table(place, shape.title, threads, rounds, rows)


def _row(title: str, direction: str, turns: Sequence[Turn], ours: Sequence[Turn]) -> Row:
    """Ratios are taken round by round."""
    pairs = list(zip(ours, turns, strict=True))
    return Row(
        title,
        direction,
        gb_per_s=statistics.median(turn.gb_per_s for turn in turns),
        over=statistics.median(our.gb_per_s / turn.gb_per_s for our, turn in pairs),
        cpu_s_per_gb=statistics.median(turn.cpu_s_per_gb for turn in turns),
        cpu_over=statistics.median(our.cpu_s_per_gb / turn.cpu_s_per_gb for our, turn in pairs),
    )


class _Bench:
    """The bytes to move, and a set of buffers for each thread, aligned as direct reads want them."""

    def __init__(self, shape: Shape, threads: int) -> None:
        self._shape = shape
        self._threads = threads
        self._content = {half: os.urandom(HEADER_SIZE + shape.nbytes(half)) for half in Half}
        self._buffers: list[dict[Half, Buffers]] = [
            {half: _aligned(shape, half) for half in Half} for _ in range(threads)
        ]

    def turn(self, way: Way) -> tuple[Turn, Turn]:
        """Write all pages, read them, compare them, remove them."""
        fingerprint, space = secrets.token_hex(32), secrets.token_hex(32)
        names = [
            ObjectName(fingerprint, half, space, secrets.token_hex(32), f"{number:016x}")
            for number in range(self._shape.pages)
            for half in (Half.DRAFT, Half.TARGET)
        ]
        way.prepare(names)
        try:
            self._fill()
            write = self._timed(names, way.write, lambda name, _: way.settle(name))
            self._all(names, lambda name, _: way.forget(name))
            for buffers in self._buffers:
                for header, payload in buffers.values():
                    header[:], payload[:] = bytes(len(header)), bytes(len(payload))
            read = self._timed(names, way.read)
            self._compare()
        finally:
            way.clear(names)
        return write, read

    def _all(self, names: Sequence[ObjectName], action: Action) -> None:
        def work(number: int) -> None:
            for start in range(2 * number, len(names), 2 * self._threads):
                for name in names[start : start + 2]:
                    action(name, self._buffers[number][name.half])

        with ThreadPoolExecutor(self._threads) as pool:
            for done in [pool.submit(work, number) for number in range(self._threads)]:
                done.result()

    def _timed(self, names: Sequence[ObjectName], *actions: Action) -> Turn:
        gigabytes = self._shape.pages * sum(map(len, self._content.values())) / 1e9
        cpu, begun = time.process_time(), time.perf_counter()
        for action in actions:
            self._all(names, action)
        seconds = time.perf_counter() - begun
        return Turn(gigabytes / seconds, (time.process_time() - cpu) / gigabytes)

    def _fill(self) -> None:
        for buffers in self._buffers:
            for half, (header, payload) in buffers.items():
                header[:] = self._content[half][:HEADER_SIZE]
                payload[:] = self._content[half][HEADER_SIZE:]

    def _compare(self) -> None:
        used = self._buffers[: self._shape.pages]
        for buffers in used:
            for half, (header, payload) in buffers.items():
                if self._content[half] != bytes(header) + bytes(payload):
                    raise BenchError("other bytes came back than were written")


def _aligned(shape: Shape, half: Half) -> Buffers:
    whole = memoryview(mmap.mmap(-1, HEADER_SIZE + shape.nbytes(half)))
    return whole[:HEADER_SIZE], whole[HEADER_SIZE:]
