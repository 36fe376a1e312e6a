"""`make trace-viewer NAME=k2`: show one trace in Perfetto, offline, on loopback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, Optional

from common.cli.parser import Parser
from common.core import flag_types
from common.core.errors import EXIT_OK
from common.core.guard import guarded
from common.show.trace_viewer import PORT, choose, serve


def main(arguments: Optional[List[str]] = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("name", help="Name of a run or of an implementation.")
    add("--log-dir", type=flag_types.path, default=Path("log"), help="Folder of the runs. Default: log")
    add("--window", type=flag_types.whole(1), default=1, help="Number of the trace in the run, from 1. Default: 1")
    add("--port", type=flag_types.whole(0, 65535), default=PORT, help=f"Port; 0 takes any free one. Default: {PORT}")
    options = parser.parse_args(arguments)
    serve(choose(options.name, options.log_dir, options.window), options.port)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded("trace-viewer", main))
