"""Reads and writes OCI images as containerd's import takes them: a tar stream of content-addressed files.

containerd keeps what it has: a stream may leave out every file that is in its store already, or whose unpacked form is.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar"


@dataclass(frozen=True, slots=True)
class Content:
    """One content-addressed file of an image, in memory or on disk."""

    digest: str
    media_type: str
    size: int
    data: bytes | Path

    @property
    def descriptor(self) -> dict[str, Any]:
        return {"mediaType": self.media_type, "digest": self.digest, "size": self.size}


@dataclass(frozen=True, slots=True)
class Image:
    """A manifest with everything that it names."""

    manifest: Content
    config: Content
    layers: tuple[Content, ...]

    @property
    def parts(self) -> tuple[Content, ...]:
        return (self.config, *self.layers)


def read(layout: Path, tag: str) -> Image:
    """The image `tag` of an OCI layout folder; raises `KeyError` when there is none."""
    index = json.loads((layout / "index.json").read_text())
    tags = {
        entry.get("annotations", {}).get("org.opencontainers.image.ref.name"): entry for entry in index["manifests"]
    }
    manifest = _stored(layout, tags[tag])
    named = json.loads((layout / "blobs" / manifest.digest.replace(":", "/")).read_text())
    return Image(manifest, _stored(layout, named["config"]), tuple(_stored(layout, part) for part in named["layers"]))


def prune(layout: Path) -> None:
    """Deletes what no tag of the layout folder leads to: a new image takes the tag and leaves the old one without."""
    index = json.loads((layout / "index.json").read_text())
    index["manifests"] = [entry for entry in index["manifests"] if _tag(entry)]
    kept: set[str] = set()
    for image in (read(layout, _tag(entry)) for entry in index["manifests"]):
        kept |= {part.digest for part in (image.manifest, *image.parts)}
    (layout / "index.json").write_text(json.dumps(index))
    for file in (layout / "blobs" / "sha256").iterdir():
        if f"sha256:{file.name}" not in kept:
            file.unlink()


def chain_digests(image: Image) -> Iterator[str]:
    """The name that containerd gives each layer once it is unpacked onto those below; for uncompressed layers only."""
    chain = ""
    for layer in image.layers:
        chain = f"sha256:{hashlib.sha256(f'{chain} {layer.digest}'.encode()).hexdigest()}" if chain else layer.digest
        yield chain


def single_file(name: str, program: bytes) -> Image:
    """An image that holds one static program and runs it."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as layer:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode = len(program), 0o755
        layer.addfile(entry, io.BytesIO(program))
    files = _made(_LAYER, archive.getvalue())
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{name}"]},
        "rootfs": {"type": "layers", "diff_ids": [files.digest]},
    }
    config = _made(_CONFIG, json.dumps(settings).encode())
    named = {"schemaVersion": 2, "mediaType": _MANIFEST, "config": config.descriptor, "layers": [files.descriptor]}
    return Image(_made(_MANIFEST, json.dumps(named).encode()), config, (files,))


def write(image: Image, name: str, parts: Iterable[Content], out: IO[bytes]) -> None:
    """Streams the image under `name` to `out`, with only those `parts` that the receiver lacks."""
    index = {
        "schemaVersion": 2,
        "manifests": [{**image.manifest.descriptor, "annotations": {"io.containerd.image.name": name}}],
    }
    with tarfile.open(fileobj=out, mode="w|", format=tarfile.GNU_FORMAT) as stream:
        _add(stream, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
        _add(stream, "index.json", json.dumps(index).encode())
        for part in (image.manifest, *parts):
            _add(stream, "blobs/" + part.digest.replace(":", "/"), part.data)


def _add(stream: tarfile.TarFile, name: str, data: bytes | Path) -> None:
    entry = tarfile.TarInfo(name)
    if isinstance(data, bytes):
        entry.size = len(data)
        stream.addfile(entry, io.BytesIO(data))
        return
    entry.size = data.stat().st_size
    with data.open("rb") as file:
        stream.addfile(entry, file)


def _tag(entry: dict[str, Any]) -> str:
    tag: str = entry.get("annotations", {}).get("org.opencontainers.image.ref.name", "")
    return tag


def _stored(layout: Path, descriptor: dict[str, Any]) -> Content:
    path = layout / "blobs" / descriptor["digest"].replace(":", "/")
    return Content(descriptor["digest"], descriptor["mediaType"], descriptor["size"], path)


def _made(media_type: str, data: bytes) -> Content:
    return Content(f"sha256:{hashlib.sha256(data).hexdigest()}", media_type, len(data), data)
