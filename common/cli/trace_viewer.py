"""`make trace-viewer NAME=k2`: show one trace in Perfetto, offline, on loopback."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import List, Optional

from common.cli.parser import Parser
from common.core import flag_types
from common.core.errors import EXIT_OK
from common.core.guard import guarded
from common.report.trace_viewer import PORT, choose, serve


def main(arguments: Optional[List[str]] = None) -> int:
    parser = Parser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("--log-dir", type=flag_types.path, default=Path("log"))
    parser.add_argument("--window", type=flag_types.whole(1), default=1, help="which of the run's traces, from 1")
    parser.add_argument("--port", type=flag_types.whole(0, 65535), default=PORT, help="0: any free one")
    options = parser.parse_args(arguments)
    serve(choose(options.name, options.log_dir, options.window), options.port)
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(guarded("trace-viewer", main))
