"""Define the cases and outcomes that conformance.json holds.  Does not import torch.

Results: pass (as asked), differs (a wrong answer), refuses (an error and no answer), crashes (the process died),
timeout (no answer in time), n/a (the case does not apply; the message says why), error (this suite failed).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, Mapping, Optional

from common.core.text import finite

RESULTS = ("pass", "differs", "refuses", "crashes", "timeout", "n/a", "error")
PASS, DIFFERS, REFUSES, CRASHES, TIMEOUT, NOT_APPLICABLE, ERROR = RESULTS


@dataclass(frozen=True)
class Asked:
    """A case in words.  Files of format 1 have no `wrong` and no `refusal`."""

    name: str  # as --cases takes it
    title: str  # of the row in the matrix
    asks: str  # what is asked and what is right
    wrong: str = "the answer is not the transducer loss"  # what an implementation that differs does
    refusal: str = ""  # what an implementation that raises an error does; "": an error is fine

    def to_json(self) -> Dict[str, str]:
        """Return these fields, without those of subclasses."""
        return {key: getattr(self, key) for key in Asked.__dataclass_fields__}

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> Asked:
        """Return the case of a document; unknown fields are ignored."""
        return cls(**{key: data[key] for key in Asked.__dataclass_fields__ if key in data})


@dataclass(frozen=True)
class Outcome:
    """The result of a case for one implementation."""

    result: str  # one of RESULTS
    message: str = ""  # one line
    loss_error: Optional[float] = None  # relative; None if it was not compared
    grad_error: Optional[float] = None  # relative; None if it was not compared
    reproduction: str = ""  # a few lines of code that show a wrong answer or a crash without this suite

    def __post_init__(self) -> None:
        if self.result not in RESULTS:
            raise ValueError(f"not a result: {self.result}")

    def to_json(self) -> Dict[str, Any]:
        """Return the fields, with infinite and NaN errors as large numbers, which JSON has not."""
        errors = {"loss_error": self.loss_error, "grad_error": self.grad_error}
        bounded = {key: None if error is None else finite(error) for key, error in errors.items()}
        return {**asdict(self), **bounded}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Return the outcome of a document; unknown fields are ignored."""
        return cls(**{key: data[key] for key in cls.__dataclass_fields__ if key in data})


#: End of the message of a loss that passes because it is infinite as it must be, although its gradient is NaN.
NAN_GRADIENT = "gradient nan"


@dataclass
class Judged:
    """The outcomes of an implementation, or why it could not be judged."""

    name: str
    kind: str
    status: str = "judged"  # else "missing", "unsupported", or "error" if the suite failed
    reason: str = ""  # why it could not be judged
    #: version, torch, python, device_name; on a GPU also cuda, and with --executor ray the node.
    about: Dict[str, Any] = field(default_factory=dict)
    cells: Dict[str, Outcome] = field(default_factory=dict)  # by name of the case

    def to_json(self) -> Dict[str, Any]:
        """Return all fields as JSON holds them."""
        return {**vars(self), "cells": {name: outcome.to_json() for name, outcome in self.cells.items()}}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Judged:
        """Return the inverse of `to_json`."""
        cells = {name: Outcome.from_json(outcome) for name, outcome in data["cells"].items()}
        return cls(**{**data, "cells": cells})
