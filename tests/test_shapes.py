"""common.data.shapes and common.data.sources.published: what a shape file may hold, in every environment, and the draw
in the repo."""

from __future__ import annotations

import json
import os
import pickle
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import has_words

from common.core.errors import UserError
from common.data import batching, shapes
from common.data.sources import published

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.environment_contract

REPOSITORY = Path(__file__).parents[1]
SHARED = REPOSITORY.parent / "shared" / "data"


class Code:
    """Unpickling one would create the file `marker`."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def fails(path: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        shapes.load(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message


def stored(path: Path, value: object) -> Path:
    torch.save(value, path)
    return path


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64])
def test_any_integer_tensor_loads_as_int32(tmp_path, dtype):
    rows = shapes.load(stored(tmp_path / "s.pt", torch.tensor([[5, 1], [3, 0]], dtype=dtype)))
    assert rows.dtype == np.int32
    assert rows.tolist() == [[5, 1], [3, 0]]


def test_a_transposed_tensor_loads_as_its_rows(tmp_path):
    rows = shapes.load(stored(tmp_path / "s.pt", torch.tensor([[5, 3], [1, 9]]).t()))
    assert rows.tolist() == [[5, 1], [3, 9]]
    assert rows.flags.c_contiguous


def test_what_is_saved_loads_and_is_described(tmp_path):
    path = tmp_path / "s.pt"
    shapes.save(path, np.array([[5, 1], [3, 9]]), {"about": "two"}, (tmp_path / "more", b"beside"))
    assert shapes.load(path).tolist() == [[5, 1], [3, 9]]
    described = json.loads((tmp_path / "s.json").read_text())
    assert described["about"] == "two"
    assert described["shape_file"] == {
        "name": "s.pt",
        "sha256": shapes.sha256(path),
        "utterances": 2,
        "T_min": 3,
        "U_min": 1,
        "T_max": 5,
        "U_max": 9,
    }
    assert sorted(os.listdir(tmp_path)) == ["more", "s.json", "s.pt"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[5, 1], [0, 2]], ["row 1 (counted from 0)", "T = 0", "at least 1", "generate_shape_info.py"]),
        ([[-7, 1]], ["row 0", "T = -7"]),
        ([[5, 1], [4, 1], [3, -1]], ["row 2", "U = -1", "at least 0"]),
        ([[5, 1], [2**40, 1]], ["row 1", f"T = {2**40}", "at most 2147483647"]),
        ([[5.0, 1.0]], ["float32", "integer"]),
        ([[True, False]], ["bool", "integer"]),
        ([5, 1], ["(2,)", "(utterances, 2)"]),
        ([[5, 1, 1]], ["(1, 3)"]),
        ([[[5, 1]]], ["(1, 1, 2)"]),
    ],
)
def test_a_wrong_tensor_is_refused_with_file_row_and_value(tmp_path, rows, words):
    fails(stored(tmp_path / "s.pt", torch.tensor(rows)), *words)


def test_other_wrong_tensors_are_refused(tmp_path):
    fails(stored(tmp_path / "empty.pt", torch.zeros(0, 2, dtype=torch.int32)), "no utterances")
    fails(stored(tmp_path / "sparse.pt", torch.tensor([[5, 1]]).to_sparse()), "dense")
    fails(stored(tmp_path / "bf16.pt", torch.ones(1, 2).bfloat16()), "bfloat16")
    fails(stored(tmp_path / "list.pt", [[5, 1]]), "list")


def test_what_is_no_shape_file_is_refused(tmp_path):
    fails(tmp_path / "missing.pt", "no such file", "--shape-file", "generate_shape_info.py")
    fails(tmp_path, "not a file")
    for name, content in {"empty.pt": b"", "text.pt": b"T U\n5 1\n"}.items():
        (tmp_path / name).write_bytes(content)
        fails(tmp_path / name, "not a shape file")


def test_a_truncated_file_is_refused_wherever_it_is_cut(tmp_path):
    whole = stored(tmp_path / "whole.pt", torch.ones(300, 2, dtype=torch.int32)).read_bytes()
    for length in range(1, len(whole), len(whole) // 20):
        (tmp_path / "cut.pt").write_bytes(whole[:length])
        fails(tmp_path / "cut.pt", "not a shape file")


def test_a_flipped_byte_is_refused_wherever_a_value_is(tmp_path):
    """torch.load takes another number for one: T or U of an utterance would change without a word."""
    values = torch.tensor([[335, 12]] * 300, dtype=torch.int32)
    whole = stored(tmp_path / "whole.pt", values).read_bytes()
    begin = whole.index(values.numpy().tobytes())
    for offset in range(begin, begin + 300 * 2 * 4, 97):
        (tmp_path / "flipped.pt").write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        fails(tmp_path / "flipped.pt", "not a shape file", "damaged")


def test_a_file_that_is_not_the_one_its_provenance_describes_is_refused(tmp_path):
    path, beside = tmp_path / "s.pt", tmp_path / "s.json"
    shapes.save(path, np.array([[5, 1], [3, 9]]), {})
    torch.save(torch.tensor([[5, 1], [3, 8]]), path, _use_new_zipfile_serialization=False)  # it has no checksums
    fails(path, str(beside), "sha256", "generate_shape_info.py")
    for text in ("{}", "[1", '{"shape_file": {"name": "other.pt", "sha256": "a"}}', '{"shape_file": 1}'):
        beside.write_text(text)
        assert shapes.load(path).tolist() == [[5, 1], [3, 8]]


def test_code_in_a_file_is_not_run(tmp_path):
    marker = tmp_path / "ran"
    new, old, plain = tmp_path / "new.pt", tmp_path / "old.pt", tmp_path / "plain.pt"
    torch.save(Code(marker), new)
    torch.save(Code(marker), old, _use_new_zipfile_serialization=False)
    plain.write_bytes(pickle.dumps(Code(marker)))
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    for path in (new, old, plain, tmp_path / "script.pt"):
        fails(path, "not a shape file")
    assert not marker.exists()
    pickle.loads(plain.read_bytes())  # the trap does work
    assert marker.exists()


def test_an_output_that_cannot_be_written_changes_nothing(tmp_path):
    rows = np.array([[5, 1]])
    for path in (tmp_path / "missing" / "s.pt", tmp_path, tmp_path / "s.json"):
        with pytest.raises(UserError, match="--output"):
            shapes.save(path, rows, {})
    (tmp_path / "cuts.json").write_text('[{"id": "a"}]')
    with pytest.raises(UserError, match="cuts.json"):
        shapes.save(tmp_path / "cuts.pt", rows, {})
    shapes.save(tmp_path / "s.pt", rows, {})
    before = (tmp_path / "s.pt").read_bytes()
    with pytest.raises(UserError, match="cannot write .*more"):
        shapes.save(tmp_path / "s.pt", rows + 1, {}, (tmp_path / "nowhere" / "more", b""))
    assert (tmp_path / "s.pt").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["cuts.json", "s.json", "s.pt"]


LARGER = """
import pathlib, sys
import numpy as np
from common.core.errors import UserError
from common.data import shapes
try:
    shapes.save(pathlib.Path(sys.argv[1]), np.ones((5000, 2), dtype=int), {})
