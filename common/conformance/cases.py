"""The cases: what is asked of every implementation, in words and as data.  No torch; the judging is in checks.py.

Adding one = one entry here, and a function there where none fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Mapping, Tuple


@dataclass(frozen=True)
class Case:
    """name: for --cases; title: the matrix's row; asks: what is asked and what is right; check: a function of
    common.conformance.checks, given `values`; alone: it may corrupt memory or lose a CUDA context, so it has a process
    of its own; wrong: what an implementation that differs does, as a user should know it ("a, b: <wrong>"); refusal:
    likewise where an error is no answer that a user expects, else ""; shown: a key of
    common.conformance.reproductions.TAILS."""

    name: str
    title: str
    asks: str
    check: str
    values: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False
    wrong: str = "the answer is not the transducer loss"
    refusal: str = ""
    shown: str = "loss or gradient"

    def allowing(self, large: bool) -> Case:
        """Itself, and with `large` also where it needs much memory."""
        return replace(self, values={**self.values, "allowed": large}) if "allowed" in self.values else self


def _shapes(
    name: str, title: str, asks: str, shapes: list, refusal: str = "", wrong: str = Case.wrong, **more: Any
) -> Case:
    return Case(name, title, asks, "agrees", {"shapes": shapes, **more}, wrong=wrong, refusal=refusal)


def _refused(name: str, title: str, asks: str, wrong: str) -> Case:
    return Case(name, title, asks, "must_refuse", {"what": name}, alone=True, wrong=wrong, shown="answer")


CASES: Tuple[Case, ...] = (
    Case("ragged", "ragged batch", "three utterances of other T and U: loss and gradient of each cell", "agrees"),
    _shapes(
        "one-frame",
        "T = 1 in a batch",
        "an utterance of one frame and one target beside a longer one",
        [(7, 3), (1, 1)],
        "an utterance of one frame is refused",
    ),
    _shapes(
        "one-frame-targets",
        "T = 1 with U = 3",
        "all targets on the only frame; with one symbol per frame there is no path, and the loss must be infinite or "
        "refused",
        [(1, 3)],
        "an utterance with more targets than frames is refused, though its loss is finite",
    ),
    _shapes(
        "no-target",
        "U = 0",
        "a batch without any target: blanks only",
        [(6, 0), (4, 0)],
        "U = 0 is refused",
        wrong="another loss for a batch without targets",
    ),
    _shapes(
        "no-target-in-batch",
        "U = 0 in a batch",
        "one utterance without a target beside one with three",
        [(7, 3), (4, 0)],
        "a batch is refused when one of its utterances has no target",
    ),
    _shapes("one-cell", "T = 1, U = 0", "a single blank", [(1, 0)]),
    Case(
        "more-targets-than-frames",
        "no path (T < U)",
        "one symbol per frame at most, and more targets than frames: must be infinite or refused",
        "no_path",
        wrong="a finite loss for an utterance that has no path",
    ),
    Case(
        "many-targets",
        "U = 1100 on CUDA",
        "more targets than a CUDA block has threads",
        "more_targets_than_threads",
        alone=True,
        refusal="an utterance of 1100 targets is refused",
        shown="",
    ),
    Case(
        "slack",
        "tensor longer than its utterances",
        "two frames and one target more than the longest utterance has: must not matter",
        "agrees",
        {"slack": (2, 1)},
        wrong="frames or targets beyond the longest utterance change the result",
        refusal="a tensor longer than its longest utterance is refused: cut it first",
    ),
    Case(
        "nan-padding",
        "NaN in the padding",
        "cells outside an utterance hold NaN: the loss must be the same, their gradient 0",
        "with_padding_of",
        {"fill": float("nan")},
        wrong="NaN in the padding of the logits comes through to the loss or the gradient: mask what you pad with",
        shown="padding",
    ),
    Case(
        "padding-gradient",
        "gradient 0 in the padding",
        "the gradient of cells outside an utterance is exactly 0",
        "zero_in_the_padding",
        wrong="the gradient of padded cells is not 0, so padding trains the model",
        shown="padding",
    ),
    Case(
        "logits-50",
        "logits of +-50",
        "confident logits (am and lm of +-50 each, for an additive loss)",
        "agrees",
        {"scale": 50.0},
        wrong="confident logits give another loss: a sum of exponentials underflows",
    ),
    Case(
        "logits-1e4",
        "logits of +-1e4",
        "logits whose exponentials overflow",
        "agrees",
        {"scale": 1e4},
        wrong="large logits give another loss",
    ),
    Case(
        "minus-inf",
        "-inf on an unused symbol",
        "one symbol that no utterance has is masked with -inf, as for a forbidden symbol",
        "masked_symbol",
        wrong="a symbol masked with -inf spoils the loss or its gradient",
    ),
    _shapes("V-2", "V = 2", "blank and one symbol", [(9, 4), (6, 5), (8, 1)], V=2),
    _shapes("V-5000", "V = 5000", "a large vocabulary", [(5, 3), (4, 2)], V=5000),
    Case("blank-first", "blank = 0", "the first symbol is the blank", "agrees", {"blank": 0}),
    Case("blank-middle", "blank = 3 of 7", "one in the middle", "agrees", {"blank": 3}),
    Case("blank-last", "blank = V - 1", "the last, as torchaudio's default is", "agrees", {"blank": 6}),
    Case(
        "repeated-labels", "repeated labels", "every target is the same symbol (no CTC rule applies)", "repeated_labels"
    ),
    _refused(
        "target-too-large",
        "target = V",
        "a target that the vocabulary does not have must be refused",
        "an answer for a target out of range (target = V), instead of an error",
    ),
    _refused(
        "target-negative",
        "target = -1",
        "a negative target within an utterance must be refused",
        "an answer for a negative target, instead of an error",
    ),
    _refused(
        "frames-over",
        "T length over the tensor",
        "a length of 9 frames in a tensor of 6 must be refused",
        "an answer for more frames than the tensor has, instead of an error",
    ),
    _refused(
        "targets-over",
        "U length over the tensor",
        "a length of 5 targets in a tensor of 3 must be refused",
        "an answer for more targets than the tensor has, instead of an error",
    ),
    Case(
        "not-contiguous",
        "non-contiguous logits",
        "the same numbers with other strides",
        "not_contiguous",
        wrong="logits that are not contiguous give another result: call .contiguous() first",
        refusal="logits that are not contiguous are refused: call .contiguous() first",
    ),
    Case(
        "upstream",
        "loss * 3",
        "a loss scaled before its backward, as AMP and accumulation do",
        "scaled_upstream",
        wrong="the factor on the loss does not come through to the gradient",
        shown="upstream",
    ),
    Case(
        "upstream-weights",
        "weights per utterance",
        "reduction none, and the sum of the losses weighted by 2 and -1",
        "weighted_upstream",
        wrong="weights of utterances do not come through to the gradient",
        shown="upstream",
    ),
    Case(
        "reduction-none",
        "reduction none",
        "one loss per utterance",
        "reduction_none",
        wrong="the package's own losses per utterance are others, or their gradient is not their own",
    ),
    Case(
        "reduction-mean",
        "reduction mean",
        "the mean, of the losses of utterances or per target or per frame: which, is said",
        "reduction_mean",
        wrong="the mean is of nothing known, or its gradient is not its own",
    ),
    Case(
        "reduction-sum",
        "reduction sum",
        "the sum over utterances",
        "reduction_sum",
        wrong="the package's own sum is another, or its gradient is not its own",
    ),
    Case(
        "second-backward",
        "a second backward",
        "backward(retain_graph=True), then backward again: the same gradient, or an error",
        "second_backward",
        wrong="a second backward gives another gradient, without an error",
        shown="second backward",
    ),
    Case(
        "numeric-gradient",
        "gradient by differences",
        "in float64, where that is taken: central differences of the loss against its gradient, from one backward",
        "numeric_gradient",
        wrong="the gradient is not that of its own value, by central differences",
    ),
    Case(
        "unmodified",
        "inputs left as they were",
        "logits, targets and lengths are the same after forward and backward",
        "unmodified",
        wrong="its inputs are overwritten",
        shown="unmodified",
    ),
    Case("float16", "float16", "half precision", "on_a_dtype", {"dtype": "float16"}, wrong="another loss in float16"),
    Case("bfloat16", "bfloat16", "likewise", "on_a_dtype", {"dtype": "bfloat16"}, wrong="another loss in bfloat16"),
    Case(
        "float64",
        "float64",
        "double precision, right to 1e-9",
        "on_a_dtype",
        {"dtype": "float64"},
        wrong="an answer in float64 that has not its precision",
    ),
    Case(
        "int32",
        "int32 targets and lengths",
        "all integers that the package is given are int32",
        "on_integers",
        {"dtype": "int32"},
        alone=True,
        wrong="int32 targets and lengths give another result, without an error",
    ),
    Case(
        "int64",
        "int64 targets and lengths",
        "likewise int64, as torch makes them by default",
        "on_integers",
        {"dtype": "int64"},
        alone=True,
        wrong="int64 targets and lengths give another result, without an error",
    ),
    Case(
        "deterministic",
        "five repeats, the same bits",
        "loss and gradient of the same input",
        "deterministic",
        wrong="repeats differ in their last bits",
        shown="",
    ),
    Case(
        "no-gradient",
        "logits without gradient",
        "logits that do not require a gradient, as in validation",
        "without_gradient",
        {"mode": "leaf"},
        refusal="logits that require no gradient are refused",
    ),
    Case(
        "no-grad",
        "under torch.no_grad",
        "logits that require a gradient, under torch.no_grad",
        "without_gradient",
        {"mode": "no_grad"},
        refusal="torch.no_grad is refused",
    ),
    Case(
        "large",
        "more than 2^31 elements",
        "8 GiB of float32 logits; loss, and gradients at the beginning, in the middle and at the end (--large)",
        "more_than_2_31_elements",
        {"allowed": False},
        alone=True,
        wrong="logits of more than 2^31 elements give another result, without an error",
        refusal="logits of more than 2^31 elements are refused",
        shown="",
    ),
    Case(
        "second-device",
        "a second CUDA device",
        "tensors on cuda:1 while cuda:0 is the current device",
        "second_cuda_device",
        alone=True,
        wrong="on a device that is not the current one the result is another",
        shown="",
    ),
)

BY_NAME = {case.name: case for case in CASES}
