"""Damaged files, read by every command that reads such files, in this process: a fault takes a tenth of a second."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import random
import runpy
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, ContextManager, Dict, List, NamedTuple, Tuple

from commands import within
from fixtures_conformance import made
from fixtures_model_runs import write_inference, write_pipeline, write_profile
from fixtures_runs import correctness, memory, timing, traced_run, write_run
from fixtures_sweeps import write_sweep
from fixtures_traces import MIB, kineto, span, steps
from fixtures_traces import memory as allocated

from common.conformance import findings as conformance
from common.conformance import matrix as tables
from common.conformance.documents import Matrix
from common.conformance.records import Outcome
from common.core import settings
from common.core.errors import UserError
from common.core.paths import ROOT
from common.data import shapes
from common.records import documents, run, schema, store
from faults.invariants import CODES, Ended, check, require
from faults.mutations import mutated

#: Seconds that one command may take with one damaged file.
LONGEST = 60

#: Commands that read a log folder: a new one is a line.  {log}: the damaged folder; {whole}: one that is not; {out}: an
#: empty folder.
READERS: Tuple[Tuple[str, ...], ...] = (
    ("summarize.py", "{log}"),
    ("summarize.py", "{log}", "--all-runs", "--format", "csv"),
    ("summarize.py", "{log}", "--all-runs", "--format", "markdown"),
    ("report.py", "{log}", "--output", "{out}/report.html"),
    ("compare.py", "{whole}", "{log}", "--fail-on-slower", "2%"),
    ("compare.py", "{log}", "{whole}", "--format", "json"),
    ("compare.py", "--in", "{log}", "torchaudio", "k2"),
    ("common/cli/trace_viewer.py", "nothing-of-this-name", "--log-dir", "{log}"),
)


class Hung(BaseException):
    """A command takes too long."""


def in_time(name: str) -> ContextManager[None]:
    """Return a context that raises Hung where it takes more than LONGEST seconds.  name: of what hangs."""
    return within(LONGEST, Hung(f"{name} takes more than {LONGEST} s"))


def inside(script: str, *arguments: str) -> Ended:
    """Run a script of the suite in this process, as if it was started.  Whatever it raises but SystemExit goes on."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    argv = sys.argv
    sys.argv = [str(ROOT / script), *arguments]
    try:
        with in_time(script), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
                code: Any = 0
            except SystemExit as end:
                code = end.code
    finally:
        sys.argv = argv
    out.flush()
    err.flush()
    return Ended(code or 0, *(stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)))


def base(log: Path) -> Path:
    """A log folder with everything that this suite writes there."""
    window = kineto([*steps([100, 300]), span("loss", 1010, 20), allocated(1, 4 * MIB), allocated(1200, 2 * MIB)])
    traced_run(log / "torchaudio-30", window, window, run_id="one run")
    traced_run(log / "k2-30", window, name="k2", run_id="one run")
    (log / "k2-30" / "packed.11.pt.trace.json.gz").write_bytes(gzip.compress(window.encode()))
    write_run(log / "fast_rnnt-pruned-30", "fast_rnnt-pruned", exact=False, run_id="one run")
    write_sweep(log / "sweep-vocab-size", {"vocab_size": [500, 1000, 2000]}, ["torchaudio", "k2"])
    write_inference(log)
    write_pipeline(log, "pipeline-made", ["ASR", "TTS"], {"a": {"ASR": ([0.1], 9, 8), "TTS": ([0.2], 9, 8)}})
    write_profile(log)
    outcomes = {
        "ragged": Outcome("pass", loss_error=1e-7),
        "no-target": Outcome("differs", "loss 1", 0.5, 0.5, "print()"),
    }
    (log / "conformance.json").write_text(made(**outcomes).to_json())
    return log


class Whole(NamedTuple):
    """The undamaged log folder of this process, and its rows."""

    log: Path
    rows: List[Dict[str, Any]]


@functools.lru_cache(maxsize=1)
def whole() -> Whole:
    log = base(Path(tempfile.mkdtemp(prefix="whole-")) / "log")
    return Whole(log, _rows(log))


def _rows(log: Path) -> List[Dict[str, Any]]:
    done = inside("summarize.py", str(log), "--all-runs", "--format", "json")
    check(done, CODES)
    return json.loads(done.out) if done.out else []


