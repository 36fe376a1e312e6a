"""rnnt-bench largest --model: bins, the order of jobs, lhotse's sampler with the sizes found, and a real model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from rnnt_bench.core.errors import UserError
from rnnt_bench.data import generation, shapes
from rnnt_bench.system import memory
from rnnt_bench.tools.kept import read
from rnnt_bench.tools.largest import buckets, losses, model
from rnnt_bench.tools.largest.command import TRAINED, VARIABLES

from canned import Canned, stop
from commands import ROOT
from test_generate_shape_info import SECONDS_AND_TEXT, jsonl, simple_cuts
from test_largest import called

MODEL = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

def batch(N, T, U):
    return torch.randn(N, 8), torch.empty(N * 20 * 2**20, dtype=torch.uint8).fill_(1)

def step(model, batch):
    if len(batch[0]) > 50:
        raise ValueError("too many")
    return model.layer(batch[0]).sum()
"""


def measured(number, N, T, peak=None, ns=None):
    step = {"N": N, "T": T, "U": 1, "bucket": number, "limit_bytes": 2**30}
    step.update({key: value for key, value in (("peak_bytes", peak), ("ns", ns)) if value})
    return {"record": "measured", "value": step}


def canned(room, breaks=()):
    """Answer: a batch of up to `room` frames fits; steps over all buckets fail in turn at these buckets."""
    breaks = list(breaks)

    def answer(job, chosen):
        steps = [(step["bucket"], step["N"], step["T"]) for step in job.request["tries"]]
        if "probe" in job.name:
            ((number, N, T),) = steps
            status = "ok" if N * T <= room else "oom"
            lines = [measured(number, N, T, peak=N * T)] if status == "ok" else []
            return [{**line, "job": job.name} for line in lines] + [job.status(status, "" if lines else "no memory")]
        fails = breaks.pop(0) if breaks else None
        lines = [measured(number, N, T, ns=10**9) for number, N, T in steps if number != fails]
        lines += [measured(number, N, T) for number, N, T in steps if number == fails]
        status = "oom" if fails else "ok"
        return [{**line, "job": job.name} for line in lines] + [job.status(status, "no memory" if fails else "")]

    return answer


def searched(folder, executor, *words):
    flags = ["--model", f"{folder}/model.py:Model", "--device", "cpu", "--memory-limit", "1GiB", "--quiet"]
    (folder / "model.py").write_text(MODEL)
    code = called(executor, *flags, "--log-dir", folder / "log", *words)
    (path,) = (folder / "log").glob("largest-*/tool.jsonl")
    return code, losses.answer(read(path))


def test_the_sizes_follow_from_probes_and_resume_asks_nothing_twice(tmp_path):
    executor, again = Canned(canned(30_000, breaks=[2])), Canned(canned(30_000))
    code, answer = searched(tmp_path, executor, "--buckets", 4)
    assert code == 0 and len(answer.rows) == 4
    for row in answer.rows:
        most = 30_000 // row["T"]
        assert most * 0.9 - 1 <= row["N"] <= most
    assert any("bucket-2" in line and "not after the others" in line for line in answer.lines)
    assert answer.rows[0]["utterances_per_second"] == answer.rows[0]["N"]
    assert searched(tmp_path, again, "--buckets", 4, "--resume")[0] == 0 and not again.seen


def test_a_limit_below_one_utterance_names_the_bucket(tmp_path):
    code, answer = searched(tmp_path, Canned(canned(2_000)), "--buckets", 3)
    assert code == 1 and any("bucket-3 (T " in line and "not even 1 fits" in line for line in answer.failures)
    page = (tmp_path / "log" / "report.html").read_text()
    assert "<h1>Largest batch" in page and "1 failed</span>" in page and "0 losses" not in page
    (tmp_path / "none").mkdir()
    code, answer = searched(tmp_path / "none", Canned(canned(1)), "--buckets", 1, "--losses", "own,fused")
    assert code == 1 and "no bucket" in answer.total[0] and "resume" not in answer.total[0]


def test_bins_hold_equal_durations_and_every_utterance():
    utterances = shapes.load(ROOT / "data" / "shape_info.features.pt")
    for durations, parts in ((12, 1), (12, 2)):
        bins = buckets.of_utterances(utterances, durations, parts)
        assert sum(each.count for each in bins) == len(utterances) and len(bins) == durations * parts
        frames = np.array([each.frames for each in bins], float)
        assert frames.max() < 1.2 * frames.mean()
        assert sum(each.beyond for each in bins) <= 0.02 * len(utterances)


