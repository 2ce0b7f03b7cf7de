"""Builds the project's images from the Dockerfile and hands them to the node, without any image registry.

buildah builds in a store of our own with its layer cache on; skopeo writes the layers, uncompressed and each only
once, into a folder (an OCI layout); containerd gets what it lacks from there. So a change of code moves megabytes, and
nothing at all happens when no input of an image changed.

A layer of gigabytes would lie on the disk four times. Once containerd has unpacked it, the copies in the folder and in
containerd's store of packed layers have served: the one becomes a hollow file of the same size, which skopeo still
takes for the layer that need not be written again, and the other is deleted.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speccache_tools.cluster import containerd, oci
from speccache_tools.cluster.binaries import Say
from speccache_tools.cluster.process import Processes
from speccache_tools.cluster.settings import CACHE, REPOSITORY, RUN, image

TARGETS = ("operator", "runtime")

_STORE = ["--root", str(CACHE / "buildah"), "--runroot", str(CACHE / "buildah-run"), "--storage-driver", "overlay"]
_STORE_REFERENCE = f"[overlay@{CACHE}/buildah+{CACHE}/buildah-run]"
_UNSEEN = ["unshare", "--mount"]
"""The storage library mounts its folder onto itself and never takes that off again: let it do so in a private view."""
_LAYOUT = CACHE / "images"
_INPUTS = ("Dockerfile", ".dockerignore", "pyproject.toml", "uv.lock", "README.md", "crds", "operator", "runtime")
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"

_SUITE = "bookworm"  # its Python is 3.11
_BOOTSTRAP = [
    "mmdebstrap",
    "--variant=apt",
    "--include=python3,python3-venv,ca-certificates",
    "--dpkgopt=path-exclude=/usr/share/man/*",
    "--dpkgopt=path-exclude=/usr/share/locale/*",
    "--dpkgopt=path-exclude=/usr/share/doc/*",
    # A virtual environment in /usr/local gives `python` and `pip` where the upstream image has them.
    '--customize-hook=chroot "$1" python3 -m venv /usr/local',
]


def build(say: Say) -> None:
    """Brings both images up to date, and into the cluster when one is up."""
    base = _base_image(say)
    inputs, stamp = _inputs_digest(base), _LAYOUT / "inputs"
    if stamp.exists() and stamp.read_text() == inputs and all(_built(image(target)) for target in TARGETS):
        say("the images are up to date")
    else:
        _build_targets(base, say)
        stamp.write_text(inputs)
    if Processes(RUN).alive("containerd"):
        load(say)


def load(say: Say) -> None:
    """Gives the node's containerd each image that is built and differs from what it has, the S3 server's too."""
    containerd.put_s3_image()
    for target in TARGETS:
        if not _built(image(target)):
            say(f"{image(target)} is not built: `make images` does it")
            continue
        _export(target)
        wanted = oci.read(_LAYOUT / "layout", target)
        hollow = [part for part in containerd.lacking(wanted) if _is_hollow(part)]
        if hollow:  # the node's store was emptied since
            for part in hollow:
                _file(part).unlink()
            _export(target)
        sent = containerd.put(wanted, image(target))
        if sent:
            say(f"gave {image(target)} to the node, {sent / 1e6:.0f} MB of it new")
        for part in wanted.layers:
            if not _is_hollow(part):
                os.truncate(_file(part), 0)
                os.truncate(_file(part), part.size)
    oci.prune(_LAYOUT / "layout")
    containerd.forget_replaced_images()


def _base_image(say: Say) -> str:
    """Name of the local stand-in for the upstream Python image, made from Debian packages when it is missing."""
    recipe = json.dumps([_BOOTSTRAP, _SUITE]).encode()
    name = f"speccache.test/python:{hashlib.sha256(recipe).hexdigest()[:12]}"
    if _built(name):
        return name
    say("making the Python base image from Debian packages")
    with _temporary_folder() as folder:
        _run([*_BOOTSTRAP, _SUITE, str(folder / "root.tar")])
        container = _buildah("from", "scratch").strip()
        _buildah("add", "--quiet", container, str(folder / "root.tar"), "/")
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        _buildah("config", f"--env=PATH={path}", "--cmd=python3", container)
        _buildah("commit", "--quiet", "--rm", container, name)
    return name


def _build_targets(base: str, say: Say) -> None:
    """Builds all targets, then drops what was built on the way: only what has a name can serve the next build."""
    shutil.rmtree(CACHE / "tmp", ignore_errors=True)  # of builds that were killed; they were gigabytes
    _buildah("rm", "--all")
    for target in ("lock", *TARGETS):  # the first has a name for its layers' sake: it changes with dependencies only
        say(f"building {image(target)}")
        _build_target(target, base)
    _buildah("rmi", "--prune")
    _LAYOUT.mkdir(parents=True, exist_ok=True)


def _build_target(target: str, base: str) -> None:
    """One `buildah bud`. What belongs to this machine comes in by mounts and is in no layer."""
    with _temporary_folder() as folder:
        (folder / "pip.conf").write_text(_pip_configuration())
        (folder / "uv.toml").write_text(_uv_configuration())
        mounts = {
            os.environ.get("SSL_CERT_FILE") or _AUTHORITIES: f"{_AUTHORITIES}:ro",
            str(folder / "pip.conf"): "/etc/pip.conf:ro",
            str(folder / "uv.toml"): "/etc/uv/uv.toml:ro",
            _uv_cache(): "/host-uv-cache",  # what this machine downloaded once is not downloaded again
        }
        _buildah(
            "bud",
            "--layers",
            "--pull-never",
            "--isolation=chroot",
            "--network=host",
            f"--target={target}",
            f"--tag={image(target)}",
            f"--build-arg=PYTHON={base}",
            "--build-arg=UV_CACHE_DIR=/host-uv-cache",
            *(f"--volume={here}:{there}" for here, there in mounts.items()),
            str(REPOSITORY),
        )


def _pip_configuration() -> str:
    index = os.environ.get("PIP_INDEX_URL")
    return f"[global]\ncert = {_AUTHORITIES}\n" + (f"index-url = {index}\n" if index else "")


def _uv_configuration() -> str:
    index = os.environ.get("UV_DEFAULT_INDEX") or os.environ.get("UV_INDEX_URL")
    return "system-certs = true\n" + (f'[[index]]\nurl = "{index}"\ndefault = true\n' if index else "")


def _uv_cache() -> str:
    if shutil.which("uv"):
        folder = Path(subprocess.run(["uv", "cache", "dir"], capture_output=True, text=True, check=True).stdout.strip())
    else:
        folder = CACHE / "uv"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def _inputs_digest(base: str) -> str:
    """Digest of everything that the images are made of; equal means that a build would change nothing."""
    digest = hashlib.sha256(" ".join([base, *map(image, TARGETS)]).encode())
    for name in _INPUTS:
        root = REPOSITORY / name
        for file in [root] if root.is_file() else sorted(root.rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                content = hashlib.sha256(file.read_bytes()).hexdigest()
                digest.update(f"{file.relative_to(REPOSITORY)} {content}\n".encode())
    return digest.hexdigest()


def _built(name: str) -> bool:
    command = [*_UNSEEN, "buildah", *_STORE, "inspect", "--type=image", name]
    return subprocess.run(command, capture_output=True).returncode == 0


def _export(target: str) -> None:
    """Writes the image into the layout folder; layers that are there, hollow or not, are not written again."""
    _LAYOUT.mkdir(parents=True, exist_ok=True)
    source = f"containers-storage:{_STORE_REFERENCE}{image(target)}"
    with _temporary_folder() as folder:
        flags = ["--quiet", f"--tmpdir={folder}", "--dest-oci-accept-uncompressed-layers"]
        _run(["skopeo", "copy", *flags, source, f"oci:{_LAYOUT}/layout:{target}"])


def _file(part: oci.Content) -> Path:
    assert isinstance(part.data, Path)
    return part.data


def _is_hollow(part: oci.Content) -> bool:
    return _file(part).stat().st_blocks == 0


def _buildah(command: str, *arguments: str) -> str:
    return _run(["buildah", *_STORE, command, *arguments])


def _run(command: list[str]) -> str:
    """Runs a command with its temporary files on the cache's disk, and keeps what it says for the case of failure."""
    scratch = CACHE / "tmp"
    scratch.mkdir(parents=True, exist_ok=True)
    variables = {**os.environ, "TMPDIR": str(scratch)}
    completed = subprocess.run([*_UNSEEN, *command], capture_output=True, text=True, env=variables)
    if completed.returncode != 0:
        raise containerd.ImageError(f"{' '.join(command)} failed:\n{completed.stdout}\n{completed.stderr}")
    return completed.stdout


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    (CACHE / "tmp").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE / "tmp") as folder:
        yield Path(folder)
