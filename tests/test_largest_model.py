"""rnnt-bench largest --model: bins, the order of jobs, lhotse's sampler with the sizes found, and a real model."""

from __future__ import annotations

import numpy as np
import pytest
from canned import Canned
from commands import ROOT
from test_largest import called

from rnnt_bench.data import shapes
from rnnt_bench.tools.kept import read
from rnnt_bench.tools.largest import buckets, losses

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
        chosen_buckets = job.given["buckets"]
        if "probe" in job.name:
            ((number, N, T, _),) = chosen_buckets
            status = "ok" if N * T <= room else "oom"
            lines = [measured(number, N, T, peak=N * T)] if status == "ok" else []
            return [{**line, "job": job.name} for line in lines] + [job.status(status, "" if lines else "no memory")]
        fails = breaks.pop(0) if breaks else None
        lines = [measured(number, N, T, ns=10**9) for number, N, T, _ in chosen_buckets if number != fails]
        lines += [measured(number, N, T) for number, N, T, _ in chosen_buckets if number == fails]
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


def test_a_loss_that_the_model_cannot_take_is_refused(tmp_path):
    import torch

    from rnnt_bench.core.errors import UserError
    from rnnt_bench.tools.largest.model import Training

    (tmp_path / "own.py").write_text(MODEL)
    name = f"{tmp_path / 'own.py'}:Model"
    given = {"model": name, "arguments": {}, "loss": "torchaudio", "optimizer": "AdamW"}
    with pytest.raises(UserError, match="--losses torchaudio.*argument"):
        Training(given, torch.device("cpu"), {})
    Training({**given, "loss": ""}, torch.device("cpu"), {})
