"""--executor ray on Ray nodes of this machine, which are killed for real.  The Python that has Ray is that of the ray
environment, or of the variable RAY_PYTHON; without one these tests are skipped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from commands import ROOT, assert_user_error, run, start, wait_for

from benchmarks import local_cluster
from benchmarks.cluster_speed import sleeping
from common.analysis import logs
from common.core import settings
from common.core.errors import EXIT_INTERRUPTED, UserError
from common.jobs import carried, cluster, spread
from common.jobs.executor import Executor, Lost
from common.jobs.spec import Job, Task
from common.records import store
from common.records.schema import Environment, Status
from common.setup import environments
from common.system import nvml

PYTHON = os.environ.get(cluster.PYTHON) or environments.interpreter("ray")
needs_ray = pytest.mark.skipif(PYTHON is None, reason=f"no Ray: {environments.reason('ray')}, or set RAY_PYTHON")
NAMES = ("torchaudio", "reference")
#: Spreads sleeping jobs, as a benchmark does its own: ADDRESS ROUNDS SECONDS LOG_DIR [--resume].
SESSION = """
import sys
from pathlib import Path
from benchmarks.cluster_speed import sleeping, spent
from common.core.errors import EXIT_OK
from common.core.guard import guarded
address, rounds, seconds, log_dir, *resume = sys.argv[1:]
pids = log_dir + "-pids"
Path(pids).mkdir(exist_ok=True)
jobs = sleeping(int(rounds), float(seconds), ("torchaudio", "reference"), pids)
def body():
    spent(address, jobs, Path(log_dir), quiet=False, resume=bool(resume))
    return EXIT_OK
sys.exit(guarded("session", body))
"""


@pytest.fixture(scope="module")
def nodes():
    """A cluster whose head runs no job, and a list of its nodes, two at first."""
    with local_cluster.started(Path(PYTHON), 0) as there:
        yield there, [there.add(), there.add()]


def fresh(nodes):
    """Where a test killed one, another takes its place."""
    there, found = nodes
    for place, node in enumerate(found):
        try:
            os.kill(node["raylet"], 0)
            alive = Path(f"/proc/{node['raylet']}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            alive = False
        if not alive:
            found[place] = there.add()
    return there, found


def session(address, rounds, seconds, log_dir, *more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), cluster.PYTHON: str(PYTHON)}
    return subprocess.Popen(
        [sys.executable, "-c", SESSION, address, str(rounds), str(seconds), str(log_dir), *more],
        cwd=ROOT,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(log_dir):
    """(implementation, job, status) of every job that ended, in the order of the files."""
    return [
        (path.parent.name.rsplit("-", 1)[0], record.job, record.status)
        for path in sorted(log_dir.glob("*/results.jsonl"))
        for record in store.read(path)
        if isinstance(record, Status)
    ]


def devices(log_dir):
    """{job: node} of every implementation."""
    return {
        path.parent.name.rsplit("-", 1)[0]: {
            record.job: record.node for record in store.read(path) if isinstance(record, Environment)
        }
        for path in sorted(log_dir.glob("*/results.jsonl"))
    }


@needs_ray
def test_a_node_that_dies_costs_its_job_alone(nodes, tmp_path):
    there, found = fresh(nodes)
    process = session(there.address, 4, 1.5, tmp_path / "log")
    wait_for(lambda: any(job.startswith("timing") for _, job, _ in ended(tmp_path / "log")), "timing job that ended")
    there.kill(found[0]["raylet"])
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"{found[0]['id'][:8]} died" in said, said
    jobs = ended(tmp_path / "log")
    assert len(jobs) == len(set(jobs)) == 2 * 5  # each ended once
    assert {status for _, _, status in jobs} == {"ok"}
    used = {node for of in devices(tmp_path / "log").values() for node in of.values()}
    assert any(found[1]["id"][:8] in node for node in used), used


@needs_ray
def test_a_killed_driver_resumes(nodes, tmp_path):
    there, _ = fresh(nodes)
    process = session(there.address, 3, 1.0, tmp_path / "log")
    wait_for(lambda: len(ended(tmp_path / "log")) >= 4, "four jobs that ended")
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = ended(tmp_path / "log")
    again = session(there.address, 3, 1.0, tmp_path / "log", "--resume")
    _, said = again.communicate(timeout=120)
    assert again.returncode == 0, said
    after = ended(tmp_path / "log")
    assert len(after) == len(set(after)) == 2 * 4 and set(before) < set(after)  # what had ended did not run again
    of_rounds = devices(tmp_path / "log")
    for number in (2, 3):
        assert len({of[f"timing-{number}"] for of in of_rounds.values()}) <= 2


@needs_ray
def test_ctrl_c_ends_the_remote_workers_and_keeps_what_came(nodes, tmp_path):
    there, _ = fresh(nodes)
    process = session(there.address, 2, 40.0, tmp_path / "log")
    pids = tmp_path / "log-pids"
    wait_for(lambda: pids.exists() and len(list(pids.iterdir())) == 2, "two jobs on the nodes")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_INTERRUPTED, said
    assert [status for _, _, status in ended(tmp_path / "log")] == ["interrupted"] * 2
    wait_for(lambda: not any(Path("/proc", pid.name).exists() for pid in pids.iterdir()), "end of the workers", 20)


@needs_ray
def test_a_node_whose_set_up_fails_is_left_out(nodes, tmp_path):
    there, found = fresh(nodes)
    broken = tmp_path / "checkout"
    for part in ("common", "requirements", "fused_transducer"):
        shutil.copytree(ROOT / part, broken / part, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("benchmark_*.py"):
        shutil.copy(script, broken)
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_INDEX": "1"}
    bad = there.add(TRANSDUCER_CHECKOUT=str(broken), **nowhere)
    try:
        process = session(there.address, 1, 0.1, tmp_path / "log")
        _, said = process.communicate(timeout=120)
    finally:
        there.kill(bad["raylet"])
    assert process.returncode == 0, said
    assert f"{bad['id'][:8]} is left out" in said, said
    assert not any(bad["id"][:8] in node for of in devices(tmp_path / "log").values() for node in of.values())
    assert len(ended(tmp_path / "log")) == 4


@needs_ray
def test_traces_and_an_own_loss_come_through(nodes, tmp_path, tiny_shapes):
    """A loss of the user's own, his shape file, and the trace files of the pass: none of them is on the node."""
    there, _ = fresh(nodes)
    own = tmp_path / "benchmark_flash.py"
    script = (ROOT / "benchmark_torchaudio.py").read_text()
    own.write_text(script.replace('"torchaudio"', '"flash"').replace("self.module", '__import__("torchaudio")'))
    log = tmp_path / "log"
    flags = ["--preset", "quick", "--rounds", "1", "--scope", "step", "--threads", "1"]
    flags += ["--passes", "correctness,trace"]
    more = ("--only", own, *flags, "--shape-file", tiny_shapes, "--log-dir", log)
    code, _, stderr = finished(started("benchmark_all.py", *more, there=there))
    assert code == 0, stderr
    (row,) = logs.read([log]).rows
    assert row.name == "flash" and row.status == "ok" and row.windows, row.reason
    told = row.environment
    assert told.node and told.shape_file == str(tiny_shapes)
    text = "".join(path.read_text() for path in log.glob("*/results.jsonl"))
    assert ".build/carried" not in text


