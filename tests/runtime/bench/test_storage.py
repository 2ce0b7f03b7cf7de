"""`bench storage` on a real directory and a real bucket: small shapes, every row, and nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from speccache_api.storage_target import BucketTarget
from speccache_runtime.bench.server import BenchError
from speccache_runtime.bench.storage import Row, Shape, Table, run_storage_bench, to_json
from speccache_runtime.errors import ConfigError

SMALL = Shape("small", 64 << 10, 8 << 10, 5)


def check(table: Table, ways: list[str]) -> None:
    assert [(row.direction, row.way) for row in table.rows] == [
        (way, name) for way in ("write", "read") for name in ways
    ]
    assert (table.shape, table.threads, table.rounds) == ("small", 2, 2)
    for row in table.rows:
        assert row.gb_per_s > 0
        assert row.over > 0
        assert row.cpu_s_per_gb >= 0
    assert [row.over for row in table.rows if row.way == "SpecCache"] == [1.0, 1.0]


def test_a_directory(tmp_path: Path) -> None:
    (table,) = run_storage_bench(tmp_path, None, 2, 2, [SMALL])
    check(table, ["SpecCache", "O_DIRECT pwritev, preadv"])
    assert list(tmp_path.iterdir()) == []


def test_a_bucket(s3_server, s3_environment: None) -> None:
    folder = s3_server.make_bucket("benched")
    target = BucketTarget(
        bucket="benched",
        prefix="under/this",
        endpoint=s3_server.endpoint,
        region=None,
        force_path_style=True,
        credentials_secret=None,
        ca_bundle_config_map=None,
        service_account=None,
    )
    (table,) = run_storage_bench(None, target, 2, 2, [SMALL])
    signed, plain = "boto3 as it comes", "boto3, neither checksums nor signed bodies"
    check(table, ["SpecCache", plain, signed, "plain sockets (http.client)"])
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_what_is_printed() -> None:
    row = Row("SpecCache", "write", gb_per_s=1.234, over=1.0, cpu_s_per_gb=0.5, cpu_over=1.0)
    table = Table("bucket b", "small", 2, 5, [row])
    lines = table.to_text().splitlines()
    assert lines[0] == "bucket b, small, 2 threads, medians of 5"
    assert lines[-1] == "| write: SpecCache | 1.23 | 1.00 | 0.50 | 1.00 |"
    assert json.loads(to_json([table]))[0]["rows"][0]["gb_per_s"] == 1.234


def test_places_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--directory DIR, --bucket NAME or both"):
        run_storage_bench(None, None, 2, 2)
    with pytest.raises(BenchError, match=r"cannot measure in .*none: No such file"):
        run_storage_bench(tmp_path / "none", None, 2, 2)