except UserError as error:
    print(error)
"""


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A limit on the size of a file stands in for it."""
    shapes.save(tmp_path / "s.pt", np.array([[5, 1]]), {})
    before = (tmp_path / "s.pt").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", LARGER, str(tmp_path / "s.pt")],
        cwd=REPOSITORY,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert has_words(done.stdout, "s.pt", "File too large", "--output")
    assert (tmp_path / "s.pt").read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["s.json", "s.pt"]


@pytest.mark.parametrize(
    ("factor", "frames", "encoder_frames"),
    [(4, 1411, 352), (4, 2725, 680), (4, 128, 31), (4, 7, 1), (2, 1411, 705), (8, 1411, 175), (6, 1411, 234)],
)
def test_subsampling(factor, frames, encoder_frames):
    assert shapes.subsampled(frames, factor) == encoder_frames
    assert shapes.subsampled(np.array([frames]), factor).tolist() == [encoder_frames]


def test_too_few_frames_leave_none_and_odd_factors_are_refused():
    assert max(shapes.subsampled(frames) for frames in range(7)) < 1
    with pytest.raises(UserError, match="--subsampling-factor 3.*1, 2, 4, 6, 8"):
        shapes.subsampled(100, 3)


def test_the_draw_holds_to_the_published_figures():
    known = json.loads(published.FIGURES.read_text())
    rows = published.draw(published.load_figures())
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


def test_the_draw_follows_its_description_to_the_letter():
    """One utterance after another, in plain Python, as the figures' "about" says."""
    known = json.loads(published.FIGURES.read_text())
    count = known["utterances"]
    raw = [int(number) for number in np.random.PCG64(7).random_raw(2 * count)]

    def interpolated(at, xs, ys):
        right = next(i for i in range(1, len(xs)) if at <= xs[i])
        return ys[right - 1] + (at - xs[right - 1]) / (xs[right] - xs[right - 1]) * (ys[right] - ys[right - 1])

    rows = published.draw(published.load_figures(), seed=7)
    for index in range(0, count, 997):
        percent_t, percent_u = (100 * (raw[index + column * count] >> 11) / 2**53 for column in range(2))
        frames = interpolated(percent_t, known["T_percent"], known["T_at_percent"])
        upper_edges = known["T_bin_edges"][1:-1]
        table = known["U_per_1000_T_at_percent_by_T_bin"][sum(edge <= frames for edge in upper_edges)]
        tokens = frames / 1000 * interpolated(percent_u, known["U_per_1000_T_percent"], table)
        assert rows[index].tolist() == [round(frames), round(tokens)]


def test_seeds_differ_and_repeat():
    known = published.load_figures()
    assert (published.draw(known, 1) == published.draw(known, 1)).all()
    assert (published.draw(known, 1) != published.draw(known, 2)).any()


def test_the_figures_are_the_published_ones():
    if not SHARED.is_dir():
        pytest.skip(f"no {SHARED.name} folder beside the checkout")
    assert published.FIGURES.read_bytes() == (SHARED / "train_clean_100_shapes.json").read_bytes()


def test_the_committed_shape_file_is_the_draw():
    assert (shapes.load(REPOSITORY / "shape_info.pt") == published.draw(published.load_figures())).all()
