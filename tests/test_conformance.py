"""The conformance matrix: each loss that is wrong on purpose is caught by its case; a crash costs one cell."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re

import pytest
import torch
from losses.benchmark_reference import Reference
from rnnt_bench.conformance import show
from rnnt_bench.conformance.judge import judge
from rnnt_bench.conformance.outcomes import CRASHES, DIFFERS, NOT_ASKED, PASS, REFUSES, Outcome, Row
from rnnt_bench.core import implementations, settings
from rnnt_bench.core.errors import NotRunnable
from rnnt_bench.core.implementations import KINDS, with_variants
from rnnt_bench.core.questions import BY_NAME, TABLE
from rnnt_bench.losses import oracle, topologies

import right_losses
from commands import ROOT, run
from fixtures_model_runs import made, write_check

CPU = torch.device("cpu")


def adapter_of(kind):
    adapter = kind(settings.resolve({"preset": "quick"}, "cpu"))
    adapter.load("cpu")
    return adapter


def outcome_of(kind, case):
    return judge(BY_NAME[case], adapter_of(kind), CPU)


def wrong(loss, **attributes):
    """The reference with another loss: loss(adapter, right, logits, prepared), where right(logits) is the right one."""

    def of(self, logits, prepared):
        return loss(self, lambda leaf: Reference.loss(self, leaf, prepared), logits, prepared)

    return type("Wrong", (Reference,), {"loss": of, **attributes})


def biased(value, factor):
    """The value, with a gradient that is off by the factor."""
    return value.detach() + factor * nothing(value)


def nothing(value):
    """0, with the gradient of the value."""
    return value - value.detach()


def hooked(values, function):
    values = values * 1
    if values.requires_grad:
        values.register_hook(function)
    return values


def losses_of(self, logits, prepared, **changed):
    return topologies.transducer_loss(logits, **vars(prepared), **{**Reference.options(self), **changed})


class SavedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, function):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = function(leaf)
            (ctx.gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach()


def saved(scaled):
    """A loss that computes its gradient in forward, and returns scaled(context, upstream) in backward."""
    function = type("Saved", (SavedGradient,), {"backward": staticmethod(lambda ctx, up: (scaled(ctx, up), None))})
    return by(lambda right, x: function.apply(x, right))


def refuses_no_target(self, right, x, prepared):
    if prepared.target_lengths.min() == 0:
        raise AssertionError  # without words, as some do
    return right(x)


def wants_frames(self, right, x, prepared):
    assert (prepared.logit_lengths >= prepared.target_lengths).all()
    return right(x)


def overwrites(self, right, x, prepared):
    loss = right(x * 1)
    x.data.mul_(2)
    return loss


def shortens(self, right, x, prepared):
    loss = right(x)
    prepared.logit_lengths.sub_(1)
    return loss


def value_per_frame(self, right, x, prepared):
    """Its gradient is of the whole loss, for every reduction; the adapter makes the values good."""
    losses = losses_of(self, x, prepared, reduction="none")
    if self.repairs:
        return self.reduced(losses)
    values = losses + losses.detach() * (1 / prepared.logit_lengths - 1)
    if self.reduction == "none":
        return values
    return nothing(values.sum()) + (values.mean() if self.reduction == "mean" else values.sum()).detach()


def prepares(**changes):
    """The right loss of changed targets or lengths: changes are functions of (tensor, logits)."""

    def loss(self, right, x, prepared):
        for name, change in changes.items():
            setattr(prepared, name, change(getattr(prepared, name), x))
        return right(x)

    return wrong(loss)


def halved(prepared, gradient):
    """The gradient where only one arc gets that of a cell whose next target is the blank."""
    blank = torch.nn.functional.pad(prepared.targets == 0, (0, 1))[:, None, :, None]
    return torch.where(blank & (torch.arange(gradient.size(-1)) == 0), gradient / 2, gradient)


def by(function, **attributes):
    return wrong(lambda self, right, x, prepared: function(right, x), **attributes)


def keeps(name, least=0):
    """A loss that keeps a tensor of `prepared` by the shape of logits with at least so many frames."""
    kept = {}

    def change(tensor, x):
        return kept.setdefault(x.shape, tensor) if x.size(1) >= least else tensor

    return prepares(**{name: change})


class Shared(torch.autograd.Function):
    """The gradient, which a later loss of the same shape writes over before backward."""

    buffers = {}

    @staticmethod
    def forward(ctx, logits, function):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = function(leaf)
            (gradient,) = torch.autograd.grad(loss, leaf)
        ctx.buffer = Shared.buffers.setdefault(logits.shape, torch.empty_like(gradient))
        ctx.buffer.copy_(gradient)
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        return ctx.buffer * upstream, None


CALLS, FINE = itertools.count(), (PASS, "")
SIMULATED = {"simulated": True, "dtypes": ("float32", "float16")}  # a simulator takes any dtype, its kernels do not
NanWithoutPath = by(lambda right, x: right(hooked(x, lambda gradient: gradient * math.nan)))
PER_FRAME = "of each loss per frame"
#: The sizes up to which a kernel with a thread for each frame or target is right.
BLOCKS = {(512, 1024): "frames-513", (1024, 1024): "frames-1025", (1024, 128): "targets-129"}
#: Only a large batch has as many frames and as many targets.
BLOCKS[300, 128] = "in-flight-at-size"


def Beyond(limit, **attributes):
    T, U = limit
    return by(lambda right, x: right(x) * (1.01 if x.size(1) > T or x.size(2) > U + 1 else 1), **attributes)


def slightly_off(*dtypes):
    return by(lambda right, x: biased(right(x), 1.0001 if x.dtype in dtypes else 1))


#: By name: the loss, and by the case that catches it its words, or another result and words.
WRONG = {
    "KeepsLengths": (keeps("logit_lengths"), {"in-flight": "loss ", "in-flight-frozen-joiner": "loss "}),
    "KeepsLongTargets": (keeps("targets", 200), {"in-flight": FINE, "in-flight-at-size": "loss "}),
    "SharedBuffer": (by(lambda right, x: Shared.apply(x, right)), {"ragged": FINE, "in-flight": "the gradient"}),
    "ReadsPadding": (by(lambda right, x: right(x) + 1e-6 * x[:, -1].abs().sum()), {"garbage": "loss "}),
    "Off": (by(lambda right, x: right(x) * 1.001), {"ragged": "loss ", "one-frame": "loss "}),
    "LastBlankOff": (by(lambda right, x: right(x) * 1.001, topology="modified-last-blank"), {"many-targets": "loss "}),
    "GradientOff": (
        by(lambda right, x: biased(right(x), 1.01)),
        {
            "ragged": "the gradient is 1.01 times",
            "V-5000": "the gradient is 1.01 times",
        },
    ),
    "ScalesInPlace": (
        saved(lambda ctx, upstream: ctx.gradient.mul_(upstream)),
        {"second-backward": "in the second backward: ", "upstream": FINE},
    ),
    "ForgetsUpstream": (
        saved(lambda ctx, upstream: ctx.gradient.clone()),
        {"upstream-negative": "is -0.5 times", "upstream": "the gradient"},
    ),
    "PaddingTrains": (
        by(lambda right, x: right(x) + nothing(x.square().sum() * 1e-4)),
        {
            "padding-gradient": "gradient in the padding up to",
            "slack": "the gradient is not: at utterance",
        },
    ),
    "NoTarget": (
        wrong(refuses_no_target),
        {"no-target-in-batch": (REFUSES, "AssertionError: raise AssertionError"), "ragged": FINE},
    ),
    "WantsFrames": (wrong(wants_frames), {"many-targets": FINE}),
    "Overwrites": (wrong(overwrites), {"unmodified": "overwrites logits"}),
    "DocumentedOverwrites": (wrong(overwrites, overwrites_logits=True), {"unmodified": (PASS, "as it documents")}),
    "ShortensLengths": (wrong(shortens), {"unmodified": "logit_lengths"}),
    "BlankIsZero": (
        wrong(lambda self, right, x, given: losses_of(self, x, given, blank=0)),
        {"blank-middle": "loss ", "blank-last": "loss ", "blank-first": FINE},
    ),
    "WrongMean": (
        wrong(lambda self, right, x, given: right(x) / (2 if self.reduction == "mean" else 1)),
        {"reduction-mean": "compared with the ", "reduction-sum": FINE},
    ),
    "MeanPerFrame": (
        wrong(
            lambda self, right, x, given: (
                losses_of(self, x, given, reduction="sum") / given.logit_lengths.sum()
                if self.reduction == "mean"
                else right(x)
            )
        ),
        {"reduction-mean": (PASS, "sum over all frames of the batch")},
    ),
    "ValuePerFrame": (
        wrong(value_per_frame, repairs=True),
        {
            "ragged": FINE,
            "upstream-weights": FINE,
            "reduction-none": f"compared with the none {PER_FRAME}",
            "reduction-sum": f"compared with the sum {PER_FRAME}",
            "reduction-mean": "compared with the mean over utterances of the loss per frame",
        },
    ),
    "ClampsTargets": (
        prepares(targets=lambda targets, x: targets.clamp(0, x.shape[-1] - 1)),
        {"target-too-large": "answers ", "target-negative": "answers "},
    ),
    "ClampsLengths": (
        prepares(
            logit_lengths=lambda lengths, x: lengths.clamp(max=x.shape[1]),
            target_lengths=lambda lengths, x: lengths.clamp(max=x.shape[2] - 1),
        ),
        {"frames-over": "answers ", "targets-over": "answers "},
    ),
    "ReadsStorage": (
        by(lambda right, x: right(x.as_strided(x.shape, torch.empty(x.shape).stride()))),
        {"not-contiguous": "loss "},
    ),
    "ReadsInt32": (
        prepares(targets=lambda targets, x: targets.contiguous().view(torch.int32)[:, : x.shape[2] - 1]),
        {"int64": "loss ", "int32": FINE},
    ),
    "Flaky": (by(lambda right, x: right(x) * (1 + 1e-6 * (next(CALLS) % 2))), {"deterministic": "repeats differ"}),
    "Overflows": (by(lambda right, x: right(x.exp().log())), {"logits-1e4": "loss ", "minus-inf": "nan, expected"}),
    "FullOfNan": (by(lambda right, x: right(x) + 0 * x.sum()), {"nan-padding": "loss nan"}),
    "AlwaysTrains": (
        by(lambda right, x: right(x) + torch.zeros((), requires_grad=True)),
        {"no-gradient": "requires a gradient"},
    ),
    "RoundsTwice": (by(lambda right, x: right(x.float()).to(x.dtype)), {"float64": "loss "}),
    # as an -1e30 for log 0 gives
    "FiniteWithoutPath": (by(lambda right, x: right(x).clamp(max=1e30)), {"impossible-target": "loss 1e+30"}),
    "OneArc": (
        wrong(lambda self, right, x, given: right(hooked(x, functools.partial(halved, given)))),
        {"blank-target": "the gradient"},
    ),
    # a sum that starts at -1000
    "Floored": (by(lambda right, x: right(x).clamp(max=1000.0)), {"nats-1000": "loss 1000", "nats-10000": "loss 1000"}),
    "ZeroTimesNan": (
        by(lambda right, x: hooked(right(x), lambda upstream: upstream * upstream / upstream)),
        {"upstream-negative": FINE, "upstream-zero": "nan instead of 0"},
    ),
    # the numbers in the storage of the logits, whatever their strides are
    "ReadsAhead": (
        by(lambda right, x: right(torch.as_strided(x, (x.numel(),), (1,), x.storage_offset()).view(x.shape))),
        {"slice": "loss "},
    ),
    # it differentiates cells that no path meets
    "Unmet": (
        by(lambda right, x: right(x) + 1e-3 * nothing(x[:, 0, -1].sum()), topology="modified"),
        {"unmet-cells": "gradient up to"},
    ),
    "LosesDigits": (
        by(lambda right, x: biased(right(x), 1.01 if x.size(1) > 300 else 1)),
        {"long": "the gradient is 1.01 times"},
    ),
    "NoBfloat16": (
        by(lambda right, x: right(x) * (0.5 if x.dtype == torch.bfloat16 else 1), **SIMULATED),
        {"float16": FINE, "bfloat16": (NOT_ASKED, "no bfloat16")},
    ),
    "Reference": (
        Reference,
        {
            "impossible-target": (PASS, "an infinite loss, gradient up to 0"),
            "frames-1025": FINE,
            "slice": FINE,
            "unmet-cells": (NOT_ASKED, "a path meets every cell"),
            "many-targets": FINE,
        },
    ),
    **{f"Beyond{limit}": (Beyond(limit), {case: "loss "}) for limit, case in BLOCKS.items()},
    # in an interpreter it would take hours; one compiled for the CPU is asked as all others are
    "Looping": (
        Beyond((300, 128), python_loops=("cpu",)),
        {"in-flight-at-size": (NOT_ASKED, "minutes"), "targets-129": "loss ", "long": "loss "},
    ),
    # as a run has it
    "LittleOffInFloat32": (slightly_off(torch.float32), {"ragged": (PASS, "imprecise: ")}),
    "CumulativeSums": (
        wrong(lambda self, right, x, given: right_losses.cumulative_sums(x, *vars(given).values()).sum()),
        {"ragged": FINE, "in-flight-at-size": (PASS, "imprecise: ")},
    ),
    "LittleOff": (slightly_off(torch.float32, torch.float64), {"ragged": "the gradient is 1.0001"}),
    "Interpreted": (Beyond((512, 1024), **SIMULATED), {"frames-513": (NOT_ASKED, "hours")}),
    "Compiled": (
        Beyond((512, 1024), **SIMULATED, simulator_compiled=True),
        {"frames-513": "loss ", "target-too-large": (PASS, "refuses")},
    ),
}


def test_what_a_package_refuses_before_it_is_asked_is_its_refusal():
    """A pruned loss computes its ranges, of which fast_rnnt takes no batch without targets, while it prepares."""
    script = implementations.find("fast_rnnt-pruned").script
    adapter = implementations.load(script)(settings.resolve({"preset": "quick"}, "cpu"))
    try:
        adapter.load("cpu")
    except NotRunnable as error:
        pytest.skip(str(error))
    assert judge(BY_NAME["no-target"], adapter, CPU).result == REFUSES


@pytest.mark.parametrize("name, case", [(name, case) for name, (_, cases) in WRONG.items() for case in cases])
def test_a_wrong_loss_is_caught_by_its_case(name, case):
    kind, cases = WRONG[name]
    outcome, expected = outcome_of(kind, case), cases[case]
    result, words = (DIFFERS, expected) if isinstance(expected, str) else expected
    assert outcome.result == result and words in outcome.message, outcome


def test_nan_in_the_gradient_of_an_infinite_loss_passes_and_is_marked():
    for kind in (Reference, NanWithoutPath):
        outcome = outcome_of(kind, "impossible-target")
        marked = "| \u2713\\* |" in show.page(made(**{"impossible-target": outcome}), {})
        assert outcome.result == PASS and marked == (kind is NanWithoutPath)


@pytest.mark.environment_contract
def test_the_reference_row_is_right_wherever_it_is_asked():
    adapter = adapter_of(Reference)
    outcomes = {case.name: judge(case, adapter, CPU) for case in TABLE}
    assert {name: o for name, o in outcomes.items() if o.result not in (PASS, NOT_ASKED)} == {}
    not_asked = {name for name, outcome in outcomes.items() if outcome.result == NOT_ASKED}
    durations = {case.name for case in TABLE if case.durations or case.sigma is not None}
    assert not_asked == {*durations, "more-targets-than-frames", "unmet-cells"}


def test_an_error_of_ours_or_one_that_loses_the_context_is_no_refusal(monkeypatch):
    """A device-side assert is no answer, since nothing works after it."""

    def fails(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    assert outcome_of(type("Broken", (Reference,), {"prepare": fails}), "ragged").result == "error"
    assert outcome_of(wrong(fails), "target-too-large").result == PASS
    monkeypatch.setattr("rnnt_bench.conformance.answers.context_lost", lambda device: True)
    assert outcome_of(wrong(fails), "target-too-large").result == CRASHES


FATAL = """
import os, time
from rnnt_bench.conformance import answers
from rnnt_bench.losses import topologies
from losses.benchmark_reference import Reference

