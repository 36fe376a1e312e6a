"""What one implementation did in one case, as plain data.  No torch: the matrix is made from these alone.

pass: as asked; differs: it answered, and the answer is wrong; refuses: it raised an error before it answered; crashes:
its process died; timeout: it was ended; n/a: the case does not concern it, with why; error: the suite itself failed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Dict, Mapping, Optional

PASS, DIFFERS, REFUSES, CRASHES, TIMEOUT, NOT_APPLICABLE, ERROR = RESULTS = (
    "pass",
    "differs",
    "refuses",
    "crashes",
    "timeout",
    "n/a",
    "error",
)

#: JSON has no infinity: an error that is not finite is written as this.
INFINITE = 1e300


@dataclass(frozen=True)
class Outcome:
    """result: one of RESULTS; message: one line; loss_error, grad_error: relative, where they were compared;
    reproduction: code of a few lines that shows a wrong answer or a crash without this suite."""

    result: str
    message: str = ""
    loss_error: Optional[float] = None
    grad_error: Optional[float] = None
    reproduction: str = ""

    def __post_init__(self) -> None:
        if self.result not in RESULTS:
            raise ValueError(f"not a result: {self.result}")

    def to_json(self) -> Dict[str, Any]:
        data = asdict(self)
        for key in ("loss_error", "grad_error"):
            if data[key] is not None:
                data[key] = min(data[key], INFINITE)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        return cls(**{key: data[key] for key in cls.__dataclass_fields__ if key in data})
