"""The report on disk: `report.py` and the end of every benchmark run both come here.

What this Python lacks (plotly, matplotlib) the main environment has: the report is made there.  Without that one, it is
a user's mistake with a hint, never a traceback.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import List, Sequence, Tuple

from common.errors import UserError
from common.report.collect import Group, collect
from common.report.page import page
from common.results import sweeps
from common.results.exports import plain
from common.results.summary import Row, rows, searches
from common.results.sweeps import Sweep
from common.running import interpreters
from common.settings import ROOT

FILE_NAME = "report.html"


def read_groups(paths: Sequence[Path]) -> Tuple[List[Row], List[Group]]:
    """The newest run of each configuration under `paths`, as rows and as what the report shows of them."""
    found = rows(paths) + searches(paths)
    return found, collect(found)


def read(paths: Sequence[Path]) -> Tuple[List[Row], List[Group], List[Sweep]]:
    """What the report is of.  Raises UserError when there is nothing."""
    found, groups = read_groups(paths)
    swept = sweeps.find(paths)
    if not found and not swept:
        where = ", ".join(str(path) for path in paths) or "log/"
        raise UserError(f"no runs under {where}: run `make bench` first, or name a folder that holds runs or traces")
    return found, groups, swept


def lacks(*packages: str) -> bool:
    """Is one of `packages` missing from the running Python?"""
    return any(importlib.util.find_spec(package) is None for package in packages)


def plotly_library() -> str:
    """The JavaScript of plotly, from its Python package."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(
            f"no report: plotly is not installed in {sys.executable}; `make report` uses an environment that has it, "
            "or pip install plotly"
        ) from None
    return get_plotlyjs()


def write(groups: Sequence[Group], output: Path, swept: Sequence[Sweep] = (), paths: Sequence[Path] = ()) -> Path:
    """Write the page of the logs `paths` in one step: a reader, or a full disk, meets the old file or the new one.

    Raises UserError when it cannot be written.
    """
    library = plotly_library()
    temporary = output.parent / f".{output.name}.{os.getpid()}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        content = page(groups, output.parent, library, swept, paths)
        if output.exists() and not output.is_file():  # a pipe, say: to be written to, not replaced
            output.write_text(content, encoding="utf-8")
        else:
            temporary.write_text(content, encoding="utf-8")
            os.replace(temporary, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror or error}; name another file with --output") from error
    finally:
        with suppress(OSError):  # gone already, or never made
            temporary.unlink()
    return output


def after_run(log_dir: Path, quiet: bool) -> None:
    """Write ``log_dir/report.html`` and say so on stderr.  A failure is one warning there, and costs nothing else."""
    path = log_dir / FILE_NAME
    try:
        main = interpreters.other("main") if lacks("plotly") else None
        if main is not None:
            _write_in(main, log_dir, path)
        else:
            _, groups, swept = read([log_dir])
            write(groups, path, swept, [log_dir])
    except KeyboardInterrupt:
        print("warning: the report was interrupted: report.py writes it", file=sys.stderr)
    except UserError as error:
        print(f"warning: {plain(error)}", file=sys.stderr)
    except Exception as error:  # whatever it is, the table is on the screen and stays the result
        print(f"warning: no report: {type(error).__name__}: {plain(error)}", file=sys.stderr)
    else:
        if not quiet:
            print(f"report: {path}", file=sys.stderr)


def _write_in(python: Path, log_dir: Path, path: Path) -> None:
    """report.py under another Python.  Raises UserError with its last line when it leaves no page."""
    command = [str(python), str(ROOT / "report.py"), f"--output={path}", "--", str(log_dir)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.stdout != f"{path}\n":
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode} and no output"]
        raise UserError(f"no report: {python}: {said[-1].replace('report.py: error: ', '')}")