lost = []

class Fatal(Reference):
    name = "fatal"

    def loss(self, logits, prepared):
        lengths, V = prepared.target_lengths, logits.shape[-1]
        if lengths.min() == 0:
            os.abort()
        if V == 2:
            time.sleep(1000)
        if V == 7 and prepared.targets.max() >= V:
            os.kill(os.getpid(), 11)
        if self.blank == 3:
            answers.context_lost = lambda device: True
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().loss(logits, prepared)

ADAPTER = Fatal
"""


def checked(tmp_path, source, *flags):
    """Run `check` of a script with this ADAPTER; return the exit code and {case: (result, message)}."""
    path = tmp_path / "benchmark_fatal.py"
    path.write_text(source)
    flags = (*flags, "--in-place", "--format", "json", "--log-dir", tmp_path / "log")
    done = run("rnnt-bench", "check", "--only", path, *flags)
    return done.returncode, {row["case"]: (row["result"], row["message"]) for row in json.loads(done.stdout)}


def test_a_death_and_a_lost_context_cost_one_cell_and_the_next_process_goes_on(tmp_path):
    expected = {
        "ragged": (PASS, ""),
        "no-target": (CRASHES, "killed by SIGABRT"),
        "V-2": ("timeout", "no answer within 6 s"),
        "V-5000": (PASS, ""),
        "blank-middle": (CRASHES, "the CUDA context is lost: RuntimeError: CUDA error: an illegal memory access"),
        "blank-last": (PASS, ""),
        "target-too-large": (CRASHES, "killed by SIGSEGV"),
        "target-negative": (PASS, ""),
    }
    code, cells = checked(tmp_path, FATAL, "--cases", ",".join(expected), "--timeout", "6")
    assert code == 1 and cells.keys() == expected.keys()
    for name, (result, words) in expected.items():
        assert cells[name][0] == result and cells[name][1].startswith(words)


ADAPTER = "ADAPTER = type('A', (), {'__init__': lambda self, *_: "
MISSING = "from rnnt_bench.core.errors import NotRunnable\nraise NotRunnable('missing', 'apex: build it')"


@pytest.mark.parametrize(
    "source, status, words",
    [
        (f"import os\n{ADAPTER}os._exit(3)}})", "error", "exit code 3"),
        (f"{ADAPTER}1 / 0}})", "error", "ZeroDivisionError"),
        (MISSING, "missing", "apex: build it"),
    ],
)
def test_a_script_that_does_not_load_is_one_line(tmp_path, source, status, words):
    code, cells = checked(tmp_path, source, "--cases", "ragged")
    assert code == 1 and cells[""][0] == status and words in cells[""][1]


OWN = """
from torchaudio.functional import rnnt_loss
right = lambda *given, blank: rnnt_loss(*given, blank=blank, reduction="sum")
off = lambda *given, blank: right(*given, blank=blank) * 1.001
strange = lambda logits: logits.sum()
number = 3
"""


@pytest.mark.parametrize("name, code", [("right", 0), ("off", 1), ("strange", 1), ("number", 1), ("gone", 2)])
def test_a_loss_of_one_s_own_that_is_wrong_or_cannot_be_called_fails_the_command(tmp_path, name, code):
    (tmp_path / "mine.py").write_text(OWN)
    flags = ("--only", "torchaudio", "--cases", "ragged,V-2,blank-target", "--in-place", "--log-dir", tmp_path / "log")
    if name == "right":  # else torchaudio's own corner fails it, as it should
        flags = ("--cases", "ragged,V-2", *flags[4:])
    done = run("rnnt-bench", "check", "--loss", f"{tmp_path}/mine.py:{name}", *flags)
    assert done.returncode == code, done.stderr


def test_findings_are_ordered_and_only_what_is_one():
    results = {"no-target": REFUSES, "float16": REFUSES, "ragged": PASS, "V-2": CRASHES, "target-too-large": DIFFERS}
    matrix = made(**{name: Outcome(result, "answers 3") for name, result in results.items()})
    lines = show.findings(matrix)
    assert list(lines) == [show.FINDINGS[result] for result in (DIFFERS, CRASHES, REFUSES)]
    (line,) = lines[show.FINDINGS[DIFFERS]]
    assert line.startswith("target = V: ") and line.endswith(": a (answers 3)")
    text = show.page(matrix, {})
    assert "| U = 0 | ! |" in text and "ragged batch" not in text and "pip install &lt;gone" in text
    assert text.index("### Wrong") < text.index("### Ends") < text.index("### Refuses")


def test_each_lattice_has_a_table_whose_short_heads_differ():
    matrix = made("k2:modified", ragged=Outcome(DIFFERS, "off", 0.5), **{"duration-0": Outcome(NOT_ASKED)})
    cells = {"ragged": Outcome(PASS), "duration-0": Outcome(DIFFERS, "gradient nan")}
    matrix.rows = [Row("transformers", "tdt", simulator="X=1", cells=cells), *matrix.rows]
    exact, tdt = show.tables(matrix)
    assert [[cell.shown for cell in row] for row in exact.rows] == [["ragged batch", "\u2717"]]
    assert (exact.title, tdt.title) == ("the transducer of Graves 2012", "tdt: tokens and durations")
    assert [column.title for column in tdt.columns] == ["case", "tf"]
    assert any("tf transformers (simulated)" in line for line in show.remarks(matrix))
    alone = show.remarks(made("warp-rnnt:compact", ragged=Outcome(PASS)))
    assert any(line.endswith("wr warp-rnnt") for line in alone)
    for kind in KINDS:
        heads = [show.short(implementation.name) for implementation in with_variants() if implementation.kind == kind]
        assert len(set(heads)) == len(heads)


def test_every_outcome_is_a_row_and_what_was_not_judged_fails():
    cells = {"ragged": Outcome(PASS, "", 1e-8, 2.04e-7), "V-2": Outcome(DIFFERS, "", math.inf)}
    answer = show.answer_of(made(**cells))
    rows = {(row["loss"], row["case"]): row for row in json.loads(answer.render("json"))}
    assert rows["a", "ragged"]["grad_error"] == 2.04e-7 and rows["a", "V-2"]["loss_error"] >= 1e300
    assert rows["gone", ""]["result"] == "missing"
    assert "gone: missing: gone is not installed" in answer.render("table")


def test_caveats_are_those_of_the_newest_matrix_that_judged_the_loss(tmp_path):
    committed = show.judged("optimized_transducer", [])
    assert "a second backward gives another gradient, without an error" in committed.caveats
    assert committed.version == "1.4" and committed.day >= "2026-11-23"
    assert show.judged("no such loss", []) is None
    write_check(tmp_path, "flash", day=1, ragged=Outcome(REFUSES, "no"))
    newest = write_check(tmp_path, "flash", day=2, **{"V-2": Outcome(CRASHES), "upstream": Outcome(DIFFERS)})
    assert show.judged("flash", [tmp_path]).caveats == [BY_NAME["upstream"].wrong, "ends or hangs the process: V = 2"]
    newest.write_text("{")
    assert show.judged("flash", [tmp_path]).caveats == []  # an error is fine there


def test_the_committed_page_and_corners_are_of_these_cases():
    corners = json.loads((ROOT / "docs" / show.CORNERS).read_text())
    assert {case for of in corners.values() for case in of["results"]} <= BY_NAME.keys() and len(corners) > 50
    assert all(show.judged(name, []).caveats == [] for name in ("reference", "fused"))
    page = (ROOT / "docs" / show.PAGE).read_text()
    assert "## Matrix" in page and "### Wrong without an error" in page and len(page.split()) <= 3300


def test_the_command_judges_writes_and_prints_the_matrix(tmp_path):
    flags = ("--only", "reference,torchaudio", "--cases", "ragged,target-too-large", "--log-dir", tmp_path / "log")
    done = run("rnnt-bench", "check", *flags, "--output", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert re.search("as asked in all: .*reference", done.stdout) and "target = V" in done.stdout
    page, corners = ((tmp_path / "out" / name).read_text() for name in (show.PAGE, show.CORNERS))
    assert "| target = V | **\u2717** |" in page and str(tmp_path) not in page
    results = {name: of["results"] for name, of in json.loads(corners).items()}
    assert results == {"torchaudio": {"target-too-large": "differs"}, "reference": {}}
    assert len({of["day"] for of in json.loads(corners).values()}) == 1 and json.loads(corners)["torchaudio"]["version"]
    assert "Judged earlier" not in page
    assert "target = V" in run("rnnt-bench", "summarize", tmp_path / "log").stdout


def test_what_a_run_does_not_judge_keeps_its_corners_and_their_day(tmp_path):
    earlier = {"flash": {"version": "2.1", "day": "2020-02-03", "results": {"V-2": "differs", "gone": "differs"}}}
    (tmp_path / show.CORNERS).write_text(json.dumps(earlier))
    flags = ("--only", "reference", "--cases", "ragged", "--quiet", "--log-dir", tmp_path / "log", "--output", tmp_path)
    assert run("rnnt-bench", "check", *flags).returncode == 0
    corners = json.loads((tmp_path / show.CORNERS).read_text())
    assert corners["flash"] == earlier["flash"] and corners["reference"]["day"] > "2020-02-03"
    page = (tmp_path / show.PAGE).read_text()
    assert page.index("## Judged earlier") < page.index("flash 2.1, 2020-02-03: \u2717 V = 2\n")
    (tmp_path / show.CORNERS).write_text("[]")
    refused = run("rnnt-bench", "check", *flags)
    assert refused.returncode == 2 and str(tmp_path / show.CORNERS) in refused.stderr


def test_the_unchanged_template_is_right_in_every_case(tmp_path):
    code, cells = checked(tmp_path, (ROOT / "benchmark_mine.py").read_text())
    assert code == 0 and {result for result, _ in cells.values()} == {PASS, NOT_ASKED}
    assert {cells[name][0] for name in ("impossible-target", "minus-inf", "nan-padding")} == {PASS}


def test_a_target_that_the_template_may_not_emit_leaves_its_gradient_finite():
    """-inf in one cell leaves other paths; in all cells it leaves none, and an infinite loss."""
    adapter = implementations.load(str(ROOT / "benchmark_mine.py"))(settings.resolve({"preset": "quick"}, "cpu"))
    for frames, infinite in ((slice(1, 2), False), (slice(None), True)):
        logits = torch.sin(torch.arange(2 * 4 * 3 * 5.0)).view(2, 4, 3, 5)
        logits[0, frames, :, 3] = -math.inf
        logits[0, 0, 1, 0] = -math.inf
        targets, T_lengths, U_lengths = torch.tensor([[1, 3], [2, 2]]), torch.tensor([4, 3]), torch.tensor([2, 1])
        leaf, truth = logits.clone().requires_grad_(), logits.double().requires_grad_()
        value = adapter.function()(leaf, targets, T_lengths, U_lengths)
        value.backward()
        assert leaf.grad.isfinite().all() and bool(value.isinf()) == infinite
        if not infinite:
            right = oracle.losses(truth, targets, [(4, 2), (3, 1)]).sum()
            right.backward()
            assert abs(value - right) < 1e-5 and (leaf.grad - truth.grad).abs().max() < 1e-5


def test_the_list():
    listed = run("rnnt-bench", "check", "--list")
    assert listed.returncode == 0 and all(case.name in listed.stdout for case in TABLE)
