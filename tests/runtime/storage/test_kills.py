"""Writers killed at random moments of a write-heavy run, on a volume and on a bucket: see killed_writers.py.

SPECCACHE_TEST_KILLS is how many on each; `make soak` takes 250.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speccache_runtime.cache.storage.outcome import Outcome
from speccache_tools.cluster.s3_server import S3Server

from .places import BUCKET, bucket_target

KILLS = int(os.environ.get("SPECCACHE_TEST_KILLS", "30"))
PROGRAM = Path(__file__).with_name("killed_writers.py")


def kill_writers(place: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), place, str(KILLS), "20"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    assert seen["kills"] == KILLS
    assert seen["reported"] > KILLS
    assert seen[Outcome.HIT] >= seen["reported"]
    assert seen.keys() <= {"kills", "reported", "lone drafts", Outcome.HIT, Outcome.MISS}
    return seen


def test_on_a_volume_pages_are_whole_and_what_was_stored_is_there(tmp_path: Path) -> None:
    seen = kill_writers(str(tmp_path))
    unfinished = list((tmp_path / "v2" / "tmp").iterdir())
    assert unfinished or seen["lone drafts"], "no kill came in the middle of a pair, so this has shown nothing"


@pytest.mark.usefixtures("s3_environment")
def test_in_a_bucket_pages_are_whole_and_what_was_stored_is_there(s3_server: S3Server) -> None:
    s3_server.make_bucket(BUCKET)
    seen = kill_writers(bucket_target(s3_server.endpoint, region=s3_server.region).model_dump_json())
    assert seen["lone drafts"], "no kill came in the middle of a pair, so this has shown nothing"
