"""common.data.batching: which rows share a batch, cells, and which batches are picked; hand-computed."""

from __future__ import annotations

import numpy as np
import pytest
from commands import has_words

from common.core.errors import UserError
from common.data import batching, streams

pytestmark = pytest.mark.environment_contract


def rows(*pairs):
    return np.array(pairs, dtype=np.int32).reshape(-1, 2)


def frames(batches):
    return [batch[:, 0].tolist() for batch in batches]


def random_rows(count, seed=0):
    return (np.array([1, 0]) + 300 * streams.uniform64(seed, 2 * count).reshape(count, 2)).astype(np.int32)


def test_fixed_size_keeps_file_order_and_the_short_last_batch():
    batches = batching.fixed_size(rows((4, 1), (9, 0), (2, 5), (7, 7), (1, 1)), 2)
    assert len(batches) == 3
    assert [batch.tolist() for batch in batches] == [[[4, 1], [9, 0]], [[2, 5], [7, 7]], [[1, 1]]]
    assert [batches.rows(i).tolist() for i in range(3)] == [[0, 1], [2, 3], [4]]
    assert batches[0].dtype == np.int32
    assert batches[-1].tolist() == [[1, 1]]
    with pytest.raises(IndexError):
        batches[3]


def test_a_batch_size_over_the_number_of_utterances_gives_one_batch():
    assert frames(batching.fixed_size(rows((4, 1), (9, 0)), 30)) == [[4, 9]]


def test_sorting_moves_t_and_u_as_pairs():
    batches = batching.max_frames(rows((3, 9), (5, 1)), 100)
    assert batches[0].tolist() == [[5, 1], [3, 9]]
    assert batches.rows(0).tolist() == [1, 0]


def test_equal_t_is_sorted_by_u_and_equal_rows_keep_file_order():
    batches = batching.max_frames(rows((5, 1), (5, 3), (5, 1), (6, 0), (5, 3)), 100)
    assert batches[0].tolist() == [[6, 0], [5, 3], [5, 3], [5, 1], [5, 1]]
    assert batches.rows(0).tolist() == [3, 1, 4, 0, 2]


def test_greedy_filling_up_to_the_limit():
    assert frames(batching.max_frames(rows((6, 1), (5, 1), (4, 1), (3, 1)), 10)) == [[6], [5, 4], [3]]
    assert frames(batching.max_frames(rows((5, 1), (5, 1), (5, 1)), 10)) == [[5, 5], [5]]


def test_an_utterance_over_the_limit_is_alone_and_warned_about():
    batches = batching.max_frames(rows((3, 1), (30, 1), (7, 1), (11, 1), (10, 1)), 10)
    assert frames(batches) == [[30], [11], [10], [7, 3]]
    assert batches.too_long == [1, 3]
    assert has_words(batches.warning(), "2 utterances", "--max-frames", "30 frames (row 1")
    assert batching.max_frames(rows((10, 1)), 10).warning() is None


def test_greedy_filling_matches_a_plain_loop():
    shapes = random_rows(2000)
    expected, batch = [], []
    for utterance in sorted(shapes.tolist(), key=lambda pair: (-pair[0], -pair[1])):
        if batch and sum(pair[0] for pair in batch) + utterance[0] > 1000:
            expected.append(batch)
            batch = []
        batch.append(utterance)
    expected.append(batch)
    batches = batching.max_frames(shapes, 1000)
    assert [batch.tolist() for batch in batches] == expected
    assert sorted(np.concatenate([batches.rows(i) for i in range(len(batches))])) == list(range(2000))


def test_cells_are_t_times_u_plus_one():
    batches = batching.fixed_size(rows((4, 1), (9, 0), (2, 5)), 2)
    assert batches.cells(0) == (4 * 2 + 9 * 1, 2 * 9 * 2)
    assert batches.cells(1) == (12, 12)
    assert [cells.tolist() for cells in batches.all_cells()] == [[17, 12], [36, 12]]
    assert batches.describe(-2) == {
        "index": 0,
        "N": 2,
        "T_max": 9,
        "U_max": 1,
        "useful_cells": 17,
        "padded_cells": 36,
        "frames": 13,
        "tokens": 1,
        "one_symbol_cells": (8 - 1) + 9,
    }
    assert batches.describe(0, prune_range=1)["pruned_cells"] == 4 + 9
    assert batches.describe(1, prune_range=5)["pruned_cells"] == 2 * 5
    assert batches.describe(1, prune_range=9)["pruned_cells"] == 12
    assert batches.describe(1)["one_symbol_cells"] == 0  # no path: five symbols in two frames