def _told(row: Dict[str, Any], log: Path) -> Any:
    """Return what a row says of its own run alone."""
    keys = ("name", "status", "step_ms", "loss_ms", "loss_error", "peak_memory_mb", "sweep", "cell")
    return json.dumps([str(row["log_dir"]).replace(str(log), ""), *(row.get(key) for key in keys)])


def _damaged(seed: int, folder: Path, pattern: str) -> Tuple[Path, Path, List[bytes], random.Random]:
    """A copy of the log folder with one damaged file: (log, file, lines that are whole, the chance of this seed)."""
    chance, log = random.Random(f"{pattern} {seed}"), folder / "log"
    shutil.copytree(whole().log, log)
    file = chance.choice(sorted(log.glob(pattern)))
    content, kept = mutated(file.read_bytes(), chance)
    file.write_bytes(content)
    return log, file, kept, chance


def read_by(readers: Tuple[Tuple[str, ...], ...], log: Path, folder: Path) -> None:
    for script, *words in readers:
        out = folder / "out"
        out.mkdir(exist_ok=True)
        done = inside(script, *(word.format(log=log, whole=whole().log, out=out) for word in words))
        check(done, CODES)
        left = [path.name for path in [*out.iterdir(), *log.rglob("*")] if path.name.startswith(".")]
        require(not left, f"{script} left {left}")


def others_are_read(log: Path, file: Path) -> None:
    """Every row but those of the damaged file is as it was."""
    before, now = ({_told(row, at) for row in rows} for at, rows in ((whole().log, whole().rows), (log, _rows(log))))
    gone = [row for row in before - now if file.parent.name not in row]
    require(not gone, f"no row any more: {gone}")


def records(pattern: str, readers: int, seed: int, folder: Path) -> None:
    """A damaged file of records, read by so many of the READERS."""
    log, file, kept, chance = _damaged(seed, folder, pattern)
    _complete_records_are_read(file, kept)
    others_are_read(log, file)
    read_by(tuple(chance.sample(READERS, readers)), log, folder)


def _complete_records_are_read(file: Path, kept: List[bytes]) -> None:
    """Check a file whose first line, which says what it is, is whole."""
    first = file.read_bytes().split(b"\n", 1)[0]
    if first in kept and json.loads(first)["record"] in ("run", "sweep"):
        with contextlib.redirect_stderr(io.StringIO()):
            records = store.read(file)
        lost = [line[:80] for line in kept if schema.decoded(line) not in records]
        require(not lost, f"whole records were not read: {lost}")


def traces(seed: int, folder: Path) -> None:
    """A damaged trace, packed or not, beside records that are whole."""
    log, file, _, chance = _damaged(seed, folder, "*/*.pt.trace.json*")
    others_are_read(log, file)
    read_by(tuple(chance.sample(READERS, 2)), log, folder)


def model_runs(seed: int, folder: Path) -> None:
    """A damaged inference.jsonl, pipeline.jsonl or profile.json beside records that are whole."""
    log, file, _, chance = _damaged(seed, folder, "*/[ip][nir]*.json*")
    others_are_read(log, file)
    read_by((READERS[0], READERS[3], chance.choice(READERS)), log, folder)


def matrices(seed: int, folder: Path) -> None:
    """A damaged conformance.json, read by the report and by conformance.py --update."""
    log, file, _, _ = _damaged(seed, folder, "conformance.json")
    read_by((("report.py", "{log}", "--output", "{out}/report.html"),), log, folder)
    new = documents.read(whole().log / "conformance.json", Matrix)
    try:
        merged = conformance.updated(new, conformance.read(file, new.device, new.machine.cpu))
    except UserError as error:
        require("\n" not in str(error) and str(file) in str(error), f"unclear: {error}")
    else:
        require(bool(tables.markdown(merged) and merged.to_json()), "no matrix")


JOBS = [correctness(), timing("timing-1", [10, 20], [1, 2]), timing("timing-2", [30, 40], [3, 4]), memory(8, 32, 16)]


def _measure(log: Path, resume: bool) -> None:
    """Resume the jobs of a run that are not done."""
    wanted = settings.resolve({"preset": "quick", "rounds": 2, "passes": ("correctness", "timing", "memory")}, "cpu")
    with run.open_runs(["torchaudio"], wanted, log, resume) as run_of:
        for job in JOBS:
            if not run_of["torchaudio"].is_done(job[-1]["job"]):
                run_of["torchaudio"].add(job)


