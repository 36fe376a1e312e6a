"""`make mutants`: put one-line faults into what reads records, one at a time, and say which no test notices.

Each fault is put into a copy of the checkout, where the tests of the readers run until one fails.  One that survives
needs a test, or the line is needless.  The table has what readers once let pass, and lines on which a verdict rests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
#: Tests of the readers, those that end most faults first.
TESTS = (
    "answer",
    "compare",
    "machines",
    "control",
    "summarize",
    "statistics",
    "records",
    "runner",
    "rounds",
    "package",
)
#: Folder of common/ -> the tests that end most of its faults, which come before the others.
FIRST = {"records": ("records",), "jobs": ("runner", "rounds")}


class Fault(NamedTuple):
    file: str  # below common/
    old: str  # stands once in the file
    new: str


FAULTS = [
    Fault("analysis/ratios.py", "if min(map(len, quiet)) >= FEWEST_ROUNDS", "if min(map(len, quiet)) > FEWEST_ROUNDS"),
    Fault("analysis/ratios.py", "left = whole - by_mean - by_slope", "left = whole"),
    Fault("analysis/ratios.py", "student_t(confidence, count - 2)", "student_t(confidence, count - 1)"),
    Fault("analysis/ratios.py", "fmean(sides[1]) - fmean(sides[0])", "fmean(sides[0]) - fmean(sides[1])"),
    Fault("analysis/ratios.py", "\nFEWEST_CONTROLS = 3", "\nFEWEST_CONTROLS = 2"),
    Fault("analysis/ratios.py", "FEWEST_BATCHES = 10", "FEWEST_BATCHES = 2"),
    Fault("analysis/ratios.py", "math.fsum((pair.x - x) ** 2 for pair in pairs) or 1.0", "math.inf"),
    Fault("analysis/machines.py", "MARGIN = 0.15", "MARGIN = 1.5"),
    Fault("analysis/machines.py", "if mine.cpu != theirs.cpu or cores_differ:", "if cores_differ:"),
    Fault("analysis/machines.py", "if mine.cpu != theirs.cpu or cores_differ:", "if mine.cpu != theirs.cpu:"),
    Fault("analysis/machines.py", "if is_known(mine) and is_known(theirs):", "if is_known(mine) or is_known(theirs):"),
    Fault("analysis/groups.py", " and not machines.apart(first, row)", ""),
    Fault("analysis/groups.py", "*_other_batches(first, other), *machines", "*machines"),
    Fault("analysis/groups.py", ", *machines.apart(first, other)]", "]"),
    Fault("analysis/groups.py", "(shared and are_alike)", "shared"),
    Fault("analysis/verdict.py", "MEMORY_MARGIN = 0.02", "MEMORY_MARGIN = 0.5"),
    Fault("analysis/row.py", "BEYOND = 1.1", "BEYOND = 5.0"),
    Fault("analysis/doubts.py", "BUSY_LIMIT = 0.1", "BUSY_LIMIT = 0.9"),
    Fault("analysis/doubts.py", "SEPARATE = 1.3", "SEPARATE = 1.01"),
    Fault("analysis/doubts.py", "COARSE = 10", "COARSE = 1_000"),
    Fault("analysis/doubts.py", "LEAK_MB = 0.05", "LEAK_MB = 50"),
    Fault("analysis/standing.py", "\nFAR = 3.0", "\nFAR = 30.0"),
    Fault("analysis/standing.py", "BEYOND_LOAD = 10.0", "BEYOND_LOAD = 1_000.0"),
    Fault("analysis/comparison.py", "PROCESS_TOLERANCE = 0.1", "PROCESS_TOLERANCE = 1.0"),
    Fault("analysis/comparison.py", "ERROR_FACTOR, ERROR_FLOOR = 10.0, 1e-6", "ERROR_FACTOR, ERROR_FLOOR = 1e3, 1e-6"),
    Fault("analysis/comparison.py", "not time.doubt and time.low > 1 + allowed", "not time.doubt and time.low > 1"),
    Fault("analysis/comparison.py", "if time.lost:", "if False:"),
    Fault("analysis/comparison.py", 'doubt.withholds and doubt.kind != "uncontrolled"', 'doubt.kind == "beside load"'),
    Fault("analysis/times.py", "SLOW, FASTER = 0.8, 1.2", "SLOW, FASTER = 0.1, 9.0"),
    Fault("analysis/measured.py", '"{planned - done[name]} of', '"{planned} of'),
    Fault("analysis/measured.py", "SEVERITY.index(status) > SEVERITY", "SEVERITY.index(status) < SEVERITY"),
    Fault("analysis/measured.py", "error <= allowed for", "error <= 10 * allowed for"),
    Fault("records/store.py", "return 2 * loaded_ns > ", "return loaded_ns > "),
    Fault("records/store.py", 'if record.status == "ok" or before is None', "if True or before is None"),
    Fault("records/store.py", "if newer > schema.SCHEMA:", "if newer > schema.SCHEMA + 1:"),
    Fault("records/store.py", "number: times - 1", "number: times"),
    Fault("records/store.py", "stream.truncate(before)", "pass"),
    Fault("records/run.py", "if end is None:", "if True:"),
    Fault("records/run.py", 'self.failed or (end is not None and end.status != "ok")', "self.failed"),
    Fault("jobs/session.py", '"oom",\n            "killed by', '"error",\n            "killed by'),
    Fault("jobs/session.py", 'status = "oom" if aborted else "error"', 'status = "error" if aborted else "error"'),
    Fault("jobs/session.py", "if child.seconds() > timeout:", "if child.seconds() > 10 * timeout:"),
    Fault("jobs/job.py", "if number <= rounds_of(find(name).kind", "if 0 <= rounds_of(find(name).kind"),
    Fault("jobs/rounds.py", "LIMITS_EVERY = 3", "LIMITS_EVERY = 1"),
]


def copied(folder: Path) -> None:
    """Copy the files that git knows into a folder, as they are now, with a link to the environments."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(ROOT / name):
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    (folder / ".venv").symlink_to(ROOT / ".venv")


