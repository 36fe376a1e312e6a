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
from benchmarks.cluster_speed import sleeping
from common.analysis import logs
from common.analysis.groups import groups
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


@contextmanager
def added(there, **more):
    """Another node, until the end of the block; its name in labels."""
    node = there.add(**more)
    try:
        yield node["id"][:8]
    finally:
        there.kill(node["raylet"])


def copied(checkout):
    """What measures, in a checkout of its own."""
    for part in ("common", "requirements", "fused_transducer"):
        shutil.copytree(ROOT / part, checkout / part, ignore=shutil.ignore_patterns("__pycache__"))
    for script in ROOT.glob("benchmark_*.py"):
        shutil.copy(script, checkout)
    return checkout


def broken(there, folder):
    """`added`: a node whose set-up fails."""
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_NO_INDEX": "1"}
    return added(there, TRANSDUCER_CHECKOUT=str(copied(folder / "checkout")), **nowhere)


@needs_ray
def test_a_node_whose_set_up_fails_is_left_out(nodes, tmp_path):
    there, _ = fresh(nodes)
    with broken(there, tmp_path) as bad:
        process = session(there.address, 1, 0.1, tmp_path / "log")
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"{bad} is left out" in said, said
    assert not any(bad in node for of in devices(tmp_path / "log").values() for node in of.values())
    assert len(ended(tmp_path / "log")) == 4


@needs_ray
def test_a_node_of_another_revision_is_left_out(nodes, tmp_path):
    there, found = fresh(nodes)
    other = copied(tmp_path / "checkout")
    for shared in (".venv", ".build"):
        (other / shared).symlink_to((ROOT / shared).resolve())
    with (other / "common" / "jobs" / "worker.py").open("a") as stream:
        stream.write("# of another revision\n")
    with added(there, TRANSDUCER_CHECKOUT=str(other)) as bad:
        process = session(there.address, 1, 0.1, tmp_path / "log")
        _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert f"{bad} is left out" in said and "bring both to one revision" in said, said
    used = {node.rpartition("/")[2] for of in devices(tmp_path / "log").values() for node in of.values()}
    assert used <= {node["id"][:8] for node in found} and len(ended(tmp_path / "log")) == 4


def may_mount():
    """May we have mounts of our own?"""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def blind(folder):
    """A cluster of one node, which sees nothing of `folder`."""
    with local_cluster.started(Path(PYTHON), 0) as there:
        start_node = (
            "start",
            f"--address={there.address}",
            "--num-cpus=1",
            "--object-store-memory=83886080",
            "--block",
        )
        hide = ("unshare", "-rm", "sh", "-c", f'mount -t tmpfs none "{folder}" && exec "$@"', "sh")
        command = [*hide, str(PYTHON), "-m", "ray.scripts.scripts", *start_node, "--disable-usage-stats"]
        environment = {**os.environ, "TRANSDUCER_CHECKOUT": str(ROOT)}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert any("Ray runtime started" in line for line in process.stdout)
                yield there
            finally:
                process.terminate()


@needs_ray
def test_traces_and_an_own_loss_come_through(nodes, tmp_path, tiny_shapes):
    """A loss of the user's own, his shape file, and the trace files of the pass: none of them is on the node, which
    does not see their folder where that can be."""
    with blind(tmp_path) if may_mount() else nullcontext(fresh(nodes)[0]) as there:
        own_loss_comes_through(there, tmp_path, tiny_shapes)