def started(script, *flags, there=None):
    """A command, with the cluster `there` where one is given."""
    through = ("--executor", "ray", "--ray-address", there.address) if there else ()
    return start(script, *flags, *through, env={**os.environ, cluster.PYTHON: str(PYTHON)})


def finished(process):
    """(exit code, stdout, stderr)."""
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def both(script, *flags, there, tmp_path):
    """(what it printed, its log folder) of a command on this machine, and through the cluster; both at once."""
    logs_of = [tmp_path / name for name in ("local", "ray")]
    where = "--output" if script == "conformance.py" else "--log-dir"
    processes = [started(script, *flags, where, log, there=one) for log, one in zip(logs_of, (None, there))]
    found = []
    for process, log in zip(processes, logs_of):
        code, out, err = finished(process)
        assert code == 0, err
        found.append((out, log))
    return found


#: Of a row: which run it is of, what follows from a few times, and how busy the machine was.
OWN = ("log_dir", "run_id", "started", "id", "against_fastest", "n", "samples", "flagged_samples", "stopped", "notes")


def unmeasured(value):
    """What is not a measured number: no float, and rounds without their device."""
    if isinstance(value, dict):
        return {key.partition(" on ")[0]: unmeasured(one) for key, one in value.items() if key not in OWN}
    if isinstance(value, list):
        return [unmeasured(one) for one in value]
    return "number" if isinstance(value, float) else value


LIMIT = ("--memory-limit", "500MB")


