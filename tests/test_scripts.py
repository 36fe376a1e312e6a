"""A loss of one's own: copies of benchmark_mine.py through the real commands, and code to copy."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rnnt_bench.cli import benchmark, parser
from rnnt_bench.cli.run import Script
from rnnt_bench.core import implementations, snippets
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.implementations import BY_NAME, with_variants
from rnnt_bench.setup import environments

from commands import ROOT, assert_user_error, rows_of, run
from fixtures_runs import change, records_of, write_records

QUICK = ["--in-place", "--preset", "quick", "--limits", "false"]
RESULT = "return losses"


@pytest.fixture
def copy(tmp_path):
    """Write a copy of the template with some of its text replaced, outside of the repository."""

    def make(file="benchmark_flash.py", replaced=()):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        path = tmp_path / "elsewhere" / file
        text = (ROOT / "benchmark_mine.py").read_text()
        for old, new in dict(replaced).items():
            assert text.count(old) == 1
            text = text.replace(old, new)
        path.write_text(text)
        return path

    return make


@pytest.fixture
def quick(tmp_path, tiny_shapes):
    return ["--shape-file", tiny_shapes, "--log-dir", tmp_path / "log", *QUICK]


def test_a_copy_measures_its_own_file(copy, quick, tmp_path):
    """A wrong loss in the copy is found wrong, under the copy's name, though nobody changed `name`."""
    path = copy(replaced={RESULT: "return -2 * losses"})
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run(path, *quick, "--passes", "correctness", "--only", "reference", cwd=path.parent, env=variables)
    assert done.returncode == 1, done.stderr
    rows = rows_of(tmp_path / "log")
    assert set(rows) == {"flash", "reference"} and rows["reference"]["status"] == "ok"
    assert rows["flash"]["status"] == "error" and "wrong result" in rows["flash"]["reason"]


def test_a_copy_with_a_name_and_a_variant_beside_another(copy, quick, tmp_path):
    """Chosen by its file in benchmark_all.py, and continued by --resume; the variant says its kind itself."""
    named = 'name = "lat"\n    variants = {"again": {"fewest_targets": 1}}'
    path = copy("lattice.py", {'name = "mine"': named})
    arguments = [*quick, "--passes", "correctness", "--only", f"reference,{path},{path}:again,{copy()}"]
    done = run("benchmark_all.py", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "log")
    assert set(rows) == {"reference", "lat", "lat:again", "flash"}
    assert {row["status"] for row in rows.values()} == {"ok"} and rows["lat:again"]["kind"] == "exact"
    assert run("benchmark_all.py", *arguments, "--resume", cwd=tmp_path).returncode == 0
    assert len(list((tmp_path / "log").glob("*/results.jsonl"))) == 4


def test_a_script_of_another_lattice_takes_an_exact_loss_beside_it(copy, quick, tmp_path):
    """--only names a loss on the regular lattice: no flag for lattices was given, and none is added."""
    path = copy(replaced={'name = "mine"': 'name = "mine"\n    topology = "tdt"'})
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = run(path, *quick, "--passes", "correctness", "--only", "reference", cwd=path.parent, env=variables)
    rows = rows_of(tmp_path / "log")
    assert "--topology" not in done.stderr and rows["reference"]["status"] == "ok"
    assert rows["flash"]["kind"] == "tdt" and rows["flash"]["status"] == "error"  # it computes the regular loss


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Return (folder, flags) of a run of a copy that was stopped before its memory pass."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "benchmark_flash.py").write_text((ROOT / "benchmark_mine.py").read_text())
    torch.save(torch.tensor([[12 + 3 * i, 2 + i] for i in range(12)]), folder / "tiny.pt")
    passes = ["--passes", "correctness,memory", "--log-dir", "log", "--shape-file", folder / "tiny.pt"]
    flags = ["--only", "benchmark_flash.py", *QUICK, *passes]
    assert run("benchmark_all.py", *flags, cwd=folder).returncode == 0
    lines = records_of(folder / "log" / "flash-2")
    ends = [at for at, line in enumerate(lines) if line["record"] == "status"]
    write_records(folder / "log" / "flash-2", lines[: ends[0] + 1])
    return folder, flags