def test_no_batch_of_lhotses_sampler_exceeds_what_was_probed(tmp_path):
    lhotse = pytest.importorskip("lhotse")
    from lhotse.testing.dummies import dummy_recording

    code, answer = searched(tmp_path, Canned(canned(30_000)), "--buckets", 6, "--format", "lhotse")
    utterances = shapes.load(ROOT / "data" / "shape_info.features.pt")[::40]
    cuts = [
        lhotse.MonoCut(str(n), 0, float(T) / 100, 0, recording=dummy_recording(n, duration=100.0))
        for n, T in enumerate(utterances[:, 0])
    ]
    space = {"cuts": lhotse.CutSet.from_cuts(cuts)}
    exec(answer.render("lhotse"), space)
    count = 0
    for batch in space["sampler"]:
        longest = max(round(cut.duration * 100) for cut in batch)
        row = next(row for row in answer.rows if longest <= row["T"])
        assert len(batch) <= row["N"]
        count += len(batch)
    assert count == len(cuts)


def test_a_model_is_tried_for_real(tmp_path):
    from rnnt_bench.jobs.session import Executor

    code, answer = searched(tmp_path, Executor(), "--buckets", 2, "--memory-limit", "200MB")
    assert [row["N"] for row in answer.rows] == [9, 9] and code == 0
    assert all(160 < row["peak_mb"] < 200 and row["utterances_per_second"] for row in answer.rows)


BROKEN = """
import torch

def missing():
    raise ValueError("no checkpoint here")

def large():
    return torch.nn.Linear(2**14, 2**13)  # 512 MiB

class Refuses(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)

    def forward(self, *inputs):
        raise ValueError("takes no such batch")
"""


@pytest.mark.parametrize(
    "name, flags, wanted",
    [
        ("missing", [], ["bucket 2 (N 1, ", "no checkpoint here"]),
        ("Refuses", [], ["bucket 2 (N 1, ", "takes no such batch"]),
        ("Refuses", ["--optimizer", "AdmW"], ["torch.optim", "AdamW"]),
        ("Refuses", ["--losses", "torchaudio"], ["bucket 2 (", "--losses torchaudio: ", "no argument `loss`"]),
        ("Refuses", ["--gradient-checkpointing"], ["bucket 2 (", "--gradient-checkpointing: Refuses has no"]),
    ],
)
def test_a_factory_or_a_batch_that_fails_is_one_line_with_the_bucket(name, flags, wanted, tmp_path, capsys):
    from rnnt_bench.jobs.session import Executor

    (tmp_path / "broken.py").write_text(BROKEN)
    words = ["--model", f"{tmp_path}/broken.py:{name}", "--device", "cpu", "--memory-limit", "200MB", "--buckets", 2]
    assert called(Executor(), *words, *flags, "--quiet", "--log-dir", tmp_path / "log") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in wanted)


def test_weights_that_do_not_fit_are_a_row_that_does_not_fit(tmp_path, capsys):
    from rnnt_bench.jobs.session import Executor

    (tmp_path / "broken.py").write_text(BROKEN)
    words = ["--model", f"{tmp_path}/broken.py:large", "--device", "cpu", "--memory-limit", "200MB", "--buckets", 1]
    assert called(Executor(), *words, "--quiet", "--log-dir", tmp_path / "log") == 1
    assert "bucket-1 (T " in (text := capsys.readouterr().out) and "not even 1 fits" in text


def test_ctrl_c_keeps_what_was_found_and_resume_goes_on(tmp_path):
    answer_all, seen = canned(30_000), []

    def answer(job, chosen):
        seen.append(job.name)
        return stop(job) if len(seen) == 9 else answer_all(job, chosen)

    code, kept = searched(tmp_path, Canned(answer), "--buckets", 3)
    assert code == 130 and kept.rows[2]["N"] and kept.rows[1]["status"] == "interrupted"
    again = Canned(answer_all)
    code, whole = searched(tmp_path, again, "--buckets", 3, "--resume")
    assert code == 0 and all(row["N"] for row in whole.rows)
    assert not {name for _, name in again.seen} & {*seen[:8]}


