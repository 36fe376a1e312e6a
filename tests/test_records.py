"""Records on disk: checked when read, readable whatever happened to their writer; nothing measured is lost."""

from __future__ import annotations

import fcntl
import json
import os
import re
import runpy

import pytest
from rnnt_bench.core import files, settings
from rnnt_bench.core.errors import UserError
from rnnt_bench.records import schema, store
from rnnt_bench.records.run import continued_run, earlier_runs, open_runs
from rnnt_bench.traces import reader

from commands import ROOT, run, within
from fixtures_model_runs import costs, write_pipeline
from fixtures_runs import change, header, memory, read_rows, records_of, timed, timing, write_records, write_run

RUN = {"record": "run", "schema": schema.SCHEMA, "name": "x"}
ENDED = {"record": "status", "job": "trace", "status": "ok"}


def status(job, word):
    return {"record": "status", "job": job, "status": word}


def test_every_record_of_the_committed_results_is_known_and_loses_nothing():
    """A record that is read and written again has all of its fields but those that repeat others."""
    written = 0
    for path in set(ROOT.glob("results/**/*.jsonl")) - set(ROOT.glob("results/*-fused-table/parts.jsonl")):
        typed = store.read(path)
        raw = records_of(path)
        assert len(typed) == len(raw)
        for mine, theirs in zip(map(schema.as_written, typed), raw):
            for key, value in mine.items():
                if not isinstance(value, (dict, list)):
                    assert theirs.get(key, value) == value, (path, key)
                    written += 1
    assert written > 10000


@pytest.mark.parametrize(
    "text, words",
    [
        ('[1]\n{"record":"x"}\n', "line 1"),
        ('{"record":"run","schema":99}\n', "newer version"),
        ('{"record":"run","name":"x","settings":{"vocab_size":"large"}}\n', r"line 1.*`\$\.settings\.vocab_size`"),
        ('{"record":"run","name":"x","machine":{"cores":-2}}\n', r"line 1.*`\$\.machine\.cores`"),
        ('{"record":' * 10**5 + "\n", "line 1.*recursion"),
    ],
)
def test_what_is_no_result_file_is_said(tmp_path, text, words):
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(UserError, match=words) as raised:
        store.read_run(tmp_path)
    assert str(tmp_path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["0", "NaN", "1e999", "1e300", '"1"'])
def test_times_that_no_clock_gave_are_left_out(tmp_path, value):
    path = write_records(tmp_path, [header("k2"), *timing("timing-1", [1.5], [])])
    path.write_text(path.read_text().replace('"total_wall_ns":1500000', f'"total_wall_ns":{value}'))
    assert not [record for record in store.read(path) if isinstance(record, schema.Sample) and not record.warmup]


def test_what_newer_versions_add_is_ignored_and_what_older_lack_has_its_default(tmp_path):
    newer = [{**RUN, "colour": ["red"]}, {"record": "profile", "encoder": {}}, {**ENDED, "watts": 3}]
    first, end = store.read(write_records(tmp_path, newer))
    assert (first.name, end.status) == ("x", "ok")
    first, limits, end = store.read(write_records(tmp_path, [RUN, {"record": "limits"}, ENDED]))
    assert (first.kind, first.machine.cores, limits.streams, end.reason, end.round) == ("exact", None, [], "", None)


def test_a_folder_that_is_gone_while_it_is_searched_has_no_records(tmp_path, monkeypatch):
    path, gone, scandir = write_records(tmp_path / "a", [RUN]), tmp_path / "gone", os.scandir
    gone.mkdir()

    def removing(folder):
        if str(folder) == str(gone):
            gone.rmdir()
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", removing)
    assert store.files_named(schema.FILE_NAME, tmp_path) == [path] and not gone.exists()


def test_a_command_line_may_have_bytes_that_are_no_text(tmp_path):
    path = write_records(tmp_path, [{**RUN, "command": ["summarize.py", "caf\udce9"]}])
    assert store.read(path)[0].command[1] == "caf\udce9"


def test_a_job_that_ran_again_counts_once(tmp_path):
    first = [{"record": "stop", "job": "timing-1", "scope": "loss"}, status("timing-1", "interrupted")]
    again = [{"record": "stop", "job": "timing-1", "scope": "step"}, status("timing-1", "ok")]
    failed = [{"record": "stop", "job": "timing-1", "scope": "loss"}, status("timing-1", "error")]
    died = [{"record": "stop", "job": "timing-1", "scope": "loss"}]
    other = [{"record": "stop", "job": "trace", "scope": "loss"}]
    records = [RUN, *first, *again, *failed, *died, *other]
    latest = store.latest_jobs(store.read(write_records(tmp_path, records)))
    lines_of = {job: [schema.as_written(line) for line in lines] for job, lines in latest.items()}
    assert lines_of == {"timing-1": again, "trace": other}


def test_rounds_that_were_measured_again_are_counted():
    ends = [("ok", 1), ("error", 1), ("ok", 2), ("ok", 1), ("error", 2), ("ok", 1)]
    lines = [schema.Status(status=end, pass_name="timing", round=number) for end, number in ends]
    assert store.repeated(lines) == {1: 2}


def test_the_schema_tells_every_kind_and_every_field():
    """The docs need it: each field has a type and words; every part that is named is there too."""
    rows = {each.name: each for each in runpy.run_path(str(ROOT / "docs" / "_records.py"))["describe"]()}
    assert {"run", "environment", "sample", "status", "Batch"} <= set(rows) and len(rows) >= 20
    assert all(each.text and each.fields for each in rows.values())
    named = {word for each in rows.values() for field in each.fields for word in re.findall(r"\b[A-Z]\w+", field.type)}
    assert named <= set(rows)