@pytest.mark.parametrize("T, U", [(1, 0), (1, 1), (5, 2), (6, 6), (9, 1)])
def test_one_symbol_cells_are_those_that_a_path_meets(T, U):
    """Every frame takes one step, with a symbol or without, from (0, 0) to (T, U)."""
    met = {(t, u) for t in range(T) for u in range(U + 1) if u <= t and U - u <= T - t}
    assert batching.fixed_size(rows((T, U)), 1).describe(0)["one_symbol_cells"] == len(met)


@pytest.mark.parametrize("make", [lambda s: batching.fixed_size(s, 7), lambda s: batching.max_frames(s, 900)])
def test_all_cells_are_those_of_each_batch(make):
    batches = make(random_rows(500))
    useful, padded = batches.all_cells()
    assert list(zip(useful.tolist(), padded.tolist())) == [batches.cells(i) for i in range(len(batches))]
    assert batches.longest().tolist() == [batch[:, 0].max() for batch in batches]


def test_cells_do_not_overflow_32_bits():
    batches = batching.fixed_size(rows(*[(60000, 60000)] * 3), 3)
    assert batches.cells(0) == (3 * 60000 * 60001,) * 2
    assert batches.all_cells()[1].tolist() == [3 * 60000 * 60001]


def test_bad_sizes_name_their_flag():
    with pytest.raises(UserError, match="--batch-size 0"):
        batching.fixed_size(rows((1, 1)), 0)
    with pytest.raises(UserError, match="--max-frames 0"):
        batching.max_frames(rows((1, 1)), 0)
    with pytest.raises(UserError, match="--batches shortest.*first, longest, random, spread"):
        batching.select(batching.fixed_size(rows((1, 1)), 1), "shortest", 1, 0)
    with pytest.raises(UserError, match="at least 1"):
        batching.select(batching.fixed_size(rows((1, 1)), 1), "first", 0, 0)


def test_no_utterances_give_no_batches():
    for batches in (batching.fixed_size(rows(), 3), batching.max_frames(rows(), 3)):
        assert len(batches) == 0 and list(batches) == []
        assert batches.all_cells()[0].tolist() == []
        assert [batching.select(batches, mode, 5, 0) for mode in batching.MODES] == [[]] * 4


def test_first_and_longest():
    batches = batching.fixed_size(rows((4, 1), (9, 0), (2, 5), (9, 9), (12, 0)), 1)  # padded cells 8, 9, 12, 90, 12
    assert batching.select(batches, "first", 3, seed=1) == [0, 1, 2]
    assert batching.select(batches, "longest", 3, seed=1) == [3, 2, 4]


@pytest.mark.parametrize("mode", batching.MODES)
def test_a_count_over_what_there_is_takes_all(mode):
    batches = batching.fixed_size(random_rows(20), 3)
    assert sorted(batching.select(batches, mode, 100, seed=3)) == list(range(7))


def test_random_is_seeded_and_a_smaller_count_is_its_start():
    batches = batching.fixed_size(random_rows(300), 3)
    picked = batching.select(batches, "random", 20, seed=3)
    assert len(set(picked)) == 20
    assert batching.select(batches, "random", 20, seed=3) == picked
    assert batching.select(batches, "random", 7, seed=3) == picked[:7]
    assert batching.select(batches, "random", 20, seed=4) != picked


def test_spread_takes_one_of_each_equal_part_of_the_lengths():
    lengths = [7, 2, 9, 1, 8, 3, 6, 4, 5, 10]
    batches = batching.fixed_size(rows(*[(length, 1) for length in lengths]), 1)
    for seed in range(20):
        picked = [lengths[index] for index in batching.select(batches, "spread", 5, seed)]
        assert [(length + 1) // 2 for length in picked] == [5, 4, 3, 2, 1]  # longest first
    assert len({tuple(batching.select(batches, "spread", 5, seed)) for seed in range(20)}) > 5


def test_seeded_picks_are_the_same_everywhere():
    """Written down once: any numpy, any machine must pick these."""
    batches = batching.max_frames(random_rows(5000, seed=5), 3000)
    assert len(batches) == 258
    assert [float(value).hex() for value in streams.uniform64(34, 2)] == [
        "0x1.07feb6101d480p-8",
        "0x1.be8df8f63c817p-1",
    ]
    assert batching.select(batches, "random", 6, seed=11) == [215, 47, 73, 60, 69, 3]
    assert batching.select(batches, "spread", 6, seed=11) == [6, 65, 111, 130, 178, 254]


def test_a_million_utterances():
    shapes = random_rows(1_000_000)
    batches = batching.max_frames(shapes, 10000)
    useful, _ = batches.all_cells()
    assert useful.sum() == (shapes[:, 0].astype(np.int64) * (shapes[:, 1] + 1)).sum()
    assert len(batching.select(batches, "spread", 80, seed=0)) == 80