STEPS = """
import json, random, resource, runpy, sys
from pathlib import Path
import torch

path, factory, size, group, buckets = sys.argv[1:]
space = runpy.run_path(path)
warm = torch.ones(64, 64, requires_grad=True)
(warm @ warm).sum().backward()
torch.optim.AdamW([warm]).step()
if group:  # of what is in use; the cache of files is given back where memory is short
    (usage,) = (file for name in ("usage_in_bytes", "current") if (file := Path(group, f"memory.{name}")).exists())
    stat = dict(line.split() for line in Path(group, "memory.stat").read_text().splitlines())
    bound = int(usage.read_text()) - int(stat.get("cache") or stat["file"]) + int(size)
    bounds = {"limit_in_bytes": bound, "memsw.limit_in_bytes": bound, "max": bound, "swap.max": 0}
    for name, value in bounds.items():
        if (file := Path(group, f"memory.{name}")).exists():
            file.write_text(str(value))
else:
    bound = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + int(size)
    resource.setrlimit(resource.RLIMIT_AS, (bound, bound))
model = space[factory]()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(100):
    space["step"](model, space["batch"](*random.choice(json.loads(buckets)))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@contextmanager
def cgroup():
    """Yield a new cgroup: below that of this process, of version 2 beside all; skip where none can limit memory."""
    lines = memory.CGROUP.read_text().splitlines() if memory.CGROUP.exists() else []
    own = [line.partition(":memory:")[2] for line in lines if ":memory:" in line]
    folder = memory.CGROUPS / "memory" / own[0].lstrip("/") if own else memory.CGROUPS
    group = folder / f"rnnt-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made: {error}")
    try:
        if not any((group / f"memory.{name}").exists() for name in ("max", "limit_in_bytes")):
            pytest.skip(f"{group} has no controller of memory")
        yield group
    finally:
        group.rmdir()


def takes(factory, limit, limits, *buckets):
    """Tell whether the steps of a training get through under a limit that the kernel enforces, on pages or on address
    space, in a process that knows nothing of the search."""
    path, _, name = factory.rpartition(":")
    variables = {**os.environ, **VARIABLES, "PYTHONPATH": os.path.dirname(path)}
    with limits() as group:
        enter = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(group)] if group else []
        words = [sys.executable, "-c", STEPS, path, name, str(limit), str(group or ""), json.dumps(buckets)]
        done = subprocess.run([*enter, *words], env=variables, stderr=subprocess.PIPE, text=True)
    wanted = done.returncode == -signal.SIGKILL if group else "can't allocate memory" in done.stderr
    assert not done.returncode or wanted, done.stderr
    return not done.returncode


def test_the_kernel_lets_the_sizes_found_run_a_hundred_steps_and_not_one_utterance_more(tmp_path):
    """Under a limit on address space, and on the pages of a cgroup."""
    from rnnt_bench.jobs.session import Executor

    _, answer = searched(tmp_path, Executor(), "--buckets", 2, "--memory-limit", "200MB", "--margin", "1%")
    sizes = [row["N"] for row in answer.rows]
    model = f"{tmp_path / 'model.py'}:Model"
    for limits in (nullcontext, cgroup):
        assert takes(model, 200_000_000, limits, *([N, 1, 1] for N in sizes))
        assert not any(takes(model, 200_000_000, limits, [N + 1, 1, 1]) for N in sizes)


def test_arguments_come_from_a_file_and_flags_win(tmp_path):
    (tmp_path / "model.yaml").write_text("layers: 1\nwidth: 2\n")
    given, answer_all = [], canned(30_000)

    def answer(job, chosen):
        given.append(job.request["arguments"])
        return answer_all(job, chosen)

    searched(tmp_path, Canned(answer), "--buckets", 1, "--args", tmp_path / "model.yaml", "--arg", "width=3")
    assert given[0] == {"layers": 1, "width": 3}


@pytest.mark.parametrize("count, is_pair", [("4", False), ("4x2", True)])
def test_nemos_lines_have_a_bin_for_each_size(count, is_pair, tmp_path):
    _, answer = searched(tmp_path, Canned(canned(30_000)), "--buckets", count)
    config = yaml.safe_load(answer.render("nemo"))
    bins = config["bucket_duration_bins"]
    assert config["use_bucketing"] and bins == sorted(bins)
    assert config["bucket_batch_size"] == [row["N"] for row in answer.rows] and len(bins) == len(answer.rows)
    wanted = [[row["seconds"], row["U"]] if is_pair else row["seconds"] for row in answer.rows]
    assert bins == wanted and config["max_duration"] == answer.rows[-1]["seconds"]


def test_lines_to_paste_say_of_which_loss_they_are(tmp_path):
    _, answer = searched(tmp_path, Canned(canned(30_000)), "--buckets", 2, "--losses", "own,fused")
    for name, key in (("nemo", "bucket_batch_size:"), ("lhotse", "batch_sizes =")):
        before, own, fused = re.split("# (?:own|fused)\n", answer.render(name))
        assert not before and own == fused and own.count(key) == 1


WAV2VEC2 = {
    "vocab_size": 51,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
}
PARAKEET = {
    "vocab_size": 51,
    "blank_token_id": 50,
    "pad_token_id": 0,
    "decoder_hidden_size": 16,
    "encoder_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_mel_bins": 80},
}


CONFORMER = {
    **{"features": 40, "vocab_size": 50, "encoder_dim": 16, "heads": 2, "feed_forward": 16, "layers": 1},
    **{"kernel": 5, "decoder_dim": 16, "joiner_dim": 16, "embed_channels": [2, 2, 2]},
}


def trained(name, given, monkeypatch):
    """Return the model of a job, with its optimizer."""
    import torch
    from rnnt_bench.tools.largest import model

    if "arakeet" in name or name.startswith("transformers"):
        pytest.importorskip("transformers")
    pytest.importorskip("torchaudio")
    monkeypatch.chdir(ROOT)
    usual = {
        "arguments": {},
        "amp": False,
        "features": 80,
        "hop": 160,
        "vocab_size": 50,
        "gradient_checkpointing": False,
    }
    request = buckets.Steps(model=name, optimizer="AdamW", share=1.0, **{**usual, **given})
    return model.Training(request, torch.device("cpu"), torch.optim.AdamW)


@pytest.mark.parametrize(
    "name, given",
    [
        ("torchaudio.models:emformer_rnnt_base", {"arguments": {"num_symbols": 50}}),
        ("torchaudio.models:emformer_rnnt_base", {"arguments": {"num_symbols": 50}, "amp": True}),
        ("transformers:Wav2Vec2ForCTC", {"arguments": WAV2VEC2}),  # of samples
        ("transformers:ParakeetForTDT", {"arguments": PARAKEET}),
        ("transformers:ParakeetForTDT", {"arguments": PARAKEET, "loss": "fused", "vocab_size": 500}),  # not its own
        ("examples/largest.py:small", {"loss": "torchaudio"}),
        ("examples/largest.py:small", {"loss": "fused"}),
        ("examples/largest_parakeet.py:small", {"loss": "torchaudio"}),
        ("examples/largest_parakeet.py:small", {"loss": "fused"}),
        (TRAINED, {"arguments": CONFORMER, "features": 40}),
        (TRAINED, {"arguments": CONFORMER, "features": 40, "loss": "torchaudio", "amp": True}),
    ],
)
def test_models_by_name_take_a_step(name, given, monkeypatch):
    import torch

    training = trained(name, given, monkeypatch)
    weights = [weight.clone() for weight in training.model.parameters()]
    training.step(2, 80, 3)
    assert any(not torch.equal(*pair) for pair in zip(weights, training.model.parameters()))


@pytest.mark.parametrize("file, choices", [("largest", ["fast_rnnt-pruned"]), ("largest_parakeet", ["torchaudio"])])
def test_a_loss_that_an_example_does_not_have_is_refused_with_its_choices(file, choices, monkeypatch):
    with pytest.raises(UserError) as raised:
        trained(f"examples/{file}.py:small", {"loss": "nothing"}, monkeypatch)
    assert all(word in str(raised.value) for word in ["'nothing'", "fused", *choices])


def test_gradient_checkpointing_runs_a_layer_twice_in_less_memory(monkeypatch):
    """The part of a layer: hooks of the layer itself run once, since transformers checkpoints its forward alone."""
    import torch
    from rnnt_bench.instruments.memory import peaks

    sizes = {**PARAKEET["encoder_config"], "num_hidden_layers": 4, "subsampling_conv_channels": 8}
    arguments = {**PARAKEET, "encoder_config": sizes}
    measured = []
    for checkpointing in (False, True):
        given = {"arguments": arguments, "gradient_checkpointing": checkpointing}
        training = trained("transformers:ParakeetForTDT", given, monkeypatch)
        calls = []
        training.model.encoder.layers[0].self_attn.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        training.step(4, 1600, 3)
        count = len(calls)
        step = SimpleNamespace(run=partial(training.step, 4, 1600, 3))
        measured.append((count, peaks(lambda step=step: step, torch.device("cpu"))["torch_allocated_bytes"]))
    (once, plain), (twice, checkpointed) = measured
    assert (once, twice) == (1, 2) and checkpointed < 0.8 * plain


FEW_MELS = {**PARAKEET, "encoder_config": {**PARAKEET["encoder_config"], "num_mel_bins": 40}}


@pytest.mark.parametrize(
    "name, given, size",
    [
        ("Wav2Vec2ForCTC", {"arguments": WAV2VEC2, "hop": 320}, (2, 320 * 80)),
        ("ParakeetForTDT", {"arguments": FEW_MELS, "features": 40}, (2, 80, 40)),
    ],
)
def test_frames_are_as_wide_as_the_flags_say(name, given, size, monkeypatch):
    training = trained(f"transformers:{name}", given, monkeypatch)
    assert training.batch(2, 80, 3)[training.model.main_input_name].shape == size
    training.step(2, 80, 3)


def test_a_yaml_names_the_model_of_the_profile(tmp_path, capsys):
    (tmp_path / "conformer.yaml").write_text(yaml.safe_dump({**CONFORMER, "layers": 2}))
    given, answer_all = [], canned(30_000)

    def answer(job, chosen):
        given.append(job.request)
        return answer_all(job, chosen)

    words = ["--model", tmp_path / "conformer.yaml", "--arg", "vocab_size=70", "--losses", "fused,torchaudio"]
    words += ["--buckets", 1, "--device", "cpu", "--memory-limit", "1GiB", "--quiet", "--log-dir", tmp_path / "log"]
    assert called(Canned(answer), *words) == 0 and "conformer.yaml" in capsys.readouterr().out
    assert {(job["loss"], job["features"], job["vocab_size"], job["arguments"]["layers"]) for job in given} == {
        (loss, 40, 70, 2) for loss in ("fused", "torchaudio")
    }
    wrong = ("--arg layer=2", "layers"), ("--losses fused,nothing", "fast_rnnt"), ("--losses k2", "--losses fast_rnnt")
    for flag, advice in wrong:
        assert called(Canned(), *words, *flag.split()) == 2 and advice in capsys.readouterr().err


def test_buckets_are_those_of_a_manifest_too(tmp_path, capsys):
    pytest.importorskip("lhotse")
    (tmp_path / "bpe.model").write_bytes(generation.train([text for _, text in SECONDS_AND_TEXT], 40))
    flags = ["--buckets", 1, "--shape-file", jsonl(tmp_path / "cuts.jsonl.gz", simple_cuts())]
    _, answer = searched(tmp_path, Canned(canned(30_000)), *flags, "--bpe-model", tmp_path / "bpe.model")
    (row,) = answer.rows
    longest = max(seconds for seconds, _ in SECONDS_AND_TEXT)
    assert row["T"] == 100 * longest and longest < row["seconds"] < longest + 0.01
    assert 5 < row["U"] <= max(len(text) for _, text in SECONDS_AND_TEXT) and row["N"] == len(SECONDS_AND_TEXT)
    words = ["--model", f"{tmp_path}/model.py:Model", "--device", "cpu", "--memory-limit", "1GiB", *flags]
    assert called(Canned(), *words) == 2 and "--bpe-model" in capsys.readouterr().err


@pytest.mark.parametrize("outputs", [{"logits": torch.zeros(1, 2, 2, 3)}, torch.zeros(1, 2, 3), ("text",)])
def test_what_is_neither_a_loss_nor_logits_is_told(outputs):
    with pytest.raises(TypeError, match=r"define step\(model, batch\)"):
        model.loss_of(lambda *_: outputs, (1,))
