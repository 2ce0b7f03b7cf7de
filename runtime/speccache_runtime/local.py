"""Serving a resource without a cluster: what operator, inspection Job and kubelet do between them, on this machine.

resource file → SpecCacheDeployment → inspection → memory plan → wire document → EngineConfig, by the same functions as
in a cluster, then with directories of this machine in the place of mounted volumes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import yaml
from yaml.constructor import ConstructorError

from speccache_api.drafts import DRAFTS
from speccache_api.fingerprint import fingerprint
from speccache_api.geometry import Inspection
from speccache_api.names import HTTP_PORT, KIND
from speccache_api.resource import InvalidResource, SpecCacheDeployment
from speccache_api.sizing import MemoryPlan, SizingError, known_inspection, kv_dtype, size_memory
from speccache_api.storage_target import BucketTarget, VolumeTarget
from speccache_api.uris import builtin_name, claim_and_folder
from speccache_api.wire import build_wire
from speccache_runtime.config import EngineConfig, builtin_directory, from_wire
from speccache_runtime.errors import ConfigError

LOCAL_HOST = "127.0.0.1"
"""`serve -f` answers this machine only, unless told otherwise: it has no authentication."""


class _Loader(yaml.SafeLoader):
    """The safe loader, whose errors all say which value of which line cannot be read."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """As the base class, but raises YAMLError (or RecursionError) only."""
        try:
            return super().construct_object(node, deep)
        except (yaml.YAMLError, RecursionError):
            raise
        except Exception as error:
            # What int(), float(), datetime() or a look-up raise comes through: 2024-13-45 has the form of a date.
            problem = f"{node.value!r} is no value of type {node.tag.rpartition(':')[2]}; put a text in quotes"
            raise ConstructorError(None, None, problem, node.start_mark) from error


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What stands in for the cluster. `claims` maps a claim's name to a directory; `storage_dir` has a default."""

    claims: Mapping[str, Path] = field(default_factory=dict)
    storage_dir: Path | None = None
    host: str = LOCAL_HOST
    port: int = HTTP_PORT


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """A resource that can be served here: the engine's settings and the memory they were computed from."""

    config: EngineConfig
    memory: MemoryPlan


def read_resource(path: Path) -> dict[str, Any]:
    """The one SpecCacheDeployment in a YAML file, as plain data. Other documents in the file are left alone.

    Raises ConfigError when the file cannot be read, is not YAML, or has none or several.
    """
    try:
        documents = list(yaml.load_all(path.read_text(encoding="utf-8"), _Loader))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} cannot be read: lists or mappings are nested too deeply") from error
    found = [document for document in documents if isinstance(document, dict) and document.get("kind") == KIND]
    if len(found) != 1:
        raise ConfigError(f"{path} must hold exactly one {KIND}, found {len(found)}")
    return found[0]


def parse_resource(data: dict[str, Any], origin: Path) -> SpecCacheDeployment:
    """The resource, checked. Raises ConfigError with all problems in one line; `origin` is only named in it."""
    try:
        return SpecCacheDeployment.parse(data)
    except InvalidResource as error:
        raise ConfigError(f"{origin}: " + "; ".join(f"{path}: {text}" for path, text in error.problems)) from error
    except RecursionError as error:
        raise ConfigError(f"{origin}: lists or mappings are nested too deeply, or hold themselves") from error


def plan_locally(resource: SpecCacheDeployment, options: LocalOptions) -> LocalPlan:
    """Resolve `resource` for this machine; reads model files when their geometry is not known.

    Raises ConfigError or ModelError in one line.
    """
    spec = resource.spec
    target = model_directory(spec.model.uri, "target", options.claims)
    draft = None
    if spec.draft is not None:
        draft = model_directory(spec.draft.uri, DRAFTS[spec.algorithm].builtin, options.claims)
    inspection = known_inspection(spec) or _inspect(target, draft, spec.algorithm)
    try:
        memory = size_memory(spec, inspection)
    except SizingError as error:
        raise ConfigError(str(error)) from error
    config = replace(
        from_wire(build_wire(resource, inspection, memory)),
        target_path=target,
        draft_path=draft,
        host=options.host,
        port=options.port,
        admin=None,  # its token is in a Secret of the cluster
    )
    return LocalPlan(_with_storage(config, options.storage_dir), memory)


def read_fingerprint(resource: SpecCacheDeployment, claims: Mapping[str, Path]) -> str:
    """What the pages of the resource's model lie below in storage. Raises ConfigError or ModelError."""
    spec = resource.spec
    known = known_inspection(spec)
    if known is None or known.target.declared:
        known = _inspect(model_directory(spec.model.uri, "target", claims), None, "None")
    return fingerprint(known.target.identity, kv_dtype(spec), spec.kv_cache.page_size)


def model_directory(uri: str, half: Literal["target", "draft"], claims: Mapping[str, Path]) -> Path:
    """Where the files of `uri` lie on this machine. Raises ConfigError that says which option is missing."""
    name, place = builtin_name(uri), claim_and_folder(uri)
    if name is not None:
        return builtin_directory(name, half)
    assert place is not None, "the resource's schema knows no third kind"
    claim, path = place
    if claim not in claims:
        raise ConfigError(f"{uri}: say which directory stands for the claim: --claim {claim}=DIR")
    directory = claims[claim] / path
    if not directory.is_dir():
        raise ConfigError(f"{uri}: {directory} is not a directory")
    return directory


def parse_claims(pairs: Iterable[str]) -> dict[str, Path]:
    """`["models=/data"]` → `{"models": Path("/data")}`. Raises ConfigError."""
    claims: dict[str, Path] = {}
    for pair in pairs:
        name, equals, directory = pair.partition("=")
        if not (name and equals and directory):
            raise ConfigError(f"--claim {pair}: write it as NAME=DIR")
        claims[name] = Path(directory)
    return claims


def default_storage_dir(namespace: str, name: str) -> Path:
    """Where `serve -f` keeps the storage tier of a resource unless told otherwise."""
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "speccache" / "serve" / namespace / name


def make_storage_dir(path: Path) -> None:
    """Make the directory unless it is there. Raises ConfigError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the storage directory {path}: {error.strerror or error}") from error


def _inspect(target: Path, draft: Path | None, algorithm: str) -> Inspection:
    # Imports the model code: not at module level, so that a typing error in the resource is answered at once.
    from speccache_runtime.model.inspect import inspect as inspect_models

    return inspect_models(target, draft, algorithm)


def _with_storage(config: EngineConfig, directory: Path | None) -> EngineConfig:
    if config.storage is None:
        if directory is not None:
            raise ConfigError("--storage-dir: the resource has no spec.kvCache.storage; add it, or drop the option")
        return config
    target = config.storage.target
    if isinstance(target, BucketTarget):
        if directory is not None:
            raise ConfigError(f"--storage-dir: the resource keeps its pages in {target.url}; drop the option")
        return replace(config, storage=replace(config.storage, target=local_bucket(target)))
    path = directory or default_storage_dir(config.namespace, config.name)
    make_storage_dir(path)
    return replace(config, storage=replace(config.storage, target=VolumeTarget(claim=None, path=str(path))))


def local_bucket(target: BucketTarget) -> BucketTarget:
    """The bucket as a user's machine reaches it: credentials and certificates are those of its environment (AWS_*)."""
    return target.model_copy(update={"credentials_secret": None, "ca_bundle_config_map": None, "service_account": None})
