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
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import numpy
import pytest
from commands import ROOT, assert_user_error, run, start, wait_for

from benchmarks import local_cluster
from common.analysis import logs, ranking
from common.analysis.groups import groups
from common.core import settings
from common.core.errors import EXIT_INTERRUPTED, UserError
from common.jobs import carried, cluster, spread
from common.jobs.executor import Executor, Lost
from common.jobs.node import Description, Node
from common.jobs.spec import Job
from common.records import store
from common.records.run import open_runs
from common.records.schema import Environment, Status
from common.setup import environments
from common.setup.checkout import suite
from common.system import nvml

PYTHON = os.environ.get(cluster.PYTHON) or environments.interpreter("ray")
needs_ray = pytest.mark.skipif(PYTHON is None, reason=f"no Ray: {environments.reason('ray')}, or set RAY_PYTHON")
NAMES = ("torchaudio", "reference")
CPU = ("--device", "cpu", "--threads", 1)
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
#: Models of the user's own, in one file; `wait`: seconds for a call, of Whole with a batch of one utterance.
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
    def __init__(self, vocab_size, wait=0.0):
        super().__init__()
        self.wait = wait
        self.front, self.symbols = nn.Linear(80, vocab_size), nn.Embedding(vocab_size, vocab_size)
    def forward(self, features, lengths, symbols, symbol_lengths):
        time.sleep(self.wait * (len(features) == 1))
        frames = self.front(features[:, ::4])
        return frames[:, :, None] + self.symbols(symbols)[:, None], (lengths + 3) // 4
"""
#: Holds the GPUs of a cluster until its input ends; first says which there are.
HOLDER = """
import json, ray, sys
from common.jobs import gateway
gateway.BUSY_SECONDS = 5
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
held = gateway.Gateway(sys.argv[1], "cuda")
print(json.dumps(held.devices()), flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def two_nodes():
    """A cluster whose head runs no job, and a list of its nodes, two at first."""
    with local_cluster.started(Path(PYTHON), 0) as ray_cluster:
        yield ray_cluster, [ray_cluster.add(), ray_cluster.add()]


@pytest.fixture
def nodes(two_nodes):
    """`two_nodes`; where a test killed one, another takes its place."""
    ray_cluster, known = two_nodes
    for index, node in enumerate(known):
        stat = Path(f"/proc/{node['raylet']}/stat")
        if not stat.exists() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            known[index] = ray_cluster.add()
    return ray_cluster, known


@contextmanager
def added(ray_cluster, **options):
    """Add a node until the end of the block; yields its name in labels."""
    node = ray_cluster.add(**options)
    try:
        yield node["id"][:8]
    finally:
        ray_cluster.kill(node["raylet"])


@pytest.fixture
def own_model(tmp_path):
    (tmp_path / "mymodel.py").write_text(OWN_MODEL)
    return tmp_path / "mymodel.py"


def session(ray_cluster, rounds, seconds, log_dir, *flags):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), cluster.PYTHON: str(PYTHON)}
    command = [sys.executable, "-c", SESSION, ray_cluster.address, str(rounds), str(seconds), str(log_dir), *flags]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def started(script, *flags, ray_cluster=None):
    """Start a command, through the cluster if one is given."""
    through = ("--executor", "ray", "--ray-address", ray_cluster.address) if ray_cluster else ()
    return start(script, *flags, *through, env={**os.environ, cluster.PYTHON: str(PYTHON)})


def finished(process):
    """Return (exit code, stderr) at its end."""
    _, err = process.communicate(timeout=300)
    return process.returncode, err


def both(script, *flags, ray_cluster, tmp_path):
    """Run a command on this machine, and through the cluster, at once; returns their log folders."""
    folders = [tmp_path / name for name in ("local", "ray")]
    where = "--output" if script == "conformance.py" else "--log-dir"
    processes = [started(script, *flags, where, log, ray_cluster=on) for log, on in zip(folders, (None, ray_cluster))]
    for process in processes:
        code, err = finished(process)
        assert code == 0, err
    return folders


