"""`make tensorboard`'s own summaries and `make trace-viewer`, with the real servers."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from importlib.util import find_spec

import pytest
from browsers import CHROMIUM, DRIVER, Browser
from commands import ROOT
from fixtures_runs import trace, traced_run, write_run
from fixtures_sweeps import write_sweep
from fixtures_traces import MIB, kineto, memory, span, steps, write
from viewer_servers import LOOPBACK, VIEWER, listening_addresses, needs_viewer, started

from common.core.errors import UserError
from common.core.text import plain
from common.show import trace_viewer

needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER and find_spec("selenium")), reason="needs selenium, chromium and chromedriver"
)

# A picture of one white pixel.
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b55"
    "0000000a49444154789c63f80f0001010100b138f6140000000049454e44ae426082"
)


def window(durations, peak):
    return kineto(steps(durations) + [memory(1, peak * MIB)])


def make_log(folder):
    traced_run(folder / "k2-2", window([100, 300], 4), window([200], 8), name="k2")
    write_run(folder / "torchaudio-2")
    (folder / "k2-2" / "stages.png").write_bytes(PNG)
    (folder / "bars.png").write_bytes(PNG)
    (folder / "k2-2" / "not.png").write_text("<script>")
    return folder


def scalars(*arguments):
    return subprocess.run(
        [str(VIEWER), "-m", "common.cli.tensorboard", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def events(folder):
    return sorted(path.name for path in folder.rglob("*tfevents*"))


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    log = make_log(tmp_path_factory.mktemp("board") / "log")
    with started("tensorboard", tmp_path_factory.mktemp("server") / "output", LOGDIR=log) as server:
        server.wait_for(lambda server: len(server.json("/data/plugin/scalars/tags")) == 2)
        yield server


@needs_viewer
def test_scalars_of_each_run_and_window(board):
    def values(run, tag):
        return [(step, value) for _, step, value in board.json("/data/plugin/scalars/scalars", run=run, tag=tag)]

    assert values("k2-2", "4_profiled/step_us") == [(1, 200.0), (2, 200.0)]
    assert values("k2-2", "4_profiled/peak_memory_mb") == [(1, 4.0), (2, 8.0)]
    assert values("torchaudio-2", "1_time/step_ms_median") == [(0, 25.0)]
    assert values("torchaudio-2", "1_time/loss_ms_median") == [(0, 2.5)]
    assert values("torchaudio-2", "2_memory/step_torch_allocated_mb") == [(0, 32.0)]
    assert values("torchaudio-2", "2_memory/peak_mb") == [(0, 32.0)]
    assert values("torchaudio-2", "1_time/step_ms") == [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)]  # by sample
    tags = board.json("/data/plugin/scalars/tags")
    assert "4_profiled/step_us" not in tags["torchaudio-2"]  # no trace, no number
    assert "4_profiled/inflation" in tags["k2-2"]
    groups = {tag.partition("/")[0] for tag in tags["k2-2"]}
    assert groups >= {"1_time", "2_memory", "3_correctness", "4_profiled"}


@needs_viewer
def test_runs_are_lines_of_the_hparams_table(board):
    def ask(path, **body):
        return board.json(f"/data/plugin/hparams/{path}", json.dumps(body).encode())

    columns = ask("experiment")
    assert {"implementation", "torch", "vocab_size", "threads"} <= {column["name"] for column in columns["hparamInfos"]}
    compared = [column["name"]["tag"] for column in columns["metricInfos"]]
    assert compared[0] == "1_time/step_ms_median" and "2_memory/peak_mb" in compared
    asked = {"colParams": [{"metric": column["name"]} for column in columns["metricInfos"]], "sliceSize": 10}
    statuses = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    lines = ask("session_groups", allowedStatuses=statuses, startIndex=0, **asked)["sessionGroups"]
    by_name = {line["hparams"]["implementation"]: line for line in lines}
    assert set(by_name) == {"k2", "torchaudio"} and by_name["k2"]["hparams"]["vocab_size"] == 500
    values = {column["name"]["tag"]: column["value"] for column in by_name["torchaudio"]["metricValues"]}
    assert values["1_time/step_ms_median"] == 25 and values["2_memory/peak_mb"] == 32


@needs_viewer
def test_pictures_and_the_table_are_there_too(board):
    images = board.wait_for(lambda board: board.json("/data/plugin/images/tags"))
    assert set(images) == {".", "k2-2"} and list(images["k2-2"]) == ["stages"]
    assert {"bars", "report/peak-memory", "report/step-time", "report/time-memory"} <= set(images["."])
    (image,) = board.json("/data/plugin/images/images", run="k2-2", tag="stages", sample="0")
    assert board.get(f"/data/plugin/images/individualImage?{image['query']}") == PNG
    (text,) = board.json("/data/plugin/text/text", run=".", tag="table")
    assert "torchaudio" in text["text"] and "<table>" in text["text"]


@needs_viewer
def test_it_says_what_its_users_must_know_and_stays_on_loopback(board):
    printed = board.output.read_text()
    assert "no longer maintained" in printed and "from the internet" in printed and "reads a run folder once" in printed
    assert "2 run folders" in printed and "scalars of 2 written anew" in printed
    assert listening_addresses(board.port) == {LOOPBACK}


@needs_viewer
@pytest.mark.thorough
def test_nothing_is_written_twice_unless_it_changed(tmp_path):
    """The first time without the main environment, and so without pictures of the report."""
    log = make_log(tmp_path / "log")
    code = (
        "import sys; from common.setup import environments; environments.interpreter = lambda name: None; "
        "from common.cli import tensorboard; sys.exit(tensorboard.main(sys.argv[1:]))"
    )
    done = subprocess.run([str(VIEWER), "-c", code, str(log)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "scalars of 2 written anew" in done.stderr, done.stderr
    (warning,) = (line for line in done.stderr.splitlines() if "no pictures of the report" in line)
    assert "the main environment is" in warning and "make setup" in warning
    without = [name for name in events(log) if (log / name).exists()]
    assert scalars(log).returncode == 0
    assert [name for name in events(log) if (log / name).exists()] != without  # drawn once the environment is there
    first = events(log)
    assert len(first) == 3  # two runs and the log folder itself
    assert "scalars of 0 written anew" in scalars(log).stderr and events(log) == first
    os.utime(log / "k2-2" / "results.jsonl", (1, 1))
    assert "scalars of 1 written anew" in scalars(log).stderr
    second = events(log)
    assert len(second) == 3 and len(set(second) & set(first)) == 1  # torchaudio's stayed
    assert not list(log.rglob(".events-*"))


@needs_viewer
def test_a_sweep_alone_has_its_pictures(tmp_path):
    write_sweep(tmp_path / "log" / "sweep-threads", {"threads": [1, 2]})
    done = scalars(tmp_path / "log")
    assert done.returncode == 0 and "no pictures" not in done.stderr
    (name,) = events(tmp_path / "log")
    assert b"report/sweep-threads-time" in (tmp_path / "log" / name).read_bytes()


@needs_viewer
def test_broken_and_hostile_folders_cost_nobody_else(tmp_path):
    log = make_log(tmp_path / "log")
    traced_run(log / "cut-2", "{", name="cut")
    write(
        log / "<script>" / "w.1.pt.trace.json", kineto(steps([100]) + [span("<script>alert(1)</script>\x1b[2J", 1, 2)])
    )
    (log / "garbled").mkdir()
    (log / "garbled" / "results.jsonl").write_text("no record\nof anything\n")
    done = scalars(log)
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "5 run folders" in done.stderr and "scalars of 4 written anew" in done.stderr
    assert f"{log / 'garbled'}: no scalars: " in done.stderr and not events(log / "garbled")
    missing = scalars(tmp_path / "nowhere")
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1 and "no such folder" in missing.stderr


# One trace in Perfetto.


@needs_viewer
def test_the_trace_viewer_serves_perfetto_and_the_trace_on_loopback_only(tmp_path):
    log = tmp_path / "log"
    text = window([100, 300], 4)
    write(log / "k2-2" / "w.1.pt.trace.json", window([1], 1))
    write(log / "k2-2" / "w.2.pt.trace.json.gz", text)
    with started("trace-viewer", tmp_path / "output", LOGDIR=log, NAME="k2", WINDOW=2) as server:
        assert listening_addresses(server.port) == {LOOPBACK}
        assert b"<script" in server.get("/") and b"erfetto" in server.get("/")
        assert b"ProfilerStep#2" in gzip.decompress(server.get("/localtrace"))
        with server.open("/") as page:  # the UI asks the internet who its user is
            assert "default-src 'self'" in page.headers["Content-Security-Policy"]
            assert "Access-Control-Allow-Origin" not in page.headers
        assert "w.2.pt.trace.json.gz" in (tmp_path / "output").read_text()


def many(log):
    """k2 twice, the second newer; k2-pruned once."""
    for age, (folder, name) in enumerate([("k2-2.2", "k2"), ("k2-2", "k2"), ("k2-pruned-2", "k2-pruned")]):
        path = write(log / folder / "w.1.pt.trace.json", window([1], 1))
        os.utime(path, (1000 - age, 1000 - age))
        write_run(log / folder, name=name, jobs=[trace([path.name])])
    write(log / "theirs" / "w.1.pt.trace.json", window([1], 1))
    return log


@pytest.mark.parametrize(
    "name, folder",
    [("k2", "k2-2.2"), ("k2-2", "k2-2"), ("k2-pruned", "k2-pruned-2"), ("k2-p", "k2-pruned-2"), ("th", "theirs")],
)
def test_a_name_means_the_newest_run_of_it(tmp_path, name, folder):
    assert trace_viewer.choose(name, many(tmp_path), 1).parent.name == folder


def test_runs_are_searched_for_in_folders_below(tmp_path):
    """make trace-viewer LOGDIR=results NAME=k2 finds it, as summarize.py does."""
    many(tmp_path / "2026-02")
    old, new = tmp_path / "2026-01" / "k2-2", tmp_path / "2026-02" / "k2-2"
    os.utime(write(old / "w.1.pt.trace.json", window([1], 1)), (1, 1))
    with pytest.raises(UserError, match="could be 2026-02/k2-2, 2026-01/k2-2"):  # nobody knows whose the old one is
        trace_viewer.choose("k2-2", tmp_path, 1)
    write_run(old, name="k2", jobs=[trace(["w.1.pt.trace.json"])])
    for name, folder in [("k2-2", new), ("k2", new.with_name("k2-2.2")), ("2026-01/k2-2", old), ("2026-02/k2-2", new)]:
        assert trace_viewer.choose(name, tmp_path, 1).parent == folder
    assert trace_viewer.choose("k2-2", old, 1).parent == old
    with pytest.raises(UserError, match=r"k3: no such run; .* holds .*2026-01/k2-2"):
        trace_viewer.choose("k3", tmp_path, 1)


@pytest.mark.parametrize("name", ["", "k", "k3", "\x1b[2J<script>"])
def test_a_name_that_means_nothing_lists_what_is_there(tmp_path, name):
    with pytest.raises(UserError) as error:
        trace_viewer.choose(name, many(tmp_path), 1)
    reason = str(error.value)
    assert "k2-2.2" in reason and "k2-pruned-2" in reason and plain(reason) == reason


def test_a_window_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="windows 1 to 1"):
        trace_viewer.choose("k2", many(tmp_path), 2)


@needs_viewer
@pytest.mark.parametrize(
    "variables, words", [([], "which run?"), (["NAME=k3"], "no such run"), (["LOGDIR=nowhere"], "no")]
)
def test_mistakes_are_one_line(tmp_path, variables, words):
    many(tmp_path)
    command = ["make", "--silent", "trace-viewer", f"PYTHON={VIEWER}", f"LOGDIR={tmp_path}", *variables]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert line.startswith("trace-viewer: error: ") and words in line


def test_a_run_without_a_trace_is_there(tmp_path):
    many(tmp_path)
    for folder, name in (("fast_rnnt-2", "fast_rnnt"), ("k2-simple-2", "k2-simple")):
        write_run(tmp_path / folder, name=name, jobs=[])
    for given, name in (("fast_rnnt", "fast_rnnt-2"), ("k2-simple-2", "k2-simple-2")):
        with pytest.raises(UserError, match=f"there, but without a trace: {name} "):
            trace_viewer.choose(given, tmp_path, 1)


WORDS = """(() => {
  const found = [], walk = (root) => { for (const it of root.childNodes) {
    if (it.shadowRoot) walk(it.shadowRoot);
    if (it.nodeType !== Node.TEXT_NODE) { walk(it); continue; }
    if (!it.parentElement?.closest('td, th')) continue;
    for (const { 0: word, index } of it.data.matchAll(/\\S+/g)) {
      const range = document.createRange(); range.setStart(it, index); range.setEnd(it, index + word.length);
      found.push([word, new Set([...range.getClientRects()].map((box) => box.top)).size]); } } };
  walk(document.body); return found; })()"""


@needs_viewer
@needs_browser
@pytest.mark.thorough
def test_no_word_is_broken_in_the_text_tab(tmp_path):
    for name in ("optimized_transducer", "fast_rnnt-pruned", "warp-transducer"):
        write_run(tmp_path / "log" / name, name)
    browser = Browser(tmp_path / "profile")
    try:
        with started("tensorboard", tmp_path / "output", LOGDIR=tmp_path / "log") as server:
            server.wait_for(lambda server: server.json("/data/plugin/text/tags"))
            browser.resize(1200)
            browser.driver.get(f"{server.url}/#text")
            browser.wait.until(lambda _: any("optimized" in word for word, _ in browser.js(WORDS)))
            broken = [word for word, lines in browser.js(WORDS) if lines > 1]
    finally:
        browser.close()
    assert broken == []
