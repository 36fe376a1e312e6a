from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import has_words
from fixtures_runs import (
    COMMAND,
    one_row,
    read_rows,
    status,
    summarize,
    write_run,
)

# Which runs.


def test_newest_of_a_configuration_and_how_many_earlier(tmp_path):
    for day in (1, 3, 2):
        write_run(tmp_path / f"t.{day}", started=f"2026-01-0{day}T00:00:00+00:00")
    write_run(tmp_path / "other-size", batch_size=8, started="2025-01-01T00:00:00+00:00")
    write_run(tmp_path / "k2", name="k2", started="2025-01-01T00:00:00+00:00")
    runs = {Path(row["log_dir"]).name: row["earlier_runs"] for row in read_rows(tmp_path)}
    assert runs == {"t.3": 2, "other-size": 0, "k2": 0}
    assert has_words(summarize(tmp_path), "2 earlier runs", "not shown")
    assert len(read_rows(tmp_path, "--all-runs")) == 5
    assert "earlier" not in summarize(tmp_path, "--all-runs")


def test_a_run_that_was_missing_gives_way_to_one_that_is_not(tmp_path):
    write_run(tmp_path / "old", name="k2", jobs=[[status("correctness", "missing", "no k2")]])
    write_run(tmp_path / "new", name="k2", started="2026-02-01T00:00:00+00:00")
    assert one_row(tmp_path)["status"] == "ok"


def test_default_is_log_here_and_nothing_there_is_one_line(tmp_path):
    error = summarize(code=2, cwd=tmp_path)
    assert has_words(error, "summarize.py: error: ", "log/", "make bench") and error.count("\n") == 1
    write_run(tmp_path / "log" / "torchaudio-30")
    assert "torchaudio" in summarize(cwd=tmp_path)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["nowhere"], "nowhere: no such file or folder"),
        (["--format", "xml"], "xml"),
        (["."], "no runs under ."),
        (["log", "--output", "nowhere/x"], "cannot write nowhere/x"),
    ],
)
def test_bad_usage_is_one_clear_line(tmp_path, arguments, words):
    write_run(tmp_path / "log" / "a")
    (tmp_path / "empty").mkdir()
    cwd = tmp_path / "empty" if arguments == ["."] else tmp_path
    assert words in summarize(*arguments, code=2, cwd=cwd)


@pytest.mark.parametrize(
    "damage",
    [
        b"{",
        b"not json\n{}\n",
        b"\xff\xfe\n",
        b"",
        b'{"record":"run","schema":99}\n',
        b'{"record":"run","schema":"x"}\n',
        b'{"record":"status","job":"x"}\n',
        b'{"record":"run","schema":1,"name":"x","settings":[1]}\n',
        b'{"record":"run","schema":1}\n',
    ],
)
def test_records_that_cannot_be_read_are_an_error_row_beside_the_others(tmp_path, damage):
    write_run(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "results.jsonl").write_bytes(damage)
    bad, good = read_rows(tmp_path)
    assert good["status"] == "ok" and bad["status"] == "error" and bad["name"] == "bad"
    assert "results.jsonl" in bad["reason"]
    assert one_row(tmp_path / "bad", code=1)["reason"] == bad["reason"]
    assert "results.jsonl" in summarize(tmp_path / "bad", code=1)


def test_output_file_and_a_terminal_without_unicode(tmp_path):
    write_run(tmp_path / "a", name="mödel")
    assert summarize(tmp_path, "--output", tmp_path / "table.txt") == ""
    assert "mödel" in (tmp_path / "table.txt").read_text(encoding="utf-8")
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    assert "m\\xf6del" in summarize(tmp_path, environment=ascii_only)


def test_help_teaches_and_nothing_imports_torch():
    assert "profiled step us" in summarize("--help")
    code = "import sys, summarize; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=COMMAND.parent)


def test_a_reader_that_stops_early_is_no_error(tmp_path):
    write_run(tmp_path / "a")
    shown = subprocess.run(
        f"{sys.executable} {COMMAND} {tmp_path} | head -1", shell=True, capture_output=True, text=True
    )
    assert shown.stderr == "" and shown.stdout.startswith("batch size 30")


def test_csv_has_ten_columns_that_do_not_change_with_the_run(tmp_path):
    write_run(tmp_path / "k2", name="k2")
    short, whole = (summarize(tmp_path, "--format", "csv", *flags) for flags in ((), ("--all-columns",)))
    names = "name,kind,status,device,vocab_size,step_ms,step_ms_low,step_ms_high,loss_ms,peak_mb"
    assert short.splitlines()[0] == names and short.splitlines()[1].startswith("k2,exact,ok,")
    assert len(whole.splitlines()[0].split(",")) > 30
