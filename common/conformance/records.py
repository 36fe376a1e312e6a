"""Define the cases and outcomes that conformance.json holds.  Does not import torch.

Results: pass (as asked), differs (a wrong answer), refuses (an error and no answer), crashes (the process died),
timeout (no answer in time), n/a (the case does not apply; the message says why), error (this suite failed).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Dict, List, Mapping, Optional

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

    def in_words(self) -> Asked:
        """Return the case without the fields of a subclass."""
        return Asked(self.name, self.title, self.asks, self.wrong, self.refusal)


@dataclass(frozen=True)
class Outcome:
    """The result of a case for one implementation.

    Errors are relative, and None if they were not compared; one that is infinite or NaN becomes UNBOUNDED, since JSON
    has neither.
    """

    result: str  # one of RESULTS
    message: str = ""  # one line
    loss_error: Optional[float] = None
    grad_error: Optional[float] = None
    reproduction: str = ""  # a few lines of code that show a wrong answer or a crash without this suite

    def __post_init__(self) -> None:
        if self.result not in RESULTS:
            raise ValueError(f"not a result: {self.result}")
        for name in ("loss_error", "grad_error"):
            error = getattr(self, name)
            object.__setattr__(self, name, None if error is None else finite(error))


#: End of the message of a loss that passes because it is infinite as it must be, although its gradient is NaN.
NAN_GRADIENT = "gradient nan"


@dataclass(frozen=True)
class Loaded:
    """Versions that an implementation was judged with."""

    version: Optional[str] = None  # of the package
    torch: Optional[str] = None
    python: Optional[str] = None
    device_name: Optional[str] = None  # of the GPU, or the CPU's model name
    cuda: Optional[str] = None  # of torch, on a GPU


@dataclass
class Judged:
    """The outcomes of an implementation, or why it could not be judged."""

    name: str
    kind: str
    status: str = "judged"  # else "missing", "unsupported", or "error" if the suite failed
    reason: str = ""  # why it could not be judged
    loaded: Loaded = field(default_factory=Loaded)
    simulator: Optional[str] = None  # in which kernels for CUDA ran on a CPU
    cells: Dict[str, Outcome] = field(default_factory=dict)  # by name of the case


@dataclass(frozen=True)
class Work:
    """The cases that one process judges."""

    script: str  # as Implementation has it
    variant: str  # of the script, "" for none
    device: str  # "cpu", "cuda" or "cuda:N"
    large: bool  # also ask for more than 2^31 elements
    cases: List[str]  # names


@dataclass(frozen=True)
class Line:
    """A line that the process of some Work writes for its parent; fields of other events keep their defaults.

    Events: "loaded" or "not-run", then for each case "start", "asked" before each call of the loss, and "outcome";
    "died" replaces it if the fork of the case was killed, "lost" follows it if no other case can be judged.
    """

    event: str
    case: str = ""  # of start, outcome and died
    loaded: Optional[Loaded] = None
    status: str = ""  # of not-run: "missing" or "unsupported"
    reason: str = ""  # of not-run
    reproduction: str = ""  # of asked: code that shows what happens if the process dies
    outcome: Optional[Outcome] = None
    signal: int = 0  # of died: what killed the fork
    oom: bool = False  # of died: whether the kernel killed a process for lack of memory meanwhile

    def to_json(self) -> Dict[str, Any]:
        """Return the fields that are not the default."""
        return {key: value for key, value in asdict(self).items() if value != getattr(Line, key, None)}

    @classmethod
    def from_json(cls, line: Mapping[str, Any]) -> Line:
        """Return the inverse of `to_json`."""
        parts = {"loaded": Loaded, "outcome": Outcome}
        return cls(**{key: parts[key](**value) if key in parts else value for key, value in line.items()})
