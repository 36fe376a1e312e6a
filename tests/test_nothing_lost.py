"""What a broken record, a strange file, a link or too little memory costs: itself, and nothing that was measured."""

from __future__ import annotations

import json
import os
import resource
import shutil

import pytest
from commands import assert_user_error, run, within
from fixtures_runs import header, memory, read_rows, records_of, timed, write_run

from common.core import files
from common.core.errors import UserError
from common.records import store
from common.traces import reader


def insert(path, index, *lines):
    """Put lines into a file before the line of this index."""
    old = path.read_text().splitlines()
    path.write_text("\n".join([*old[:index], *lines, *old[index:]]) + "\n")


BROKEN = {
    "nonsense": "no record",
    "nesting": '{"record":"run","name":' + "[" * 10**5 + "]" * 10**5 + "}",
    "a list for a text": '{"record":"status","job":["memory"],"status":"ok"}',
    "a number for a text": '{"record":"status","job":"memory","status":3}',
    "no time": '{"record":"sample","job":"timing-1","scope":"step","round":1,"batch":4,"total_wall_ns":-1}',
}


@pytest.mark.parametrize("line", BROKEN.values(), ids=BROKEN)
def test_a_broken_record_costs_itself_and_is_named(line, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "log" / name, name=name)
    before, path = read_rows(tmp_path / "log"), tmp_path / "log" / "a" / "results.jsonl"
    insert(path, 5, line)
    for words in (
        ["summarize.py", tmp_path / "log", "--format", "json"],
        ["rnnt-bench", "report", tmp_path / "log", "--output", tmp_path / "page.html"],
        ["rnnt-bench", "compare", "--in", tmp_path / "log", "a", "b"],
    ):
        done = run(*words)
        (warning,) = done.stderr.splitlines()
        assert done.returncode == 0 and warning.startswith("warning: ") and f"{path}, line 6" in warning, done.stderr
        assert words[0] != "summarize.py" or json.loads(done.stdout) == before


@pytest.mark.parametrize("field, value", [("started", 5), ("name", ["x"]), ("settings", {"l2": ["x"], "scopes": []})])
def test_a_run_without_its_first_record_costs_only_that_run(field, value, tmp_path):
    for name in ("a", "c"):
        write_run(tmp_path / "log" / name, name=name)
    path = tmp_path / "log" / "c" / "results.jsonl"
    right, wrong = (json.dumps(each, separators=(",", ":")) for each in (header("c")[field], value))
    path.write_text(path.read_text().replace(right, wrong, 1))
    assert {row["name"]: row["status"] for row in read_rows(tmp_path / "log")} == {"a": "ok", "c": "error"}


def test_an_addition_after_one_that_could_not_be_undone_costs_no_line_but_its_own(tmp_path):
    """Its writer was killed between the two."""
    path = write_run(tmp_path / "a") / "results.jsonl"
    whole, half = path.read_text(), '{"record":"environment","job":"mem'
    path.write_text(whole + half)
    store.append(path, [{}])
    assert path.read_text() == f"{whole}{half}\n{{}}\n"
    assert read_rows(tmp_path)[0]["status"] == "ok"


def test_an_attempt_that_lost_its_status_is_not_mixed_with_the_next(tmp_path):
    path = write_run(tmp_path / "a") / "results.jsonl"
    peaks = memory(1000)
    peaks[-1]["status"] = 5
    insert(path, 1, *(json.dumps(line) for line in peaks))
    (row,) = read_rows(tmp_path)
    assert row["memory"]["step"]["torch_allocated_mb"] == 32


@pytest.mark.parametrize("spoiled, code", [("new", 1), ("baseline", 0)])
def test_times_that_are_no_numbers_on_the_new_side_do_not_pass(spoiled, code, tmp_path):
    for side in ("baseline", "new"):
        timed(tmp_path / side, "torchaudio", [10, 11, 12])
    path = tmp_path / spoiled / "torchaudio" / "results.jsonl"
    records = records_of(path)
    for record in records:
        if record["record"] == "sample":
            record["total_wall_ns"] = float("nan")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    done = run("rnnt-bench", "compare", tmp_path / "baseline", tmp_path / "new", "--fail-on-slower", "2%")
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert ("no times" in done.stderr) is bool(code)


@pytest.mark.parametrize("read", [store.read, reader.read, files.read_text])
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "device"):
        with within(10), pytest.raises(UserError, match="pipe|device|not a file"):
            read(tmp_path / name)


def test_a_folder_of_a_stranger_costs_its_own_row(tmp_path):
    write_run(tmp_path / "torchaudio-30", "torchaudio")
    for name in ("stranger", "large"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "stranger" / "results.jsonl")
    with (tmp_path / "large" / "results.jsonl").open("wb") as stream:
        stream.truncate(2**29)
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))}
    done = run("summarize.py", tmp_path, "--format", "json", **limit)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert rows["torchaudio"]["status"] == "ok" and "Traceback" not in done.stderr
    assert "not a file" in rows["stranger"]["reason"] and "memory" in rows["large"]["reason"]


def test_links_are_not_written_through(tmp_path, tiny_shapes):
    """A link in the place of a file of a log folder, and of the page."""
    flags = "--in-place --preset quick --limits false --passes correctness --resume".split()
    victim, log = tmp_path / "victim", tmp_path / "log"
    flags += ["--shape-file", tiny_shapes, "--log-dir", log]
    assert run("benchmark_all.py", "--only", "reference", *flags[:-5], *flags[-4:]).returncode == 0
    (folder,) = log.glob("reference-*")
    (log / "report.html").unlink(missing_ok=True)
    for name in (".measuring.lock", "results.jsonl"):
        victim.write_bytes((folder / "results.jsonl").read_bytes())
        before = victim.read_bytes()
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(log, tmp_path / "copy")
        link = tmp_path / "copy" / folder.name / name
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        flags[-1] = tmp_path / "copy"
        assert_user_error(run("benchmark_all.py", "--only", "reference", *flags), link, "is a link")
        assert victim.read_bytes() == before
    (log / "report.html").symlink_to(victim)
    assert run("rnnt-bench", "report", log, "--output", log / "report.html").returncode == 0
    assert victim.read_bytes() == before and not (log / "report.html").is_symlink()