def results(log):
    """Return (folder, job, status, node) of every job that ended, of runs in a log folder; each once."""
    rows = []
    for path in sorted([*log.glob("*/results.jsonl"), *log.glob("*/inference.jsonl"), *log.glob("*/pipeline.jsonl")]):
        text = path.read_text()
        assert ".build/carried" not in text
        records = store.read(path) if text else []
        node_of = {record.job: record.node for record in records if isinstance(record, Environment)}
        name = path.parent.name.rsplit("-", 1)[0]
        rows += [(name, r.job, r.status, node_of.get(r.job)) for r in records if isinstance(r, Status)]
    assert len(rows) == len(set(rows))
    return rows


@needs_ray
def test_a_killed_driver_resumes_and_a_node_that_dies_costs_its_job_alone(nodes, tmp_path):
    ray_cluster, known = nodes
    log = tmp_path / "log"
    process = session(ray_cluster, 4, 1.5, log)
    wait_for(lambda: len(results(log)) >= 3, "three jobs that ended")
    process.kill()
    process.communicate()
    before = results(log)
    process = session(ray_cluster, 4, 1.5, log, "--resume")
    wait_for(lambda: len(results(log)) > len(before), "another job that ended")
    ray_cluster.kill(known[0]["raylet"])
    code, err = finished(process)
    assert code == 0 and f"{known[0]['id'][:8]} died" in err, err
    assert len(results(log)) == 2 * 5 and set(before) < set(results(log))  # what had ended did not run again
    assert {status for _, _, status, _ in results(log)} == {"ok"}
    assert any(known[1]["id"][:8] in node for _, _, _, node in results(log))


@needs_ray
def test_ctrl_c_ends_the_remote_workers_and_keeps_what_came(nodes, tmp_path):
    log, pids = tmp_path / "log", tmp_path / "log-pids"
    process = session(nodes[0], 2, 40.0, log)
    wait_for(lambda: pids.exists() and len(list(pids.iterdir())) == 2, "two jobs on the nodes")
    process.send_signal(signal.SIGINT)
    code, err = finished(process)
    assert code == EXIT_INTERRUPTED, err
    assert [status for _, _, status, _ in results(log)] == ["interrupted"] * 2
    wait_for(lambda: not any(Path("/proc", pid.name).exists() for pid in pids.iterdir()), "end of the workers", 20)


def copied(checkout):
    """Copy what measures into a checkout of its own; returns its folder."""
    for part in ("common", "losses", "requirements", "fused_transducer"):
        shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("benchmark_*.py"):
        shutil.copy(script, checkout)
    return checkout


@needs_ray
def test_nodes_that_cannot_measure_the_same_are_left_out(nodes, tmp_path):
    """One whose set-up fails, one of another revision, and one without a checkout."""
    ray_cluster, known = nodes
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_INDEX": "1"}
    bare, other = copied(tmp_path / "bare"), copied(tmp_path / "other")
    for shared in (".venv", ".build"):
        (other / shared).symlink_to((ROOT / shared).resolve())
    with (other / "common" / "jobs" / "worker.py").open("a") as stream:
        stream.write("# of another revision\n")
    variables = [{"TRANSDUCER_CHECKOUT": str(bare), **nowhere}]
    variables += [{"TRANSDUCER_CHECKOUT": str(folder)} for folder in (other, tmp_path)]
    with ExitStack() as stack:
        bad = [stack.enter_context(added(ray_cluster, **of_node)) for of_node in variables]
        code, err = finished(session(ray_cluster, 1, 0.1, tmp_path / "log"))
    assert code == 0 and all(f"{node} is left out" in err for node in bad), err
    assert "bring both to one revision" in err and "no checkout" in err
    used = {node.rpartition("/")[2] for _, _, _, node in results(tmp_path / "log")}
    assert used <= {node["id"][:8] for node in known} and len(results(tmp_path / "log")) == 4


