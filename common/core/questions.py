"""Define the questions that check a loss, as a table of data.  Does not import torch.

A question is a small batch, a way to call a loss on it, and what must come out: mostly the loss and
the gradients of the float64 reference.  Earlier calls, numbers in the padding, a factor of the loss
and tensors without gradient must not change the answer.

`rnnt-bench check` asks all of TABLE, and shows what a loss accepts, refuses and gets wrong.  A
run asks the JUDGED ones on small batches (losses/questions.py).  It asks one of HARD at the
measured size, in a timed process of the first rounds (losses/passes/after_timing.py).  A new
question is a row of TABLE, and a function of conformance/checks.py if none there fits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Shapes = Sequence[tuple[int, int]]  # (T, U) of each utterance
#: A batch whose T and U differ, with T = 1 and U = 0 among them.
SHAPES: Shapes = ((11, 5), (7, 4), (9, 2), (1, 0))
#: T and U + 1 around 16 and 32, the sizes of blocks in kernels.
BLOCKS: Shapes = ((32, 8), (16, 15), (17, 14), (48, 3))
RAGGED: Shapes = ((9, 4), (6, 5), (8, 1))
#: A batch with few logits.
FEW: Shapes = ((4, 2), (3, 1))
#: The largest batch of `check`: T and U are above the number of threads in a kernel's block, and
#: the logits take 8 MB.
AT_SIZE: Shapes = ((301, 40), (260, 129), (150, 20))
#: A logit x for which float32 has infinity as exp(x), and 0 as exp(-x).
SHARP = 100.0
#: A number in the padding of encoder and decoder outputs, far from those of real frames.
GARBAGE = 1000.0
#: Beginnings of the names of the joiner's weights.
JOINER = ("output", "extra")
#: What is said of a wrong answer to most questions.
WRONG = "the answer is not the transducer loss"


@dataclass(frozen=True)
class Question:
    """Hold a question.

    Its texts:
        name: as --cases takes it; "" for a question that only a run asks.
        title: heads its row in the matrix of `rnnt-bench check`.
        asks: explains the title.
        wrong: says what is wrong with a loss that answers wrongly.
        refusal: says what is wrong with a loss that raises an error; "" where an error is fine.

    The batch:
        shapes: (T, U) of each utterance; () for those of a measured batch.
        draw: number of the seeded draw of its inputs.
        V, D: vocabulary size, and dimension of the joiner.
        slack: frames and targets by which its tensors exceed the longest utterance.
        entry: (name, index, value): the targets or the lengths, whichever `name` says, are
            overwritten by `value` at `index`.

    The logits:
        logits: "random"; "trained", those of a trained model; or "sine", 3 sin(0.7 k) for entry k,
            without a joiner.
        largest: the weights are scaled in place so that the largest logit has this magnitude.
        offset: is added to all logits.
        minus_inf: a symbol whose logit is -inf in every cell.
        garbage: fills the padding.

    The call:
        upstream: the upstream gradient: one number for the sum, one for each utterance, or, with
            in_flight, one for each loss; () for 1.
        in_flight: a second loss runs its forward before the backward of both.  It has as many
            utterances, with the lengths in reverse order.
        earlier: shapes of a batch that the loss is called on first, before the weights are scaled.
        frozen: beginnings of the names of leaves that need no gradient.
        blank, dtype, durations, sigma: replace the loss's own; "" or None leaves them.
        integers: dtype of targets and lengths; "" for the loss's own.

    Who asks, and how:
        judged: whether a run asks it too, on small batches.
        one_symbol: whether a run asks it only of a loss with at most one target a frame.
        check: the function of conformance.checks that asks it.
        may_refuse: whether an error is a right answer too.
        slow: whether it would take hours in a simulator, which then skips it.
        alone: whether it needs a process of its own: a loss may corrupt memory or lose its CUDA
            context.
    """

    name: str = ""
    title: str = ""
    asks: str = ""
    wrong: str = WRONG
    refusal: str = ""
    shapes: Shapes = ()
    draw: int = 0
    V: int = 17
    D: int = 24
    slack: tuple[int, int] = (0, 0)
    entry: tuple[str, tuple[Any, ...], int] | None = None
    logits: str = "random"
    largest: float | None = None
    offset: float = 0.0
    minus_inf: int | None = None
    garbage: float | None = None
    upstream: tuple[float, ...] = ()
    in_flight: bool = False
    earlier: Shapes = ()
    frozen: tuple[str, ...] = ()
    blank: int | None = None
    dtype: str = ""
    durations: str | None = None
    sigma: float | None = None
    integers: str = ""
    judged: bool = False
    one_symbol: bool = False
    check: str = "agrees"
    may_refuse: bool = False
    slow: bool = False
    alone: bool = False

    def but(self, **values: Any) -> Question:
        """Return a copy of the question with other values of these fields."""
        return replace(self, **values)

    @property
    def is_weighted(self) -> bool:
        """Tell whether `upstream` has a number for each utterance.

        With `in_flight` it has one for each loss instead."""
        return len(self.upstream) > 1 and not self.in_flight

    @property
    def cells(self) -> int:
        """Return the number of lattice cells: the sum of T (U + 1) over the utterances, twice with
        two losses in flight."""
        losses = 2 if self.in_flight else 1
        return losses * sum(T * (U + 1) for T, U in self.shapes)


IN_FLIGHT = Question(
    title="two losses in flight, times -30,000 and 7, after other weights and lengths in the same padded shape",
    wrong="two losses in flight, other weights or other lengths in the same padded shape change the answer",
    largest=24.0,
    upstream=(-30000.0, 7.0),
    in_flight=True,
    garbage=GARBAGE,
)
#: A timed process asks one of these at the measured size.  Two of them have an `offset`.  With it
#: exp() of the logits is infinite, or 0, unless the largest logit is subtracted first.
HARD = (
    IN_FLIGHT.but(name="in-flight", offset=SHARP),
    IN_FLIGHT.but(
        name="in-flight-frozen-joiner",
        title=f"{IN_FLIGHT.title}, with a frozen joiner",
        frozen=JOINER,
        offset=-SHARP,
    ),
    IN_FLIGHT.but(
        name="in-flight-frozen-outputs",
        title=f"{IN_FLIGHT.title}, with frozen outputs of encoder and decoder",
        frozen=("encoder_out", "decoder_out"),
    ),
)
#: An `entry` that makes all targets the symbol 3.
ALIKE = ("targets", (...,), 3)
CORNER = Question(shapes=RAGGED, V=7, logits="sine", largest=3.0, blank=0)


def _corner(
    name: str, title: str, asks: str = "", wrong: str = WRONG, refusal: str = "", **values: Any
) -> Question:
    """Return a question that only `check` asks, with the batch and logits of CORNER.

    values: fields of Question that differ from CORNER."""
    return CORNER.but(name=name, title=title, asks=asks, wrong=wrong, refusal=refusal, **values)


def _judged(name: str, title: str, wrong: str = WRONG, **values: Any) -> Question:
    """Return a question that a run asks too, on a batch of RAGGED if `values` has no shapes."""
    return Question(name, title, wrong=wrong, judged=True, **{"shapes": RAGGED, **values})


def _durations(name: str, title: str, durations: str, asks: str, **values: Any) -> Question:
    """Return a question that only losses with durations (tdt, multi-blank) are asked.

    durations: the ones that replace the loss's own, as --durations takes them: "0,2,4"."""
    wrong = f"a wrong loss or gradient with durations {durations}"
    return _corner(name, title, asks, wrong, durations=durations, **values)


