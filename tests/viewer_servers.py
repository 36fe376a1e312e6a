"""`make tensorboard` and `make trace-viewer` started for a test, on a free port, and asked over HTTP."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import ROOT

from common.setup import environments

VIEWER = environments.interpreter("viewer")
needs_viewer = pytest.mark.skipif(
    VIEWER is None or shutil.which("make") is None,
    reason="no viewer environment or no make here: `make setup` makes the environment",
)


#: Whatever proxy a variable names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """url: where it listens, without a slash at the end; output: the file that holds what it said."""

    def __init__(self, url: str, output: Path):
        self.url, self.output = url, output

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str, **query: str) -> bytes:
        asked = f"{self.url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        with DIRECT.open(asked, timeout=20) as answer:
            data = answer.read()
            return gzip.decompress(data) if answer.headers.get("Content-Encoding") == "gzip" else data

    def json(self, path: str, **query: str):
        return json.loads(self.get(path, **query))

    def wait_for(self, ask, seconds=90):
        """The first answer of `ask` that is true."""
        deadline, found = time.monotonic() + seconds, None
        while time.monotonic() < deadline:
            try:
                found = ask(self)
            except OSError as error:  # urllib.error.URLError is one
                found = error
            if found and not isinstance(found, OSError):
                return found
            time.sleep(0.2)
        raise AssertionError(f"{found!r} and nothing else within {seconds} s: {self.output.read_text()}")


@contextmanager
def started(target, output, **variables):
    """`make target NAME=value ...` with PORT=0; ended, with all it started, on the way out."""
    command = ["make", "--silent", target, f"PYTHON={VIEWER}", "PORT=0"]
    command += [f"{name}={value}" for name, value in variables.items()]
    with output.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while True:
            found = re.search(r"http://127\.0\.0\.1:(\d+)", output.read_text())
            if found:
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"did not start: {output.read_text()}")
            time.sleep(0.1)
        yield Server(found[0], output)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def listening_addresses(port):
    """The local addresses, as /proc writes them, that listen on a TCP port."""
    found = set()
    for table in ("tcp", "tcp6"):
        path = Path("/proc/net") / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            address, state = line.split()[1], line.split()[3]
            if state == "0A" and int(address.rpartition(":")[2], 16) == port:
                found.add(address.rpartition(":")[0])
    return found


LOOPBACK = "0100007F"
