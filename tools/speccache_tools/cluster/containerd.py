"""What we ask of the node's containerd: run its client, and put images into its store."""

import subprocess
from pathlib import Path

from speccache_tools.cluster import binaries, oci
from speccache_tools.cluster.settings import CACHE, PAUSE_IMAGE, RUN, S3_IMAGE

SOCKET = RUN / "containerd.sock"


class ImageError(Exception):
    """An image could not be built, or containerd refused it."""


def ctr(*arguments: str) -> subprocess.CompletedProcess[str]:
    """containerd's own client, in the namespace that the kubelet uses."""
    return subprocess.run(_command(*arguments), capture_output=True, text=True)


def lacking(image: oci.Image) -> list[oci.Content]:
    """The parts of `image` that containerd has neither packed nor, for layers, unpacked."""
    packed = set(_lines("content", "list", "--quiet"))
    unpacked = {line.split()[0] for line in _lines("snapshots", "list")}
    chains = dict(zip(image.layers, oci.chain_digests(image), strict=True))
    return [part for part in image.parts if part.digest not in packed and chains.get(part) not in unpacked]


def put(image: oci.Image, name: str) -> int:
    """Gives containerd what it lacks of `image` and names it; returns the bytes sent. Raises `ImageError`.

    Afterwards it has the layers unpacked only: their packed form would just take the same space again. That is why an
    image comes in under a name of its own: were the old one to lose its name first, containerd might clear away layers
    that both share before the new one holds them.
    """
    parts = lacking(image)
    if not parts and _names().get(name) == image.manifest.digest:
        return 0
    with subprocess.Popen(
        _command("images", "import", "-"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as importer:
        assert importer.stdin is not None
        assert importer.stdout is not None
        try:
            oci.write(image, f"{name}-incoming", parts, importer.stdin)
            importer.stdin.close()
        except BrokenPipeError:
            pass  # it gave up; its own words, read next, say more
        words = importer.stdout.read().decode(errors="replace")
    if importer.returncode != 0:
        raise ImageError(f"{name}: {words.strip()}")
    ctr("images", "tag", "--force", f"{name}-incoming", name)
    ctr("images", "remove", f"{name}-incoming")
    ctr("content", "delete", *(layer.digest for layer in image.layers))
    return sum(part.size for part in parts)


def put_pause_image() -> None:
    """The image that holds each pod's namespaces: a few lines of Go, so that no registry is asked for it."""
    program, source = CACHE / "bin" / "pause", Path(__file__).parent / "pause" / "main.go"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        binaries.build_file(source, program)
    put(oci.single_file("pause", program.read_bytes()), PAUSE_IMAGE)


def put_s3_image() -> None:
    """An S3 server for pods, if its program is built: that, and no other file."""
    if binaries.VERSITYGW.path.exists():
        put(oci.single_file(binaries.VERSITYGW.name, binaries.VERSITYGW.path.read_bytes()), S3_IMAGE)


def forget_replaced_images() -> None:
    """Removes images that a newer one of the same name replaced: only their digest still names them."""
    names = _names()
    current = {digest for name, digest in names.items() if not name.startswith("sha256:")}
    replaced = [name for name, digest in names.items() if digest not in current]
    if replaced:
        ctr("images", "remove", *replaced)


def _names() -> dict[str, str]:
    """Manifest digest of each image name."""
    rows = [line.split() for line in _lines("images", "list")[1:]]
    return {row[0]: row[2] for row in rows}


def _lines(*arguments: str) -> list[str]:
    return ctr(*arguments).stdout.splitlines()


def _command(*arguments: str) -> list[str]:
    return ["ctr", f"--address={SOCKET}", "--namespace=k8s.io", *arguments]