def edit(folder, log):
    with (folder / "benchmark_flash.py").open("a") as file:
        file.write("# faster\n")


def save_other_shapes(folder, log):
    torch.save(torch.tensor([[13 + 3 * i, 2 + i] for i in range(12)]), folder / "tiny.pt")


@pytest.mark.parametrize(
    "alter, words",
    [
        (None, ""),
        (edit, "benchmark_flash.py"),
        (save_other_shapes, "tiny.pt"),
        (lambda _, log: change(log, "environment", torch="1.0"), "torch was 1.0"),
        (lambda _, log: change(log, "environment", implementation_version="1.0"), "version of flash"),
        (lambda _, log: change(log, "environment", device_name="another"), "device was another"),
    ],
    ids=["nothing", "loss", "shapes", "torch", "package", "device"],
)
def test_resume_never_joins_what_differs(alter, words, stopped, tmp_path):
    folder, flags = stopped[0], [*stopped[1][:-1], tmp_path / "tiny.pt"]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    log = tmp_path / "log" / "flash-2"
    records = log / "results.jsonl"
    records.write_text(records.read_text().replace(str(folder), str(tmp_path)))  # as if it had run there
    if alter:
        alter(tmp_path, log)
    before = records.read_bytes()
    done = run("benchmark_all.py", *flags, "--resume", cwd=tmp_path)
    assert done.returncode == 0 and words in done.stderr, done.stderr
    jobs = {
        path.parent.name: len(re.findall('"status": ?"ok"', path.read_text()))
        for path in tmp_path.glob("log/*/*.jsonl")
    }
    assert jobs == ({"flash-2": 1, "flash-2.2": 2} if alter else {"flash-2": 2})
    assert ("a run of its own" in done.stderr) is bool(alter) is (records.read_bytes() == before)


def test_a_script_that_stops_the_clock_is_timed_all_the_same(copy, quick, tmp_path):
    stopped = "import time\n\ntime.perf_counter_ns = time.perf_counter = lambda: 0\nfrom types"
    path = copy(replaced={"from types": stopped})
    flags = [*quick, "--passes", "timing", "--rounds", "1", "--max-seconds", "0.1"]
    done = run("benchmark_all.py", "--only", path, *flags)
    assert done.returncode == 0, done.stderr
    samples = [record for record in records_of(tmp_path / "log" / "flash-2") if record["record"] == "sample"]
    assert samples and min(sample["total_wall_ns"] for sample in samples) > 100_000


def test_corner_cases_of_a_copy(copy, tmp_path):
    """The template's example is right in the corners that its readers will meet first."""
    cases = "ragged,nan-padding,padding-gradient,slack,no-target,one-frame"
    flags = ("--cases", cases, "--format", "json", "--log-dir", tmp_path / "log")
    done = run("rnnt-bench", "check", "--in-place", "--only", copy(), *flags)
    assert done.returncode == 0, done.stderr
    assert {(row["loss"], row["result"]) for row in json.loads(done.stdout)} == {("flash", "pass")}


@pytest.mark.parametrize(
    "wrong, words",
    [
        ("name = 'torchaudio'", ["'torchaudio'", "benchmark_torchaudio.py", "a name of its own"]),
        ("name = 'my loss'", ["'my loss'", "letters"]),
        ("layout = 'paded'", ["'paded'", "padded"]),
        ("variants = 'far'", ["variants"]),
        ("variants = {'far': 1}", ["variants"]),
    ],
)
def test_attributes_that_will_not_do(copy, quick, wrong, words):
    path = copy(replaced={'name = "mine"': wrong})
    assert_user_error(run("benchmark_all.py", "--only", path), path.stem[10:], *words)


def test_files_that_are_no_rows(copy, tmp_path):
    first = copy()
    (tmp_path / "second").mkdir()
    second = first.rename(tmp_path / "second" / first.name)
    assert_user_error(run("benchmark_all.py", "--only", f"{copy()},{second}"), second, "'flash'", first)
    assert_user_error(run("benchmark_all.py", "--only", "benchmark_flush.py"), "benchmark_flush.py", "no such file")
    assert_user_error(run("benchmark_all.py", "--only", "summarize.py"), "summarize.py", "no ADAPTER")
    first.write_text("def nothing_of_that_kind(:")
    assert_user_error(run("rnnt-bench", "check", "--only", first), first, "line 1", "not Python")


