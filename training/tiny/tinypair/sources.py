"""Finds text that may be trained on: the standard library, installed packages, and package archives in a folder.

Every source keeps its declared licence, so that the list shipped with the model says where its data came from.
"""

from __future__ import annotations

import email
import io
import re
import site
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path, PurePosixPath

from tinypair.licences import PSF, Declared, declared_licence

CODE = frozenset({".py", ".pyi", ".toml", ".cfg", ".yaml", ".yml", ".sh"})
PROSE = frozenset({".md", ".rst", ".txt"})
PACKED_FILE_BYTES = 600_000
_BORROWED = re.compile(
    r"(^|/)(_?vendor(ed)?|_?third_?party|_?extern(al|als)?|licen[cs]es?|[^/]*\.(dist|egg)-info|site-packages|dist-packages"
    r"|node_modules)(/|$)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Source:
    """One package (or the standard library) and the files of it that are worth reading.

    `paths` are files on disk, or member names when `archive` is set. `readme` is the description in its metadata.
    """

    name: str
    version: str
    licence: Declared
    kind: str
    paths: tuple[str, ...] = field(repr=False)
    archive: Path | None = None
    readme: str = field(default="", repr=False)


def wanted(path: str) -> bool:
    """True for text files that belong to the package itself: copies of other projects carry other licences."""
    return PurePosixPath(path).suffix.lower() in CODE | PROSE and _BORROWED.search(path) is None


def normal_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def standard_library() -> Source:
    root = Path(sysconfig.get_paths()["stdlib"]).resolve()
    paths = [p for p in sorted(root.rglob("*")) if p.is_file() and wanted(str(p.relative_to(root)))]
    version = ".".join(map(str, sys.version_info[:3]))
    return Source("python-standard-library", version, Declared("PSF-2.0", (PSF,)), "stdlib", tuple(map(str, paths)))


def installed_packages() -> Iterator[Source]:
    """Packages beside this interpreter whose metadata allow it; RECORD says which files are theirs."""
    roots = {sysconfig.get_paths()[key] for key in ("purelib", "platlib")} | set(site.getsitepackages())
    seen: set[str] = set()
    for found in sorted(metadata.distributions(path=sorted(roots)), key=lambda d: d.name.lower()):
        meta = email.message_from_string(found.read_text("METADATA") or "")
        name, licence = normal_name(found.name), declared_licence(meta)
        if licence is None or name in seen:
            continue
        seen.add(name)
        paths = tuple(str(found.locate_file(f)) for f in found.files or () if wanted(str(f)) and ".." not in f.parts)
        yield Source(name, found.version, licence, "installed", paths, readme=_description(meta))


def package_archives(folder: Path) -> Iterator[Source]:
    """Wheels and source archives in `folder` whose metadata allow it."""
    for path in sorted(folder.iterdir()):
        members = list_members(path)
        meta_name = _metadata_member(members)
        if meta_name is None:
            continue
        meta = email.message_from_string(next(read_members(path, [meta_name]))[1])
        licence = declared_licence(meta)
        if licence is not None:
            paths = tuple(m for m in members if wanted(m))
            name = normal_name(str(meta["Name"]))
            yield Source(name, str(meta["Version"]), licence, "archive", paths, path, _description(meta))


def list_members(archive: Path) -> list[str]:
    if archive.suffix in {".whl", ".zip"}:
        with zipfile.ZipFile(archive) as bundle:
            return bundle.namelist()
    with tarfile.open(archive) as bundle_tar:
        return [m.name for m in bundle_tar if m.isfile()]


def read_members(archive: Path, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(name, text) of the named members that are UTF-8, in archive order. Nothing is written to disk."""
    wanted_names = set(names)
    if archive.suffix in {".whl", ".zip"}:
        with zipfile.ZipFile(archive) as bundle:
            for name in bundle.namelist():
                if name in wanted_names:
                    yield name, bundle.read(name).decode("utf-8", "replace")
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            stream = tar.extractfile(member) if member.isfile() and member.name in wanted_names else None
            if stream is not None:
                yield member.name, stream.read().decode("utf-8", "replace")


def pack(archive: Path, folder: Path) -> Path:
    """Writes a small copy of a package archive into `folder`: its metadata and its text files, nothing else."""
    members = list_members(archive)
    keep = [m for m in members if wanted(m)] + [m for m in [_metadata_member(members)] if m]
    stem = archive.name.removesuffix(".tar.gz").removesuffix(".whl").removesuffix(".zip")
    packed = folder / f"{stem}.tar.xz"
    with tarfile.open(packed, "w:xz") as tar:
        for name, text in read_members(archive, keep):
            data = text.encode()
            if len(data) <= PACKED_FILE_BYTES:
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
    return packed


def _metadata_member(members: list[str]) -> str | None:
    inside = [m for m in members if re.fullmatch(r"[^/]+/PKG-INFO|[^/]+\.dist-info/METADATA", m)]
    return inside[0] if inside else None


def _description(meta: email.message.Message) -> str:
    body = meta.get_payload()
    return body if isinstance(body, str) and body.strip() else str(meta.get("Description") or "")
