"""What conformance.json holds: the cases, and what each implementation did in each.  No torch.

pass: as asked; differs: it answered, and the answer is wrong; refuses: it raised an error and gave no answer; crashes:
its process died; timeout: no answer in time; n/a: the case does not apply, with the reason; error: the suite failed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Mapping, Optional

from common.core.text import finite

RESULTS = ("pass", "differs", "refuses", "crashes", "timeout", "n/a", "error")
PASS, DIFFERS, REFUSES, CRASHES, TIMEOUT, NOT_APPLICABLE, ERROR = RESULTS


@dataclass(frozen=True)
class Asked:
    """A case in words, for readers.  name: for --cases; title: of its row; asks: what is asked and what is right;
    wrong: what an implementation that differs does, for its user ("a, b: <wrong>"); refusal: what one that raises an
    error does, "" where an error is fine.  Files of format 1 have no wrong and no refusal."""

    name: str
    title: str
    asks: str
    wrong: str = "the answer is not the transducer loss"
    refusal: str = ""

    def to_json(self) -> Dict[str, str]:
        return {key: getattr(self, key) for key in Asked.__dataclass_fields__}

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Asked:
        return cls(**{key: data[key] for key in Asked.__dataclass_fields__ if key in data})


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
        errors = {"loss_error": self.loss_error, "grad_error": self.grad_error}
        bounded = {key: None if error is None else finite(error) for key, error in errors.items()}
        return {**asdict(self), **bounded}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        return cls(**{key: data[key] for key in cls.__dataclass_fields__ if key in data})


#: How the message ends of a loss that passes, infinite as it must be, and leaves NaN in the gradient.
NAN_GRADIENT = "gradient nan"


@dataclass
class Judged:
    """status: "judged", or why not: "missing", "unsupported", or "error" when the suite failed, with the reason;
    about: version, torch, python, device_name (and of a GPU cuda); with --executor ray the `node` too; cells: outcome
    of each case by its name."""

    name: str
    kind: str
    status: str = "judged"
    reason: str = ""
    about: Dict[str, Any] = field(default_factory=dict)
    cells: Dict[str, Outcome] = field(default_factory=dict)

    def to_json(self) -> Dict[str, Any]:
        return {**vars(self), "cells": {name: outcome.to_json() for name, outcome in self.cells.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Judged:
        cells = {name: Outcome.from_json(outcome) for name, outcome in data["cells"].items()}
        return cls(**{**data, "cells": cells})