def test_what_a_copy_inherits_and_computes_is_known_before_it_runs(copy):
    """From a file beside it, and from the suite's own classes; the last word is that of the class itself."""
    (copy().parent / "beside.py").write_text(
        "from benchmark_k2_pruned import K2Pruned\nprint('imported')\n"
        "class Beside(K2Pruned):\n    name = 'beside'\n    topology = 'MODIFIED'.lower()\n"
    )
    path = copy(replaced={"from rnnt_bench.losses.adapter import Adapter": "from beside import Beside as Adapter"})
    text = path.read_text().replace('name = "mine"', 'variants = {"far": {"layout": "joint", "topology": "regular"}}')
    path.write_text(text)
    attributes = implementations._attributes_of_file(path)
    assert attributes.name == "beside" and attributes.kind("beside") == "pruned"
    assert attributes.of_variant("far").kind("beside") == "exact"


@pytest.mark.parametrize("line", ["import nowhere_at_all", "raise SystemExit(3)", "print(1 / 0)"])
def test_a_copy_that_cannot_be_imported_has_a_row_of_its_own(copy, line, monkeypatch):
    monkeypatch.setattr(implementations, "BY_NAME", {})
    path = copy(replaced={"from types": f"{line}\nfrom types"})
    row = implementations.of_file(str(path))
    assert row.name == "flash" and row.kind == "exact" and not row.variants


def test_every_exact_loss_of_logits_is_a_row_by_utterance_too(copy, monkeypatch):
    monkeypatch.setattr(implementations, "BY_NAME", dict(BY_NAME))
    parse = parser.implementations(parser.standard())
    for names in ("torchaudio:by-utterance,fused", "apex:by-utterance", "fast_rnnt:by-utterance@k2"):
        assert set(parse(names)) == set(names.split(","))
    (name,) = parse(f"{copy()}:by-utterance")
    assert name == "flash:by-utterance" and implementations.find(name).kind == "by-utterance"
    for name in ("fused", "nemo-tdt", "k2-pruned", "k2:hat", "torchaudio:by-utterance"):
        with pytest.raises(UserError, match="variant"):
            parse(f"{name}:by-utterance")


def test_a_copy_needs_its_loss_and_those_of_the_flag(copy, monkeypatch):
    monkeypatch.setattr(benchmark, "benchmark", lambda names, options, needed: [names[: len(needed)], needed])
    script = Script(copy("theirs.py"), "")
    options = script.parser().parse_args(["--loss", f"{ROOT}/tests/own_joint.py:loss", "--only", "torchaudio"])
    assert script.main(options) == [["theirs", "own_joint.loss"]] * 2


@pytest.mark.parametrize("implementation", with_variants(), ids=lambda implementation: implementation.name)
def test_kinds_are_what_adapters_say(implementation):
    adapter = importlib.import_module(implementation.script).ADAPTER
    attributes = implementations.attributes_of(implementation)
    assert vars(attributes) == {key: getattr(adapter, key) for key in vars(attributes)}
    assert attributes.of_variant(implementation.variant).kind(implementation.name) == implementation.kind
    path = implementations.file_of(implementation)
    assert implementations.file_of(implementations.of_file(str(path))) == path


@pytest.mark.parametrize(
    "body, status, words",
    [
        ("return logits.sum((1, 2, 3))", "error", "correctness: the loss has the shape (4,)"),
        ("import flash_rnnt", "missing", "flash needs flash_rnnt: pip install what your loss needs"),
        ("targets.reshape(-1, 1000003)", "error", "benchmark_flash.py, line {line}, in transducer_loss"),
    ],
)
def test_an_author_is_told_what_is_wrong(copy, quick, tmp_path, body, status, words):
    path = copy(replaced={"    import torch\n": f"    {body}\n"})
    done = run("benchmark_all.py", "--only", path, *quick, "--passes", "correctness", "--quiet")
    row, line = rows_of(tmp_path / "log")["flash"], path.read_text().split(body)[0].count("\n") + 1
    words = words.format(line=line)
    assert row["status"] == status and words in row["reason"] and words.split()[0] in done.stdout, done.stderr