@functools.lru_cache(maxsize=1)
def _undisturbed() -> Tuple[bytes, Any]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder)
        _measure(log, resume=False)
        (file,) = log.glob("*/results.jsonl")
        (row,) = _rows(log)
        return file.read_bytes(), _told(row, log)


def killed(seed: int, folder: Path) -> None:
    """A writer that was killed at any byte of a results.jsonl; --resume ends in the table of a run that was not."""
    content, row = _undisturbed()
    log, chance = folder / "log", random.Random(f"killed {seed}")
    _measure(log, resume=False)
    (file,) = log.glob("*/results.jsonl")
    at = chance.randrange(content.index(b"\n") + 1, file.stat().st_size + 1)
    cut = file.read_bytes()[:at] + chance.choice([b"", b"", b"\x00" * 50])
    file.write_bytes(cut)
    with contextlib.redirect_stderr(io.StringIO()):
        before = store.read(file)
        _measure(log, resume=True)
    (standing,) = _rows(log)
    require(_told(standing, log) == row, f"another table than undisturbed: {_told(standing, log)}, not {row}")
    ended = {record.job for record in before if isinstance(record, schema.Status)}
    now = [record.job for record in store.read(file) if isinstance(record, schema.Status)]
    require(sorted(now) == sorted(job[-1]["job"] for job in JOBS), f"jobs {now}, of which {ended} were there")


def resumed(seed: int, folder: Path) -> None:
    """A damaged results.jsonl that is resumed: it goes on, or one line says why not."""
    log, chance = folder / "log", random.Random(f"resumed {seed}")
    _measure(log, resume=False)
    (file,) = log.glob("*/results.jsonl")
    content, _ = mutated(file.read_bytes(), chance)
    file.write_bytes(content)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            _measure(log, resume=True)
    except UserError as error:
        require("\n" not in str(error), f"more than a line: {error}")
    left = [path.name for path in log.rglob(".*")]
    require(not left, f"left: {left}")
    _rows(log)


def shape_files(seed: int, folder: Path) -> None:
    """A damaged shape file is refused in one line, or its rows are rows."""
    import torch

    chance, path = random.Random(f"shapes {seed}"), folder / "shapes.pt"
    torch.save(torch.tensor([[12 + 3 * i, 2 + i] for i in range(12)], dtype=torch.int32), path)
    path.write_bytes(mutated(path.read_bytes(), chance)[0])
    try:
        rows = shapes.load(path)
        require(rows.ndim == 2 and rows.shape[1] == 2 and (rows[:, 0] >= 1).all(), f"rows {rows}")
    except UserError as error:
        require("\n" not in str(error) and str(path) in str(error), f"unclear: {error}")


def manifests(seed: int, folder: Path) -> None:
    """A damaged manifest is refused in one line, or gives a shape file."""
    chance = random.Random(f"manifests {seed}")
    recordings = [
        {"id": f"r{n}", "sources": [], "sampling_rate": 16000, "num_samples": 16000, "duration": 1.0} for n in "ab"
    ]
    warnings = [
        {"id": f"s{n}", "recording_id": f"r{n}", "start": 0.0, "duration": 1.0, "channel": 0, "text": "a b"}
        for n in "ab"
    ]
    for name, entries in {"recordings": recordings, "supervisions": warnings}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    damaged = folder / chance.choice(["recordings.jsonl", "supervisions.jsonl"])
    damaged.write_bytes(mutated(damaged.read_bytes(), chance)[0])
    flags = ["--bpe-vocab-size", "6", "--output", str(folder / "shapes.pt")]
    done = inside("generate_shape_info.py", "--manifest", str(folder / "supervisions.jsonl"), *flags)
    check(done, CODES)
    require((folder / "shapes.pt").exists() == (done.code == 0), "a shape file only where it says so")


#: By name: what the damage is of, and how many of a thousand and some faults.
KINDS: Dict[str, Tuple[Callable[[int, Path], None], int]] = {
    "records": (functools.partial(records, "*/results.jsonl", 3), 400),
    "sweeps": (functools.partial(records, "*/sweep.jsonl", 2), 150),
    "traces": (traces, 150),
    "matrices": (matrices, 80),
    "models": (model_runs, 90),
    "killed": (killed, 150),
    "resumed": (resumed, 100),
    "shapes": (shape_files, 60),
    "manifests": (manifests, 40),
}