def may_mount():
    """Return whether we may have mounts of our own."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def blind(folder):
    """A cluster of one node, which sees nothing of `folder`."""
    with local_cluster.started(Path(PYTHON), 0) as ray_cluster:
        flags = (f"--address={ray_cluster.address}", "--num-cpus=1", "--object-store-memory=83886080", "--block")
        hide = ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "sh")
        command = [*hide, str(PYTHON), "-m", "ray.scripts.scripts", "start", *flags, "--disable-usage-stats"]
        environment = {**os.environ, "TRANSDUCER_CHECKOUT": str(ROOT)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert any("Ray runtime started" in line for line in process.stdout)
                yield ray_cluster
            finally:
                process.terminate()


@needs_ray
def test_traces_and_an_own_loss_come_through(nodes, tmp_path, tiny_shapes):
    """A loss of the user's own, his shape file, and the trace files of the pass: none of them is on the node, which
    does not see their folder where that can be."""
    script_path, log = tmp_path / "benchmark_flash.py", tmp_path / "log"
    script = (ROOT / "benchmark_torchaudio.py").read_text()
    script_path.write_text(script.replace('"torchaudio"', '"flash"').replace("self.module", '__import__("torchaudio")'))
    flags = ("--preset", "quick", "--rounds", 1, "--scope", "step", "--passes", "correctness,trace", *CPU)
    with blind(tmp_path) if may_mount() else nullcontext(nodes[0]) as ray_cluster:
        process = started(
            *("benchmark_all.py", "--only", script_path, *flags, "--shape-file", tiny_shapes, "--log-dir", log),
            ray_cluster=ray_cluster,
        )
        code, err = finished(process)
    assert code == 0, err
    (row,) = logs.read([log]).rows
    assert row.name == "flash" and row.status == "ok" and row.windows, row.reason
    assert row.environment.node and row.environment.shape_file == str(tiny_shapes) and results(log)


#: Of a row: which run it is of, what follows from a few times, and how busy the machine was.
OWN = ("log_dir", "run_id", "started", "id", "against_fastest", "n", "samples", "flagged_samples", "stopped", "notes")


def unmeasured(value):
    """Return what is not a measured number: no float, and rounds without their device."""
    if isinstance(value, dict):
        return {key.partition(" on ")[0]: unmeasured(item) for key, item in value.items() if key not in OWN}
    if isinstance(value, list):
        return [unmeasured(item) for item in value]
    return "number" if isinstance(value, float) else value


@needs_ray
@pytest.mark.parametrize(
    "flags",
    [
        ("--only", "torchaudio,reference", "--rounds", 2, "--passes", "timing"),
        ("--only", "torchaudio", "--rounds", 1, "--passes", "timing", "--sweep", "vocab-size=8,16"),
        (
            *("--only", "torchaudio", "--rounds", 1, "--find-largest", "batch-size"),
            *("--largest-cap", 2, "--memory-limit", "500MB"),
        ),
    ],
    ids=["run", "sweep", "find-largest"],
)
def test_rows_are_those_of_the_local_executor(nodes, tmp_path, tiny_shapes, flags):
    """The same keys, statuses, batches and sizes."""
    small = ("--preset", "quick", "--scope", "step", "--shape-file", tiny_shapes, *CPU)
    rows = []
    for log in both("benchmark_all.py", *flags, *small, ray_cluster=nodes[0], tmp_path=tmp_path):
        done = run("summarize.py", log, "--format", "json")
        assert done.returncode == 0, done.stderr
        rows.append([unmeasured(row) for row in json.loads(done.stdout)])
        assert "OMP_NUM_THREADS" not in run("summarize.py", log).stdout  # which Ray sets
    assert rows[0] == rows[1] and {row["status"] for row in rows[0]} == {"ok"}


@needs_ray
def test_a_profile_of_inference_resumes_and_survives_a_node(nodes, tmp_path, own_model):
    """The model is in a user's file. Ctrl-C keeps what came back; then a node dies."""
    ray_cluster, known = nodes
    (tmp_path / "slow.yaml").write_text(
        "pretrained_model: {source: mymodel.py:Net, sample_rate: 100, arguments: {wait: 0.15}}\n"
        "profiling_dimensions: {audio_mockup_secs: [1, 2, 3, 4, 5, 6, 7], batch_sizes: [1], export_logs: true}\n"
    )
    log = tmp_path / "log"
    command = ("profile_inference.py", tmp_path / "slow.yaml", "--max-samples", 1, "--log-dir", log)
    process = started(*command, ray_cluster=ray_cluster)
    wait_for(lambda: results(log), "a cell that ended")
    process.send_signal(signal.SIGINT)
    code, err = finished(process)
    assert code == EXIT_INTERRUPTED, err
    before = len(results(log))
    process = started(*command, "--resume", ray_cluster=ray_cluster)
    wait_for(lambda: len(results(log)) > before, "another cell that ended")
    ray_cluster.kill(known[1]["raylet"])
    code, err = finished(process)
    assert code == 0 and f"{known[1]['id'][:8]} died" in err, err
    well = [job for _, job, status, _ in results(log) if status == "ok"]
    assert sorted(well) == [f"{seconds}s-x1" for seconds in range(1, 8)]
    assert {status for _, _, status, _ in results(log)} <= {"ok", "interrupted"}
    assert len(list(log.glob("*/traces/*/*.trace.json"))) == 7  # they came back