@needs_ray
@pytest.mark.parametrize(
    "flags",
    [
        ("--only", "torchaudio,reference", "--rounds", 2, "--passes", "timing"),
        ("--only", "torchaudio", "--rounds", 1, "--passes", "timing", "--sweep", "vocab-size=8,16"),
        ("--only", "torchaudio", "--rounds", 1, "--find-largest", "batch-size", "--largest-cap", 2, *LIMIT),
    ],
    ids=["run", "sweep", "find-largest"],
)
def test_rows_are_those_of_the_local_executor(nodes, tmp_path, tiny_shapes, flags):
    """The same keys, statuses, batches and sizes."""
    there, _ = fresh(nodes)
    small = ("--preset", "quick", "--device", "cpu", "--scope", "step", "--threads", 1, "--shape-file", tiny_shapes)
    rows = []
    for _, log in both("benchmark_all.py", *flags, *small, there=there, tmp_path=tmp_path):
        done = run("summarize.py", log, "--format", "json")
        assert done.returncode == 0, done.stderr
        rows.append([unmeasured(row) for row in json.loads(done.stdout)])
        assert "OMP_NUM_THREADS" not in run("summarize.py", log).stdout  # which Ray sets
    assert rows[0] == rows[1] and {row["status"] for row in rows[0]} == {"ok"}


#: A model of the user's own, in a file of its own; `wait`: seconds for a call.
OWN_MODEL = """
import time
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, wait=0.0):
        super().__init__()
        self.wait, self.layer = wait, nn.Linear(1, 4)
    def forward(self, waves, lengths):
        time.sleep(self.wait)
        return self.layer(waves[..., None])

class Whole(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.front, self.symbols = nn.Linear(80, vocab_size), nn.Embedding(vocab_size, vocab_size)
    def forward(self, features, lengths, symbols, symbol_lengths):
        frames = self.front(features[:, ::4])
        return frames[:, :, None] + self.symbols(symbols)[:, None], (lengths + 3) // 4
"""


@pytest.fixture
def own_model(tmp_path):
    (tmp_path / "mymodel.py").write_text(OWN_MODEL)
    return tmp_path / "mymodel.py"


def tasks_of(log):
    """(task, status) of every one that ended, and the nodes, of the one run in a log folder."""
    (path,) = log.glob("*/inference.jsonl")
    records = store.read(path)
    assert ".build/carried" not in path.read_text()
    nodes_of = {record.node for record in records if isinstance(record, Environment)}
    return [(record.job, record.status) for record in records if isinstance(record, Status)], nodes_of


@needs_ray
def test_a_profile_of_inference_resumes_and_survives_a_node(nodes, tmp_path, own_model):
    """Of a model in a file of the user's: Ctrl-C keeps what came back; then a node dies."""
    there, found = fresh(nodes)
    (tmp_path / "slow.yaml").write_text(
        "pretrained_model: {source: mymodel.py:Net, sample_rate: 100, arguments: {wait: 0.15}}\n"
        "profiling_dimensions: {audio_mockup_secs: [1, 2, 3, 4, 5, 6, 7], batch_sizes: [1], export_logs: true}\n"
    )
    log = tmp_path / "log"
    command = ("profile_inference.py", tmp_path / "slow.yaml", "--max-samples", 1, "--log-dir", log)
    process = started(*command, there=there)
    wait_for(lambda: list(log.glob("*/inference.jsonl")) and tasks_of(log)[0], "a cell that ended")
    process.send_signal(signal.SIGINT)
    code, _, said = finished(process)
    assert code == EXIT_INTERRUPTED, said
    before, _ = tasks_of(log)
    assert ("1s-x1", "ok") in before or ("2s-x1", "ok") in before or "interrupted" in dict(before).values()
    process = started(*command, "--resume", there=there)
    wait_for(lambda: len(tasks_of(log)[0]) > len(before), "another cell that ended")
    there.kill(found[1]["raylet"])
    code, _, said = finished(process)
    assert code == 0 and f"{found[1]['id'][:8]} died" in said, said
    after, used = tasks_of(log)
    well = [job for job, status in after if status == "ok"]
    assert sorted(well) == [f"{seconds}s-x1" for seconds in range(1, 8)] and len(used) == 2
    assert {status for _, status in after} <= {"ok", "interrupted"}
    assert len(list(log.glob("*/traces/*/*.trace.json"))) == 7  # they came back


