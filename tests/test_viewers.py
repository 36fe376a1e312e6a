"""`make tensorboard` and `make trace-viewer` with the real servers, and their plugin's numbers against ours."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from rnnt_bench.analysis import logs
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.text import plain
from rnnt_bench.setup import environments
from rnnt_bench.show import trace_viewer

from commands import ROOT, wait_for
from fixtures_runs import MIB, REAL, allocation, kineto, span, steps, trace, traced_run, write, write_run

VIEWER = environments.interpreter("viewer")
needs_viewer = pytest.mark.skipif(not (VIEWER and shutil.which("make")), reason="no viewer environment or no make here")


#: A machine that is busy with other tests takes minutes to start TensorBoard.
START_SECONDS = 300
#: Whatever proxy a variable names.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """url: where it listens, without a slash at the end; output: the file that holds what it said."""

    def __init__(self, url: str, output: Path):
        self.url, self.output, self.port = url, output, int(url.rpartition(":")[2])

    def get(self, path: str, **query: str) -> bytes:
        asked = f"?{urllib.parse.urlencode(query)}" if query else ""
        with DIRECT.open(f"{self.url}{path}{asked}", timeout=60) as answer:
            data = answer.read()
            return gzip.decompress(data) if answer.headers.get("Content-Encoding") == "gzip" else data

    def json(self, path: str, **query: str):
        return json.loads(self.get(path, **query))

    def wait_for(self, ask):
        """Wait until what `ask` gives is true."""

        def answered():
            with suppress(OSError):  # urllib.error.URLError is one
                return ask(self)

        wait_for(answered, f"answer of the server, which says {self.output.read_text()},", START_SECONDS)


@contextmanager
def started(target, output, **variables):
    """`make target NAME=value ...` with PORT=0; ended, with all it started, on the way out."""
    values = [f"{name}={value}" for name, value in {"PYTHON": VIEWER, "PORT": 0, **variables}.items()]
    command = ["make", "--silent", target, *values]
    with output.open("w") as stream:
        process = subprocess.Popen(command, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True)

    def url():
        assert process.poll() is None, f"did not start: {output.read_text()}"
        return re.search(r"http://127\.0\.0\.1:\d+", output.read_text())

    try:
        wait_for(url, "address of the server", START_SECONDS)
        server = Server(url()[0], output)
        server.wait_for(lambda server: listening_addresses(server.port))
        yield server
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=60)


def listening_addresses(port):
    """The local addresses, as /proc writes them, that listen on a TCP port."""
    tables = [path.read_text() for path in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if path.exists()]
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = [line[1].rpartition(":") for line in lines if line[3] == "0A"]
    return {address for address, _, of in listening if int(of, 16) == port}


LOOPBACK = "0100007F"


def window(durations, peak):
    return kineto(steps(durations) + [allocation(1, peak * MIB)])


def scalars(log):
    command = [str(VIEWER), "rnnt-bench", "tensorboard", str(log)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def events(folder):
    return sorted(path.name for path in folder.rglob("*tfevents*"))


@needs_viewer
def test_scalars_of_each_run_and_window_on_loopback(tmp_path):
    traced_run(tmp_path / "log" / "k2-2", window([100, 300], 4), window([200], 8), name="k2")
    write_run(tmp_path / "log" / "torchaudio-2")
    with started("tensorboard", tmp_path / "output", LOGDIR=tmp_path / "log") as board:
        board.wait_for(lambda server: len(server.json("/data/plugin/scalars/tags")) == 2)
        tags = board.json("/data/plugin/scalars/tags")
        shown = {
            (run, tag): [each[1:] for each in board.json("/data/plugin/scalars/scalars", run=run, tag=tag)]
            for run in tags
            for tag in tags[run]
        }
        assert listening_addresses(board.port) == {LOOPBACK}
    assert shown["k2-2", "4_profiled/step_us"] == [[1, 200.0], [2, 200.0]]
    assert shown["k2-2", "4_profiled/peak_memory_mb"] == [[1, 4.0], [2, 8.0]]
    assert shown["torchaudio-2", "1_time/step_ms_median"] == [[0, 25.0]]
    assert shown["torchaudio-2", "1_time/step_ms"] == [[1, 10.0], [2, 20.0], [3, 30.0], [4, 40.0]]  # by sample
    assert shown["torchaudio-2", "2_memory/peak_mb"] == [[0, 32.0]]
    assert "4_profiled/step_us" not in tags["torchaudio-2"]  # no trace, no number
    printed = (tmp_path / "output").read_text()
    assert "no longer maintained" in printed and "scalars of 2 written" in printed


@needs_viewer
def test_broken_folders_cost_nobody_else_and_an_earlier_file_is_replaced(tmp_path):
    log = tmp_path / "log"
    write_run(log / "torchaudio-2")
    traced_run(log / "cut-2", "{", name="cut")
    evil = span("<script>alert(1)</script>\x1b[2J", 1, 2)
    write(log / "<script>" / "w.1.pt.trace.json", kineto([*steps([100]), evil]))
    (log / "garbled").mkdir()
    (log / "garbled" / "results.jsonl").write_text("no record\nof anything\n")
    done = scalars(log)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "4 run folders" in done.stderr and "scalars of 3 written" in done.stderr
    assert f"{log / 'garbled'}: no scalars: " in done.stderr and not events(log / "garbled")
    first = events(log)
    scalars(log)
    assert len(events(log)) == len(first) == 3
    assert not list(log.rglob(".events-*"))
    missing = scalars(tmp_path / "nowhere")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "no such folder" in missing.stderr


def ask(server, path, host):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", path, headers={"Host": host.format(server.port)})
    return connection.getresponse().status


@needs_viewer
def test_the_trace_viewer_serves_perfetto_and_the_trace_to_this_machine_alone(tmp_path):
    log, path = tmp_path / "log", tmp_path / "log" / "k2-2" / "w.2.pt.trace.json.gz"
    write(log / "k2-2" / "w.1.pt.trace.json", window([1], 1))
    write(path, window([100, 300], 4))
    with started("trace-viewer", tmp_path / "output", LOGDIR=log, NAME="k2-2", WINDOW=2) as server:
        assert listening_addresses(server.port) == {LOOPBACK}
        assert b"<script" in server.get("/") and b"erfetto" in server.get("/")
        assert b"ProfilerStep#2" in server.get("/localtrace")
        with DIRECT.open(server.url, timeout=60) as page:  # the UI asks the internet who its user is
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        for asked in ("/", "/localtrace", "/file_info"):
            assert ask(server, asked, "evil.example:{}") == 403 and ask(server, asked, "localhost:{}") == 200
        path.write_bytes(path.read_bytes()[:60])
        assert ask(server, "/localtrace", "127.0.0.1:{}") == 404
        assert ask(server, "/..%2f..%2fetc/passwd", "127.0.0.1:{}") == 404
        assert ask(server, "/%00", "127.0.0.1:{}") == ask(server, "/a%00b", "127.0.0.1:{}") == 404
        two = b"GET / HTTP/1.0\r\nHost: 127.0.0.1\r\nHost: evil.example\r\n\r\n"
        for request in (two, two.replace(b"127.0.0.1", b"localhost"), b"GET / HTTP/1.0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
                connection.sendall(request)
                assert connection.recv(100).split()[1] == b"403"
    assert "w.2.pt.trace.json.gz: not a whole trace" in (tmp_path / "output").read_text()


def test_labels_get_a_track_of_their_own_and_what_kineto_did_not_write_is_handed_on():
    """Perfetto drops spans that begin within another of their track and end after it, as labels and Python calls do."""
    call = {**span("enter", 995, 10), "cat": "python_function"}
    events = [call, span("ProfilerStep#1", 1000, 900), span('say "tid": 9', 1500, 200)]
    shown = json.loads(trace_viewer.labelled(kineto(events).encode()))["traceEvents"]
    tracks = {event.get("cat"): event["tid"] for event in shown}
    assert len(shown) == 4 and tracks["user_annotation"] != tracks["python_function"] == call["tid"]
    for other in (b"", b"{", json.dumps({"traceEvents": events}).encode(), gzip.compress(b"x")):
        assert trace_viewer.labelled(other) == other


def test_a_name_means_a_folder_or_the_newest_run_of_an_implementation(tmp_path):
    for age, (folder, name) in enumerate([("k2-2.2", "k2"), ("below/k2-2", "k2")]):
        path = write(tmp_path / folder / "w.1.pt.trace.json", window([1], 1))
        os.utime(path, (1000 - age, 1000 - age))
        write_run(tmp_path / folder, name=name, jobs=[trace([path.name])])
    for name, wanted in {"k2": "k2-2.2", "k2-2.2": "k2-2.2", "k2-2": "below/k2-2", "below/k2-2": "below/k2-2"}.items():
        assert trace_viewer.choose(name, tmp_path, 1).parent == tmp_path / wanted
    for name, number, words in (("\x1b[2J", 1, "k2-2.2"), ("", 1, "below/k2-2"), ("k2", 2, "1 to 1")):
        with pytest.raises(UserError, match=words) as error:
            trace_viewer.choose(name, tmp_path, number)
        assert plain(str(error.value)) == str(error.value)


API = "/data/plugin/pytorch_profiler"
REAL_FOLDERS = ("torch-1.13.1", "torch-2.11.0", "torch-1.13.1-stub", "torch-2.11.0-stub")


def counted(ts, total):
    event = allocation(ts, total)
    event["args"].update(Addr=1, **{"Total Reserved": 0})  # without these the plugin leaves an event out
    return event


def windows_of(plugin, name):
    """(average step in us, peak in bytes) of each window of a run, as the plugin shows them."""
    (worker,) = plugin.json(f"{API}/workers", run=name, view="Overview")
    for window in plugin.json(f"{API}/spans", run=name, worker=worker):
        where = {"run": name, "worker": worker, "span": window}
        average = plugin.json(f"{API}/overview", view="Overview", **where)["performance"][0]["value"]
        curve = plugin.json(f"{API}/memory_curve", view="Memory", memory_metric="B", **where)
        yield average, float(re.fullmatch(r"Peak Memory Usage: ([\d.]+)B", curve["metadata"]["peaks"]["CPU"])[1])


@needs_viewer
@pytest.mark.thorough
def test_our_step_times_and_peaks_are_the_plugins_but_for_what_it_counts_twice(tmp_path):
    """It counts the stub of a step that was cut off as a step, and the copies of steps on the GPU."""
    log = tmp_path / "log"
    for name in REAL_FOLDERS:
        shutil.copytree(REAL / name, log / name)
    copies = [span(f"ProfilerStep#{at}", 1001 + 4010 * at, 2000, "gpu_user_annotation") for at in (0, 1)]
    host = [*steps([4000, 5000]), counted(1100, 3 * MIB), counted(1200, MIB)]
    write(log / "copies" / "w.1.pt.trace.json", kineto([*host, *({**copy, "tid": 7} for copy in copies)]))
    with started("tensorboard", tmp_path / "output", LOGDIR=log) as plugin:
        plugin.wait_for(lambda server: {*REAL_FOLDERS, "copies"} <= set(server.json(f"{API}/runs")["runs"]))
        shown = {name: list(windows_of(plugin, name)) for name in (*REAL_FOLDERS, "copies")}
    for name, of_plugin in shown.items():
        (row,) = logs.rows([log / name])
        mine = [(window.average_step_time_us, window.peak_memory_mb * MIB) for window in row.profile.windows]
        assert [peak for _, peak in of_plugin] == [peak for _, peak in mine] and len(mine) == len(of_plugin)
        differing = [at for at, (theirs, ours) in enumerate(zip(of_plugin, mine)) if abs(theirs[0] - ours[0]) > 0.5]
        assert differing == ([1] if "stub" in name else [0] if name == "copies" else []), name


def test_a_browser_that_goes_away_does_not_make_the_trace_a_damaged_one(tmp_path, capsys):
    class Gone(trace_viewer.Handler):
        trace = write(tmp_path / "right.json", kineto([]))

        def __init__(self):
            """Serve nobody."""

        def _send(self, content, kind):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        Gone()._send_trace()
    assert capsys.readouterr().out == ""