QUICK = ("--steps", 1, "--warmup", 0, "--trace-steps", 1, "--limits", "false", "--loss", "torchaudio", *CPU)


@needs_ray
def test_a_profile_of_a_model_is_that_of_the_local_command(nodes, tmp_path, own_model, tiny_shapes):
    flags = (f"--model={own_model}:Whole", "--arg=vocab_size=9", "--size=vocab_size=9", *QUICK)
    sizes = ("--sweep", "batch-size=1,2", "--shape-file", tiny_shapes)
    folders = [
        log / "profile-sweep-batch-size"
        for log in both("profile_model.py", *flags, *sizes, ray_cluster=nodes[0], tmp_path=tmp_path)
    ]
    here, through = (json.loads((folder / "profile.json").read_text()) for folder in folders)
    assert len({cell.pop("node") for cell in through}) == 2  # a size on each
    for local, remote in zip(here, through):
        assert [(row["name"], row["macs"]) for row in local["rows"]] == [
            (row["name"], row["macs"]) for row in remote["rows"]
        ]
        assert local.keys() - {"node"} == remote.keys()
        assert all(local[key] == remote[key] for key in ("batches", "model"))
    files = [{str(path.relative_to(folder)).split(".")[0] for path in folder.rglob("*")} for folder in folders]
    assert files[0] == files[1]


def slow_command(kind, folder, shapes):
    """Return a command with a model or a loss of the user's own, its jobs, the first or `slow` of which takes long, and
    a function of its log folder that gives the node of each job that ended."""
    log = folder / "log"
    if kind == "conformance":
        script = (ROOT / "losses/benchmark_reference.py").read_text().replace('name = "reference"', 'name = "slow"')
        (folder / "benchmark_slow.py").write_text(f"{script}\nimport time\n\ntime.sleep(10)\n")
        only = f"{folder}/benchmark_slow.py,torchaudio,reference"
        flags = ("--only", only, "--cases", "ragged,float64", "--device", "cpu", "--output", log)
        file, of_file, jobs = log / "conformance.json", "implementations", ["reference", "slow", "torchaudio"]
    else:
        (folder / "mymodel.py").write_text(OWN_MODEL)
        model = (f"--model={folder}/mymodel.py:Whole", "--arg=vocab_size=9", "--arg=wait=1.0", "--size=vocab_size=9")
        flags = (*model, *QUICK, "--sweep", "batch-size=1,2,3", "--shape-file", shapes, "--log-dir", log)
        file, of_file = log / "profile-sweep-batch-size" / "profile.json", None
        jobs = [f"batch-size {size}" for size in (1, 2, 3)]

    def kept():
        if not file.exists():
            return {}
        rows = json.loads(file.read_text())
        rows = rows[of_file] if of_file else [row for row in rows if row.get("rows")]
        return {row.get("size") or row["name"]: row["node"] for row in rows}

    return (f"{'conformance' if of_file else 'profile_model'}.py", *flags), jobs, kept