@needs_ray
def test_a_profile_of_a_model_is_that_of_the_local_command(nodes, tmp_path, own_model, tiny_shapes):
    there, _ = fresh(nodes)
    flags = (f"--model={own_model}:Whole", "--arg=vocab_size=9", "--size=vocab_size=9", "--loss=torchaudio")
    quick = ("--steps", 1, "--warmup", 0, "--trace-steps", 1, "--threads", 1, "--limits", "false", "--device", "cpu")
    sizes = ("--sweep", "batch-size=1,2", "--shape-file", tiny_shapes)
    folders = [
        log / "profile-sweep-batch-size"
        for _, log in both("profile_model.py", *flags, *quick, *sizes, there=there, tmp_path=tmp_path)
    ]
    here, through = (json.loads((folder / "profile.json").read_text()) for folder in folders)
    nodes_of = [cell.pop("node") for cell in through]
    assert len(set(nodes_of)) == 2  # a size on each
    for one, other in zip(here, through):
        assert [row["name"] for row in one["rows"]] == [row["name"] for row in other["rows"]]
        assert [row["macs"] for row in one["rows"]] == [row["macs"] for row in other["rows"]]
        assert one.keys() == other.keys() and one["batches"] == other["batches"] and one["model"] == other["model"]
    assert {str(path.relative_to(folders[0])).split(".")[0] for path in folders[0].rglob("*")} == {
        str(path.relative_to(folders[1])).split(".")[0] for path in folders[1].rglob("*")
    }


@needs_ray
def test_conformance_is_that_of_the_local_command(nodes, tmp_path):
    there, _ = fresh(nodes)
    cases = ("--cases", "no-target,float64,repeated-labels", "--only", "torchaudio,reference", "--device", "cpu")
    found = both("conformance.py", *cases, there=there, tmp_path=tmp_path)
    (here, through) = (json.loads((log / "conformance.json").read_text())["implementations"] for _, log in found)
    assert [row["cells"] for row in through] == [row["cells"] for row in here] and here[0]["cells"]
    assert len({row.pop("node") for row in through}) == 2
    assert [row.keys() for row in through] == [row.keys() for row in here]


@needs_ray
def test_a_pipeline_takes_its_stage_and_its_data_to_the_nodes(nodes, tmp_path, own_model):
    there, _ = fresh(nodes)
    examples = {"id": numpy.array(["a", "b"]), "src_lengths": numpy.array([3, 5])}
    numpy.savez(tmp_path / "data.npz", src_tokens=numpy.ones((2, 5), numpy.float32), **examples)
    config = tmp_path / "short.yaml"
    config.write_text(
        "general: {dataset_type: npy, dataset_path: data.npz, warmup: 0, repeats: 1}\n"
        "stage1: {factory: mymodel.py:Net}\n"
    )
    log = tmp_path / "log"
    code, _, said = finished(started("pipeline_metrics.py", "--config", config, "--log-dir", log, there=there))
    (path,) = log.glob("*/pipeline.jsonl")
    assert code == 0 and ".build/carried" not in path.read_text(), said
    assert {one.job: one.status for one in store.read(path) if isinstance(one, Status)} == {"a": "ok", "b": "ok"}


@needs_ray
def test_a_cluster_that_is_not_there_is_an_error(tmp_path):
    environment = {**os.environ, cluster.PYTHON: str(PYTHON)}
    flags = ("--only", "torchaudio", "--executor", "ray", "--ray-address", "127.0.0.1:9", "--log-dir", tmp_path / "log")
    assert_user_error(run("benchmark_all.py", *flags, env=environment), "--executor ray")


def test_ray_needs_its_environment(tmp_path):
    environment = {**os.environ, cluster.PYTHON: str(tmp_path / "none")}
    flags = ("--only", "torchaudio", "--executor", "ray", "--log-dir", tmp_path / "log")
    assert_user_error(run("benchmark_all.py", *flags, env=environment), "--executor ray", tmp_path / "none")


@pytest.fixture
def beside(own_model, monkeypatch):
    """The folder of a model of the user's own, from which Python can import."""
    monkeypatch.setenv("PYTHONPATH", str(own_model.parent))
    monkeypatch.syspath_prepend(str(own_model.parent))
    return own_model.parent


def test_a_task_takes_its_files_along(beside):
    """As its values name them, wherever they stand; what is installed is there already."""
    weights = beside / "weights.bin"
    weights.write_bytes(b"1")
    installed = ["torchaudio.models:Emformer", "common.models.small:Generator", "hf:model", "a text", "", 3, None]
    given = {"model": f"{beside}/mymodel.py:Net", "arguments": {"path": [str(weights)], "more": installed}}
    files = carried.files(given)
    assert files == (f"{beside}/mymodel.py", str(weights))
    there = carried.placed(given, dict(zip(files, ("/there/mymodel.py", "/there/weights.bin"))))
    assert there["model"] == "/there/mymodel.py:Net" and there["arguments"]["path"] == ["/there/weights.bin"]
    assert there["arguments"]["more"] == installed


