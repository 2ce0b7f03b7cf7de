"""etcd and the API server alone, in the foreground: everything that a test of API behaviour needs, in seconds.

It uses free ports and a folder of its own, so any number of these live beside each other and beside the full cluster.
It ends with its caller: on SIGINT, on SIGTERM, or when the pipe that is its standard input closes. If it is killed
outright, the kernel kills both programs too, and only the folder is left, in the system's place for temporary files.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from speccache_tools.cluster import control_plane, credentials
from speccache_tools.cluster.control_plane import Endpoints
from speccache_tools.cluster.process import StartError, free_ports, told_to_end, until
from speccache_tools.cluster.settings import environment


def run(announce: str) -> None:
    """Serves until told to end. Prints `announce` with `{kubeconfig}` filled in as soon as requests are answered."""
    stopping = told_to_end()
    folder = Path(tempfile.mkdtemp(prefix="speccache-api-"))
    programs: list[subprocess.Popen[bytes]] = []
    try:
        _start(folder, programs)
        sys.stdout.write(announce.format(kubeconfig=folder / "credentials" / "admin.kubeconfig") + "\n")
        sys.stdout.flush()
        until(lambda: stopping.is_set() or any(program.poll() is not None for program in programs), seconds=1e9)
        if not stopping.is_set():
            raise StartError("etcd or the API server ended; end of the log:\n" + _log_end(folder))
    finally:
        for program in reversed(programs):
            program.kill()
            program.wait()
        shutil.rmtree(folder)


def _start(folder: Path, programs: list[subprocess.Popen[bytes]]) -> None:
    apiserver, etcd_client, etcd_peer = free_ports(3)
    endpoints = Endpoints("127.0.0.1", apiserver, etcd_client, etcd_peer)
    secrets = folder / "credentials"
    credentials.create(secrets, endpoints.server)
    serve = control_plane.apiserver_command(secrets, endpoints)
    # No controller makes service accounts here, and pods made by a test must not wait for one.
    serve.append("--disable-admission-plugins=ServiceAccount")
    with (folder / "log").open("ab") as log:
        for command in (control_plane.etcd_command(folder / "etcd", endpoints), serve):
            child = ["setpriv", "--pdeathsig", "KILL", *command]
            programs.append(subprocess.Popen(child, stdout=log, stderr=log, env=environment(), start_new_session=True))
    if not until(lambda: control_plane.ready(secrets) or programs[1].poll() is not None, seconds=120):
        raise StartError("the API server is not ready in time; end of the log:\n" + _log_end(folder))


def _log_end(folder: Path) -> str:
    return "\n".join((folder / "log").read_text(errors="replace").splitlines()[-15:])
