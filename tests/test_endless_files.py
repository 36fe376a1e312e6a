"""Files that never end or never answer (pipes, devices), that are too large, and too little memory: one line each."""

from __future__ import annotations

import json
import os
import resource

import pytest
from commands import assert_user_error, run, within
from fixtures_runs import traced_run, write_run
from fixtures_traces import kineto, steps

from common.conformance.documents import Matrix
from common.core import files
from common.core.errors import UserError
from common.core.guard import guarded
from common.data import provenance
from common.records import documents, store
from common.system.locks import Claim
from common.traces import reader

#: What stands where a file is looked for.
STRANGE = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "silent": lambda path: path.symlink_to("/dev/random"),
}


@pytest.fixture(params=STRANGE)
def strange(request, tmp_path):
    """Return a function that puts something strange at a path."""
    return lambda path: STRANGE[request.param](path) or path


READERS = {
    "records": store.read,
    "document": lambda path: documents.read(path, Matrix),
    "trace": reader.read,
    "text": files.read_text,
}


@pytest.mark.parametrize("kind", READERS)
def test_it_is_refused(kind, strange, tmp_path):
    path = strange(tmp_path / "file")
    with within(10), pytest.raises(UserError, match="pipe|device|not a file"):
        READERS[kind](path)


def test_where_a_reason_is_not_asked_for_it_is_as_if_absent(strange, tmp_path):
    strange(tmp_path / "shapes.json")
    with within(10):
        assert store.first(tmp_path / "shapes.json") is None
        assert provenance.part(tmp_path / "shapes.pt", "options") == {}


def test_a_lock_is_no_pipe(tmp_path):
    os.mkfifo(tmp_path / ".lock")
    with within(10), pytest.raises(OSError, match="pipe"):
        Claim(tmp_path / ".lock")


def test_a_folder_of_a_stranger_costs_its_own_row(strange, tmp_path):
    write_run(tmp_path / "torchaudio-30", "torchaudio")
    (tmp_path / "stranger").mkdir()
    strange(tmp_path / "stranger" / "results.jsonl")
    done = run("summarize.py", tmp_path, "--format", "json", timeout=60)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["torchaudio"]["status"] == "ok"
    assert rows["stranger"]["status"] == "error" and "not a file" in rows["stranger"]["reason"]


@pytest.mark.parametrize("name", ["conformance.json", "profile.json", "sweep.jsonl", "inference.jsonl", "x.png"])
def test_the_report_of_the_others_is_written(name, tmp_path):
    traced_run(tmp_path / "torchaudio-30", kineto(steps([100, 300])))
    (tmp_path / "stranger").mkdir()
    os.mkfifo(tmp_path / "stranger" / name)
    done = run("report.py", tmp_path, "--output", tmp_path / "report.html", timeout=120)
    assert done.returncode == 0, done.stderr
    assert "torchaudio" in (tmp_path / "report.html").read_text()


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "results.jsonl").open("wb") as stream:
        stream.truncate(files.LARGEST + 1)
    with pytest.raises(UserError, match="more than"):
        store.read(tmp_path)


def test_no_memory_for_a_file_costs_its_own_row(tmp_path):
    write_run(tmp_path / "torchaudio-30", "torchaudio")
    (tmp_path / "large").mkdir()
    with (tmp_path / "large" / "results.jsonl").open("wb") as stream:
        stream.truncate(2**29)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))}
    done = run("summarize.py", tmp_path, "--format", "json", **limit)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["torchaudio"]["status"] == "ok" and "memory" in rows["large"]["reason"]


def test_no_memory_at_all_is_one_line(capsys):
    def body():
        raise MemoryError

    assert guarded("tool.py", body) == 2
    assert capsys.readouterr().err.startswith("tool.py: error: not enough memory")


def test_a_list_of_examples_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "examples.tsv")
    flags = ["--dataset-type", "raw", "--dataset-path", tmp_path / "examples.tsv", "--log-dir", tmp_path / "log"]
    assert_user_error(run("pipeline_metrics.py", *flags, timeout=120), "examples.tsv")


def test_a_profile_without_what_has_a_default_is_told(tmp_path):
    from fixtures_model_runs import write_profile

    write_profile(tmp_path)
    (path,) = tmp_path.rglob("profile.json")
    sizes = json.loads(path.read_text())
    for size in sizes:
        size.pop("options", None)
        size.pop("not_counted", None)
    path.write_text(json.dumps(sizes))
    done = run("summarize.py", tmp_path, timeout=60)
    assert "Traceback" not in done.stderr and done.returncode in (0, 1), done.stderr