@pytest.mark.parametrize(
    ("source", "words"),
    [("mymodel:Net", ["mymodel.py:Net"]), ("other.py:Net", ["imports mymodel.py"]), (".", ["a folder"])],
)
def test_what_cannot_go_along_is_one_line(beside, source, words):
    (beside / "other.py").write_text("import mymodel\nNet = mymodel.Net\n")
    config = beside / "x.yaml"
    kind = "type: EncoderASR, " if source == "." else ""
    config.write_text(f"pretrained_model: {{{kind}source: '{source}'}}\nprofiling_dimensions: {{batch_sizes: [1]}}\n")
    done = run("profile_inference.py", config, "--executor", "ray", cwd=beside, env=dict(os.environ))
    assert_user_error(done, "--executor ray", *words)


class Simulated(Executor):
    """A device that sleeps for each job and dies with one of them."""

    here = False

    def __init__(self, label, dies_with=None):
        self.label, self.dies_with, self.done = label, dies_with, []

    def execute(self, job, python, folder, settings, timeout, note):
        time.sleep(0.01)
        if job == self.dies_with:
            raise Lost(f"{self.label} died", began=True)
        self.done.append(job)
        return []


def serve(lane, job):
    lane.execute(job, None, None, None, 0, None)


def test_work_of_a_lost_device_goes_to_another():
    one, other = Simulated("a", dies_with=0), Simulated("b")
    spread.spread([one, other], range(8), serve)
    assert one.done == [] and sorted(other.done) == list(range(8))


def test_without_a_device_the_run_ends():
    with pytest.raises(UserError, match="a died"):
        spread.spread([Simulated("a", dies_with=1)], range(3), serve)


def test_an_error_stops_what_is_not_begun():
    lanes = [Simulated("a"), Simulated("b")]

    def failing(lane, job):
        serve(lane, job)
        if job == 2:
            raise UserError("broken")

    with pytest.raises(UserError, match="broken"):
        spread.spread(lanes, range(100), failing)
    assert sum(len(lane.done) for lane in lanes) < 100


@pytest.mark.parametrize(
    "job",
    [
        Job("torchaudio", "throughput", 2, 8, 16, (("batch_size", 8),), 1000),
        Task("a", "inference", {"batch": 2}, (("threads", 1),), ("/a/file",)),
    ],
)
def test_a_job_on_the_wire_is_the_same_job(job):
    from dataclasses import asdict

    from common.jobs.node import runnable

    kind = "job" if isinstance(job, Job) else "task"
    assert runnable(json.loads(json.dumps({"kind": kind, **asdict(job)}))) == job


def test_rounds_of_two_devices_are_not_paired(tmp_path):
    """Of the same round on two devices nothing is paired; on one device all is."""
    from common.analysis import ranking
    from common.records.run import open_runs

    chosen = settings.resolve({"preset": "quick"}, "cpu")

    def records(name, factor, nodes):
        found = [Job(name, "correctness").status("ok", "", 1)]
        for number, node in enumerate(nodes, start=1):
            of = {"job": f"timing-{number}"}
            found.append({"record": "environment", "device": "cpu", "node": node, **of})
            for batch in range(3):
                time_ns = 1e6 * factor * (1 + number)
                sample = {"scope": "step", "round": number, "batch": batch, "total_wall_ns": time_ns}
                found.append({"record": "sample", **of, **sample})
            found.append(Job(name, "timing", number).status("ok", "", 1))
        return found

    with open_runs(NAMES, chosen, tmp_path, False) as run_of:
        run_of["torchaudio"].add(records("torchaudio", 1, ["a", "b", "a"]))
        run_of["reference"].add(records("reference", 2, ["a", "a", "a"]))
    rows = {row.name: row for row in logs.read([tmp_path], all_runs=True).rows}
    ratio = ranking.over(rows["torchaudio"], rows["reference"], "step")
    assert ratio.batches == 3 and len(ratio.new) == 2 and ratio.ratio == pytest.approx(2)


def test_what_nvidia_smi_tells(monkeypatch, tmp_path):
    """A made nvidia-smi: its answer is read, and anything else is nothing."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, GPU-1, 550.1, 1980, 1980, [N/A]'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    told = nvml.from_smi()
    assert told["uuid"] == "GPU-1" and told["sm_mhz"] == 1980 and told["memory_mhz"] is None
    program.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert nvml.from_smi() is None


def test_sleeping_jobs_are_those_of_a_run():
    assert len(sleeping(3, 0.1, NAMES)) == 2 * 4
