"""`bench restart`: what a restart costs a server that keeps both halves of its KV cache, and one that lost the draft's.

    cold             a new server on empty storage
    restored         its successor on the same storage: pairs come back whole
    draft withheld   its successor, after the draft's halves were removed, told to use the rest (Degrade); not with a
                     draft that keeps no KV
    plain            a server without speculation and without storage, for comparison

Every run is a `speccache-runtime serve` process of its own, ended by SIGTERM as a pod is. The prompts are sent one at a
time, greedy, so the text of all runs must be the same.
"""

from __future__ import annotations

import copy
import os
import platform
import secrets
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from speccache_api.drafts import DRAFTS
from speccache_api.resource import SpecCacheDeployment
from speccache_api.storage_target import BucketTarget, StorageTarget, VolumeTarget, resolve
from speccache_api.uris import builtin_name
from speccache_runtime.bench.client import complete
from speccache_runtime.bench.prompts import Prompt, load_prompts
from speccache_runtime.bench.report import COLD, PLAIN, RESTORED, TITLES, WITHHELD, Report, Run
from speccache_runtime.bench.server import BenchError, Server
from speccache_runtime.errors import ConfigError
from speccache_runtime.local import (
    local_bucket,
    make_storage_dir,
    parse_claims,
    parse_resource,
    read_fingerprint,
    read_resource,
)
from speccache_runtime.upkeep import empty, remove_drafts

VERSIONS_OF = ("speccache", "torch", "transformers")


def run_restart_bench(
    path: Path, claims: Sequence[str], scratch: Path | None, new_tokens: int, algorithm: str | None = None
) -> Report:
    """Measure all runs, with `algorithm` in place of the resource's own if it is given.

    Progress goes to standard error. Temporary storage is made under `scratch`, which is made if it is missing, or in
    the resource's bucket under a prefix of its own, and removed. Raises ConfigError for a resource that cannot show the
    effect, BenchError when a server cannot be run, StorageError when the bucket cannot be used.
    """
    data = with_algorithm(read_resource(path), algorithm)
    resource = parse_resource(data, path)
    _check(resource)
    if scratch is not None:
        make_storage_dir(scratch)
    stored_under = read_fingerprint(resource, parse_claims(claims))
    salt = "benchmark" if resource.spec.kv_cache.require_cache_salt else None
    with tempfile.TemporaryDirectory(prefix="speccache-bench-", dir=scratch) as folder:
        data, target = with_storage_of_its_own(data, resource, Path(folder) / "storage")
        bench = _Bench(Path(folder), target, resource.served_name, tuple(claims), load_prompts(), new_tokens, salt)
        try:
            runs = [bench.run(COLD, data), bench.run(RESTORED, data)]
            if DRAFTS[resource.spec.algorithm].pool:
                withhold_drafts(target, stored_under)
                runs.append(bench.run(WITHHELD, with_degrade(data)))
            plain = bench.run(PLAIN, without_speculation(data))
        finally:
            if isinstance(target, BucketTarget):
                empty(target, stored_under)
    return Report(runs, plain, {"new_tokens": new_tokens, **_about(resource)})


@dataclass(frozen=True, slots=True)
class _Bench:
    folder: Path
    target: StorageTarget
    model: str
    claims: tuple[str, ...]
    prompts: tuple[Prompt, ...]
    new_tokens: int
    salt: str | None
    """Of every request, where the resource demands one."""

    def run(self, name: str, data: dict[str, Any]) -> Run:
        """Start a server for `data`, send every prompt, end the server."""
        resource = self.folder / f"{name}.yaml"
        resource.write_text(yaml.safe_dump(data), encoding="utf-8")
        begun = time.monotonic()
        _progress(f"{TITLES[name]}: starting … ")
        arguments: list[str | Path] = ["-f", resource]
        arguments += [part for claim in self.claims for part in ("--claim", claim)]
        if isinstance(self.target, VolumeTarget) and "storage" in data["spec"]["kvCache"]:
            arguments += ["--storage-dir", self.target.path]
        with Server(*arguments) as server:
            _progress(f"{time.monotonic() - begun:.1f} s; {len(self.prompts)} prompts ")
            answers = []
            for prompt in self.prompts:
                answers.append(complete(server.url, self.model, prompt.text, self.new_tokens, salt=self.salt))
                _progress(".")
        _progress(f" {time.monotonic() - begun:.1f} s\n")
        return Run(name, self.prompts, answers)


