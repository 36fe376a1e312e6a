"""Damaged files, read by every command that reads such files, in this process: a fault takes a tenth of a second."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

from rnnt_bench.core import settings
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import ROOT
from rnnt_bench.records import run, schema, store

from commands import command, read, within
from faults import check, require
from faults.damage import mutated
from fixtures_runs import MIB, correctness, kineto, memory, span, steps, timing, traced_run, write_run
from fixtures_runs import allocation as allocated

#: Seconds that one command may take with one damaged file.
LONGEST = 60
#: Committed runs that are damaged beside the made ones.
COMMITTED = ROOT / "results" / "2026-11-27-amd-epyc-2-cores-tdt"
#: Commands that read a log folder: a new one is a line.  {log}: the damaged folder; {whole}: one that is not; {out}: an
#: empty folder.
READERS: tuple[tuple[str, ...], ...] = (
    ("summarize.py", "{log}"),
    ("summarize.py", "{log}", "--all-runs", "--format", "csv"),
    ("summarize.py", "{log}", "--all-runs", "--format", "markdown"),
    ("rnnt-bench", "report", "{log}", "--output", "{out}/report.html"),
    ("rnnt-bench", "compare", "{whole}", "{log}", "--fail-on-slower", "2%"),
    ("rnnt-bench", "compare", "{log}", "{whole}", "--format", "json"),
    ("rnnt-bench", "compare", "--in", "{log}", "torchaudio", "k2"),
)


class Hung(BaseException):
    """A command takes too long."""


@functools.lru_cache(maxsize=1)
def whole() -> tuple[Path, list[dict[str, Any]]]:
    """Return the undamaged log folder of this process, and its rows."""
    log = Path(tempfile.mkdtemp(prefix="whole-")) / "log"
    window = kineto([*steps([100, 300]), span("loss", 1010, 20), allocated(1, 4 * MIB), allocated(1200, 2 * MIB)])
    traced_run(log / "torchaudio-30", window, window, run_id="one run")
    write_run(log / "k2-30", "k2", run_id="one run")
    for name in ("001-fused-tdt", "004-reference-tdt"):
        shutil.copytree(COMMITTED / name, log / name)
    return log, rows_of(log)


def rows_of(log: Path) -> list[dict[str, Any]]:
    done = read(command("summarize.py", log, "--all-runs", "--format", "json"))
    check(done)
    return json.loads(done.stdout) if done.stdout else []


def told(row: dict[str, Any], log: Path) -> str:
    """Return what a row says of its own run alone."""
    keys = ("name", "status", "step_ms", "loss_ms", "loss_error", "peak_memory_mb")
    return json.dumps([str(row["log_dir"]).replace(str(log), ""), *(row.get(key) for key in keys)])


def logs(seed: int, folder: Path) -> None:
    """A damaged file of a log folder: whole records are read, other rows are as before, and each reader ends well."""
    chance, log = random.Random(f"logs {seed}"), folder / "log"
    before, rows = whole()
    shutil.copytree(before, log)
    file = chance.choice(sorted(path for path in log.rglob("*") if path.is_file()))
    content, kept = mutated(file.read_bytes(), chance)
    file.write_bytes(content)
    if file.suffix == ".jsonl" and content.split(b"\n", 1)[0] in kept:
        with contextlib.redirect_stderr(io.StringIO()):
            records = store.read(file)
        lost = [line[:80] for line in kept if schema.decoded(line) not in records]
        require(not lost, f"whole records were not read: {lost}")
    gone = {told(row, before) for row in rows} - {told(row, log) for row in rows_of(log)}
    require(all(file.parent.name in row for row in gone), f"no row any more: {gone}")
    (folder / "out").mkdir()
    for script, *words in chance.sample(READERS, 3):
        with within(LONGEST, Hung(f"{script} takes more than {LONGEST} s")):
            check(read(command(script, *(word.format(log=log, whole=before, out=folder / "out") for word in words))))
    left = [path.name for path in folder.rglob(".*")]
    require(not left, f"left: {left}")


JOBS = [correctness(), timing("timing-1", [10, 20], [1, 2]), timing("timing-2", [30, 40], [3, 4]), memory(8, 32, 16)]


def _measure(log: Path, resume: bool) -> Path:
    """Do the jobs of a run that are not done; return its file, the newest: what differs begins a run of its own."""
    wanted = settings.resolve({"preset": "quick", "rounds": 2, "passes": ("correctness", "timing", "memory")}, "cpu")
    with run.open_runs(["torchaudio"], wanted, log, resume) as run_of:
        for job in JOBS:
            if not run_of["torchaudio"].is_done(job[-1]["job"]):
                run_of["torchaudio"].add(job)
    return max(log.glob("*/results.jsonl"), key=lambda path: path.stat().st_mtime)


def resumed(seed: int, folder: Path) -> None:
    """A writer killed at any byte of a results.jsonl: --resume ends in the table of a run that was not."""
    log, chance = folder / "log", random.Random(f"resumed {seed}")
    file = _measure(log, resume=False)
    content, (row,) = file.read_bytes(), rows_of(log)
    if seed % 2:
        file.write_bytes(mutated(content, chance)[0])
    else:
        at = chance.randrange(content.index(b"\n") + 1, len(content) + 1)
        file.write_bytes(content[:at] + chance.choice([b"", b"", b"\x00" * 50]))
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            _measure(log, resume=True)
    except UserError as error:
        require(seed % 2 == 1 and "\n" not in str(error), f"more than a line: {error}")
    now = rows_of(log)
    require(seed % 2 == 1 or [told(each, log) for each in now] == [told(row, log)], f"another table: {now}, not {row}")
    require(not [*log.rglob(".*")], "a file is left")


#: By name: the faults, and how many of them `make faults` tries.
KINDS = {"logs": (logs, 600), "resumed": (resumed, 250)}
