"""What summarize.py says of a trace against TensorBoard's profiler plugin, asked over HTTP of the real server."""

from __future__ import annotations

import importlib.util
import re
import shutil

import pytest
from commands import run
from fixtures_traces import MIB, REAL, kineto, memory, span, steps, write
from viewer_servers import needs_viewer, started

from common.analysis import logs
from common.traces import reader

pytestmark = needs_viewer

API = "/data/plugin/pytorch_profiler"
REAL_FOLDERS = ("torch-1.13.1", "torch-2.11.0", "torch-1.13.1-stub", "torch-2.11.0-stub")
QUICK = "torchaudio-2"
GPU_COPIES, SCRIPTS = "gpu-copies", "scripts"
HAS_TORCHAUDIO = importlib.util.find_spec("torchaudio") is not None


def counted(ts, total, **device):
    event = memory(ts, total, **device)
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


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["torch-1.13.1-stub", "torch-2.11.0-stub"])
def test_the_plugin_counts_the_stub_of_a_cut_off_step_and_we_do_not(plugin, log, name):
    (first, second), mine = windows_of(plugin, name), ours(log, name)
    assert abs(first[0] - mine[0][0]) <= 0.5 and [first[1], second[1]] == [peak for _, peak in mine]
    whole, stub = (step.duration for step in reader.read(sorted((log / name).glob("*.gz"))[1]).steps)
    assert abs(second[0] - (whole + stub) / 2) <= 0.5
    assert mine[1][0] == whole > 1.5 * second[0]


@pytest.mark.thorough
def test_the_plugin_counts_gpu_copies_as_steps_and_we_do_not(plugin, log):
    """Since torch 2.0 every record_function span over GPU work has a copy of category "gpu_user_annotation", from its
    first kernel to its last: ProfilerStep too.  The plugin takes the copies for further steps, so that its average is
    neither the host's step (4500 us here) nor the GPU's (2200 us): 3350 us."""
    ((average, peak),) = windows_of(plugin, GPU_COPIES)
    assert average == (4000 + 5000 + 2000 + 2400) / 4
    assert ours(log, GPU_COPIES) == [(4500.0, 3 * MIB)] and peak == 3 * MIB
