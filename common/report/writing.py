"""The report on disk: `report.py` and the end of every benchmark run both come here.

Where the running Python lacks jinja2 or matplotlib, the main environment's Python makes the report.  Where that is not
there either, the error is one line with a hint.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Optional, Sequence, Tuple

from common.analysis import logs
from common.analysis.logs import Log
from common.core.errors import UserError
from common.core.paths import ROOT
from common.core.text import plain
from common.report.page import page
from common.setup import interpreters

FILE_NAME = "report.html"


def read(paths: Sequence[Path]) -> Log:
    """What the report is of: the newest run of each configuration.  Raises UserError when there is nothing."""
    log = logs.read(paths)
    if not log:
        where = ", ".join(str(path) for path in paths) or "log/"
        raise UserError(f"no runs under {where}: run `make bench` first, or name a folder that holds runs or traces")
    return log


def write(log: Log, output: Path, paths: Sequence[Path] = ()) -> Path:
    """Write the page of the logs `paths` in one step: a reader, or a full disk, meets the old file or the new one.
    Raises UserError."""
    temporary = output.parent / f".{output.name}.{os.getpid()}"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        content = page(log.groups, output.parent, swept=log.sweeps, paths=paths)
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


def after_run(log_dir: Path, quiet: bool, log: Optional[Log] = None) -> None:
    """Write ``log_dir/report.html`` and say so on stderr.  log: all that is in `log_dir`, where that was read already.
    A failure is one warning there and not fatal."""
    path = log_dir / FILE_NAME
    try:
        main = interpreters.other("main") if interpreters.lacks("jinja2") else None
        if main is not None:
            _, printed, said = run(main, log_dir, f"--output={path}")
            if printed != f"{path}\n":
                raise UserError(f"no report: {main}: {said.replace('report.py: error: ', '')}")
        else:
            write(log.newest() if log else read([log_dir]), path, [log_dir])
    except KeyboardInterrupt:
        print("warning: the report was interrupted: report.py writes it", file=sys.stderr)
    except UserError as error:
        print(f"warning: {plain(error)}", file=sys.stderr)
    except Exception as error:  # not fatal: the table is on the screen
        print(f"warning: no report: {type(error).__name__}: {plain(error)}", file=sys.stderr)
    else:
        if not quiet:
            print(f"report: {path}", file=sys.stderr)


def run(python: Path, log_dir: Path, *flags: str) -> Tuple[int, str, str]:
    """report.py under another Python: its exit code, what it printed, and the last line of its errors."""
    command = [str(python), str(ROOT / "report.py"), *flags, "--", str(log_dir)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode} and no output"]
    return done.returncode, done.stdout, said[-1]
