"""Define the conformance cases: what every implementation is asked, in words and as data.  Does not import torch.

A new case is one entry here, and a new function in checks.py if none of those there fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Literal, Mapping, Optional, Tuple, get_args

from msgspec import Struct
from msgspec.structs import force_setattr

from common.core.text import finite

Result = Literal["pass", "differs", "refuses", "crashes", "timeout", "n/a", "error"]
RESULTS = get_args(Result)
PASS, DIFFERS, REFUSES, CRASHES, TIMEOUT, NOT_APPLICABLE, ERROR = RESULTS
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

    name: as --cases takes it; title: of the row in the matrix; asks: what is asked and what is right; wrong: what an
    implementation that differs does; refusal: what one that raises an error does, "" where an error is fine; check: a
    function of common.conformance.checks, "" for the one with the name of the case; values: its keyword arguments;
    alone: it may corrupt memory or lose a CUDA context.
    """

    name: str
    title: str
    asks: str
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


def _agrees(name: str, title: str, asks: str, wrong: str = Case.wrong, refusal: str = "", **values: Any) -> Case:
    """Return a case in which loss and gradient must be right; `values` go to checks.agrees."""
    return Case(name, title, asks, wrong, refusal, "agrees", values)


def _refuses(name: str, title: str, asks: str, instead: str, alter: Any) -> Case:
    """Return a case in which an error is right and any answer is wrong: a batch that `alter` makes impossible."""
    wrong = f"an answer for {instead}, instead of an error"
    return Case(name, title, asks, wrong, "", "must_refuse", {"alter": alter}, alone=True)


def _upstream(name: str, factor: float, asks: str) -> Case:
    """Return the case of a factor on the summed loss."""
    wrong = f"the factor {factor:g} on the loss does not reach the gradient"
    return Case(name, f"loss * {factor:g}", asks, wrong, "", "upstream", {"weights": (factor,)})


def _durations(name: str, title: str, durations: Tuple[int, ...], asks: str, **values: Any) -> Case:
    """Return a case of losses that predict durations."""
    given = ",".join(map(str, durations))
    words = f"durations {given}: {asks}"
    wrong = f"a wrong loss or gradient with durations {given}"
    return Case(name, title, words, wrong, "", "with_durations", {"durations": given, **values})


