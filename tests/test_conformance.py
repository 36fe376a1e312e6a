"""The conformance matrix: the judge is proven on losses that are wrong on purpose, each caught by the case that is for
it; the reference row passes; processes that die or hang cost one cell; findings and reproductions say what is so.
"""

from __future__ import annotations

import functools
import json
import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from commands import KILLS, ROOT, assert_user_error, run
from fixtures_conformance import made
from msgspec import structs

from common.conformance import command, large, matrix
from common.conformance import findings as judging
from common.conformance.cases import BY_NAME, CASES
from common.conformance.documents import Matrix, MatrixRow
from common.conformance.findings import FATAL, KINDS, REFUSAL, WRONG, findings, updated
from common.conformance.isolated import examine
from common.conformance.judge import judge
from common.conformance.records import CRASHES, DIFFERS, NOT_APPLICABLE, PASS, REFUSES, TIMEOUT, Judged, Outcome
from common.conformance.reproductions import DIES
from common.core import scripts, settings
from common.core.implementations import BY_NAME as IMPLEMENTATIONS
from common.core.implementations import KINDS as KINDS_OF_LOSS
from common.core.implementations import with_variants
from common.losses import oracle, vectorised
from common.records import documents
from common.records.schema import Machine
from common.setup import environments, obtaining
from losses.benchmark_reference import Reference

CPU = torch.device("cpu")
COMMITTED = ROOT / "docs" / "conformance.json"


def adapter_of(kind):
    adapter = kind(settings.resolve({"preset": "quick"}, "cpu"))
    adapter.load("cpu")
    return adapter


def outcome_of(kind, case):
    return judge(BY_NAME[case], adapter_of(kind), CPU)


# The judge, on losses that are wrong on purpose.


class Off(Reference):
    def loss(self, logits, prepared):
        return super().loss(logits, prepared) * 1.001


class LastBlankOff(Off):
    topology = "modified-last-blank"


class GradientOff(Reference):
    def loss(self, logits, prepared):
        right = super().loss(logits, prepared)
        return right.detach() + 1.01 * (right - right.detach())


class Single(Reference):
    """float32 inside, whatever it is given."""

    def loss(self, logits, prepared):
        return super().loss(logits.float(), prepared).double()


class SingleGradientOff(Single):
    def loss(self, logits, prepared):
        right = super().loss(logits, prepared)
        return right.detach() + 1.02 * (right - right.detach())


class OneBackward(Reference):
    """Frees what it saved, as some do with retain_graph=True too."""

    def loss(self, logits, prepared):
        return Once.apply(logits, lambda leaf: super(OneBackward, self).loss(leaf, prepared))


class PaddingTrains(Reference):
    def loss(self, logits, prepared):
        every_cell = logits.square().sum() * 1e-4
        return super().loss(logits, prepared) + every_cell - every_cell.detach()


class NoTarget(Reference):
    """Refuses as some do: an assertion without words."""

    def loss(self, logits, prepared):
        if prepared.target_lengths.min() == 0:
            raise AssertionError
        return super().loss(logits, prepared)


class Overwrites(Reference):
    def loss(self, logits, prepared):
        loss = super().loss(logits * 1, prepared)
        logits.data.mul_(2)
        return loss


class DocumentedOverwrites(Overwrites):
    overwrites_logits = True


class ShortensLengths(Reference):
    def loss(self, logits, prepared):
        loss = super().loss(logits, prepared)
        prepared.logit_lengths.sub_(1)
        return loss


class BlankIsZero(Reference):
    def loss(self, logits, prepared):
        return vectorised.transducer_loss(logits, **vars(prepared), **{**self.options(), "blank": 0})


class WrongMean(Reference):
    def loss(self, logits, prepared):
        loss = super().loss(logits, prepared)
        return loss / 2 if self.reduction == "mean" else loss


class MeanPerFrame(Reference):
    def loss(self, logits, prepared):
        if self.reduction != "mean":
            return super().loss(logits, prepared)
        losses = vectorised.transducer_loss(logits, **vars(prepared), **{**self.options(), "reduction": "none"})
        return losses.sum() / prepared.logit_lengths.sum()


class ValuePerFrame(Reference):
    """Its gradient is of the whole loss, for every reduction; the adapter makes the values good."""

    repairs = True

    def loss(self, logits, prepared):
        losses = vectorised.transducer_loss(logits, **vars(prepared), **{**self.options(), "reduction": "none"})
        if self.repairs:
            return self.reduced(losses)
        values = losses + losses.detach() * (1 / prepared.logit_lengths - 1)
        return values if self.reduction == "none" else values.sum() - (values.sum() - self.value(values)).detach()

    def value(self, values):
        return values.mean() if self.reduction == "mean" else values.sum()


class ClampsTargets(Reference):
    def loss(self, logits, prepared):
        prepared.targets = prepared.targets.clamp(0, logits.shape[-1] - 1)
        return super().loss(logits, prepared)


class ClampsLengths(Reference):
    def loss(self, logits, prepared):
        prepared.logit_lengths = prepared.logit_lengths.clamp(max=logits.shape[1])
        prepared.target_lengths = prepared.target_lengths.clamp(max=logits.shape[2] - 1)
        return super().loss(logits, prepared)


