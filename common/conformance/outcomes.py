"""Hold what check records: the outcome of each question of the table, a row for each
implementation."""

from __future__ import annotations

from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from rnnt_bench.core.text import finite

Result = Literal["pass", "differs", "refuses", "crashes", "timeout", "n/a", "error"]
RESULTS = get_args(Result)
PASS, DIFFERS, REFUSES, CRASHES, TIMEOUT, NOT_ASKED, ERROR = RESULTS
#: End of the message of a loss that passes because it is infinite as it must be, although its
#: gradient is NaN.
NAN_GRADIENT = "gradient up to nan"
#: Beginning of the message of a loss that passes because it is right in float64.
IMPRECISE = "imprecise: "
JUDGED = "judged"


class Outcome(Struct, frozen=True, omit_defaults=True):
    """Hold the result of a case for one implementation.

    message: one line; errors are relative, and None if they were not compared; one that is infinite
    or NaN becomes UNBOUNDED, since JSON has neither.
    """

    result: Result
    message: str = ""
    loss_error: float | None = None
    grad_error: float | None = None

    def __post_init__(self) -> None:
        for name in ("loss_error", "grad_error"):
            error = getattr(self, name)
            force_setattr(self, name, None if error is None else finite(error))


class Row(Struct, omit_defaults=True):
    """Hold the outcomes of an implementation by the name of the case, with the versions that it was
    judged with.

    status: "judged", or why it could not be, with a reason: "missing", "unsupported", or "error" if
      the suite failed;
    device_name: of the GPU, or the CPU's model name; simulator: in which kernels for CUDA ran on a
    CPU.
    """

    name: str
    kind: str
    status: str = JUDGED
    reason: str = ""
    version: str | None = None
    torch: str | None = None
    device_name: str | None = None
    simulator: str | None = None
    cells: dict[str, Outcome] = {}