def own_loss_comes_through(there, tmp_path, tiny_shapes):
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
QUICK = ("--steps", 1, "--warmup", 0, "--trace-steps", 1, "--threads", 1, "--limits", "false", "--device", "cpu")


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
    sizes = ("--sweep", "batch-size=1,2", "--shape-file", tiny_shapes)
    folders = [
        log / "profile-sweep-batch-size"
        for _, log in both("profile_model.py", *flags, *QUICK, *sizes, there=there, tmp_path=tmp_path)
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


KINDS = ("inference", "profile", "conformance")


def command(kind, folder, shapes, wait):
    """(a command of the user's own model or loss, the jobs it has), the first of which takes `wait` longer than the
    others; of "inference" all do."""
    log = folder / "log"
    if kind == "conformance":
        script = (ROOT / "benchmark_reference.py").read_text().replace('name = "reference"', 'name = "slow"')
        (folder / "benchmark_slow.py").write_text(f"{script}\nimport time\n\ntime.sleep({10 * wait})\n")
        only = f"{folder}/benchmark_slow.py,torchaudio,reference"
        flags = ("--only", only, "--cases", "ragged,float64", "--device", "cpu", "--output", log)
        return ("conformance.py", *flags), ["reference", "slow", "torchaudio"]
    (folder / "mymodel.py").write_text(OWN_MODEL)
    if kind == "profile":
        flags = (f"--model={folder}/mymodel.py:Whole", "--arg=vocab_size=9", f"--arg=wait={wait}", "--loss=torchaudio")
        sizes = ("--size=vocab_size=9", "--sweep", "batch-size=1,2,3", "--shape-file", shapes, "--log-dir", log)
        return ("profile_model.py", *flags, *QUICK, *sizes), [f"batch-size {size}" for size in (1, 2, 3)]
    (folder / "slow.yaml").write_text(
        f"pretrained_model: {{source: mymodel.py:Net, sample_rate: 100, arguments: {{wait: {wait / 5}}}}}\n"
        "profiling_dimensions: {audio_mockup_secs: [1, 2, 3, 4], batch_sizes: [1]}\n"
    )
    flags = (folder / "slow.yaml", "--max-samples", 1, "--log-dir", log)
    return ("profile_inference.py", *flags), [f"{seconds}s-x1" for seconds in (1, 2, 3, 4)]


def kept(log):
    """{job that ended well: its node} of the log of a `command`; each once."""
    found = []
    for path in log.glob("*/inference.jsonl"):
        records = store.read(path)
        of = {record.job: record.node for record in records if isinstance(record, Environment)}
        found += [(one.job, of[one.job]) for one in records if isinstance(one, Status) and one.status == "ok"]
    for path in log.glob("*/profile.json"):
        found += [(cell["size"], cell["node"]) for cell in json.loads(path.read_text()) if cell.get("rows")]
    for path in log.glob("conformance.json"):
        found += [(row["name"], row["node"]) for row in json.loads(path.read_text())["implementations"]]
    assert len(found) == len(dict(found))
    return dict(found)


@needs_ray
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_node_that_dies_costs_no_size_and_no_row(nodes, tmp_path, tiny_shapes, kind):
    there, found = fresh(nodes)
    (script, *flags), jobs = command(kind, tmp_path, tiny_shapes, 1.0)
    process = started(script, *flags, there=there)
    wait_for(lambda: kept(tmp_path / "log"), "job that ended")
    (node, *_) = kept(tmp_path / "log").values()
    dying = next(one for one in found if one["id"][:8] not in node)  # has the slow job
    there.kill(dying["raylet"])
    code, _, said = finished(process)
    assert code == 0 and f"{dying['id'][:8]} died" in said, said
    assert sorted(kept(tmp_path / "log")) == jobs and set(kept(tmp_path / "log").values()) == {node}


@needs_ray
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_command_resumes(nodes, tmp_path, tiny_shapes, kind):
    there, _ = fresh(nodes)
    (script, *flags), jobs = command(kind, tmp_path, tiny_shapes, 1.0)
    process = started(script, *flags, there=there)
    wait_for(lambda: kept(tmp_path / "log"), "job that ended")
    process.kill()
    process.communicate()
    before = kept(tmp_path / "log")
    assert len(before) < len(jobs)
    code, _, said = finished(started(script, *flags, "--resume", there=there))
    assert code == 0, said
    after = kept(tmp_path / "log")
    assert sorted(after) == jobs and before.items() <= after.items()
    assert not any(f" {job}:" in said for job in before) and all(f" {job}:" in said for job in after.keys() - before)


@needs_ray
def test_a_node_whose_set_up_fails_has_no_part_in_any_command(nodes, tmp_path, tiny_shapes):
    there, _ = fresh(nodes)
    with broken(there, tmp_path) as bad:
        for kind in KINDS:
            (tmp_path / kind).mkdir()
            (script, *flags), jobs = command(kind, tmp_path / kind, tiny_shapes, 0.0)
            code, _, said = finished(started(script, *flags, there=there))
            assert code == 0 and f"{bad} is left out" in said, said
            of = kept(tmp_path / kind / "log")
            assert sorted(of) == jobs and not any(bad in node for node in of.values())


@needs_ray
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_devices_of_another_kind_have_a_table_of_their_own(nodes, tmp_path, tiny_shapes):
    """Two nodes with all cores, and one with one of them."""
    there, found = fresh(nodes)
    log = tmp_path / "log"
    small = ("--preset", "quick", "--device", "cpu", "--scope", "step", "--threads", 1, "--shape-file", tiny_shapes)
    flags = ("--only", "torchaudio,reference", "--rounds", 1, "--passes", "correctness,timing", "--log-dir", log)
    with added(there, cores=1) as single:
        code, _, said = finished(started("benchmark_all.py", *flags, *small, there=there))
    assert code == 0 and "on 2 devices: " in said and "on 1 device: " in said, said
    rows = logs.read([log], all_runs=True).rows
    apart = {
        row.header.machine.cores: {row.environment.node.rpartition("/")[2] for row in of}
        for of in groups(rows)
        for row in of
    }
    assert apart.pop(1) == {single} and len(apart) == 1
    assert next(iter(apart.values())) <= {node["id"][:8] for node in found}
    assert "Machines side by side" in (log / "report.html").read_text()


#: Holds the GPUs of a cluster until its input ends; first says which there are.
HOLDER = "import sys; from common.jobs import gateway; gateway.BUSY_SECONDS = 5; gateway.main(sys.argv[1], 'cuda')"


@needs_ray
def test_each_gpu_of_a_node_is_a_device_that_one_run_holds(nodes):
    there, _ = fresh(nodes)
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    with added(there, gpus=2) as node, ExitStack() as holders:
        told = []
        for _ in range(2):
            process = subprocess.Popen([str(PYTHON), "-c", HOLDER, there.address], cwd=ROOT, **how)
            holders.enter_context(process)
            told.append(json.loads(process.stdout.readline())["devices"])
    assert [[one["label"].partition(node)[2] for one in of] for of in told] == [["/gpu0", "/gpu1"]] * 2
    assert [one["reason"] for one in told[0]] == ["", ""]
    assert all("not free" in one["reason"] for one in told[1])


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
    one, other = Simulated("a", dies_with=0), Simulated("b")
    spread.spread([one, other], range(8), serve)
    assert one.done == [] and sorted(other.done) == list(range(8))


def test_a_job_that_two_devices_died_with_is_an_error_and_the_others_run(capsys):
    jobs = [Job("torchaudio", "timing", number) for number in range(1, 9)]
    lanes, once_more, ends = [Simulated(label, dies_with=jobs[0]) for label in "abc"], spread.OnceMore(), {}

    def ask(lane, job):
        found = once_more.execute(job.name, lane, job, None, None, None, 0, None)
        assert job.name not in ends
        ends[job.name] = found[-1]["status"] if found else "ok"

    spread.spread(lanes, jobs, ask)
    assert ends == {**{job.name: "ok" for job in jobs}, jobs[0].name: "error"}
    assert sum(lane.dead for lane in lanes) == 2  # the third never had it
    assert capsys.readouterr().err.count("left out from here on") == 2


def test_devices_of_all_kinds_are_one_where_times_do_not_matter():
    def kind(device, count, **machine):
        lanes = [Simulated(f"{device}-{place}") for place in range(count)]
        return cluster.Kind(lanes, {"device": device, "machine": {"cpu": "made", "cores": 2, **machine}})

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


def test_a_node_without_the_environment_of_a_task_says_so(monkeypatch, tmp_path):
    """Rather than run the task in another Python."""
    from common.jobs.node import Node

    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    request = {"names": [], "device": "cpu", "controls": False, "environment": "silero", "files": {}}
    assert "make setup ENVIRONMENTS=silero" in Node().describe(request)["reason"]


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
