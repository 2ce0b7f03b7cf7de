"""A real S3 server over a directory: versitygw, for tests and for trying things out on this machine.

It listens on the loopback device only, takes one key pair, and dies with the process that started it. A folder in its
directory is a bucket, so making and removing buckets needs no client.
"""

import secrets
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from speccache_tools.cluster.binaries import VERSITYGW
from speccache_tools.cluster.process import StartError, free_ports, told_to_end, until
from speccache_tools.cluster.settings import environment


class S3Server:
    """Starts and stops one server; the port stays the same, so that clients find it again.

    The directory's file system must keep extended attributes (tmpfs does since Linux 6.6).
    """

    def __init__(
        self,
        directory: Path,
        *,
        port: int | None = None,
        region: str = "us-east-1",
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """`directory` is made if it is missing. `certificate` and its key, in PEM files, make it speak TLS."""
        self.directory = directory
        self.region = region
        self.access_key = "speccache"
        self.secret_key = secrets.token_hex(16)
        self.port = port or free_ports(1)[0]
        self._certificate = certificate
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed where the server is

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return f"{'https' if self._certificate else 'http'}://127.0.0.1:{self.port}"

    @property
    def variables(self) -> dict[str, str]:
        """What an S3 client takes from its environment. For path-style addresses, which it needs, there is none."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint,
            "AWS_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }

    def make_bucket(self, name: str) -> Path:
        """An empty bucket, unless it is there; returns its folder. Names have 3 to 63 characters."""
        folder = self.directory / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def start(self) -> None:
        """Returns when the server answers; raises `StartError` when it cannot."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StartError(f"the S3 server has no directory: {error}") from error
        # Without --keep-alive every request would need a connection of its own.
        command = [str(VERSITYGW.path), "--quiet", "--keep-alive", "--port", f"127.0.0.1:{self.port}"]
        command += ["--region", self.region]
        if self._certificate:
            command += ["--cert", str(self._certificate[0]), "--key", str(self._certificate[1])]
        self._process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *command, "posix", str(self.directory)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**environment(), "ROOT_ACCESS_KEY": self.access_key, "ROOT_SECRET_KEY": self.secret_key},
        )
        process = self._process
        if not until(lambda: self._answers() or process.poll() is not None, seconds=30, pause=0.01) or process.poll():
            self.stop()
            raise StartError(f"the S3 server did not start:\n{self.log_end()}")

    def stop(self) -> None:
        """Kills the server if it runs, as a crash would: what it has answered for is in the directory."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = None

    def log_end(self) -> str:
        """The last lines that the server has written."""
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-15:])

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> "S3Server":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._log.close()

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            return False
        return True


def run(directory: Path, buckets: list[str], port: int | None) -> None:
    """Serves in the foreground until told to end; prints what a shell must export to use it."""
    stopping = told_to_end()
    with S3Server(directory, port=port) as server:
        for bucket in buckets:
            server.make_bucket(bucket)
        sys.stdout.writelines(f"export {name}={value}\n" for name, value in server.variables.items())
        sys.stdout.flush()
        until(lambda: stopping.is_set() or not server.running, seconds=1e9)
        if not stopping.is_set():
            raise StartError(f"the S3 server ended:\n{server.log_end()}")
