"""What we ask of the node's containerd: run its client, and put images into its store."""

import subprocess

import binaries
import oci
from settings import CACHE, PAUSE_IMAGE, RUN, SOURCES

SOCKET = RUN / "containerd.sock"


class ImportFailed(Exception):
    """containerd refused an image."""


def ctr(*arguments: str) -> subprocess.CompletedProcess[str]:
    """containerd's own client, in the namespace that the kubelet uses."""
    return subprocess.run(_command(*arguments), capture_output=True, text=True)


def put(image: oci.Image, name: str) -> int:
    """Gives containerd what it lacks of `image` and names it; returns the bytes sent. Raises `ImportFailed`."""
    known = set(ctr("content", "list", "--quiet").stdout.split())
    lacking = [part for part in image.parts if part.digest not in known]
    if image.manifest.digest in known and not lacking and _named(name) == image.manifest.digest:
        return 0
    with subprocess.Popen(
        _command("images", "import", "-"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as importer:
        assert importer.stdin is not None
        assert importer.stdout is not None
        try:
            with importer.stdin:
                oci.write(image, name, lacking, importer.stdin)
        except BrokenPipeError:
            pass  # it gave up; its own words say more
        words = importer.stdout.read().decode(errors="replace")
    if importer.returncode != 0:
        raise ImportFailed(f"{name}: {words.strip()}")
    return sum(part.size for part in lacking)


def put_pause_image() -> None:
    """The image that holds each pod's namespaces: a few lines of Go, so that no registry is asked for it."""
    program = CACHE / "bin" / "pause"
    if not program.exists() or program.stat().st_mtime < (SOURCES / "pause" / "main.go").stat().st_mtime:
        binaries.build_file(SOURCES / "pause" / "main.go", program)
    put(oci.single_file("pause", program.read_bytes()), PAUSE_IMAGE)


def _named(name: str) -> str | None:
    listed = ctr("images", "list", f"name=={name}").stdout.splitlines()[1:]
    return listed[0].split()[2] if listed else None


def _command(*arguments: str) -> list[str]:
    return ["ctr", f"--address={SOCKET}", "--namespace=k8s.io", *arguments]
