"""Write the report to disk, for `rnnt-bench report` and for the end of every benchmark run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Optional, Sequence

from common.analysis import logs
from common.analysis.logs import Log
from common.core.errors import UserError
from common.core.files import another, make_folder, write_whole
from common.core.paths import ROOT
from common.core.text import plain
from common.setup import interpreters
from common.show.page import page

FILE_NAME = "report.html"


def write(log: Log, output: Path, paths: Sequence[Path] = ()) -> Path:
    """Write the page of the logs `paths`, whole or not at all.  Raises UserError."""
    advice = another("--output")
    make_folder(output.parent, advice)
    write_whole(advice, (output, page(log.groups, output.parent, swept=log.sweeps, paths=paths)))
    return output


def after_run(log_dir: Path, quiet: bool, log: Optional[Log] = None) -> None:
    """Write ``log_dir/report.html`` and say so on stderr.  log: the content of `log_dir`, where it was read already.

    Where the running Python lacks jinja2, the main environment's makes the page.  A failure is one warning on stderr
    and not fatal.
    """
    path = log_dir / FILE_NAME
    try:
        main = interpreters.other("main") if interpreters.lacks("jinja2") else None
        if main is not None:
            command = [str(main), str(ROOT / "rnnt-bench"), "report", f"--output={path}", "--", str(log_dir)]
            ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
            if ended.stdout != f"{path}\n":
                lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode} and no output"]
                raise UserError(f"no report: {main}: {lines[-1]}")
        else:
            write(log.newest() if log else logs.read_any([log_dir]), path, [log_dir])
    except KeyboardInterrupt:
        print("warning: the report was interrupted: `rnnt-bench report` writes it", file=sys.stderr)
    except UserError as error:
        print(f"warning: {plain(error)}", file=sys.stderr)
    except Exception as error:  # not fatal: the table is on the screen
        print(f"warning: no report: {type(error).__name__}: {plain(error)}", file=sys.stderr)
    else:
        if not quiet:
            print(f"report: {path}", file=sys.stderr)
