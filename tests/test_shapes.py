"""What a shape file may hold, the draw in the repo, which rows share a batch, and which batches are picked."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from rnnt_bench.core import settings
from rnnt_bench.core.errors import UserError
from rnnt_bench.data import batching, shapes

from commands import ROOT, has_words

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.environment_contract


class Code(str):
    """Unpickling one would make the folder that it names."""

    def __reduce__(self):
        return os.mkdir, (str(self),)


def fails(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        shapes.load(path)
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in (str(path), *words))


def stored(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_tensor_loads_as_int32_rows(tmp_path, dtype):
    rows = shapes.load(stored(tmp_path / "s.pt", torch.tensor([[5, 3], [1, 9]], dtype=dtype).t()))
    assert rows.dtype == np.int32 and rows.tolist() == [[5, 1], [3, 9]] and rows.flags.c_contiguous


def test_what_is_saved_is_described_and_what_cannot_be_written_changes_nothing(tmp_path):
    path = tmp_path / "s.pt"
    shapes.save(path, np.array([[5, 1], [3, 9]]), {"about": "two"}, (tmp_path / "more", b"beside"))
    described = json.loads((tmp_path / "s.json").read_text())
    known = {"name": "s.pt", "sha256": shapes.sha256(path), "utterances": 2}
    assert described["shape_file"] == {**known, "T_min": 3, "U_min": 1, "T_max": 5, "U_max": 9}
    assert described["about"] == "two" and (tmp_path / "more").read_bytes() == b"beside"
    (tmp_path / "cuts.json").write_text('[{"id": "a"}]')
    for wrong in (tmp_path / "missing" / "s.pt", tmp_path, tmp_path / "s.json", tmp_path / "cuts.pt"):
        with pytest.raises(UserError, match="--output"):
            shapes.save(wrong, np.array([[5, 1]]), {})
    with pytest.raises(UserError, match="cannot write .*more"):
        shapes.save(path, np.array([[5, 1]]), {}, (tmp_path / "nowhere" / "more", b""))
    assert shapes.load(path).tolist() == [[5, 1], [3, 9]]
    assert sorted(os.listdir(tmp_path)) == ["cuts.json", "more", "s.json", "s.pt"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[5, 1], [0, 2]], ["row 1 (counted from 0)", "T = 0", "at least 1", "generate_shape_info.py"]),
        ([[5, 1], [4, 1], [3, -1]], ["row 2", "U = -1", "at least 0"]),
        ([[5, 1], [2**40, 1]], ["row 1", f"T = {2**40}", "at most 2147483647"]),
        ([[5.0, 1.0]], ["float32", "integer"]),
        ([[True, False]], ["bool", "integer"]),
        ([5, 1], ["(2,)", "(utterances, 2)"]),
        ([[[5, 1]]], ["(1, 1, 2)"]),
        (torch.zeros(0, 2, dtype=torch.int32), ["no utterances"]),
        (torch.tensor([[5, 1]]).to_sparse(), ["dense"]),
        (torch.ones(1, 2).bfloat16(), ["bfloat16"]),
    ],
)
def test_a_wrong_tensor_is_refused_with_file_row_and_value(tmp_path, rows, words):
    fails(stored(tmp_path / "s.pt", torch.as_tensor(rows)), *words)


def test_what_is_no_shape_file_is_refused_wherever_it_is_cut_or_flipped(tmp_path):
    """torch.load takes a flipped number for another one: an utterance would change without a word."""
    fails(tmp_path / "missing.pt", "no such file", "--shape-file", "generate_shape_info.py")
    fails(tmp_path, "not a file")
    fails(stored(tmp_path / "list.pt", [[5, 1]]), "list")
    values = torch.tensor([[335, 12]] * 300, dtype=torch.int32)
    whole = stored(tmp_path / "whole.pt", values).read_bytes()
    begin = whole.index(values.numpy().tobytes())
    broken = [b"", b"T U\n5 1\n", *(whole[:length] for length in range(1, len(whole), len(whole) // 9))]
    for at in range(begin, begin + 300 * 2 * 4, 397):
        broken.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for content in broken:
        (tmp_path / "broken.pt").write_bytes(content)
        fails(tmp_path / "broken.pt", "not a shape file")


def test_code_in_a_file_is_not_run(tmp_path):
    marker = tmp_path / "ran"
    new, old, plain, script = (tmp_path / f"{name}.pt" for name in ("new", "old", "plain", "script"))
    torch.save(Code(marker), new)
    torch.save(Code(marker), old, _use_new_zipfile_serialization=False)
    plain.write_bytes(pickle.dumps(Code(marker)))
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(script))
    for path in (new, old, plain, script):
        fails(path, "not a shape file")
    assert not marker.exists()
    pickle.loads(plain.read_bytes())  # the trap does work
    assert marker.exists()


def test_subsampling():
    for factor, frames, expected in (
        (4, 1411, 352),
        (4, 128, 31),
        (4, 7, 1),
        (2, 1411, 705),
        (8, 1411, 175),
        (6, 1411, 234),
    ):
        assert shapes.subsampled(np.array([frames]), factor).tolist() == [expected]
    assert max(shapes.subsampled(frames) for frames in range(7)) < 1
    with pytest.raises(UserError, match="--subsampling-factor 3.*1, 2, 4, 6, 8"):
        shapes.subsampled(100, 3)


# The draw.


def test_the_draw_holds_to_the_published_figures_and_is_the_committed_file():
    known = json.loads(shapes.FIGURES.read_text())
    rows, _ = shapes.draw()
    assert (shapes.load(ROOT / "shape_info.pt") == rows).all()
    assert rows.dtype == np.int32 and rows.shape == (85617, 2)
    for column, name in enumerate("TU"):
        assert known[f"{name}_min"] <= rows[:, column].min() and rows[:, column].max() <= known[f"{name}_max"]
        assert rows[:, column].mean() == pytest.approx(known[f"{name}_mean"], rel=2e-3)
    assert np.corrcoef(rows.T)[0, 1] == pytest.approx(known["T_U_correlation"], abs=5e-3)
    in_file_order = batching.fixed_size(rows, 30)
    useful, padded = in_file_order.all_cells()
    assert 0.504 <= useful.sum() / padded.sum() <= 0.505
    assert in_file_order.longest().mean() == pytest.approx(known["mean_max_T_of_batch_30"], rel=2e-3)
    by_length = batching.max_frames(rows, 10000)
    assert len(by_length) in (2772, 2773)
    assert len(by_length[0]) in (19, 20) and len(by_length[1]) == len(by_length[2]) == 21


# Batches.


def rows(*pairs):
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def random_rows(count, seed=0):
    return (np.array([1, 0]) + 300 * shapes.uniform64(seed, 2 * count).reshape(count, 2)).astype(np.int32)


def test_fixed_size_keeps_file_order_and_the_short_last_batch():
    batches = batching.fixed_size(rows((4, 1), (9, 0), (2, 5), (7, 7), (1, 1)), 2)
    assert [batch.tolist() for batch in batches] == [[[4, 1], [9, 0]], [[2, 5], [7, 7]], [[1, 1]]]
    assert [batches.rows(i).tolist() for i in range(3)] == [[0, 1], [2, 3], [4]]
    assert batches[-1].tolist() == [[1, 1]] and batches[0].dtype == np.int32
    with pytest.raises(IndexError):
        batches[3]


def test_padded_frames_are_utterances_times_the_longest():
    """By hand: 10 x 2 is 20, 7 x 2 is 14, and a third of 7 would make 21."""
    lengths = rows((7, 1), (10, 1), (3, 1), (9, 1), (7, 2), (30, 1))
    batches = batching.max_frames(lengths, 20, padded=True)
    assert [batches[at][:, 0].tolist() for at in range(len(batches))] == [[30], [10, 9], [7, 7], [3]]
    assert [len(each) for each in map(batches.rows, range(len(batches)))] == [1, 2, 2, 1]
    padded = [len(batch) * batch[:, 0].max() for batch in map(batches.__getitem__, range(1, len(batches)))]
    assert max(padded) <= 20 and batches.too_long == [5]
    everything = batching.max_frames(random_rows(2000), 1000, padded=True)
    sizes = [(len(batch), int(batch[:, 0].max())) for batch in map(everything.__getitem__, range(len(everything)))]
    assert all(n * T <= 1000 or n == 1 for n, T in sizes) and sum(n for n, _ in sizes) == 2000


def test_sorting_moves_t_and_u_as_pairs_and_fills_up_to_the_limit():
    batches = batching.max_frames(rows((5, 1), (5, 3), (5, 1), (6, 0), (5, 3)), 100)
    assert batches[0].tolist() == [[6, 0], [5, 3], [5, 3], [5, 1], [5, 1]]
    assert batches.rows(0).tolist() == [3, 1, 4, 0, 2]  # equal rows keep file order
    batches = batching.max_frames(rows((3, 1), (30, 1), (7, 1), (11, 1), (10, 1)), 10)
    assert [batch[:, 0].tolist() for batch in batches] == [[30], [11], [10], [7, 3]] and batches.too_long == [1, 3]
    line = batching.warnings(batches, [0], settings.resolve({}, "cpu"))[0]
    assert has_words(line, "2 utterances", "--max-frames", "30 frames (row 1")


def test_greedy_filling_matches_a_plain_loop():
    expected, batch = [], []
    for utterance in sorted(random_rows(2000).tolist(), key=lambda pair: (-pair[0], -pair[1])):
        if batch and sum(pair[0] for pair in batch) + utterance[0] > 1000:
            expected.append(batch)
            batch = []
        batch.append(utterance)
    expected.append(batch)
    batches = batching.max_frames(random_rows(2000), 1000)
    assert [batch.tolist() for batch in batches] == expected
    assert sorted(np.concatenate([batches.rows(i) for i in range(len(batches))])) == list(range(2000))


def test_cells_are_t_times_u_plus_one():
    batches = batching.fixed_size(rows((4, 1), (9, 0), (2, 5)), 2)
    sizes = {"index": 0, "N": 2, "T_max": 9, "U_max": 1, "useful_cells": 17, "padded_cells": 36, "frames": 13}
    assert batches.describe(-2) == {**sizes, "tokens": 1, "one_symbol_cells": (8 - 1) + 9}
    assert batches.describe(0, prune_range=1)["pruned_cells"] == 4 + 9
    assert batches.describe(1, prune_range=9)["pruned_cells"] == 12
    assert batches.describe(1)["one_symbol_cells"] == 0  # no path: five symbols in two frames
    batches = batching.fixed_size(rows(*[(60000, 60000)] * 3), 3)  # beyond 32 bits
    assert batches.describe(0)["useful_cells"] == batches.all_cells()[1][0] == 3 * 60000 * 60001


@pytest.mark.parametrize("T, U", [(1, 0), (1, 1), (5, 2), (6, 6), (9, 1)])
def test_one_symbol_cells_are_those_that_a_path_meets(T, U):
    """Every frame takes one step, with a symbol or without, from (0, 0) to (T, U)."""
    met = {(t, u) for t in range(T) for u in range(U + 1) if u <= t and U - u <= T - t}
    assert batching.fixed_size(rows((T, U)), 1).describe(0)["one_symbol_cells"] == len(met)


@pytest.mark.parametrize("make", [lambda s: batching.fixed_size(s, 7), lambda s: batching.max_frames(s, 900)])
def test_all_cells_are_those_of_each_batch(make):
    batches = make(random_rows(500))
    useful, padded = batches.all_cells()
    described = [batches.describe(index) for index in range(len(batches))]
    assert useful.tolist() == [each["useful_cells"] for each in described]
    assert padded.tolist() == [each["padded_cells"] for each in described]
    assert batches.longest().tolist() == [batch[:, 0].max() for batch in batches]


def test_which_batches_are_picked():
    batches = batching.fixed_size(rows((4, 1), (9, 0), (2, 5), (9, 9), (12, 0)), 1)  # padded cells 8, 9, 12, 90, 12
    assert batching.select(batches, "first", 3, seed=1) == [0, 1, 2]
    assert batching.select(batches, "longest", 3, seed=1) == [3, 2, 4]
    for mode in ("first", "longest", "random", "spread"):  # a count over what there is takes all
        assert sorted(batching.select(batching.fixed_size(random_rows(20), 3), mode, 100, seed=3)) == list(range(7))
    batches = batching.fixed_size(random_rows(300), 3)
    picked = batching.select(batches, "random", 20, seed=3)
    assert len(set(picked)) == 20 and batching.select(batches, "random", 7, seed=3) == picked[:7]
    assert batching.select(batches, "random", 20, seed=4) != picked


def test_spread_takes_one_of_each_equal_part_of_the_lengths():
    lengths = [7, 2, 9, 1, 8, 3, 6, 4, 5, 10]
    batches = batching.fixed_size(rows(*[(length, 1) for length in lengths]), 1)
    for seed in range(20):
        picked = [lengths[index] for index in batching.select(batches, "spread", 5, seed)]
        assert [(length + 1) // 2 for length in picked] == [5, 4, 3, 2, 1]  # longest first
    assert len({tuple(batching.select(batches, "spread", 5, seed)) for seed in range(20)}) > 5


def test_seeded_picks_are_the_same_everywhere():
    batches = batching.max_frames(random_rows(5000, seed=5), 3000)
    drawn = [float(value).hex() for value in shapes.uniform64(34, 2)]
    assert len(batches) == 258 and drawn == ["0x1.07feb6101d480p-8", "0x1.be8df8f63c817p-1"]
    assert batching.select(batches, "random", 6, seed=11) == [215, 47, 73, 60, 69, 3]
    assert batching.select(batches, "spread", 6, seed=11) == [6, 65, 111, 130, 178, 254]