class ReadsStorage(Reference):
    """Takes the numbers in memory for contiguous ones."""

    def loss(self, logits, prepared):
        return super().loss(logits.as_strided(logits.shape, torch.empty(logits.shape).stride()), prepared)


class ReadsInt32(Reference):
    def loss(self, logits, prepared):
        prepared.targets = prepared.targets.contiguous().view(torch.int32)[:, : logits.shape[2] - 1]
        return super().loss(logits, prepared)


class Flaky(Reference):
    calls = 0

    def loss(self, logits, prepared):
        Flaky.calls += 1
        return super().loss(logits, prepared) * (1 + 1e-6 * (Flaky.calls % 2))


class Finite(Reference):
    """exp before log: overflows where the logits are large."""

    def loss(self, logits, prepared):
        return super().loss(logits.exp().log(), prepared)


class FullOfNan(Reference):
    def loss(self, logits, prepared):
        return super().loss(logits, prepared) + 0 * logits.sum()


class SavedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, function):
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = function(leaf)
            (ctx.gradient,) = torch.autograd.grad(loss, leaf)
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        return ctx.gradient.mul_(upstream), None


class Once(SavedGradient):
    @staticmethod
    def backward(ctx, upstream):
        gradient = ctx.gradient
        del ctx.gradient
        return gradient * upstream, None


class ScalesInPlace(Reference):
    def loss(self, logits, prepared):
        return SavedGradient.apply(logits, lambda leaf: Reference.loss(self, leaf, prepared))


class ForgetsUpstream(Reference):
    class Function(SavedGradient):
        @staticmethod
        def backward(ctx, upstream):
            return ctx.gradient.clone(), None

    def loss(self, logits, prepared):
        return self.Function.apply(logits, lambda leaf: Reference.loss(self, leaf, prepared))


class AlwaysTrains(Reference):
    def loss(self, logits, prepared):
        return super().loss(logits, prepared) + torch.zeros((), requires_grad=True)


class RoundsTwice(Reference):
    def loss(self, logits, prepared):
        return super().loss(logits.float(), prepared).to(logits.dtype)


class FiniteWithoutPath(Reference):
    """A large number where no path is possible, as an -1e30 for log 0 gives."""

    def loss(self, logits, prepared):
        return super().loss(logits, prepared).clamp(max=1e30)


class NanWithoutPath(Reference):
    def loss(self, logits, prepared):
        if logits.requires_grad:
            logits = logits * 1
            logits.register_hook(lambda gradient: gradient * math.nan)
        return super().loss(logits, prepared)


class OneArc(Reference):
    """Only one arc gets the gradient of a cell whose next target is the blank."""

    def loss(self, logits, prepared):
        def halved(gradient):
            blank = torch.nn.functional.pad(prepared.targets == 0, (0, 1))[:, None, :, None]
            return torch.where(blank & (torch.arange(gradient.size(-1)) == 0), gradient / 2, gradient)

        if logits.requires_grad:
            logits = logits * 1
            logits.register_hook(halved)
        return super().loss(logits, prepared)


class Floored(Reference):
    """A sum that starts at -1000, as NeMo's loop over tokens and durations does."""

    def loss(self, logits, prepared):
        return super().loss(logits, prepared).clamp(max=1000.0)


class ZeroTimesNan(Reference):
    """A gradient of NaN where the loss is switched off."""

    def loss(self, logits, prepared):
        loss = super().loss(logits, prepared) * 1
        loss.register_hook(lambda upstream: upstream * upstream / upstream)
        return loss


class ReadsAhead(Reference):
    """It takes its numbers from the storage of the logits, whatever their strides are."""

    def loss(self, logits, prepared):
        flat = torch.as_strided(logits, (logits.numel(),), (1,), logits.storage_offset())
        return super().loss(flat.view(logits.shape), prepared)


class Emits(Reference):
    """FastEmit on all arcs, not on those of targets alone."""

    def options(self):
        return {**super().options(), "fastemit_lambda": self.fastemit}

    def loss(self, logits, prepared):
        losses = vectorised.transducer_loss(logits, **vars(prepared), **Reference.options(self))
        return losses.detach() + (1 + self.fastemit) * (losses - losses.detach())


class Unmet(Reference):
    """It differentiates cells that no path meets."""

    topology = "modified"

    def loss(self, logits, prepared):
        return super().loss(logits, prepared) + 1e-3 * (logits[:, 0, -1] - logits[:, 0, -1].detach()).sum()


class LosesDigits(Reference):
    """Its gradient is off by 1% in long utterances."""

    def loss(self, logits, prepared):
        right = super().loss(logits, prepared)
        return right.detach() + (1.01 if logits.size(1) > 300 else 1) * (right - right.detach())


class WantsFrames(Reference):
    """It refuses more targets than frames."""

    def loss(self, logits, prepared):
        assert (prepared.logit_lengths >= prepared.target_lengths).all()
        return super().loss(logits, prepared)


