"""`make tensorboard` and `make trace-viewer` started for a test, on a free port, and asked over HTTP."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Optional

import pytest
from commands import ROOT

from common.setup import environments

VIEWER = environments.interpreter("viewer")
needs_viewer = pytest.mark.skipif(
    VIEWER is None or shutil.which("make") is None,
    reason="no viewer environment or no make here: `make setup` makes the environment",
)


#: A machine that is busy with other tests takes minutes to start TensorBoard.
START_SECONDS = 300
#: Whatever proxy a variable names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """url: where it listens, without a slash at the end; output: the file that holds what it said."""

    def __init__(self, url: str, output: Path):
        self.url, self.output = url, output

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def open(self, path: str, body: Optional[bytes] = None, **query: str) -> HTTPResponse:
        """The answer to a GET, or to a POST of the JSON `body`."""
        address = f"{self.url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        return DIRECT.open(urllib.request.Request(address, body, {"Content-Type": "application/json"}), timeout=60)

    def get(self, path: str, body: Optional[bytes] = None, **query: str) -> bytes:
        with self.open(path, body, **query) as answer:
            data = answer.read()
            return gzip.decompress(data) if answer.headers.get("Content-Encoding") == "gzip" else data

    def json(self, path: str, body: Optional[bytes] = None, **query: str):
        return json.loads(self.get(path, body, **query))

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=20).close()
        except OSError:
            return False
        return True

    def wait_for(self, ask, seconds=START_SECONDS):
        """The first answer of `ask` that is true."""
        deadline, match = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                match = ask(self)
            except OSError as error:  # urllib.error.URLError is one
                match = error
            if match and not isinstance(match, OSError):
                return match
            time.sleep(0.2)
        raise AssertionError(f"{match!r} and nothing else within {seconds} s: {self.output.read_text()}")


@contextmanager
def started(target, output, **variables):
    """`make target NAME=value ...` with PORT=0; ended, with all it started, on the way out."""
    command = ["make", "--silent", target, f"PYTHON={VIEWER}", "PORT=0"]
    command += [f"{name}={value}" for name, value in variables.items()]
    with output.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True)
    try:
        deadline, server = time.monotonic() + START_SECONDS, None
        while server is None or not server.listens():
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"did not start: {output.read_text()}")
            time.sleep(0.1)
            url = re.search(r"http://127\.0\.0\.1:(\d+)", output.read_text())
            server = Server(url[0], output) if url else None
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def listening_addresses(port):
    """The local addresses, as /proc writes them, that listen on a TCP port."""
    names = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                names.add(address.rpartition(":")[0])
    return names


LOOPBACK = "0100007F"