#: Made inputs in the names of the snippets, and torchaudio's loss or torch's own of the same logits.
BEGIN = """
import torch
torch.manual_seed(0)
N, T, U, D, V = 3, 9, 4, 8, 11
encoder_out, decoder_out = torch.randn(N, T, D), torch.randn(N, U + 1, D)
output_linear, am_linear, lm_linear = (torch.nn.Linear(D, V) for _ in range(3))
targets = torch.randint(1, V, (N, U), dtype=torch.int32)
T_lengths, U_lengths = torch.tensor([9, 7, 8], dtype=torch.int32), torch.tensor([4, 3, 2], dtype=torch.int32)
"""
RIGHT = """
def alone(logits, targets):
    scores = logits.log_softmax(-1).double()
    T, U = scores.size(0), scores.size(1) - 1
    alpha = {}
    for t in range(T):
        for u in range(U + 1):
            ways = [torch.zeros((), dtype=torch.float64)] if t == u == 0 else []
            ways += [alpha[t - 1, u] + scores[t - 1, u, 0]] if t else []
            ways += [alpha[t, u - 1] + scores[t, u - 1, int(targets[u - 1])]] if u else []
            alpha[t, u] = torch.stack(ways).logsumexp(0)
    return -(alpha[T - 1, U] + scores[T - 1, U, 0])
"""
END = """
right = [alone(full[n, :t, : u + 1], targets[n]) for n, (t, u) in enumerate(zip(T_lengths, U_lengths))]
print(float(loss.detach()), float(sum(right)) / len(right))
"""


def printed(text: str, python: Path) -> str:
    """Return what a program prints: in this process where it is for this Python, which has torch already."""
    if python.parent != Path(sys.executable).parent:
        return subprocess.run([python, "-W", "ignore", "-c", text], check=True, capture_output=True, text=True).stdout
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path])
        exec(text, {"__name__": "__main__"})
    return output.getvalue()


@pytest.mark.parametrize("name", snippets.SNIPPETS)
def test_a_snippet_runs_and_computes_the_loss(name):
    code = snippets.SNIPPETS[name]
    assert 3 <= len(code.splitlines()) <= 12 and max(map(len, code.splitlines())) < 80
    implementation = BY_NAME[name]
    python = environments.interpreter(implementation.environment)
    if python is None:
        pytest.skip(f"there is no environment {implementation.environment}")
    module = "fused_transducer" if name == "fused" else implementation.package
    load = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    if implementation.built:
        load += (
            f"from rnnt_bench.setup import extensions; sys.modules[{module!r}] = extensions.load({module!r}, 'cpu')\n"
        )
    text = "".join([BEGIN, load, snippets.JOINER, "full = logits.detach().clone()\n", code, RIGHT, END])
    loss, right = map(float, printed(text, python).split())
    if name.endswith("pruned"):
        assert 0 < loss < 100 * right
    else:
        assert loss == pytest.approx(right, rel=1e-4)


SCRIPTED = """import torch

    @torch.jit.script
    def refuses(x):
        raise RuntimeError("no kernel of mine")
        return x

    refuses(logits)"""
NO_BACKWARD = """import torch

    class Loss(torch.autograd.Function):
        forward = staticmethod(lambda ctx, x: x.sum())

    return Loss.apply(logits)"""
#: What a loss does -> words of its row.
WORDS = {
    "import sys; sys.exit('not on this machine')": "not on this machine",
    "return losses, 0": "a tuple of 2",
    "return losses.detach()": "no gradient, by which it is judged, with --mode forward too",
    NO_BACKWARD: "no gradient, by which it is judged",
    SCRIPTED: "no kernel of mine",
}


@pytest.mark.parametrize("statement", WORDS)
def test_the_words_of_a_loss_that_fails_are_those_of_its_row(statement, copy, quick, tmp_path):
    path = copy(
        replaced={
            "    N, T, U1, _ = logits.shape": "    losses = logits.sum()\n    "
            + statement
            + "\n    N, T, U1, _ = logits.shape"
        }
    )
    done = run("benchmark_all.py", *quick, "--only", path, "--mode", "forward", "--passes", "correctness", cwd=tmp_path)
    assert done.returncode == 1 and WORDS[statement] in rows_of(tmp_path / "log")["flash"]["reason"], done.stderr
