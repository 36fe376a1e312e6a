"""`make tensorboard` and `make trace-viewer` with the real servers, and their plugin's numbers against ours."""

from __future__ import annotations

import gzip
import http.client
import importlib.util
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
from collections import defaultdict
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

import pytest
from commands import ROOT, run, wait_for
from fixtures_runs import MIB, REAL, allocation, kineto, span, steps, trace, traced_run, write, write_run

from common.analysis import logs
from common.cli import viewers
from common.core.errors import UserError
from common.core.text import plain
from common.setup import environments
from common.traces import reader

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

    def open(self, path: str, **query: str) -> HTTPResponse:
        address = f"{self.url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        return DIRECT.open(address, timeout=60)

    def get(self, path: str, **query: str) -> bytes:
        with self.open(path, **query) as answer:
            data = answer.read()
            return gzip.decompress(data) if answer.headers.get("Content-Encoding") == "gzip" else data

    def json(self, path: str, **query: str):
        return json.loads(self.get(path, **query))

    def listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=20).close()
        except OSError:
            return False
        return True

    def wait_for(self, ask):
        """Wait until what `ask` gives is true."""

        def answered():
            try:
                return ask(self)
            except OSError:  # urllib.error.URLError is one
                return False

        wait_for(answered, f"answer of the server, which says {self.output.read_text()},", START_SECONDS)


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


def window(durations, peak):
    return kineto(steps(durations) + [allocation(1, peak * MIB)])


def scalars(log):
    command = [str(VIEWER), "-m", "common.cli.viewers", "tensorboard", str(log)]
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
    assert "no longer maintained" in printed and "scalars of 2 written anew" in printed


@needs_viewer
def test_broken_folders_cost_nobody_else_and_nothing_is_written_twice(tmp_path):
    log = tmp_path / "log"
    write_run(log / "torchaudio-2")
    traced_run(log / "cut-2", "{", name="cut")
    evil = span("<script>alert(1)</script>\x1b[2J", 1, 2)
    write(log / "<script>" / "w.1.pt.trace.json", kineto([*steps([100]), evil]))
    (log / "garbled").mkdir()
    (log / "garbled" / "results.jsonl").write_text("no record\nof anything\n")
    done = scalars(log)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "4 run folders" in done.stderr and "scalars of 3 written anew" in done.stderr
    assert f"{log / 'garbled'}: no scalars: " in done.stderr and not events(log / "garbled")
    first = events(log)
    assert "scalars of 0 written anew" in scalars(log).stderr and events(log) == first
    os.utime(log / "torchaudio-2" / "results.jsonl")
    assert "scalars of 1 written anew" in scalars(log).stderr and len(events(log)) == 3
    assert not list(log.rglob(".events-*"))
    missing = scalars(tmp_path / "nowhere")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "no such folder" in missing.stderr


# One trace in Perfetto.


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
        with server.open("/") as page:  # the UI asks the internet who its user is
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
        for asked in ("/", "/localtrace", "/file_info"):
            assert ask(server, asked, "evil.example:{}") == 403 and ask(server, asked, "localhost:{}") == 200
        path.write_bytes(path.read_bytes()[:60])
        assert ask(server, "/localtrace", "127.0.0.1:{}") == 404
        assert ask(server, "/..%2f..%2fetc/passwd", "127.0.0.1:{}") == 404
    assert "w.2.pt.trace.json.gz: not a whole trace" in (tmp_path / "output").read_text()


def opening(name, begin, duration):
    """Return a label and the Python call that opens it, as the profiler records them with stacks."""
    label = span(name, begin, duration)
    return [{**label, "cat": "python_function", "name": "enter", "ts": begin - 5, "dur": 10}, label]


EVENTS = [*opening("ProfilerStep#1", 1000, 900), *opening("loss", 1100, 300), *opening('say "tid": 9', 1500, 200)]