CASES: Tuple[Case, ...] = (
    _agrees("ragged", "ragged batch", "three utterances of different T and U: loss and gradient of every cell"),
    _agrees(
        "one-frame",
        "T = 1 in a batch",
        "an utterance of one frame and one target beside a longer one",
        refusal="an utterance of one frame is refused",
        shapes=[(7, 3), (1, 1)],
    ),
    _agrees(
        "one-frame-targets",
        "T = 1 with U = 3",
        "all targets on the only frame; with one symbol per frame there is no path, and the loss must be infinite or "
        "refused",
        refusal="an utterance with more targets than frames is refused, though its loss is finite",
        shapes=[(1, 3)],
    ),
    _agrees(
        "no-target",
        "U = 0",
        "a batch without any target: blanks only",
        wrong="another loss for a batch without targets",
        refusal="U = 0 is refused",
        shapes=[(6, 0), (4, 0)],
    ),
    _agrees(
        "no-target-in-batch",
        "U = 0 in a batch",
        "one utterance without a target beside one with three",
        refusal="a batch is refused when one of its utterances has no target",
        shapes=[(7, 3), (4, 0)],
    ),
    _agrees("one-cell", "T = 1, U = 0", "a single blank", shapes=[(1, 0)]),
    Case(
        "more-targets-than-frames",
        "no path (T < U)",
        "one symbol per frame at most, and more targets than frames: must be infinite or refused",
        wrong="a finite loss for an utterance that has no path",
    ),
    _durations("duration-0", "durations without 0", (1, 2, 3, 4), "every token lasts a frame or more"),
    _durations(
        "duration-gaps",
        "durations 0, 2, 4",
        (0, 2, 4),
        "no token lasts one frame, so some cells have no path",
        shapes=[(8, 4), (6, 5), (4, 1)],
    ),
    _durations(
        "duration-2-3",
        "durations 2, 3",
        (2, 3),
        "no token lasts less than two frames",
        shapes=[(13, 4), (9, 2), (8, 1)],
    ),
    _durations("one-duration", "duration 1 alone", (1,), "every token lasts one frame"),
    _durations(
        "no-duration-fits",
        "no duration fits",
        (4,),
        "fewer frames than the least duration, so no path: must be infinite with gradient 0, or refused",
        shapes=[(3, 1)],
    ),
    Case(
        "no-sigma",
        "sigma = 0",
        "without logit under-normalisation",
        wrong="a wrong loss or gradient without logit under-normalisation",
        check="with_durations",
        values={"sigma": 0.0},
    ),
    Case(
        "unmet-cells",
        "cells that no path meets",
        "the gradient of cells that no path meets is exactly 0 (durations 1,2 where it predicts durations)",
        wrong="cells that no path meets get a gradient, or NaN",
    ),
    _agrees(
        "impossible-target",
        "-inf on a target",
        "a target is masked with -inf in every cell, so no path is possible: must be infinite or refused",
        wrong="a target that is masked with -inf everywhere gives no infinite loss",
        shapes=[(4, 2)],
        minus_inf=3,
        alter=_set("targets", (0, 1), 3),
    ),
    Case(
        "many-targets",
        "U + 1 > 1,024",
        "more targets than a CUDA block has threads",
        wrong="an utterance of more than 1,023 targets has a wrong loss or gradient",
        refusal="an utterance of more than 1,023 targets is refused",
        alone=True,
    ),
    _agrees(
        "slack",
        "tensor longer than its utterances",
        "two frames and one target more than the longest utterance has: must not matter",
        wrong="frames or targets beyond the longest utterance change the result",
        refusal="a tensor longer than its longest utterance is refused: cut it first",
        slack=(2, 1),
    ),
    Case(
        "nan-padding",
        "NaN in the padding",
        "cells outside an utterance hold NaN: the loss must be the same, their gradient 0",
        wrong="NaN in the padding of the logits reaches the loss or the gradient: pad with finite numbers",
    ),
    Case(
        "padding-gradient",
        "gradient 0 in the padding",
        "the gradient of cells outside an utterance is exactly 0",
        wrong="the gradient of padded cells is not 0, so padding trains the model",
    ),
    _agrees(
        "logits-50",
        "logits of +-50",
        "confident logits",
        wrong="confident logits give another loss: a sum of exponentials underflows",
        scale=50.0,
    ),
    _agrees(
        "logits-1e4",
        "logits of +-1e4",
        "logits whose exponentials overflow",
        wrong="large logits give another loss",
        scale=1e4,
    ),
    _agrees(
        "minus-inf",
        "-inf on an unused symbol",
        "one symbol that no utterance has is masked with -inf, as for a forbidden symbol",
        wrong="a symbol masked with -inf makes the loss or its gradient wrong",
        minus_inf=6,
        alter=lambda batch: replace(batch, targets=batch.targets.clamp(max=5)),
    ),
    _agrees(
        "long",
        "T = 370, U = 96",
        "a long utterance, of 1,970 nats: rounding of the sums along a path is a relative error of the gradient",
        wrong="the gradient of a long utterance is wrong",
        shapes=[(370, 96)],
        V=40,
        slow=True,
    ),
    _agrees("frames-513", "T = 513", "more frames than 512 threads", shapes=[(513, 9), (500, 4)], slow=True),
    _agrees("frames-1025", "T = 1,025", "more frames than a CUDA block has threads", shapes=[(1025, 6)], slow=True),
    _agrees("targets-129", "U = 129", "more targets than 128 threads", shapes=[(140, 129), (131, 40)], slow=True),
    _agrees(
        "nats-1000",
        "above 1,000 nats",
        "an utterance of 1,400 to 3,200 nats (star: 350)",
        wrong="a loss above 1,000 nats, or its gradient, is wrong",
        shapes=[(20, 12)],
        scale=250.0,
    ),
    _agrees(
        "nats-10000",
        "above 10,000 nats",
        "an utterance of 14,000 to 32,000 nats (star: 2,600)",
        wrong="a loss above 10,000 nats, or its gradient, is wrong",
        shapes=[(20, 12)],
        scale=2500.0,
    ),
    _agrees("V-2", "V = 2", "blank and one symbol", shapes=[(9, 4), (6, 5), (8, 1)], V=2),
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
        "one target of the utterance is the blank's symbol: both arcs have the same probability; or refused",
        wrong="a target that equals the blank makes the gradient wrong, without an error",
        shapes=[(4, 2), (3, 1)],
        alter=_set("targets", (0, 1), 0),
        may_refuse=True,
    ),
    _refuses(
        "target-too-large",
        "target = V",
        "a target that the vocabulary does not have must be refused",
        "a target out of range (target = V)",
        _set("targets", (1, 0), 7),
    ),
    _refuses(
        "target-negative",
        "target = -1",
        "a negative target within an utterance must be refused",
        "a negative target",
        _set("targets", (1, 0), -1),
    ),
    _refuses(
        "frames-over",
        "T length over the tensor",
        "a length of 9 frames in a tensor of 6 must be refused",
        "more frames than the tensor has",
        _set("T_lengths", (0,), 9),
    ),
    _refuses(
        "targets-over",
        "U length over the tensor",
        "a length of 5 targets in a tensor of 3 must be refused",
        "more targets than the tensor has",
        _set("U_lengths", (0,), 5),
    ),
    Case(
        "not-contiguous",
        "non-contiguous logits",
        "the same numbers with other strides",
        wrong="logits that are not contiguous give another result: call .contiguous() first",
        refusal="logits that are not contiguous are refused: call .contiguous() first",
        check="laid_out",
        values={"sliced": False},
    ),
    Case(
        "slice",
        "a slice of a wider tensor",
        "the same numbers as columns of a tensor with two more, as the views of a joint's tokens and durations are",
        wrong="logits that are a slice of a wider tensor give another result: call .contiguous() first",
        refusal="logits that are a slice of a wider tensor are refused: call .contiguous() first",
        check="laid_out",
        values={"sliced": True},
    ),
    _upstream("upstream", 3, "a loss scaled before its backward, as AMP and gradient accumulation do"),
    _upstream("upstream-negative", -2, "a loss that is subtracted"),
    _upstream("upstream-zero", 0, "a loss that is switched off: the gradient must be 0"),
    Case(
        "upstream-weights",
        "weights per utterance",
        "reduction none, and the sum of the losses weighted by 2 and -1",
        wrong="weights of utterances do not reach the gradient",
        check="upstream",
        values={"weights": (2.0, -1.0)},
    ),
    Case(
        "reduction-none",
        "reduction none",
        "one loss per utterance",
        wrong="the package's own losses per utterance, or their gradient, are wrong",
        check="package_reduction",
        values={"reduction": "none"},
    ),
    Case(
        "reduction-mean",
        "reduction mean",
        "the mean, of the losses of utterances or per target or per frame; the message says which",
        wrong="the package's own mean is none of the known means, or its gradient is that of another",
        check="package_reduction",
        values={"reduction": "mean"},
    ),
    Case(
        "reduction-sum",
        "reduction sum",
        "the sum over utterances",
        wrong="the package's own sum, or its gradient, is wrong",
        check="package_reduction",
        values={"reduction": "sum"},
    ),
    Case(
        "second-backward",
        "a second backward",
        "backward(retain_graph=True), then backward again: the same gradient, or an error",
        wrong="a second backward gives another gradient, without an error",
    ),
    Case(
        "numeric-gradient",
        "gradient by differences",
        "in float64, where that is taken: central differences of the loss against its gradient, from one backward",
        wrong="the gradient does not agree with central differences of the package's own loss",
    ),
    Case(
        "unmodified",
        "inputs left as they were",
        "logits, targets and lengths are the same after forward and backward",
        wrong="its inputs are overwritten",
    ),
    *(
        Case(name, name, asks, wrong, "", "agrees", {"dtype": name})
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
            f"all integers that the package is given are {words}",
            f"{name} targets and lengths give another result, without an error",
            check="agrees",
            values={"integers": name},
            alone=True,
        )
        for name, words in (("int32", "int32"), ("int64", "int64, as torch makes them by default"))
    ),
    Case(
        "deterministic",
        "five repeats, the same bits",
        "loss and gradient of the same input",
        wrong="repeats differ in their last bits",
    ),
    Case(
        "no-gradient",
        "logits without gradient",
        "logits that do not require a gradient, as in validation",
        refusal="logits that require no gradient are refused",
        check="without_gradient",
        values={"detached": True},
    ),
    Case(
        "no-grad",
        "under torch.no_grad",
        "logits that require a gradient, under torch.no_grad",
        refusal="torch.no_grad is refused",
        check="without_gradient",
        values={"detached": False},
    ),
)

BY_NAME = {case.name: case for case in CASES}