def test_a_run_holds_no_samples_and_knows_what_is_done(tmp_path):
    job = timing("timing-1", [1.0] * 5000, [])
    with open_runs(["torchaudio"], settings.resolve({}, "cpu"), tmp_path, False) as run_of:
        run = run_of["torchaudio"]
        run.add([schema.typed(line) for line in job])
        assert run.is_done("timing-1") and len(run.records) == 3
        assert len(store.read(run.path)) == 1 + len(job)
    with open_runs(["torchaudio"], settings.resolve({}, "cpu"), tmp_path, True) as run_of:
        assert run_of["torchaudio"].is_done("timing-1") and len(run_of["torchaudio"].records) == 3


HEADS = {"results.jsonl": {**RUN, "settings": {}}, "tool.jsonl": {"record": "tool", "tool": "profile", "name": "x"}}


@pytest.mark.parametrize("name", HEADS)
def test_resume_leaves_a_file_of_a_newer_version_as_it_is(name, tmp_path):
    lines = [{**HEADS[name], "schema": schema.SCHEMA + 1}, *({"record": "end", "job": "a"} for _ in range(20))]
    (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    content = (tmp_path / name).read_bytes()
    with pytest.raises(UserError, match="newer version"):
        continued_run(tmp_path / name)
    assert (tmp_path / name).read_bytes() == content and os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", HEADS)
def test_resume_keeps_a_last_line_that_lacks_only_its_newline(name, tmp_path):
    lines = [{**HEADS[name], "schema": schema.SCHEMA}, status("timing-1", "ok"), status("timing-2", "ok")]
    (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    run = continued_run(tmp_path / name)
    assert run.is_done("timing-1") and run.is_done("timing-2")
    run.add([schema.Status(job="timing-3", status="ok")])
    run.close()
    assert records_of(tmp_path / name) == [*lines, {"record": "status", "job": "timing-3", "status": "ok"}]


def test_what_a_killed_writer_left_beside_a_file_is_removed_and_no_other_file(tmp_path):
    names = (".rnnt-bench-0123456789ab.tmp", ".rnnt-bench-ba9876543210.tmp", ".0123456789ab.tmp", "mine.tmp")
    for name in names:
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (0, 0))
    with open(tmp_path / names[1]) as held:  # of a process that writes
        fcntl.flock(held, fcntl.LOCK_EX)
        files.write_whole((tmp_path / "page.html", "text"), advice="")
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], "page.html"}


@pytest.mark.parametrize("kind", ["losses", "tool", "resume"])
def test_a_run_of_a_clock_that_was_ahead_is_told(kind, tmp_path, capsys):
    for name, year in (("ahead", 2100), ("later", 2026)):
        started = f"{year}-11-22T10:00:00+00:00"
        if kind == "tool":
            write_pipeline(tmp_path / name, "made", ["a"], {("one", "a"): costs([1.0])}, started=started)
        else:
            write_run(tmp_path / name, started=started)
    if kind == "resume":
        earlier_runs(tmp_path, "results.jsonl", schema.Header)
        told = capsys.readouterr().err
    else:
        told = run("summarize.py", tmp_path).stderr
    (line,) = [line for line in told.splitlines() if "clock" in line]
    assert "ahead" in line and "2100" in line and line.startswith("warning: ")


def insert(path, index, *lines):
    """Put lines into a file before the line of this index."""
    old = path.read_text().splitlines()
    path.write_text("\n".join([*old[:index], *lines, *old[index:]]) + "\n")


@pytest.mark.parametrize(
    "line, words",
    [
        ("no record", ""),
        ('{"record":"run","name":' + "[" * 10**5 + "]" * 10**5 + "}", "recursion"),
        ('{"record":' * 10**5, "recursion"),
        ('{"record":"status","job":["memory"],"status":"ok"}', "`$.job`"),
    ],
    ids=["nonsense", "nesting", "cut", "a list for a text"],
)
def test_a_broken_record_costs_itself_and_is_named(line, words, tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "log" / name, name=name)
    before, path = read_rows(tmp_path / "log"), tmp_path / "log" / "a" / "results.jsonl"
    insert(path, 5, line)
    for command in (
        ["summarize.py", tmp_path / "log", "--format", "json"],
        ["rnnt-bench", "report", tmp_path / "log", "--output", tmp_path / "page.html"],
        ["rnnt-bench", "compare", "--in", tmp_path / "log", "a", "b"],
    ):
        done = run(*command)
        (warning,) = done.stderr.splitlines()
        assert done.returncode == 0 and warning.startswith("warning: ")
        assert f"{path}, line 6" in warning and words in warning
        assert command[0] != "summarize.py" or json.loads(done.stdout) == before


def test_an_addition_after_one_that_could_not_be_undone_costs_no_line_but_its_own(tmp_path):
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
    change(tmp_path / spoiled / "torchaudio", "sample", total_wall_ns=float("nan"))
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


@pytest.mark.parametrize("name", [".measuring.lock", "results.jsonl"])
def test_links_are_not_written_through(name, tmp_path):
    victim, log, chosen = tmp_path / "victim", tmp_path / "log", settings.resolve({}, "cpu")
    with open_runs(["torchaudio"], chosen, log, False) as run_of:
        folder = run_of["torchaudio"].folder
    content = (folder / "results.jsonl").read_bytes()
    victim.write_bytes(content)
    (folder / name).unlink(missing_ok=True)
    for link in (folder / name, log / "report.html"):
        link.symlink_to(victim)
    with pytest.raises(UserError, match=f"{name}.* is a link"), open_runs(["torchaudio"], chosen, log, True):
        pass
    assert run("rnnt-bench", "report", log, "--output", log / "report.html").returncode == 0
    assert victim.read_bytes() == content and not (log / "report.html").is_symlink()
