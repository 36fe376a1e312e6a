"""Other lengths from the same utterances: the rules by hand, and that what differs in them is never compared."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from rnnt_bench.analysis import comparison, logs
from rnnt_bench.analysis.groups import differences, groups, heading
from rnnt_bench.core import flag_types, settings
from rnnt_bench.core.errors import UserError
from rnnt_bench.data import batching, shapes

from commands import assert_user_error, run
from fixtures_runs import write_run

ROWS = np.array([[352, 60], [1, 0], [10, 1], [33, 3], [7, 5]], dtype=np.int32)


def vary(**options):
    return batching.vary(ROWS, **options).tolist()


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, ROWS.tolist()),
        # x8 is a third convolution (T - 1) // 2, x6 is (2 T - 1) // 3, and no utterance is left without a frame
        ({"subsampling": 8}, [[175, 60], [1, 0], [4, 1], [16, 3], [3, 5]]),
        ({"subsampling": 6}, [[234, 60], [1, 0], [6, 1], [21, 3], [4, 5]]),
        # tokens are rounded, and text stays text: 0.5 would be none, 1.5 is 2, 2.5 is 2
        ({"token_scale": 0.5}, [[352, 30], [1, 0], [10, 1], [33, 2], [7, 2]]),
        ({"token_scale": 2.66}, [[352, 160], [1, 0], [10, 3], [33, 8], [7, 13]]),
        # utterances in a row become one, and the rest is kept
        ({"concatenate": 2}, [[353, 60], [43, 4], [7, 5]]),
        ({"concatenate": 2, "subsampling": 8, "token_scale": 0.5}, [[176, 30], [21, 2], [3, 2]]),
        ({"frames": 9}, [[9, 60], [9, 0], [9, 1], [9, 3], [9, 5]]),
        ({"tokens": 0, "frames": 3, "subsampling": 8, "token_scale": 3}, [[3, 0]] * 5),
    ],
)
def test_lengths_by_hand(options, expected):
    assert vary(**options) == expected


def test_frames_agree_with_the_front_ends_themselves():
    """From feature frames to x4 to x8 is from feature frames to x8; to x6 it is one frame less at most."""
    frames = np.arange(100, 3000)
    at_4 = np.stack([shapes.subsampled(frames, 4), np.ones_like(frames)], axis=1)
    assert np.array_equal(batching.vary(at_4, subsampling=8)[:, 0], shapes.subsampled(frames, 8))
    missing = shapes.subsampled(frames, 6) - batching.vary(at_4, subsampling=6)[:, 0]
    assert set(missing.tolist()) == {0, 1} and missing.mean() < 0.4


def test_lengths_that_no_shape_file_could_hold():
    for option in ({"frames": 2**31}, {"token_scale": 1e9}):
        with pytest.raises(UserError, match="--concatenate"):
            vary(**option)


def load_batches(path, **flags):
    chosen = settings.resolve({"shape_file": str(path), "preset": "quick", "batches": "first", **flags}, "cpu")
    batches, selected = batching.load(chosen)
    return [batches[index].tolist() for index in selected]


def test_batches_are_made_of_the_lengths_asked_for(tiny_shapes):
    assert load_batches(tiny_shapes) == [[[12, 2], [15, 3]], [[18, 4], [21, 5]]]
    assert load_batches(tiny_shapes, concatenate=2, token_scale=2.0) == [[[27, 10], [39, 18]], [[51, 26], [63, 34]]]
    assert load_batches(tiny_shapes, subsampling=8, tokens=1) == [[[5, 1], [7, 1]], [[8, 1], [10, 1]]]
    assert load_batches(tiny_shapes, sort_utterance=True, batches="first", frames=600, num_batches=1) == [[[600, 13]]]


def test_fewer_batches_than_asked_for_are_said(tiny_shapes):
    chosen = settings.resolve({"shape_file": str(tiny_shapes), "preset": "quick", "batch_size": 6}, "cpu")
    for asked, warnings in ((2, []), (80, ["--num-batches 80: there are no more than 2, and all are measured"])):
        wanted = replace(chosen, num_batches=asked)
        assert batching.warnings(*batching.load(wanted), wanted) == warnings


def test_a_shape_file_of_another_front_end_is_not_taken_for_x4(tiny_shapes):
    shapes.provenance_file(tiny_shapes).write_text(json.dumps({"options": {"subsampling_factor": 8}}))
    as_it_is = [[[12, 2], [15, 3]], [[18, 4], [21, 5]]]
    assert load_batches(tiny_shapes) == load_batches(tiny_shapes, subsampling=8) == as_it_is
    with pytest.raises(UserError, match="at x8 already"):
        load_batches(tiny_shapes, subsampling=6)
    for text in ("[]", "{", '{"options": {}}', '{"options": null}', '{"options": {"subsampling_factor": [8]}}'):
        shapes.provenance_file(tiny_shapes).write_text(text)
        assert shapes.subsampling(tiny_shapes) is None


@pytest.mark.parametrize(
    "text, device, preset, expected",
    [
        (None, "cpu", "cpu", {"vocab_size": 500, "batch_size": 2, "subsampling": 4}),
        ("bpe500", "cuda", "full", {"vocab_size": 500, "batch_size": 30}),
        ("quick,bpe500", "cpu", "quick", {"vocab_size": 50}),
        ("chars, seed", "cpu", "full,chars", {"vocab_size": 30, "batch_size": 30}),
        ("quick,bpe4096-x8", "cpu", "quick,bpe4096-x8", {"vocab_size": 4096, "encoder_dim": 32, "subsampling": 8}),
        ("cpu,long-form", "cpu", "cpu,long-form", {"concatenate": 4, "batch_size": 1}),
    ],
)
def test_a_preset_is_a_size_a_workload_or_both(text, device, preset, expected):
    chosen = settings.resolve({"preset": text}, device)
    assert chosen.preset == preset and chosen.to_json().items() >= expected.items()
    assert settings.resolve({"preset": preset}, device) == chosen and flag_types.described_preset(preset)
    flags = {"vocab_size": 7, "token_scale": 1.5, "batch_size": 3}
    assert settings.resolve({"preset": text, **flags}, device).to_json().items() >= flags.items()


def test_bad_flags_in_one_line():
    for text in ("large", "cpu,quick", "chars,long-form", "cpu,"):
        with pytest.raises(UserError, match="bpe4096-x8"):
            flag_types.size_and_workload(text)
    assert_user_error(run("benchmark_torchaudio.py", "--preset", "cpu,words"), "--preset", "cpu,words", "chars")
    assert_user_error(run("benchmark_torchaudio.py", "--subsampling", "5"), "--subsampling", "5", "8")


#: Settings of other inputs: a value, and the words of a heading.
OTHERS = {
    "min_duration": (1.0, "at least 1 s"),
    "max_duration": (20.5, "at most 20.5 s"),
    "subsampling": (8, "x8 frames"),
    "token_scale": (2.66, "2.66 x tokens"),
    "concatenate": (4, "4 utterances as one"),
    "frames": (100, "T 100"),
    "tokens": (0, "U 0"),
    "logits": ("trained", "trained logits"),
    "mode": ("forward", "forward only"),
}
DEFAULTS = {key: settings.SETTINGS[key].default for key in OTHERS}


@pytest.mark.parametrize("key", OTHERS)
def test_rows_of_other_inputs_never_share_a_group(key, tmp_path):
    """A run from before these settings counts as one with the defaults."""
    value, words = OTHERS[key]
    write_run(tmp_path / "a", "torchaudio")
    write_run(tmp_path / "b", "k2", **DEFAULTS)
    write_run(tmp_path / "c", "k2", **{**DEFAULTS, key: value})
    of_run = groups(logs.rows([tmp_path]))
    assert sorted(sorted(row.folder.name for row in group) for group in of_run) == [["a", "b"], ["c"]]
    assert settings.described(settings.in_rows(DEFAULTS, "cpu", "exact")) == settings.described(DEFAULTS) == []
    assert settings.described({key: value}) == [words]
    assert [words in heading(group) for group in of_run] == [len(group) == 1 for group in of_run]

    old, same, other = (comparison.read_runs(tmp_path / name)[0] for name in "abc")
    assert differences(old, same) == [] != differences(old, other) == differences(same, other)


def test_a_workload_end_to_end(tiny_shapes, tmp_path):
    flags = ["--in-place", "--preset", "quick,chars", "--max-seconds", "0.05", "--passes", "timing", "--scope", "loss"]
    flags += ["--batches", "first", "--shape-file", tiny_shapes, "--log-dir", tmp_path / "log", "--limits", "false"]
    done = run("benchmark_torchaudio.py", *flags)
    assert done.returncode == 0, done.stderr
    assert "2.66 x tokens, V 30" in " ".join(done.stdout.split()) and "preset quick,chars" in done.stderr
    (row,) = logs.rows([tmp_path / "log"])
    # U 2 3 | 4 5 become 5 8 | 11 13
    assert (row.cells[0], row.cells[1]) == (12 * 6 + 15 * 9 + 18 * 12 + 21 * 14, 2 * 15 * 9 + 2 * 21 * 14)


def test_utterances_of_other_durations_are_left_out(tiny_shapes):
    """T 12 to 45 at x4 are at least 51 to 183 frames of 10 ms, 0.51 to 1.83 s."""
    assert load_batches(tiny_shapes, min_duration=0.7, num_batches=1) == [[[18, 4], [21, 5]]]  # 75 to 78 frames, 87
    assert load_batches(tiny_shapes, max_duration=0.63) == [[[12, 2], [15, 3]]]
    shapes.provenance_file(tiny_shapes).write_text(json.dumps({"options": {"frame_shift": 0.02}}))
    assert load_batches(tiny_shapes, max_duration=1.26) == [[[12, 2], [15, 3]]]
    with pytest.raises(UserError, match="no utterance is left of 12"):
        load_batches(tiny_shapes, min_duration=100.0)
