"""Define the conformance cases: what every implementation is asked, in words and as data.  Does not import torch.

A new case is one entry here, and a new function in checks.py if none of those there fits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Literal, Mapping, Optional, Tuple, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from rnnt_bench.core.text import finite

Result = Literal["pass", "differs", "refuses", "crashes", "timeout", "n/a", "error"]
RESULTS = get_args(Result)
PASS, DIFFERS, REFUSES, CRASHES, TIMEOUT, NOT_ASKED, ERROR = RESULTS
#: End of the message of a loss that passes because it is infinite as it must be, although its gradient is NaN.
NAN_GRADIENT = "gradient nan"
JUDGED = "judged"


class Outcome(Struct, frozen=True, omit_defaults=True):
    """The result of a case for one implementation.

    message: one line; errors are relative, and None if they were not compared; one that is infinite or NaN becomes
    UNBOUNDED, since JSON has neither.
    """

    result: Result
    message: str = ""
    loss_error: Optional[float] = None
    grad_error: Optional[float] = None

    def __post_init__(self) -> None:
        for name in ("loss_error", "grad_error"):
            error = getattr(self, name)
            force_setattr(self, name, None if error is None else finite(error))


class Row(Struct, omit_defaults=True):
    """The outcomes of an implementation by the name of the case, with the versions that it was judged with.

    status: "judged", or why it could not be, with a reason: "missing", "unsupported", or "error" if the suite failed;
    device_name: of the GPU, or the CPU's model name; simulator: in which kernels for CUDA ran on a CPU.
    """

    name: str
    kind: str
    status: str = JUDGED
    reason: str = ""
    version: Optional[str] = None
    torch: Optional[str] = None
    device_name: Optional[str] = None
    simulator: Optional[str] = None
    cells: Dict[str, Outcome] = {}


@dataclass(frozen=True)
class Case:
    """A case in words, with the check that judges it.

    name: as --cases takes it; title: of the row in the matrix; asks: what it leaves open; wrong, refusal: what an
    implementation does that differs, or raises an error, "" where an error is fine; check: a function of
    conformance.checks, "" for the one with the name of the case; values: its keyword arguments; alone: it may
    corrupt memory or lose a CUDA context.
    """

    name: str
    title: str
    asks: str = ""
    wrong: str = "the answer is not the transducer loss"
    refusal: str = ""
    check: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False


def _set(name: str, index: Tuple[int, ...], value: int) -> Callable[[Any], Any]:
    """Return a function that sets `index` of the tensor `name` of a batch to `value`."""

    def alter(batch: Any) -> Any:
        tensor = getattr(batch, name).clone()
        tensor[index] = value
        return replace(batch, **{name: tensor})

    return alter


def _agrees(name: str, title: str, asks: str = "", wrong: str = Case.wrong, refusal: str = "", **values: Any) -> Case:
    """Return a case in which loss and gradient must be right; `values` go to checks.agrees."""
    return Case(name, title, asks, wrong, refusal, "agrees", values)


def _durations(name: str, title: str, durations: str, asks: str, **values: Any) -> Case:
    wrong = f"a wrong loss or gradient with durations {durations}"
    return Case(name, title, asks, wrong, "", "with_durations", {"durations": durations, **values})


def _refuses(name: str, title: str, what: str, alter: Any) -> Case:
    wrong = f"an answer for {what}, instead of an error"
    return Case(name, title, "must be refused", wrong, "", "must_refuse", {"alter": alter}, alone=True)


CASES: Tuple[Case, ...] = (
    _agrees("ragged", "ragged batch", "three utterances of different T and U: loss and gradient of every cell"),
    _agrees("one-frame", "T = 1 in a batch", refusal="an utterance of one frame is refused", shapes=[(7, 3), (1, 1)]),
    _agrees(
        "one-frame-targets",
        "T = 1 with U = 3",
        "all targets on the only frame; with one symbol per frame there is no path: infinite or refused",
        refusal="an utterance with more targets than frames is refused, though its loss is finite",
        shapes=[(1, 3)],
    ),
    _agrees(
        "no-target",
        "U = 0",
        "",
        "another loss for a batch without targets",
        "U = 0 is refused",
        shapes=[(6, 0), (4, 0)],
    ),
    _agrees(
        "no-target-in-batch",
        "U = 0 in a batch",
        refusal="a batch is refused when one of its utterances has no target",
        shapes=[(7, 3), (4, 0)],
    ),
    _agrees("one-cell", "T = 1, U = 0", "a single blank", shapes=[(1, 0)]),
    Case(
        "more-targets-than-frames",
        "no path (T < U)",
        "one symbol per frame at most, and more targets than frames: must be infinite or refused",
        "a finite loss for an utterance that has no path",
    ),
    _durations("duration-0", "durations without 0", "1,2,3,4", "every token lasts a frame or more"),
    _durations(
        "duration-gaps", "durations 0, 2, 4", "0,2,4", "some cells have no path", shapes=[(8, 4), (6, 5), (4, 1)]
    ),
    _durations("duration-2-3", "durations 2, 3", "2,3", "no token lasts one frame", shapes=[(13, 4), (9, 2), (8, 1)]),
    _durations("one-duration", "duration 1 alone", "1", "every token lasts one frame"),
    _durations(
        "no-duration-fits", "no duration fits", "4", "no path: infinite, gradient 0, or refused", shapes=[(3, 1)]
    ),
    Case(
        "no-sigma",
        "sigma = 0",
        wrong="a wrong loss or gradient without logit under-normalisation",
        check="with_durations",
        values={"sigma": 0.0},
    ),
    Case(
        "unmet-cells",
        "cells that no path meets",
        "their gradient is exactly 0 (durations 1,2 where it predicts durations)",
        "cells that no path meets get a gradient, or NaN",
    ),
    _agrees(
        "impossible-target",
        "-inf on a target",
        "a target is masked with -inf in every cell, so no path is possible: must be infinite or refused",
        "a target that is masked with -inf everywhere gives no infinite loss",
        shapes=[(4, 2)],
        minus_inf=3,
        alter=_set("targets", (0, 1), 3),
    ),
    Case(
        "many-targets",
        "U + 1 > 1,024",
        "more targets than a CUDA block has threads",
        "an utterance of more than 1,023 targets has a wrong loss or gradient",
        "an utterance of more than 1,023 targets is refused",
        alone=True,
    ),
    _agrees(
        "slack",
        "tensor longer than its utterances",
        "two frames and one target more than the longest utterance has: must not matter",
        "frames or targets beyond the longest utterance change the result",
        "a tensor longer than its longest utterance is refused: cut it first",
        slack=(2, 1),
    ),
    _agrees(
        "nan-padding",
        "NaN in the padding",
        "the loss must be the same, the gradient there 0 (that of torch's log_softmax, which some need first, is NaN)",
        "NaN in the padding of the logits reaches the loss or the gradient: pad with finite numbers",
        shapes=[(4, 2), (3, 1)],
        fill=math.nan,
    ),
    Case(
        "padding-gradient",
        "gradient 0 in the padding",
        wrong="the gradient of padded cells is not 0, so padding trains the model",
    ),
    _agrees(
        "logits-50",
        "logits of +-50",
        wrong="confident logits give another loss: a sum of exponentials underflows",
        scale=50.0,
    ),
    _agrees("logits-1e4", "logits of +-1e4", wrong="large logits give another loss", scale=1e4),
    _agrees(
        "minus-inf",
        "-inf on an unused symbol",
        "one symbol that no utterance has is masked with -inf, as for a forbidden symbol",
        "a symbol masked with -inf makes the loss or its gradient wrong",
        minus_inf=6,
        alter=lambda batch: replace(batch, targets=batch.targets.clamp(max=5)),
    ),
    _agrees(
        "long",
        "T = 370, U = 96",
        "1,970 nats: rounding of the sums along a path is a relative error of the gradient",
        "the gradient of a long utterance is wrong",
        shapes=[(370, 96)],
        V=40,
        slow=True,
    ),
    _agrees("frames-513", "T = 513", "more frames than 512 threads", shapes=[(513, 9), (500, 4)], slow=True),
    _agrees("frames-1025", "T = 1,025", "more frames than a CUDA block has threads", shapes=[(1025, 6)], slow=True),
    _agrees("targets-129", "U = 129", "more targets than 128 threads", shapes=[(140, 129), (131, 40)], slow=True),
    *(
        _agrees(
            f"nats-{nats}",
            f"above {nats:,} nats",
            wrong=f"a loss above {nats:,} nats, or its gradient, is wrong",
            shapes=[(20, 12)],
            scale=nats / 4,
        )
        for nats in (1000, 10000)
    ),
    _agrees("V-2", "V = 2", "blank and one symbol", V=2),
    _agrees("V-5000", "V = 5000", "a large vocabulary", shapes=[(5, 3), (4, 2)], V=5000),
    _agrees("blank-first", "blank = 0", "the first symbol is the blank", blank=0),
    _agrees("blank-middle", "blank = 3 of 7", "a symbol in the middle is the blank", blank=3),
    _agrees("blank-last", "blank = V - 1", "the last symbol is the blank, as is torchaudio's default", blank=6),
    _agrees(
        "repeated-labels",
        "repeated labels",
        "every target is the same symbol (no CTC rule applies)",
        alter=lambda batch: replace(batch, targets=batch.targets.clamp(3, 3)),
    ),
    _agrees(
        "blank-target",
        "a target that is the blank",
        "one target is the blank's symbol: both arcs have the same probability; or refused",
        "a target that equals the blank makes the gradient wrong, without an error",
        shapes=[(4, 2), (3, 1)],
        alter=_set("targets", (0, 1), 0),
        may_refuse=True,
    ),
    _refuses("target-too-large", "target = V", "a target out of range (target = V)", _set("targets", (1, 0), 7)),
    _refuses("target-negative", "target = -1", "a negative target", _set("targets", (1, 0), -1)),
    _refuses("frames-over", "T length over the tensor", "more frames than the tensor has", _set("T_lengths", (0,), 9)),
    _refuses(
        "targets-over", "U length over the tensor", "more targets than the tensor has", _set("U_lengths", (0,), 5)
    ),
    *(
        Case(
            name,
            title,
            f"the same numbers {asks}",
            f"logits that are {what} give another result: call .contiguous() first",
            f"logits that are {what} are refused: call .contiguous() first",
            "laid_out",
            {"sliced": name == "slice"},
        )
        for name, title, asks, what in (
            ("not-contiguous", "non-contiguous logits", "with other strides", "not contiguous"),
            ("slice", "a slice of a wider tensor", "as columns of a wider tensor", "a slice of a wider tensor"),
        )
    ),
    *(
        Case(
            name,
            f"loss * {factor}",
            asks,
            f"the factor {factor} on the loss does not reach the gradient",
            check="upstream",
            values={"weights": (factor,)},
        )
        for name, factor, asks in (
            ("upstream", 3, "a loss scaled before its backward, as AMP and gradient accumulation do"),
            ("upstream-negative", -2, "a loss that is subtracted"),
            ("upstream-zero", 0, "a loss that is switched off: the gradient must be 0"),
        )
    ),
    Case(
        "upstream-weights",
        "weights per utterance",
        "reduction none, and the sum of the losses weighted by 2 and -1",
        "weights of utterances do not reach the gradient",
        check="upstream",
        values={"weights": (2.0, -1.0)},
    ),
    *(
        Case(
            f"reduction-{reduction}",
            f"reduction {reduction}",
            asks,
            f"the package's own {wrong}",
            check="package_reduction",
            values={"reduction": reduction},
        )
        for reduction, asks, wrong in (
            ("none", "one loss per utterance", "losses per utterance, or their gradient, are wrong"),
            (
                "mean",
                "the mean of utterances, or per target or frame; the message says which",
                "mean is none of the known means, or its gradient is that of another",
            ),
            ("sum", "the sum over utterances", "sum, or its gradient, is wrong"),
        )
    ),
    Case(
        "second-backward",
        "a second backward",
        "backward(retain_graph=True), then backward again: the same gradient, or an error",
        "a second backward gives another gradient, without an error",
    ),
    Case(
        "numeric-gradient",
        "gradient by differences",
        "in float64, where that is taken: central differences of the loss against its gradient, from one backward",
        "the gradient does not agree with central differences of the package's own loss",
    ),
    Case(
        "unmodified",
        "inputs left as they were",
        "logits, targets and lengths are the same after forward and backward",
        "its inputs are overwritten",
    ),
    *(
        Case(name, name, asks, wrong, check="agrees", values={"dtype": name})
        for name, asks, wrong in (
            ("float16", "half precision", "another loss in float16"),
            ("bfloat16", "half precision with the range of float32", "another loss in bfloat16"),
            ("float64", "double precision, right to 1e-9", "an answer in float64 that is less precise than float64"),
        )
    ),
    *(
        Case(
            name,
            f"{name} targets and lengths",
            f"all integers that the package is given are {name}",
            f"{name} targets and lengths give another result, without an error",
            check="agrees",
            values={"integers": name},
            alone=True,
        )
        for name in ("int32", "int64")
    ),
    Case("deterministic", "five repeats, the same bits", wrong="repeats differ in their last bits"),
    *(
        Case(name, title, refusal=refusal, check="without_gradient", values={"detached": name == "no-gradient"})
        for name, title, refusal in (
            ("no-gradient", "logits without gradient", "logits that require no gradient are refused"),
            ("no-grad", "under torch.no_grad", "torch.no_grad is refused"),
        )
    ),
)

BY_NAME = {case.name: case for case in CASES}
