"""generate_shape_info.py --executor ray: the same bytes as on one machine, on Ray nodes of this one, which are killed
for real; and what of it needs no Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter

import numpy as np
import pytest
from commands import ROOT, parent_of, wait_for
from test_ray import PYTHON, Simulated, fresh, needs_ray, nodes  # noqa: F401
from test_shape_shards import a_cut, model, processes_of, recording, run, supervision, write  # noqa: F401

from common.core.errors import EXIT_INTERRUPTED, UserError
from common.data import shapes
from common.data.sources import bpe, manifests, shards, wire
from common.data.sources.tabulate import Kept, Work
from common.jobs import cluster, spread
from common.jobs.executor import Lost
from common.jobs.node import Node

ENTRIES = 500


@pytest.fixture
def through(nodes, monkeypatch):  # noqa: F811
    """Flags of the cluster, and its nodes."""
    there, found = fresh(nodes)
    monkeypatch.setenv(cluster.PYTHON, str(PYTHON))
    return ("--executor", "ray", "--ray-address", there.address), there, found


def on_nodes(found):
    """Process numbers of what works there: below an actor, which is below the raylet."""
    raylets = {node["raylet"] for node in found}
    return {one for one in processes_of("common.jobs.node") if parent_of(parent_of(one)) in raylets}


def cuts(path, count):
    return write(path, map(a_cut, range(count)))


@needs_ray
def test_a_node_that_dies_costs_its_shards_alone(run, through, tmp_path, model):  # noqa: F811
    flags, there, found = through
    manifest = ("--manifest", cuts(tmp_path / "cuts.jsonl", 40 * ENTRIES), "--bpe-model", model)
    of_rows = ("--speed-perturbation", 0.9, 1, 1.1, "--min-duration", 2, "--features")
    whole = run.outputs(*manifest, *of_rows, "--jobs", 1, entries=ENTRIES)
    folder = tmp_path / "out.pt.part"
    killed = []

    def kill():
        wait_for(lambda: list(folder.glob("*.npz")), "finished shard")
        actors = set(map(parent_of, on_nodes(found[:1])))  # without a raylet they would go on for seconds
        for process in (found[0]["raylet"], *actors):
            there.kill(process)
        killed.append(len(list(folder.glob("*.npz"))))

    watching = threading.Thread(target=kill, daemon=True)
    watching.start()
    code, out, err, files = run(*manifest, *of_rows, "--jobs", 1, *flags, entries=ENTRIES)
    watching.join()
    assert code == 0 and files == whole and not folder.exists(), err
    assert killed[0] < 40, "it was killed too late"
    assert found[0]["id"][:8] in err and err.count("left out") == 1, err


@needs_ray
def test_ctrl_c_keeps_finished_shards_for_any_executor(run, through, tmp_path, model):  # noqa: F811
    flags, _, found = through
    path = cuts(tmp_path / "cuts.jsonl", 40 * ENTRIES)
    output, folder = tmp_path / "out.pt", tmp_path / "out.pt.part"
    given = ("--manifest", path, "--bpe-model", model)
    code = f"import sys; from common.data.sources import shards; shards.ENTRIES = {ENTRIES}; import generate_shape_info"
    command = [
        sys.executable,
        "-c",
        f"{code}; sys.exit(generate_shape_info.main())",
        *given,
        "--output",
        output,
        *flags,
    ]
    about = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    started = subprocess.Popen(list(map(str, command)), **about)
    try:
        wait_for(lambda: list(folder.glob("*.npz")) or started.poll() is not None, "finished shard")
        there = on_nodes(found)
        os.killpg(started.pid, signal.SIGINT)
        _, err = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == EXIT_INTERRUPTED and str(folder) in err, err
    assert there
    wait_for(lambda: not there & set(processes_of("common.jobs.node")), "end of the processes on the nodes", 20)
    code, out, _, _ = run(*given, "--jobs", 2, entries=ENTRIES)
    assert code == 0 and out.startswith("taken from ")
    rows, every = shapes.load(output), 4 * 17 * 3 // 4  # texts, durations; one text in four is empty
    assert len(rows) == 30 * ENTRIES and np.array_equal(rows[every:], rows[:-every])


@needs_ray
def test_the_first_wrong_entry_is_told_and_mended_anywhere(run, through, tmp_path, model):  # noqa: F811
    flags, _, _ = through
    entries = [supervision(number) for number in range(20) if number % 5]
    write(tmp_path / "x_recordings.jsonl", map(recording, range(20)))
    path = write(tmp_path / "x_supervisions.jsonl", entries)
    given = ("--manifest", path, "--bpe-model", model)
    whole = run.outputs(*given)
    for name in whole:
        (tmp_path / name).unlink()
    write(path, [*entries[:7], {**entries[7], "recording_id": "none"}, *entries[8:13], {"a": 1}, *entries[14:]])
    code, _, err, _ = run(*given, *flags)
    kept, error = err.splitlines()
    assert code == 2 and "entry 8" in error and int(kept.split()[0]) >= 6, err  # more where later shards came first
    write(path, entries)
    code, out, _, files = run(*given)
    assert code == 0 and files == whole and int(out.splitlines()[0].split()[-2]) >= 6, out


def works(tmp_path, model):  # noqa: F811
    """(work, shard) of cuts, of supervisions, and of utterances that were read to train a model."""
    import json

    timing = manifests.Timing(0.01, (0.9, 1.0))
    kept = Kept(4, shortest=2.0)
    write(tmp_path / "x_recordings.jsonl", map(recording, range(20)))
    of_cuts = cuts(tmp_path / "cuts.jsonl", 250)
    of_supervisions = write(tmp_path / "x.jsonl", [supervision(number % 20) for number in range(250)])
    for more in ((of_cuts,), (of_supervisions, tmp_path / "x_recordings.jsonl")):
        reader, entries = manifests.opened(more[0], timing, *more[1:])
        yield Work(reader, model, kept, (0.9, 1.0)), shards.Shard(list(entries))
    read = [reader.utterance(1, json.dumps(supervision(number)), Counter()) for number in range(20)]
    yield Work(None, model, kept, (0.9, 1.0)), shards.Shard(list(enumerate(read)))


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_part_made_on_a_node_is_the_same_part(tmp_path, model, jobs):  # noqa: F811
    for work, shard in works(tmp_path, bpe.load(model)):
        wire.save(tmp_path / "work.npz", work)
        request = {"shard": wire.packed(shard), "jobs": jobs, "files": {"work": {"path": str(tmp_path / "work.npz")}}}
        node = Node()
        for _ in range(2):
            expected, found = work(shard), wire.part(node.shard(request)["part"])
            assert all(np.array_equal(one, other) for one, other in zip(expected.rows, found.rows))
            assert len(expected.rows) == len(found.rows) == 2 and len(found.rows[0])
            assert expected.counts == found.counts and expected.counts.keys() == found.counts.keys()
            assert np.array_equal(expected.used, found.used)
            request["files"] = {}
        node.worker.processes.end()


def test_a_node_with_other_packages_makes_no_part(tmp_path, model, monkeypatch):  # noqa: F811
    import sentencepiece

    work, shard = next(works(tmp_path, bpe.load(model)))
    wire.save(tmp_path / "work.npz", work)
    monkeypatch.setattr(sentencepiece, "__version__", "0.0.1")
    files = {"work": {"path": str(tmp_path / "work.npz")}}
    answer = Node().shard({"shard": wire.packed(shard), "jobs": 1, "files": files})
    assert answer.keys() == {"unfit"} and "sentencepiece 0.0.1" in answer["unfit"]


def served(lane, item):
    lane.execute(item, None, None, None, 0, None)
    if item in (7, 12):
        raise UserError(f"item {item}")
    return item * 10


def test_results_come_as_they_are_done_and_items_as_lanes_are_free():
    lanes = [Simulated("a", dies_with=0), Simulated("b"), Simulated("c")] * 2
    taken = []
    items = (taken.append(item) or item for item in range(7))
    found = []
    for number, result in spread.as_they_come(lanes, items, served):
        assert result == number * 10 and len(taken) <= len(found) + len(lanes) + 1
        found.append(number)
    assert sorted(found) == list(range(7))


def test_the_first_error_is_raised_after_all_before_it():
    lanes, taken, found = [Simulated("a"), Simulated("b")] * 2, [], []
    with pytest.raises(UserError, match="item 7"):
        for number, _ in spread.as_they_come(lanes, map(lambda item: taken.append(item) or item, range(100)), served):
            found.append(number)
    assert set(range(7)) <= set(found) and len(taken) < 20


def test_without_a_node_it_ends():
    class Dead(Simulated):
        def execute(self, *_):
            raise Lost(f"{self.label} died", began=True)

    with pytest.raises(UserError, match="a died"):
        list(spread.as_they_come([Dead("a")] * 2, range(5), served))