class Simulated(Reference):
    """Its kernels have no bfloat16, but in its simulator they take any dtype."""

    simulated = True
    dtypes = ("float32", "float16")

    def loss(self, logits, prepared):
        return super().loss(logits, prepared) * (0.5 if logits.dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize(
    "kind, case, result, words",
    [
        (Simulated, "float16", PASS, ""),
        (Simulated, "bfloat16", NOT_APPLICABLE, "no bfloat16"),
        (FiniteWithoutPath, "impossible-target", DIFFERS, "loss 1e+30"),
        (Reference, "impossible-target", PASS, "an infinite loss, gradient all 0"),
        (OneArc, "blank-target", DIFFERS, "gradient off"),
        (LosesDigits, "long", DIFFERS, "gradient off"),
        (Floored, "nats-1000", DIFFERS, "loss 1000"),
        (Floored, "nats-10000", DIFFERS, "loss 1000"),
        (ForgetsUpstream, "upstream-negative", DIFFERS, "gradient off"),
        (ZeroTimesNan, "upstream-negative", PASS, ""),
        (ZeroTimesNan, "upstream-zero", DIFFERS, "gradient nan"),
        (ReadsAhead, "slice", DIFFERS, "loss "),
        (Reference, "slice", PASS, ""),
        (Emits, "fastemit", DIFFERS, "gradient off"),
        (Reference, "fastemit", NOT_APPLICABLE, "no FastEmit"),
        (Unmet, "unmet-cells", DIFFERS, "gradient up to"),
        (Reference, "unmet-cells", NOT_APPLICABLE, "a path meets every cell"),
        (Reference, "many-targets", PASS, ""),
        (WantsFrames, "many-targets", PASS, ""),
        (LastBlankOff, "many-targets", DIFFERS, "loss "),
        (Off, "ragged", DIFFERS, "loss "),
        (Off, "one-frame", DIFFERS, "loss "),
        (GradientOff, "ragged", DIFFERS, "gradient off by 1.0e-02"),
        (GradientOff, "V-5000", DIFFERS, "gradient off"),
        (GradientOff, "numeric-gradient", DIFFERS, "gradient off by 1.0e-02 of central differences"),
        (PaddingTrains, "numeric-gradient", DIFFERS, "of central differences"),
        (Single, "numeric-gradient", PASS, "of a loss that is off by"),
        (SingleGradientOff, "numeric-gradient", DIFFERS, "gradient off by 2.0e-02 of central differences"),
        (OneBackward, "numeric-gradient", PASS, ""),
        (PaddingTrains, "padding-gradient", DIFFERS, "gradient in the padding up to"),
        (PaddingTrains, "slack", DIFFERS, "gradient in the padding"),
        (
            NoTarget,
            "no-target-in-batch",
            REFUSES,
            "AssertionError: raise AssertionError (test_conformance.py:",
        ),
        (NoTarget, "ragged", PASS, ""),
        (Overwrites, "unmodified", DIFFERS, "overwrites logits"),
        (DocumentedOverwrites, "unmodified", PASS, "as it documents"),
        (ShortensLengths, "unmodified", DIFFERS, "overwrites logit_lengths"),
        (BlankIsZero, "blank-middle", DIFFERS, "loss "),
        (BlankIsZero, "blank-last", DIFFERS, "loss "),
        (BlankIsZero, "blank-first", PASS, ""),
        (WrongMean, "reduction-mean", DIFFERS, "compared with the "),
        (WrongMean, "reduction-sum", PASS, ""),
        (MeanPerFrame, "reduction-mean", PASS, "sum over all frames of the batch"),
        (ValuePerFrame, "ragged", PASS, ""),
        (ValuePerFrame, "upstream-weights", PASS, ""),
        (ValuePerFrame, "reduction-none", DIFFERS, "(the value is that of each loss per frame, not the gradient)"),
        (ValuePerFrame, "reduction-sum", DIFFERS, "(the value is that of each loss per frame, not the gradient)"),
        (ValuePerFrame, "reduction-mean", DIFFERS, "(compared with the mean over utterances of the loss per frame)"),
        (ClampsTargets, "target-too-large", DIFFERS, "answers "),
        (ClampsTargets, "target-negative", DIFFERS, "answers "),
        (ClampsLengths, "frames-over", DIFFERS, "answers "),
        (ClampsLengths, "targets-over", DIFFERS, "answers "),
        (ReadsStorage, "not-contiguous", DIFFERS, "loss "),
        (ReadsInt32, "int64", DIFFERS, "loss "),
        (ReadsInt32, "int32", PASS, ""),
        (Flaky, "deterministic", DIFFERS, "repeats differ"),
        (Finite, "logits-1e4", DIFFERS, "loss "),
        (Finite, "minus-inf", DIFFERS, "gradient nan"),
        (FullOfNan, "nan-padding", DIFFERS, "loss nan"),
        (ScalesInPlace, "second-backward", DIFFERS, "second gradient off"),
        (ScalesInPlace, "upstream", PASS, ""),
        (ForgetsUpstream, "upstream", DIFFERS, "gradient off"),
        (AlwaysTrains, "no-gradient", DIFFERS, "requires a gradient"),
        (RoundsTwice, "float64", DIFFERS, "loss "),
    ],
)
def test_a_wrong_loss_is_caught_by_its_case(kind, case, result, words):
    outcome = outcome_of(kind, case)
    assert outcome.result == result and words in outcome.message, outcome


def test_nan_in_the_gradient_of_an_infinite_loss_passes_and_is_marked():
    outcomes = {kind: outcome_of(kind, "impossible-target") for kind in (Reference, NanWithoutPath)}
    assert [outcome.result for outcome in outcomes.values()] == [PASS, PASS]
    assert [judging.cell(outcome) for outcome in outcomes.values()] == ["pass", "pass, gradient nan"]
    compact = [matrix.markdown(made(**{"impossible-target": outcome})) for outcome in outcomes.values()]
    assert ["| \u2713\\* |" in printed for printed in compact] == [False, True]


class CountsGradients(Simulated):
    """Count the calls whose gradient a simulator would compute."""

    calls = 0

    def loss(self, logits, prepared):
        CountsGradients.calls += logits.requires_grad
        return super().loss(logits, prepared)


def test_differences_in_a_simulator_compute_one_gradient():
    assert outcome_of(CountsGradients, "numeric-gradient").result == PASS
    assert CountsGradients.calls == 1


@pytest.mark.environment_contract
def test_the_reference_row_is_right_wherever_it_is_asked():
    adapter = adapter_of(Reference)
    outcomes = {case.name: judge(case, adapter, CPU) for case in CASES}
    assert {name: o for name, o in outcomes.items() if o.result not in (PASS, NOT_APPLICABLE)} == {}
    asked = {name for name, outcome in outcomes.items() if outcome.result == PASS}
    durations = {case.name for case in CASES if case.check == "with_durations"}
    of_other_losses = {"more-targets-than-frames", "unmet-cells", "fastemit"}
    assert set(outcomes) - asked - durations == {*of_other_losses, "large", "second-device"}


def test_what_an_adapter_makes_good_is_shown_with_the_packages_own_call():
    outcome = outcome_of(ValuePerFrame, "reduction-mean")
    assert "reduction='mean'" in outcome.reproduction and outcome.reproduction.endswith("# prints False")
    assert "gradient off by" in outcome.message


@pytest.mark.parametrize(
    "room, result, words",
    [
        (2**27, NOT_APPLICABLE, "GiB of memory at least"),
        (2**28 + 2**24, NOT_APPLICABLE, "not enough memory: RuntimeError"),
        (2**33, PASS, ""),
    ],
)
def test_large_logits_are_asked_within_the_memory_that_there_is(monkeypatch, room, result, words):
    monkeypatch.setattr(large, "LARGE_V", 2**12)
    monkeypatch.setattr(large.memory, "available_memory", lambda: room + large.LEFT_BYTES)
    outcome = judge(BY_NAME["large"].allowing(large=True), adapter_of(Reference), CPU)
    assert outcome.result == result and words in outcome.message, outcome


def test_an_error_of_ours_is_not_taken_for_a_refusal():
    class Broken(Reference):
        def prepare(self, batch):
            raise RuntimeError("of the adapter")

    assert outcome_of(Broken, "ragged").result == "error"


# Processes.

FATAL_LOSS = """
import os, time
from losses.benchmark_reference import Reference

def fatal_loss(logits, targets, logit_lengths, target_lengths, **options):
    from common.losses import vectorised
    if target_lengths.min() == 0:
        os.abort()
    if logits.shape[-1] == 2:
        time.sleep(1000)
    if targets.max() >= logits.shape[-1]:
        os.kill(os.getpid(), 11)
    return vectorised.transducer_loss(logits, targets, logit_lengths, target_lengths, **options)

class Fatal(Reference):
    def function(self):
        return fatal_loss

ADAPTER = Fatal
"""


@pytest.fixture(scope="module")
def folder_of_scripts(tmp_path_factory):
    """Return a folder: workers of one environment are forks of one server."""
    return tmp_path_factory.mktemp("scripts")


@pytest.fixture
def module_of(folder_of_scripts, monkeypatch):
    """Write a script with an ADAPTER that workers find; returns its implementation."""

    def make(source):
        name = f"fatal_script_{len(list(folder_of_scripts.glob('*.py')))}"
        (folder_of_scripts / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", str(folder_of_scripts))
        return type(IMPLEMENTATIONS["reference"])(name="fatal", script=name, environment="main", package="torch")

    return make


def test_a_death_costs_one_cell_and_the_next_process_goes_on(module_of):
    names = ("ragged", "no-target", "V-2", "V-5000", "target-too-large", "target-negative")
    judged = examine(
        module_of(FATAL_LOSS), Path(sys.executable), "cpu", [c for c in CASES if c.name in names], timeout=6
    )
    assert judged.status == "judged", judged.reason
    results = {name: outcome.result for name, outcome in judged.cells.items()}
    assert results == {
        "ragged": PASS,
        "no-target": CRASHES,
        "V-2": TIMEOUT,
        "V-5000": PASS,
        "target-too-large": CRASHES,
        "target-negative": PASS,
    }
    assert judged.cells["no-target"].message.startswith("killed by SIGABRT")
    assert judged.cells["target-too-large"].message == "killed by SIGSEGV"
    assert judged.cells["target-too-large"].reproduction.endswith(DIES)
    assert "no answer within 6 s" in judged.cells["V-2"].message


LOST_LOSS = """
from losses.benchmark_reference import Reference
from common.conformance import questions
from common.losses import oracle, vectorised
from common.records import documents
from common.records.schema import Machine

lost = []
questions.context_lost = lambda device: bool(lost)

def losing_loss(logits, targets, logit_lengths, target_lengths, **options):
    if logits.shape[-1] == 2:
        lost.append("for good")
    if lost:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return vectorised.transducer_loss(logits, targets, logit_lengths, target_lengths, **options)

class Losing(Reference):
    def function(self):
        return losing_loss

ADAPTER = Losing
"""


def test_a_lost_cuda_context_costs_one_cell_and_a_new_process_goes_on(module_of):
    names = ("ragged", "V-2", "V-5000", "blank-first")
    judged = examine(
        module_of(LOST_LOSS), Path(sys.executable), "cpu", [c for c in CASES if c.name in names], timeout=60
    )
    assert judged.status == "judged", judged.reason
    results = {name: outcome.result for name, outcome in judged.cells.items()}
    assert results == {"ragged": PASS, "V-2": CRASHES, "V-5000": PASS, "blank-first": PASS}
    lost = judged.cells["V-2"]
    assert lost.message.startswith("the CUDA context is lost: RuntimeError: CUDA error: an illegal memory access")
    assert lost.reproduction.endswith(DIES)


class Asserts(Reference):
    """A device-side assert is no answer, since nothing works after it."""

    def loss(self, logits, prepared):
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_an_error_that_loses_the_context_is_no_refusal(monkeypatch):
    assert outcome_of(Asserts, "target-too-large").result == PASS
    monkeypatch.setattr("common.conformance.questions.context_lost", lambda device: True)
    assert outcome_of(Asserts, "target-too-large").result == CRASHES


@pytest.mark.parametrize(
    "source, status, words",
    [
        ("import os\nos._exit(3)", "error", "exit code 3"),
        ("import os\nos.abort()", "error", "killed by SIGABRT"),
        ("raise NameError('of the script')", "error", "NameError: of the script"),
        (
            "from common.core.errors import NotRunnable\nraise NotRunnable('missing', 'apex: build it')",
            "missing",
            "apex: build it",
        ),
    ],
)
def test_a_script_that_does_not_load_is_one_line(module_of, source, status, words):
    judged = examine(module_of(source), Path(sys.executable), "cpu", [BY_NAME["ragged"]], timeout=60)
    assert judged.status == status and words in judged.reason


# The matrix and its findings.


def test_findings_are_ordered_and_only_what_is_one():
    document = made(
        **{
            "no-target": Outcome(REFUSES, "AssertionError: assert U > 0"),
            "float16": Outcome(REFUSES, "no half"),
            "ragged": Outcome(PASS),
            "V-2": Outcome(CRASHES, "killed by SIGSEGV"),
            "target-too-large": Outcome(DIFFERS, "answers 3", reproduction="print(1)  # prints 1"),
        }
    )
    problems = findings(document)
    assert [finding.kind for finding in problems] == [WRONG, FATAL, REFUSAL] == list(KINDS)
    assert problems[0].who == {"answers 3": ["a"]} and dict(problems[0].shown) == {"a": "print(1)  # prints 1"}
    text = matrix.markdown(document)
    assert "print(1)  # prints 1" in text and "| U = 0 | ! |" in text and "pip install &lt;gone" in text
    assert text.index("### Wrong") < text.index("### Ends") < text.index("### Refuses")


def test_findings_of_a_file_of_format_1_which_has_no_words_for_them():
    document = made(ragged=Outcome(DIFFERS, "off"), **{"V-2": Outcome(CRASHES), "no-target": Outcome(REFUSES)})
    content = json.loads(document.to_json())
    content["format"] = 1
    for case in content["cases"]:
        del case["wrong"], case["refusal"]
    problems = findings(documents.typed(content, Matrix))
    assert [(finding.kind, finding.case.name) for finding in problems] == [(WRONG, "ragged"), (FATAL, "V-2")]
    assert all(finding.sentence for finding in problems)


def test_the_table_is_coloured_only_when_asked_and_words_say_it_all():
    document = made(ragged=Outcome(DIFFERS, "loss 1 instead of 2", 0.5, 0.25), **{"V-2": Outcome(DIFFERS, "", 1e300)})
    plain = matrix.table(document, color=False)
    assert "differs 5e-01" in plain and "differs nan" in plain and "\x1b" not in plain
    assert "gone: missing: gone is not installed" in plain
    assert "\x1b[1;31mdiffers 5e-01" in matrix.table(document, color=True)


def test_a_cell_that_passes_says_by_how_much_it_is_off():
    document = made(ragged=Outcome(PASS, "", 1e-8, 2.04e-7), **{"V-2": Outcome(PASS, "", 0.0), "int32": Outcome(PASS)})
    cells = [row.split()[-2:] for row in matrix.table(document, color=False).splitlines() if " pass" in row][:3]
    assert sorted(cells) == [["lengths", "pass"], ["pass", "0"], ["pass", "2e-07"]]
    assert json.loads(document.to_json())["implementations"][0]["cells"]["ragged"]["grad_error"] == 2.04e-7


def test_the_command_writes_and_prints_the_matrix(tmp_path):
    done = run(
        "conformance.py", "--only", "reference,torchaudio", "--cases", "ragged,target-too-large", "--output", tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "[2/2]" in done.stderr and re.search("right in every case: .*reference", done.stdout)
    document = json.loads((tmp_path / "conformance.json").read_text())
    rows = {entry["name"]: entry for entry in document["implementations"]}
    assert rows["reference"]["cells"]["target-too-large"]["result"] == PASS
    assert rows["reference"]["cells"]["ragged"]["grad_error"] < 1e-5
    if rows["torchaudio"]["status"] == "judged":
        assert rows["torchaudio"]["cells"]["ragged"]["result"] == PASS and rows["torchaudio"]["torch"]
    page = (tmp_path / "conformance.md").read_text()
    assert "## Matrix" in page and "conformance.py --only reference,torchaudio --cases" in page
    assert str(tmp_path) not in json.dumps(document) + page


def test_the_unchanged_template_is_right_in_every_case(tmp_path):
    path = tmp_path / "benchmark_flash.py"
    path.write_text((ROOT / "benchmark_mine.py").read_text())
    done = run("conformance.py", "--in-place", "--only", path, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "conformance.json").read_text())["implementations"]
    assert {name: cell for name, cell in row["cells"].items() if cell["result"] not in ("pass", "n/a")} == {}
    assert {"impossible-target", "minus-inf", "nan-padding"} <= row["cells"].keys()


def test_a_target_that_the_template_may_not_emit_leaves_its_gradient_finite():
    """-inf in one cell leaves other paths; in all cells it leaves none, and an infinite loss."""
    adapter = scripts.load(str(ROOT / "benchmark_mine.py"))(settings.resolve({"preset": "quick"}, "cpu"))
    loss = adapter.function()
    for frames, infinite in ((slice(1, 2), False), (slice(None), True)):
        logits = torch.sin(torch.arange(2 * 4 * 3 * 5.0)).view(2, 4, 3, 5)
        logits[0, frames, :, 3] = -math.inf
        logits[0, 0, 1, 0] = -math.inf
        targets, T_lengths, U_lengths = torch.tensor([[1, 3], [2, 2]]), torch.tensor([4, 3]), torch.tensor([2, 1])
        leaf, truth = logits.clone().requires_grad_(), logits.double().requires_grad_()
        value = loss(leaf, targets, T_lengths, U_lengths)
        value.backward()
        assert leaf.grad.isfinite().all()
        if infinite:
            assert math.isinf(value)
            continue
        right = oracle.losses(truth, targets, [(4, 2), (3, 1)]).sum()
        right.backward()
        assert abs(value - right) < 1e-5 and (leaf.grad - truth.grad).abs().max() < 1e-5


def test_an_own_loss_that_is_wrong_in_a_simulator_is_shown_with_it(tmp_path):
    text = (ROOT / "benchmark_mine.py").read_text().replace("    import torch\n", "    return 0 * logits.sum()\n", 1)
    path = tmp_path / "benchmark_far.py"
    path.write_text(text.replace('("cpu", "cuda")\n', '("cuda",)\n    simulator = {"FAR": "1"}\n', 1))
    flags = ["--cases", "ragged", "--in-place", "--device", "cpu", "--format", "markdown"]
    done = run("conformance.py", "--only", path, *flags, "--output", tmp_path)
    assert done.returncode == 0 and "`FAR=1 .venv/main/bin/python shown.py`" in done.stdout, done.stderr


def test_what_is_written_names_no_folder_of_this_machine():
    outcome = Outcome(DIFFERS, "raised in /tmp/x/loss.py, see https://example.org/a/b")
    rows = [Judged("a", "exact", cells={"ragged": outcome}), Judged("b", "exact", "missing", "no /work/y/lib.so")]
    words = ["conformance.py", "--only", "/tmp/x/benchmark_a.py", "--output=/tmp/o", "--outp", "/tmp/o", "--update"]
    device = {"device": "cpu", "machine": Machine(), "suite": ("", False)}
    document = judging.document(list(map(MatrixRow.from_judged, rows)), [BY_NAME["ragged"]], command=words, **device)
    assert document.command == ["conformance.py", "--only", "benchmark_a.py", "--update"]
    first, other = document.implementations
    assert first.cells["ragged"].message == "raised in loss.py, see https://example.org/a/b"
    assert other.reason == "no lib.so"


def test_update_keeps_what_was_not_judged_again_with_its_revision():
    earlier = made(ragged=Outcome(DIFFERS, "loss 1 instead of 2"), gone=Outcome(PASS))
    a, missing = earlier.implementations
    a.name, missing.name = "warp-transducer", "apex"
    earlier.implementations = [a, structs.replace(a, name="nemo"), missing]
    earlier.made, earlier.git_revision = "2020-01-01T00:00", "old"
    for row in earlier.implementations:  # as documents were before rows had a revision
        row.made = row.git_revision = row.git_dirty = None
    today = made(**{"ragged": Outcome(PASS), "V-2": Outcome(PASS)})
    today.implementations[0].name, today.implementations[1].name = "torchaudio", "warp-transducer"
    merged = updated(today, earlier)
    rows = {row.name: row for row in merged.implementations}
    assert list(rows) == ["torchaudio", "nemo", "warp-transducer", "apex"]
    assert rows["torchaudio"].git_revision == "abc" and rows["nemo"].git_revision == "old"
    assert rows["warp-transducer"].cells["ragged"].result == DIFFERS  # missing today
    assert rows["nemo"].cells["V-2"].message == "not asked (judged at old)" and "gone" not in rows["nemo"].cells
    text = matrix.markdown(merged)
    assert "2020-01-01; suite old |" in text and "earlier run" in text
    assert "judged 2020-01-01; suite old" in matrix.table(merged, color=False)


def test_update_wants_the_same_device_and_whole_rows(tmp_path):
    (tmp_path / "conformance.json").write_text(made(ragged=Outcome(PASS)).to_json())
    only = ("conformance.py", "--only", "reference", "--output", tmp_path, "--update")
    assert_user_error(run(*only), "--update", "is of cpu on x")
    assert_user_error(run(*only, "--cases", "ragged"), "--update", "--cases")
    (tmp_path / "conformance.json").write_text("{}")
    assert_user_error(run(*only), "--update", "cannot be read")


def test_a_killed_matrix_resumes(tmp_path):
    """kill -9 in the second implementation: the first is not judged again, and others are not taken for it."""
    copy = tmp_path / "benchmark_own.py"
    script = (ROOT / "losses/benchmark_reference.py").read_text().replace('name = "reference"', 'name = "own"')
    in_a_worker = "if 'common.conformance.worker' in sys.modules:"  # and not where it is only described
    copy.write_text(f"{script}\n{KILLS}\n{in_a_worker}\n    kill_the_command({str(tmp_path / 'told')!r})\n")
    flags = ("--only", f"reference,{copy}", "--device", "cpu", "--output", tmp_path)
    assert_user_error(run("conformance.py", *flags, "--resume"), "--resume", tmp_path)
    assert run("conformance.py", *flags, "--cases", "ragged").returncode == -9
    (before,) = json.loads((tmp_path / "conformance.json").read_text())["implementations"]
    assert_user_error(run("conformance.py", *flags, "--cases", "V-2", "--resume"), "--resume", "cases")
    done = run("conformance.py", *flags, "--cases", "ragged", "--resume")
    assert done.returncode == 0 and "[1/1] own" in done.stderr, done.stderr
    first, second = json.loads((tmp_path / "conformance.json").read_text())["implementations"]
    assert first == before and second["cells"]["ragged"]["result"] == PASS


def test_bad_flags_and_the_list():
    assert_user_error(run("conformance.py", "--cases", "everything"), "--cases", "everything")
    assert_user_error(run("conformance.py", "--large", "everyone"), "--large", "everyone")
    flags = command.parser()
    assert flags.parse_args([]).large == () and "k2" in flags.parse_args(["--large"]).large
    assert flags.parse_args(["--large", "k2"]).large == ("k2",)
    listed = run("conformance.py", "--list")
    assert listed.returncode == 0 and all(case.name in listed.stdout for case in CASES)


# What is committed.

#: Runs every code of a list as a program of its own would; "null" where the package that its second line names is
#: not there.
DRIVER = """
import contextlib, io, json, pathlib
for code in json.loads(pathlib.Path(__file__).with_suffix(".json").read_text()):
    package = code.splitlines()[1].split()[1].partition(".")[0]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            exec(code, {})
    except ModuleNotFoundError as error:
        if error.name.partition(".")[0] != package:
            raise
        print("null", flush=True)
    else:
        print(json.dumps(said.getvalue().strip()), flush=True)
"""


def committed_reproductions():
    """(command, [(name, code)]) of all that are printed and end alive."""
    shown = {}
    for finding in findings(documents.read(COMMITTED, Matrix)) if COMMITTED.exists() else ():
        for name, code in finding.shown.items():
            if DIES not in code:
                shown.setdefault(obtaining.command(name), []).append((name, code))
    return sorted(shown.items())


@pytest.mark.parametrize("command, shown", committed_reproductions())
def test_each_committed_reproduction_shows_what_it_claims(command, shown, tmp_path):
    environment = obtaining.implementation_of(shown[0][0]).environment
    if environments.interpreter(environment) is None:
        pytest.skip(environments.reason(environment))
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER)
    driver.with_suffix(".json").write_text(json.dumps([code for _, code in shown]))
    line = command.replace(obtaining.SHOWN, str(driver))
    assert str(driver) in line
    done = subprocess.run(line, shell=True, capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(('"', "null"))]
    claimed = [code.rpartition("# prints ")[2] for _, code in shown]
    wrong = [
        (name, was, claim)
        for (name, _), was, claim in zip(shown, answers, claimed)
        if was != claim and not (was is None and obtaining.effort(name) == 2)  # what set-up brings must be there
    ]
    assert len(answers) == len(claimed) and wrong == []


def test_each_package_that_is_wrong_is_shown_first_with_what_set_up_brings():
    def differing(name, shown):
        return Judged(name, "exact", cells={"second-backward": Outcome(DIFFERS, reproduction=shown)})

    names = ["warp-transducer", "optimized_transducer", "optimized_transducer:modified", "nemo", "torchaudio", "k2"]
    document = made(**{"second-backward": Outcome(PASS)})
    document.implementations = [MatrixRow.from_judged(differing(name, name)) for name in names]
    (problem,) = findings(document)
    assert list(problem.shown) == ["optimized_transducer", "torchaudio", "k2", "nemo", "warp-transducer"]
    assert obtaining.command("k2") == ".venv/k2/bin/python shown.py"
    assert obtaining.command("speechbrain (simulated)").startswith("NUMBA_ENABLE_CUDASIM=1 .venv/main/bin/python")
    assert "extensions path optimized_transducer" in obtaining.command("optimized_transducer")
    assert "b-flo" in obtaining.source("warp-transducer") and "make setup" in obtaining.source("torchaudio")


def test_the_compact_matrix_has_a_symbol_a_cell_and_says_what_it_means():
    document = made(ragged=Outcome(PASS), **{"V-2": Outcome(DIFFERS, "", 0.5)})
    document.implementations[0].name = "k2:modified"
    lines = matrix.markdown(document).partition("## Matrix")[2].partition("## Findings")[0].splitlines()
    assert "| case | k2:m |" in lines and "| ragged batch | \u2713 |" in lines and "| V = 2 | \u2717 |" in lines
    assert not [line for line in lines if "number" in line]
    assert (
        any(line.startswith("\u2713 pass: as asked") and "\u2717 differs: " in line for line in lines)
        and "k2:m k2:modified." in lines
    )


def test_heads_of_the_compact_matrix_are_short_and_differ():
    assert max(map(len, matrix.SHORT.values())) <= 5
    for kind in KINDS_OF_LOSS:
        heads = [matrix.short(implementation.name) for implementation in with_variants() if implementation.kind == kind]
        assert len(set(heads)) == len(heads)


def test_each_lattice_has_a_matrix_of_the_cases_that_concern_it():
    document = made(ragged=Outcome(PASS), **{"duration-0": Outcome(NOT_APPLICABLE)})
    other = structs.replace(
        document.implementations[0],
        name="transformers",
        kind="tdt",
        cells={"ragged": Outcome(PASS), "duration-0": Outcome(DIFFERS, "gradient nan")},
    )
    document.implementations.insert(0, other)
    parts = matrix.by_kind(document)
    assert list(parts) == ["exact", "tdt"]
    assert [case.name for case in parts["exact"].cases] == ["ragged"]
    assert {case.name for case in parts["tdt"].cases} == {"ragged", "duration-0"}
    page = matrix.markdown(document)
    assert "### tdt: tokens and durations" in page and "| case | tf |" in page and "| case | a |" in page


def test_the_page_names_the_reductions_and_whose_mean_is_which():
    page = matrix.markdown(made(**{"reduction-mean": Outcome(PASS, "sum over all targets of the batch")}))
    (line,) = [line for line in page.splitlines() if "mean_volume" in line]
    assert line.endswith("| a |")


def test_with_fastemit_the_message_says_which_value_is_returned():
    """NeMo's numba loss returns the loss times (1 + lambda); the gradient is right either way."""
    pytest.importorskip("warprnnt_numba")
    outcome = outcome_of(scripts.load("losses.benchmark_warprnnt_numba"), "fastemit")
    assert outcome.result == PASS and "returns the loss" in outcome.message


@pytest.mark.parametrize("variant", ["torch", "constrained", "tdt"])
def test_the_fused_row_is_asked_for_fastemit(variant):
    fused = functools.partial(scripts.load("benchmark_fused"), variant=variant)
    outcome = outcome_of(fused, "fastemit")
    assert outcome.result == PASS and "returns the loss" in outcome.message


@pytest.mark.skipif(not COMMITTED.exists(), reason="no matrix is committed")
def test_the_committed_page_is_made_from_the_committed_data():
    document = documents.read(COMMITTED, Matrix)
    assert COMMITTED.with_suffix(".md").read_text() == matrix.markdown(document)
    assert document.cases == [case.in_words() for case in CASES]


@pytest.mark.skipif(not COMMITTED.exists(), reason="no matrix is committed")
def test_a_document_is_written_as_it_was_read():
    assert json.loads(documents.read(COMMITTED, Matrix).to_json()) == json.loads(COMMITTED.read_text())