@needs_ray
@pytest.mark.parametrize("kind", ["profile", "conformance"])
def test_a_killed_command_resumes_and_a_dying_node_costs_nothing(nodes, tmp_path, tiny_shapes, kind):
    ray_cluster, known = nodes
    command, jobs, kept = slow_command(kind, tmp_path, tiny_shapes)
    process = started(*command, ray_cluster=ray_cluster)
    wait_for(kept, "job that ended")
    process.kill()
    process.communicate()
    before = kept()
    assert len(before) < len(jobs)
    process = started(*command, "--resume", ray_cluster=ray_cluster)
    wait_for(lambda: len(kept()) > len(before) or process.poll() is not None, "another job that ended")
    (last, *_) = [node for job, node in kept().items() if job not in before]
    dying = next(node for node in known if node["id"][:8] not in last)  # has the slow job, if it has not ended
    ray_cluster.kill(dying["raylet"])
    code, err = finished(process)
    assert code == 0, err
    assert sorted(kept()) == jobs and before.items() <= kept().items()
    assert not any(f" {job}:" in err for job in before)


@needs_ray
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_devices_of_another_kind_have_a_table_of_their_own(nodes, tmp_path, tiny_shapes):
    """Two nodes with all cores, and one with one of them."""
    ray_cluster, known = nodes
    log = tmp_path / "log"
    flags = ("--only", "torchaudio,reference", "--rounds", 1, "--passes", "correctness,timing", "--log-dir", log)
    small = ("--preset", "quick", "--scope", "step", "--shape-file", tiny_shapes, *CPU)
    with added(ray_cluster, cores=1) as single:
        code, err = finished(started("benchmark_all.py", *flags, *small, ray_cluster=ray_cluster))
    assert code == 0 and "on 2 devices: " in err and "on 1 device: " in err, err
    rows = logs.read([log], all_runs=True).rows
    nodes_of = {
        group[0].header.machine.cores: {row.environment.node.rpartition("/")[2] for row in group}
        for group in groups(rows)
    }
    assert nodes_of.pop(1) == {single} and len(nodes_of) == 1
    assert next(iter(nodes_of.values())) <= {node["id"][:8] for node in known}
    assert "Machines side by side" in (log / "report.html").read_text()


@needs_ray
def test_each_gpu_of_a_node_is_a_device_that_one_run_holds(nodes):
    ray_cluster, _ = nodes
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    with added(ray_cluster, gpus=2) as node, ExitStack() as holders:
        answers = []
        for _ in range(2):
            process = subprocess.Popen([str(PYTHON), "-c", HOLDER, ray_cluster.address], cwd=ROOT, **options)
            holders.enter_context(process)
            answers.append(json.loads(process.stdout.readline()))
    labels = [[label.partition(node)[2] for label, _ in answer] for answer in answers]
    assert labels == [["/gpu0", "/gpu1"]] * 2
    assert [reason for _, reason in answers[0]] == ["", ""]
    assert all("not free" in reason for _, reason in answers[1])


