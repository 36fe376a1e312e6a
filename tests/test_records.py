"""Records on disk: whole or not at all, and readable after whatever happened to their writer."""

from __future__ import annotations

import os
import resource
import signal
import stat
import subprocess
import sys

import pytest
from commands import ROOT

from common.errors import UserError
from common.results import records

RUN = {"record": "run", "schema": records.SCHEMA, "name": "x"}


def status(job, word):
    return {"record": "status", "job": job, "status": word}


def test_what_is_written_is_read(tmp_path):
    path = records.write(tmp_path / "new" / "folder", [RUN, {"record": "sample", "total_wall_ns": 12345678901234}])
    assert path == tmp_path / "new" / "folder" / "results.jsonl"
    assert (
        records.read(path) == records.read(path.parent) == [RUN, {"record": "sample", "total_wall_ns": 12345678901234}]
    )
    assert os.listdir(path.parent) == ["results.jsonl"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_failed_write_leaves_the_old_file(tmp_path):
    """A limit on file size stands in for a full disk: both end the write half-way."""
    records.write(tmp_path, [RUN])
    code = (
        "import sys, pathlib; from common.results import records; from common.errors import UserError\n"
        "try: records.write(pathlib.Path(sys.argv[1]), [{'record': 'run', 'filler': 'x' * 10000}])\n"
        "except UserError as error: print(error)"
    )

    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, preexec_fn=limit, capture_output=True, text=True
    )
    assert "cannot write" in done.stdout and "--log-dir" in done.stdout
    assert records.read(tmp_path) == [RUN] and os.listdir(tmp_path) == ["results.jsonl"]


def test_a_line_cut_short_at_the_end_is_left_out(tmp_path):
    path = records.write(tmp_path, [RUN, status("trace", "ok")])
    path.write_text(path.read_text() + '{"record":"sam')
    assert records.read(path) == [RUN, status("trace", "ok")]


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"record":"run","schema":1}\nnonsense\n{"record":"x"}\n', "line 2"),
        ('[1]\n{"record":"x"}\n', "line 1"),
        ('{"record":"run","schema":99}\n', "newer version"),
    ],
)
def test_what_is_no_result_file_is_said(tmp_path, text, words):
    (tmp_path / "results.jsonl").write_text(text)
    with pytest.raises(UserError, match=words):
        records.read(tmp_path)


def test_nothing_there(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        records.read(tmp_path / "results.jsonl")


def test_not_a_number_is_refused(tmp_path):
    with pytest.raises(ValueError):
        records.write(tmp_path, [{"record": "run", "value": float("nan")}])
    assert os.listdir(tmp_path) == []


def test_a_job_that_ran_again_counts_once():
    first = [{"record": "sample", "job": "timing-1", "n": 1}, status("timing-1", "interrupted")]
    again = [{"record": "sample", "job": "timing-1", "n": 2}, status("timing-1", "ok")]
    died = [{"record": "sample", "job": "timing-1", "n": 3}]
    other = [{"record": "sample", "job": "trace", "n": 4}]
    found = records.latest_jobs([RUN, *first, *again, *died, *other])
    assert found == {"timing-1": again, "trace": other}