def with_algorithm(data: dict[str, Any], algorithm: str | None) -> dict[str, Any]:
    """The resource with another algorithm, as far as its own models and the built-in ones have a draft for it; None
    leaves it as it is.

    Raises ConfigError where there is no such draft.
    """
    spec = data.get("spec") or {}
    own = spec.get("speculative") or {}
    if algorithm is None or own.get("algorithm") == algorithm:
        return data
    changed = copy.deepcopy(data)
    speculative = changed["spec"]["speculative"] = {**own, "algorithm": algorithm}
    speculative.pop("draftModel", None)
    if DRAFTS[algorithm].model:
        uri = str((spec.get("model") or {}).get("uri"))
        if builtin_name(uri) is None:
            raise ConfigError(f"--algorithm {algorithm}: {uri} has no built-in draft; give a resource that names one")
        speculative["draftModel"] = {"uri": uri}
    return changed


def with_storage_of_its_own(
    data: dict[str, Any], resource: SpecCacheDeployment, folder: Path
) -> tuple[dict[str, Any], StorageTarget]:
    """The resource and where it keeps its pages: in `folder`, or in its bucket under a prefix that nobody uses."""
    target = resolve(resource)
    if not isinstance(target, BucketTarget):
        return data, VolumeTarget(claim=None, path=str(folder))
    prefix = f"{target.prefix}/bench-{secrets.token_hex(8)}".lstrip("/")
    changed = copy.deepcopy(data)
    changed["spec"]["kvCache"]["storage"]["s3"]["prefix"] = prefix
    return changed, local_bucket(target.model_copy(update={"prefix": prefix}))


def with_degrade(data: dict[str, Any]) -> dict[str, Any]:
    """The resource, told to use target halves whose draft half is missing."""
    changed = copy.deepcopy(data)
    changed["spec"]["kvCache"]["storage"]["missingDraft"] = "Degrade"
    return changed


def without_speculation(data: dict[str, Any]) -> dict[str, Any]:
    """The resource without draft and without storage tier: nothing but the target decodes."""
    changed = copy.deepcopy(data)
    changed["spec"]["speculative"] = {"algorithm": "None"}
    del changed["spec"]["kvCache"]["storage"]
    return changed


def withhold_drafts(target: StorageTarget, fingerprint: str) -> None:
    """Remove every draft object. Raises BenchError when there was none, StorageError."""
    if not remove_drafts(target, fingerprint):
        raise BenchError(f"the cold run has left no draft objects in {target.place}")


def _check(resource: SpecCacheDeployment) -> None:
    if resource.spec.algorithm == "None" or resource.spec.kv_cache.storage is None:
        raise ConfigError(
            "bench restart needs a resource with spec.kvCache.storage and an algorithm, such as samples/tiny.yaml with "
            "spec.speculative.draftModel: it measures what becomes of both after a restart"
        )


def _about(resource: SpecCacheDeployment) -> dict[str, Any]:
    versions = {name: metadata.version(name) for name in VERSIONS_OF} | {"python": platform.python_version()}
    hardware = {"device": resource.spec.device, "cpu": _cpu_name(), "cores": len(os.sched_getaffinity(0))}
    subject = {"model": resource.spec.model.uri, "algorithm": resource.spec.algorithm}
    return {**subject, "hardware": hardware, "versions": versions}


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _progress(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