@needs_ray
def test_conformance_is_that_of_the_local_command(nodes, tmp_path):
    cases = ("--cases", "no-target,float64,repeated-labels", "--only", "torchaudio,reference", "--device", "cpu")
    folders = both("conformance.py", *cases, ray_cluster=nodes[0], tmp_path=tmp_path)
    here, through = (json.loads((log / "conformance.json").read_text())["implementations"] for log in folders)
    assert [row["cells"] for row in through] == [row["cells"] for row in here] and here[0]["cells"]
    assert len({row.pop("node") for row in through}) == 2
    assert [row.keys() for row in through] == [row.keys() for row in here]


@needs_ray
def test_a_pipeline_takes_its_stage_and_its_data_to_the_nodes(nodes, tmp_path, own_model):
    examples = {"id": numpy.array(["a", "b"]), "src_lengths": numpy.array([3, 5])}
    numpy.savez(tmp_path / "data.npz", src_tokens=numpy.ones((2, 5), numpy.float32), **examples)
    config, log = tmp_path / "short.yaml", tmp_path / "log"
    config.write_text(
        "general: {dataset_type: npy, dataset_path: data.npz, warmup: 0, repeats: 1}\n"
        "stage1: {factory: mymodel.py:Net}\n"
    )
    code, err = finished(started("pipeline_metrics.py", "--config", config, "--log-dir", log, ray_cluster=nodes[0]))
    assert code == 0, err
    assert {job: status for _, job, status, _ in results(log)} == {"a": "ok", "b": "ok"}


@needs_ray
def test_a_cluster_that_is_not_there_is_an_error(tmp_path):
    environment = {**os.environ, cluster.PYTHON: str(PYTHON)}
    flags = ("--only", "torchaudio", "--executor", "ray", "--ray-address", "127.0.0.1:9", "--log-dir", tmp_path / "log")
    assert_user_error(run("benchmark_all.py", *flags, env=environment), "--executor ray", "ray start --head")


@pytest.mark.parametrize(("python", "words"), [("none", "cannot be run"), (sys.executable, "has no Ray")])
def test_ray_needs_a_python_that_has_it(tmp_path, python, words):
    flags = ("--only", "torchaudio", "--executor", "ray", "--log-dir", tmp_path / "log")
    environment = {**os.environ, cluster.PYTHON: str(tmp_path / python)}
    assert_user_error(run("benchmark_all.py", *flags, env=environment), "--executor ray", tmp_path / python, words)


@pytest.fixture
def beside(own_model, monkeypatch):
    """The folder of a model of the user's own, from which Python can import."""
    monkeypatch.setenv("PYTHONPATH", str(own_model.parent))
    monkeypatch.syspath_prepend(str(own_model.parent))
    return own_model.parent


def test_a_task_takes_its_files_along(beside):
    """Files are found in nested values; what is installed stays."""
    weights = beside / "weights.bin"
    weights.write_bytes(b"1")
    installed = [
        "torchaudio.models:Emformer",
        "common.tools.inference.small:Generator",
        "hf:model",
        "a text",
        "",
        3,
        None,
    ]
    given = {"model": f"{beside}/mymodel.py:Net", "arguments": {"path": [str(weights)], "more": installed}}
    files = carried.files(given)
    assert files == (f"{beside}/mymodel.py", str(weights))
    placed = carried.placed(given, dict(zip(files, ("/there/mymodel.py", "/there/weights.bin"))))
    assert placed["model"] == "/there/mymodel.py:Net" and placed["arguments"]["path"] == ["/there/weights.bin"]
    assert placed["arguments"]["more"] == installed


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
        self.label, self.dies_with, self.dead, self.done = label, dies_with, False, []

    def execute(self, job, python, folder, settings, timeout, note):
        time.sleep(0.01)
        if self.dead:
            raise Lost(f"{self.label} died", began=False)
        if job == self.dies_with:
            self.dead = True
            raise Lost(f"{self.label} died", began=True)
        self.done.append(job)
        return []