def dropped(text):
    """Return the names of spans that Perfetto drops: they begin within another of their track, and end after it."""
    tracks, names = defaultdict(list), []
    for event in json.loads(text)["traceEvents"]:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for of_track in tracks.values():
        above = []
        for event in sorted(of_track, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            above = [other for other in above if other > event["ts"]]
            if above and end > above[-1]:
                names.append(event["name"])
            else:
                above.append(end)
    return names


def test_no_label_is_dropped_and_what_kineto_did_not_write_is_handed_on():
    text = kineto(EVENTS)
    assert dropped(text) == ["ProfilerStep#1", "loss", 'say "tid": 9']
    shown = viewers.labelled(text.encode())
    assert dropped(shown) == []
    kinds = [event.get("cat") for event in json.loads(shown)["traceEvents"]]
    assert sorted(map(str, kinds)) == ["None", *["python_function"] * 3, *["user_annotation"] * 3]
    for other in (b"", b"{", json.dumps({"traceEvents": EVENTS}).encode(), gzip.compress(b"x")):
        assert viewers.labelled(other) == other


@pytest.fixture
def many(tmp_path):
    """A log of k2 twice, the second folder older, and a trace of nobody knows whom."""
    for age, (folder, name) in enumerate([("k2-2.2", "k2"), ("below/k2-2", "k2")]):
        path = write(tmp_path / folder / "w.1.pt.trace.json", window([1], 1))
        os.utime(path, (1000 - age, 1000 - age))
        write_run(tmp_path / folder, name=name, jobs=[trace([path.name])])
    write(tmp_path / "theirs" / "w.1.pt.trace.json", window([1], 1))
    return tmp_path


@pytest.mark.parametrize("name", ["k2", "k2-2.2", "k2-2", "below/k2-2", "theirs"])
def test_a_name_means_a_folder_or_the_newest_run_of_an_implementation(many, name):
    assert viewers.choose(name, many, 1).parent == many / {"k2": "k2-2.2", "k2-2": "below/k2-2"}.get(name, name)


@pytest.mark.parametrize("name, number, words", [("\x1b[2J", 1, "k2-2.2"), ("", 1, "below/k2-2"), ("k2", 2, "1 to 1")])
def test_a_name_that_means_nothing_lists_what_is_there(many, name, number, words):
    with pytest.raises(UserError) as error:
        viewers.choose(name, many, number)
    assert words in str(error.value) and plain(str(error.value)) == str(error.value)


API = "/data/plugin/pytorch_profiler"
REAL_FOLDERS = ("torch-1.13.1", "torch-2.11.0", "torch-1.13.1-stub", "torch-2.11.0-stub")
QUICK = "torchaudio-2"
GPU_COPIES, SCRIPTS = "gpu-copies", "scripts"
HAS_TORCHAUDIO = importlib.util.find_spec("torchaudio") is not None


def counted(ts, total, **device):
    event = allocation(ts, total, **device)
    event["args"].update(Addr=1, **{"Total Reserved": 0})  # without these the plugin leaves an event out
    return event


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin") / "log"
    for name in REAL_FOLDERS:
        shutil.copytree(REAL / name, folder / name)
    copies = [
        {**span("ProfilerStep#1", 1001, 2000, "gpu_user_annotation"), "tid": 7},
        {**span("ProfilerStep#2", 5011, 2400, "gpu_user_annotation"), "tid": 7},
    ]
    host = [*steps([4000, 5000]), counted(1100, 3 * MIB), counted(1200, MIB)]
    write(folder / GPU_COPIES / "w.1.pt.trace.json", kineto(host + copies))
    named = [span("<script>alert(1)</script>", 1002, 5, "cpu_op"), span("</td><b>", 1010, 5)]
    write(folder / SCRIPTS / "w.1.pt.trace.json.gz", kineto(host + named))
    if HAS_TORCHAUDIO:
        import torch

        shapes = folder.parent / "shapes.pt"
        torch.save(torch.tensor([[12 + 3 * i, 2 + i] for i in range(4)], dtype=torch.int32), shapes)
        arguments = ["--in-place", "--preset", "quick", "--passes", "trace", "--shape-file", shapes]
        done = run("benchmark_torchaudio.py", *arguments, "--log-dir", folder)
        assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def plugin(log, tmp_path_factory):
    with started("tensorboard", tmp_path_factory.mktemp("server") / "output", LOGDIR=log) as server:
        wanted = {folder.name for folder in log.iterdir() if folder.is_dir()}
        server.wait_for(lambda server: wanted <= set(server.json(f"{API}/runs")["runs"]))
        yield server


def windows_of(plugin, name):
    """(average step in us, peak in bytes) of each window of a run, as the plugin shows them."""
    (worker,) = plugin.json(f"{API}/workers", run=name, view="Overview")
    results = []
    for window in plugin.json(f"{API}/spans", run=name, worker=worker):
        where = {"run": name, "worker": worker, "span": window}
        average = plugin.json(f"{API}/overview", view="Overview", **where)["performance"][0]["value"]
        curve = plugin.json(f"{API}/memory_curve", view="Memory", memory_metric="B", **where)
        peak = re.fullmatch(r"Peak Memory Usage: ([\d.]+)B", curve["metadata"]["peaks"]["CPU"])[1]
        results.append((average, float(peak)))
    return results


def ours(log, name):
    (row,) = logs.rows([log / name])
    return [(window.average_step_time_us, window.peak_memory_mb * MIB) for window in row.profile.windows]


@needs_viewer
@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "torch-1.13.1",
        "torch-2.11.0",
        SCRIPTS,
        pytest.param(QUICK, marks=pytest.mark.skipif(not HAS_TORCHAUDIO, reason="no torchaudio to make a run with")),
    ],
)
def test_step_time_and_peak_of_every_window_are_the_plugins(plugin, log, name):
    shown = windows_of(plugin, name)
    assert len(shown) == len(ours(log, name)) == (1 if name == SCRIPTS else 2)
    for (plugin_average, plugin_peak), (average, peak) in zip(shown, ours(log, name)):
        assert abs(plugin_average - average) <= 0.5  # it rounds to microseconds
        assert plugin_peak == peak


@needs_viewer
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["torch-1.13.1-stub", "torch-2.11.0-stub"])
def test_the_plugin_counts_the_stub_of_a_cut_off_step_and_we_do_not(plugin, log, name):
    (first, second), mine = windows_of(plugin, name), ours(log, name)
    assert abs(first[0] - mine[0][0]) <= 0.5 and [first[1], second[1]] == [peak for _, peak in mine]
    whole, stub = (step.duration for step in reader.read(sorted((log / name).glob("*.gz"))[1]).steps)
    assert abs(second[0] - (whole + stub) / 2) <= 0.5
    assert mine[1][0] == whole > 1.5 * second[0]


@needs_viewer
@pytest.mark.thorough
def test_the_plugin_counts_gpu_copies_as_steps_and_we_do_not(plugin, log):
    """Since torch 2.0 every record_function span over GPU work has a copy of category "gpu_user_annotation", from its
    first kernel to its last: ProfilerStep too.  The plugin takes the copies for further steps, so that its average is
    neither the host's step (4500 us here) nor the GPU's (2200 us): 3350 us."""
    ((average, peak),) = windows_of(plugin, GPU_COPIES)
    assert average == (4000 + 5000 + 2000 + 2400) / 4
    assert ours(log, GPU_COPIES) == [(4500.0, 3 * MIB)] and peak == 3 * MIB