def survivors(faults: Sequence[Fault], tests: Sequence[str]) -> Iterator[Fault]:
    """Yield the faults that no test notices; print what ends the others.  Raises SystemExit where a test fails without
    any."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        folder = Path(scratch)
        copied(folder)
        line = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        for fault in [Fault("__init__.py", "", ""), *faults]:
            path = folder / "common" / fault.file
            right = path.read_text(encoding="utf-8")
            path.write_text(right.replace(fault.old, fault.new) if fault.old else right, encoding="utf-8")
            first = FIRST.get(path.parent.name, ())
            files = [f"tests/test_{name}.py" for name in sorted(tests, key=lambda name: name not in first)]
            done = subprocess.run([*line, *files], cwd=folder, capture_output=True, text=True)
            path.write_text(right, encoding="utf-8")
            failed = next((word for word in done.stdout.splitlines() if word.startswith(("FAILED", "ERROR"))), "")
            if not fault.old:
                if done.returncode:
                    raise SystemExit(f"a test fails without a fault: {failed or done.stdout[-500:]}")
                continue
            what = fault.new.strip() or f"without {fault.old}"
            print(f"{fault.file}: {what}: {failed[:150] or 'SURVIVES'}", flush=True)
            if done.returncode == 0:
                yield fault


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", default="", help="faults whose file or line has this word")
    parser.add_argument("--tests", default=",".join(TESTS), help="default: %(default)s")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in f"{fault.file} {fault.old}"]
    alive = list(survivors(faults, options.tests.split(",")))
    print(f"{len(alive)} of {len(faults)} faults survive")
    return 1 if alive else 0


if __name__ == "__main__":
    raise SystemExit(main())
