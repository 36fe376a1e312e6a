"""The report on disk: `report.py` and the end of every benchmark run both come here.

What is missing from this Python (plotly, matplotlib) is a user's mistake with a hint, never a traceback.
"""

from __future__ import annotations

import os
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
    try:
        _, groups, swept = read([log_dir])
        path = write(groups, log_dir / FILE_NAME, swept, [log_dir])
    except KeyboardInterrupt:
        print("warning: the report was interrupted: report.py writes it", file=sys.stderr)
    except UserError as error:
        print(f"warning: {plain(error)}", file=sys.stderr)
    except Exception as error:  # whatever it is, the table is on the screen and stays the result
        print(f"warning: no report: {type(error).__name__}: {plain(error)}", file=sys.stderr)
    else:
        if not quiet:
            print(f"report: {path}", file=sys.stderr)
