"""How every command ends: its exit code, and one line for a mistake instead of a traceback.

Leaves out programming errors: those keep their traceback.
"""

from __future__ import annotations

import sys
from typing import Callable

from common.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, UserError
from common.results.exports import plain


def guarded(program: str, body: Callable[[], int], interrupted: str = "interrupted") -> int:
    """Run the body of the command `program`; returns its exit code.

    A user's mistake becomes one line on stderr and EXIT_USAGE, Ctrl-C the line `interrupted` and EXIT_INTERRUPTED, a
    closed pipe EXIT_FAILED.
    """
    try:
        return body()
    except UserError as error:
        print(f"{program}: error: {plain(error)}", file=sys.stderr)  # it may quote a file that anyone wrote
        return EXIT_USAGE
    except KeyboardInterrupt:
        print(f"{program}: {interrupted}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # Python would complain there when it cannot flush stdout
        return EXIT_FAILED