def serve(lane, job):
    lane.execute(job, None, None, None, 0, None)


def test_work_of_a_lost_device_goes_to_another():
    dying, living = Simulated("a", dies_with=0), Simulated("b")
    spread.spread([dying, living], range(8), serve)
    assert dying.done == [] and sorted(living.done) == list(range(8))


def test_a_job_that_two_devices_died_with_is_an_error_and_the_others_run(capsys):
    jobs = [Job("torchaudio", "timing", number) for number in range(1, 9)]
    lanes, once_more, ends = [Simulated(label, dies_with=jobs[0]) for label in "abc"], spread.OnceMore(), {}

    def ask(lane, job):
        records = once_more.execute(job.name, lane, job, None, None, None, 0, None)
        assert job.name not in ends
        ends[job.name] = records[-1]["status"] if records else "ok"

    spread.spread(lanes, jobs, ask)
    assert ends == {**{job.name: "ok" for job in jobs}, jobs[0].name: "error"}
    assert sum(lane.dead for lane in lanes) == 2  # the third never had it
    assert capsys.readouterr().err.count("left out from here on") == 2


def test_devices_of_all_kinds_are_one_where_times_do_not_matter():
    def kind(device, count, **machine):
        lanes = [Simulated(f"{device}-{number}") for number in range(count)]
        return cluster.Kind(
            lanes, Description({"cpu": "made", "cores": 2, **machine}, device, {}, [], (None, None), {})
        )

    cpus, gpus = [kind("cpu", 2), kind("cpu", 1, cores=4)], [kind("cuda", 2, gpu="A"), kind("cuda:1", 1, gpu="B")]
    assert [len(cluster.together(kinds).lanes()) for kinds in (cpus, gpus)] == [3, 3]
    assert cluster.together(gpus).label == "A" and cpus[1].label == "made, 4 cores"
    with pytest.raises(UserError, match="--device cpu or --device cuda"):
        cluster.together([*cpus, *gpus])


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


def test_a_node_needs_no_package_in_the_python_of_ray():
    """A cluster of another version has its own Python, so nothing that runs on a node needs a package."""
    lacking = "import sys; sys.modules.update(dict.fromkeys(['msgspec', 'numpy', 'torch', 'jinja2', 'tqdm', 'yaml']))"
    code = f"{lacking}; import common.jobs.node, common.jobs.cascade, common.conformance.isolated"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).returncode == 0


def test_a_node_without_the_environment_of_a_task_says_so(monkeypatch, tmp_path):
    """Rather than run the task in another Python."""
    silero = environments.ENVIRONMENTS["silero"]
    monkeypatch.setattr(type(silero), "current", lambda self: self.name == "main")
    with pytest.raises(UserError, match="make setup ENVIRONMENTS=silero"):
        Node().describe(suite(), [], "cpu", False, "silero", ["main", "silero"], {})


def test_rounds_of_two_devices_are_not_paired(tmp_path):
    """A round on two devices is not paired; on one device it is."""
    chosen = settings.resolve({"preset": "quick"}, "cpu")

    def records(name, factor, nodes_of_rounds):
        rows = [Job(name, "correctness").status("ok", "", 1)]
        for number, node in enumerate(nodes_of_rounds, start=1):
            job = {"job": f"timing-{number}"}
            rows.append({"record": "environment", "device": "cpu", "node": node, **job})
            for batch in range(3):
                time_ns = 1e6 * factor * (1 + number)
                sample = {"scope": "step", "round": number, "batch": batch, "total_wall_ns": time_ns}
                rows.append({"record": "sample", **job, **sample})
            rows.append(Job(name, "timing", number).status("ok", "", 1))
        return rows

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
    name, gpu = nvml.from_smi()
    assert (name, gpu.uuid, gpu.sm_mhz, gpu.memory_mhz) == ("NVIDIA H200", "GPU-1", 1980, None)
    program.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert nvml.from_smi() is None