def _refuses(name: str, title: str, input: str, *entry: Any) -> Question:
    """Return a question whose only right answer is an error.

    input: describes the impossible input; entry: makes it, see Question.entry."""
    wrong = f"an answer for {input}, instead of an error"
    return _corner(
        name,
        title,
        "must be refused",
        wrong,
        shapes=((6, 3), (5, 2)),
        entry=entry,
        check="must_refuse",
        alone=True,
    )


TABLE: tuple[Question, ...] = (
    _corner(
        "ragged",
        "ragged batch",
        "three utterances of different T and U: loss and gradient of every cell",
    ),
    _judged("blocks", "T and U around 16 and 32", shapes=BLOCKS, draw=5, slow=True),
    _judged(
        "utterances-5", "five utterances", shapes=((6, 3), (5, 2), (7, 4), (4, 1), (8, 5)), draw=13
    ),
    # These two are not asked of a lattice with one symbol a frame, on which they have no path.
    _judged("targets-as-frames", "U >= T", shapes=((3, 5), (4, 4), (2, 3)), draw=14),
    _judged("targets-140", "U = 140 of 3 frames", shapes=((3, 140), (2, 120)), draw=16, slow=True),
    _judged(
        "targets-129",
        "U = 129",
        asks="more targets than 128 threads",
        shapes=((140, 129), (131, 40)),
        draw=16,
        one_symbol=True,
        slow=True,
    ),
    _judged(
        "no-target",
        "U = 0",
        "another loss for a batch without targets",
        refusal="U = 0 is refused",
        shapes=((6, 0), (4, 0)),
        draw=17,
        may_refuse=True,
    ),
    _judged(
        "upstream",
        "a loss times 65,536",
        "the factor 65,536 on the loss does not reach the gradient",
        asks="a loss scaled before its backward, as torch.amp.GradScaler does first",
        upstream=(2.0**16,),
        draw=6,
    ),
    _judged(
        "upstream-negative",
        "a loss times -2",
        "the factor -2 on the loss does not reach the gradient",
        asks="a loss that is subtracted",
        upstream=(-2.0,),
        draw=6,
    ),
    _judged(
        "upstream-weights",
        "a factor for each utterance",
        "weights of utterances do not reach the gradient",
        asks="reduction none, and the sum of the losses weighted by 2, -1 and 0.5",
        upstream=(2.0, -1.0, 0.5),
        draw=7,
    ),
    _judged(
        "trained",
        "logits of a trained model",
        shapes=BLOCKS,
        draw=8,
        logits="trained",
        V=101,
        D=128,
        slow=True,
    ),
    *(
        _judged(
            name,
            title,
            "large or like logits give another loss",
            draw=9,
            largest=largest,
            offset=offset,
        )
        for name, title, largest, offset in (
            ("logits-100", f"logits of up to {SHARP:g}", SHARP, 0.0),
            ("logits-minus-100", f"logits of at most -{SHARP:g}", SHARP, -2 * SHARP),
            ("logits-alike", "logits that are almost alike", 1e-3, SHARP),
        )
    ),
    _judged(
        "garbage",
        "garbage in the padding",
        "the padding changes the answer",
        draw=10,
        garbage=GARBAGE,
    ),
    _judged(
        "after-larger",
        "a larger batch before it",
        "the answer is another one after a larger batch",
        draw=11,
        earlier=BLOCKS,
        slow=True,
    ),
    *(question.but(judged=True, shapes=RAGGED, draw=12, earlier=RAGGED) for question in HARD),
    HARD[0].but(
        name="in-flight-at-size",
        title=f"T = {AT_SIZE[0][0]}, U = {AT_SIZE[1][1]}: {IN_FLIGHT.title}",
        shapes=AT_SIZE,
        draw=21,
        slow=True,
    ),
    _corner(
        "one-frame",
        "T = 1 in a batch",
        refusal="an utterance of one frame is refused",
        shapes=((7, 3), (1, 1)),
    ),
    _corner(
        "one-frame-targets",
        "T = 1 with U = 3",
        "all targets on the only frame; with one symbol per frame there is no path: infinite or refused",
        refusal="an utterance with more targets than frames is refused, though its loss is finite",
        shapes=((1, 3),),
    ),
    _corner(
        "no-target-in-batch",
        "U = 0 in a batch",
        refusal="a batch is refused when one of its utterances has no target",
        shapes=((7, 3), (4, 0)),
    ),
    _corner("one-cell", "T = 1, U = 0", "a single blank", shapes=((1, 0),)),
    _corner(
        "more-targets-than-frames",
        "no path (T < U)",
        "one symbol per frame at most, and more targets than frames: must be infinite or refused",
        "a finite loss for an utterance that has no path",
        shapes=((3, 5),),
        check="of_one_symbol",
    ),
    _durations("duration-0", "durations without 0", "1,2,3,4", "every token lasts a frame or more"),
    _durations(
        "duration-gaps",
        "durations 0, 2, 4",
        "0,2,4",
        "some cells have no path",
        shapes=((8, 4), (6, 5), (4, 1)),
    ),
    _durations(
        "duration-2-3",
        "durations 2, 3",
        "2,3",
        "no token lasts one frame",
        shapes=((13, 4), (9, 2), (8, 1)),
    ),
    _durations("one-duration", "duration 1 alone", "1", "every token lasts one frame"),
    _durations(
        "no-duration-fits",
        "no duration fits",
        "4",
        "no path: infinite, gradient 0, or refused",
        shapes=((3, 1),),
    ),
    _corner(
        "no-sigma",
        "sigma = 0",
        "",
        "a wrong loss or gradient without logit under-normalisation",
        sigma=0.0,
    ),
    _corner(
        "unmet-cells",
        "cells that no path meets",
        "their gradient is exactly 0 (durations 1,2 where it predicts durations)",
        "cells that no path meets get a gradient, or NaN",
        shapes=((5, 3),),
        check="unmet_cells",
    ),
    _corner(
        "impossible-target",
        "-inf on a target",
        "a target is masked with -inf in every cell, so no path is possible: must be infinite or refused",
        "a target that is masked with -inf everywhere gives no infinite loss",
        shapes=((4, 2),),
        minus_inf=3,
        entry=("targets", (0, 1), 3),
    ),
    _corner(
        "many-targets",
        "U + 1 > 1,024",
        "more targets than a CUDA block has threads",
        "an utterance of more than 1,023 targets has a wrong loss or gradient",
        "an utterance of more than 1,023 targets is refused",
        shapes=((4, 1100),),
        V=5,
        check="many_targets",
        slow=True,
        alone=True,
    ),
    _corner(
        "slack",
        "tensor longer than its utterances",
        "two frames and one target more than the longest utterance has: must not matter",
        "frames or targets beyond the longest utterance change the result",
        "a tensor longer than its longest utterance is refused: cut it first",
        slack=(2, 1),
    ),
    _corner(
        "nan-padding",
        "NaN in the padding",
        "the loss must be the same, the gradient there 0 (that of torch's log_softmax, which some need first, is NaN)",
        "NaN in the padding of the logits reaches the loss or the gradient: pad with finite numbers",
        shapes=FEW,
        garbage=math.nan,
    ),
    _corner(
        "padding-gradient",
        "gradient 0 in the padding",
        wrong="the gradient of padded cells is not 0, so padding trains the model",
        shapes=FEW,
        check="padding_gradient",
    ),
    _corner(
        "logits-50",
        "logits of +-50",
        wrong="confident logits give another loss: a sum of exponentials underflows",
        largest=50.0,
    ),
    _corner("logits-1e4", "logits of +-1e4", wrong="large logits give another loss", largest=1e4),
    _corner(
        "minus-inf",
        "-inf on an unused symbol",
        "one symbol that no utterance has is masked with -inf, as for a forbidden symbol",
        "a symbol masked with -inf makes the loss or its gradient wrong",
        minus_inf=6,
        entry=ALIKE,
    ),
    _corner(
        "long",
        "T = 370, U = 96",
        "1,970 nats: rounding of the sums along a path is a relative error of the gradient",
        "the gradient of a long utterance is wrong",
        shapes=((370, 96),),
        V=40,
        slow=True,
    ),
    _corner(
        "frames-513",
        "T = 513",
        "more frames than 512 threads",
        shapes=((513, 9), (500, 4)),
        slow=True,
    ),
    _corner(
        "frames-1025",
        "T = 1,025",
        "more frames than a CUDA block has threads",
        shapes=((1025, 6),),
        slow=True,
    ),
    # The loss of these logits is more than four times the largest of them, so above `nats`.
    *(
        _corner(
            f"nats-{nats}",
            f"above {nats:,} nats",
            wrong=f"a loss above {nats:,} nats, or its gradient, is wrong",
            shapes=((20, 12),),
            largest=nats / 4,
        )
        for nats in (1000, 10000)
    ),
    _corner("V-2", "V = 2", "blank and one symbol", V=2),
    _corner("V-5000", "V = 5000", "a large vocabulary", shapes=((5, 3), (4, 2)), V=5000),
    _corner("blank-first", "blank = 0", "the first symbol is the blank"),
    _corner("blank-middle", "blank = 3 of 7", "a symbol in the middle is the blank", blank=3),
    _corner(
        "blank-last",
        "blank = V - 1",
        "the last symbol is the blank, as is torchaudio's default",
        blank=6,
    ),
    _corner(
        "repeated-labels",
        "repeated labels",
        "every target is the same symbol (no CTC rule applies)",
        entry=ALIKE,
    ),
    _corner(
        "blank-target",
        "a target that is the blank",
        "one target is the blank's symbol: both arcs have the same probability; or refused",
        "a target that equals the blank makes the gradient wrong, without an error",
        shapes=FEW,
        entry=("targets", (0, 1), 0),
        may_refuse=True,
    ),
    _refuses(
        "target-too-large", "target = V", "a target out of range (target = V)", "targets", (1, 0), 7
    ),
    _refuses("target-negative", "target = -1", "a negative target", "targets", (1, 0), -1),
    _refuses(
        "frames-over",
        "T length over the tensor",
        "more frames than the tensor has",
        "T_lengths",
        (0,),
        9,
    ),
    _refuses(
        "targets-over",
        "U length over the tensor",
        "more targets than the tensor has",
        "U_lengths",
        (0,),
        5,
    ),
    *(
        _corner(
            name,
            title,
            f"the same numbers {asks}",
            f"logits that are {what} give another result: call .contiguous() first",
            f"logits that are {what} are refused: call .contiguous() first",
            check="laid_out",
        )
        for name, title, asks, what in (
            ("not-contiguous", "non-contiguous logits", "with other strides", "not contiguous"),
            (
                "slice",
                "a slice of a wider tensor",
                "as columns of a wider tensor",
                "a slice of a wider tensor",
            ),
        )
    ),
    _corner(
        "upstream-zero",
        "loss * 0",
        "a loss that is switched off: the gradient must be 0",
        "the factor 0 on the loss does not reach the gradient",
        shapes=FEW,
        upstream=(0.0,),
        check="upstream_zero",
    ),
    *(
        _corner(
            f"reduction-{reduction}",
            f"reduction {reduction}",
            asks,
            f"the package's own {wrong}",
            check="package_reduction",
        )
        for reduction, asks, wrong in (
            (
                "none",
                "one loss per utterance",
                "losses per utterance, or their gradient, are wrong",
            ),
            (
                "mean",
                "the mean of utterances, or per target or frame; the message says which",
                "mean is none of the known means, or its gradient is that of another",
            ),
            ("sum", "the sum over utterances", "sum, or its gradient, is wrong"),
        )
    ),
    _corner(
        "second-backward",
        "a second backward",
        "backward(retain_graph=True), then backward again: the same gradient, or an error",
        "a second backward gives another gradient, without an error",
        shapes=FEW,
        upstream=(2.0,),
        check="second_backward",
    ),
    _corner(
        "unmodified",
        "inputs left as they were",
        "logits, targets and lengths are the same after forward and backward",
        "its inputs are overwritten",
        shapes=FEW,
        check="unmodified",
    ),
    *(
        _corner(name, name, asks, wrong, dtype=name)
        for name, asks, wrong in (
            ("float16", "half precision", "another loss in float16"),
            ("bfloat16", "half precision with the range of float32", "another loss in bfloat16"),
            (
                "float64",
                "double precision, right to 1e-9",
                "an answer in float64 that is less precise than float64",
            ),
        )
    ),
    *(
        _corner(
            name,
            f"{name} targets and lengths",
            f"all integers that the package is given are {name}",
            f"{name} targets and lengths give another result, without an error",
            integers=name,
            alone=True,
        )
        for name in ("int32", "int64")
    ),
    _corner(
        "deterministic",
        "five repeats, the same bits",
        wrong="repeats differ in their last bits",
        shapes=((30, 12), (26, 9), (17, 10)),
        V=11,
        check="deterministic",
    ),
    *(
        _corner(name, title, refusal=refusal, check="without_gradient")
        for name, title, refusal in (
            (
                "no-gradient",
                "logits without gradient",
                "logits that require no gradient are refused",
            ),
            ("no-grad", "under torch.no_grad", "torch.no_grad is refused"),
        )
    ),
)
BY_NAME = {question.name: question for question in TABLE}
JUDGED = tuple(question for question in TABLE if question.judged)
