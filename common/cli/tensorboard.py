"""`make tensorboard`: write ordinary TensorBoard summaries of a log folder, before the server starts."""

from __future__ import annotations

import sys
from typing import List, Optional

from common.analysis.folders import run_folders
from common.cli.parser import Parser
from common.core import flag_types
from common.core.errors import EXIT_OK, UserError
from common.core.guard import guarded
from common.core.paths import not_a_folder
from common.core.text import plain
from common.show.tensorboard import write_run, write_top

NOTES = (
    "Scalars, images and text work offline.  The PyTorch Profiler tab is torch-tb-profiler: no longer maintained "
    "(removed from pytorch/kineto in 2026), and its charts load from the internet.",
    "That tab reads a run folder once: start again to see traces that were written since.  `make trace-viewer NAME=k2` "
    "shows one trace, offline.",
)


def main(arguments: Optional[List[str]] = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("log_dir", type=flag_types.path, help="Folder of the runs.")
    log_dir = parser.parse_args(arguments).log_dir
    problem = not_a_folder(log_dir)
    if problem:
        raise UserError(f"{log_dir}: {problem}; run `make bench` first, or name one with LOGDIR=...")
    folders = list(run_folders(log_dir))
    written = 0
    for folder in folders:
        try:
            written += write_run(folder)
        except (OSError, UserError) as error:
            print(f"{folder}: no scalars: {plain(getattr(error, 'strerror', None) or error)}", file=sys.stderr)
    try:
        write_top(log_dir, folders)
    except OSError as error:
        print(f"{log_dir}: no table: {error.strerror or error}", file=sys.stderr)
    print(f"{len(folders)} run folders in {log_dir}, scalars of {written} written anew", file=sys.stderr)
    for note in NOTES:
        print(f"note: {note}", file=sys.stderr)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded("tensorboard", main))
