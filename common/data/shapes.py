"""The shape file: one row (T, U) per utterance, an integer tensor (utterances, 2) saved by torch,
provenance beside it.

T is the number of encoder output frames (after subsampling), U the number of target tokens.
Loading checks every row; no other code has to.  torch is imported only to read and write.  Below:
seeded numbers, and the draw of shape_info.pt.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import math
import os
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from rnnt_bench.core.called import command
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.files import another, not_a_file, read_bytes, write_whole

#: The JSON file beside a shape file, or one entry of it.
Provenance = dict[str, Any]
FACTORS = (1, 2, 4, 6, 8)
#: Seconds between feature frames, where nothing else is said.
FRAME_SHIFT = 0.01
MAKE_ONE = f"make one with {command('shapes')}"
LARGEST = np.iinfo(np.int32).max


def load(path: Path) -> np.ndarray:
    """Return the rows of the shape file: int32 (utterances, 2), columns T and U. No code in a file
    is run: torch.load with weights_only=True, and no TorchScript (which torch 1.13 would load with
    it).  The checksums in the file must be right.  Raises UserError, which names the file, the row
    (counted from 0) and the wrong value."""
    import torch

    problem = not_a_file(path)
    if problem:
        raise UserError(f"{path}: {problem}; {MAKE_ONE}, or name another with --shape-file")
    try:
        content = io.BytesIO(read_bytes(path))
        if zipfile.is_zipfile(content):
            with zipfile.ZipFile(content) as archive:
                is_script = any(name.endswith("/constants.pkl") for name in archive.namelist())
                if is_script or archive.testzip() is not None:  # torch.load ignores the checksums
                    raise ValueError("TorchScript, or a wrong checksum")
        content.seek(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old formats
            loaded = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise UserError(
            f"{path}: not a shape file: damaged, cut short, or more than a tensor (nothing in it was run); {MAKE_ONE}"
        ) from error
    integers = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    kind = getattr(loaded, "dtype", type(loaded).__name__)
    if kind not in integers or loaded.layout != torch.strided or loaded.device.type != "cpu":
        raise UserError(
            f"{path}: holds {kind}, not a dense tensor (utterances, 2) of integers; {MAKE_ONE}"
        )
    rows = loaded.numpy()
    if rows.ndim != 2 or rows.shape[1] != 2:
        raise UserError(f"{path}: a tensor of shape {rows.shape}, not (utterances, 2); {MAKE_ONE}")
    if not len(rows):
        raise UserError(f"{path}: no utterances, a tensor of shape {rows.shape}; {MAKE_ONE}")
    _check_numbers(path, "T", rows[:, 0], least=1)
    _check_numbers(path, "U", rows[:, 1], least=0)
    return np.ascontiguousarray(rows, dtype=np.int32)


def _check_numbers(path: Path, name: str, column: np.ndarray, least: int) -> None:
    """Raise UserError for a number of a column that is below `least` or no int32."""
    wrong = np.flatnonzero((column < least) | (column > LARGEST))
    if len(wrong):
        value = column[wrong[0]]
        bound = f"at least {least}" if value < least else f"at most {LARGEST}"
        raise UserError(
            f"{path}: row {wrong[0]} (counted from 0) has {name} = {value}, {name} must be {bound}; "
            f"{len(wrong)} of {len(column)} rows are wrong; {MAKE_ONE}"
        )


def save(path: Path, rows: np.ndarray, provenance: Provenance, *beside: tuple[Path, bytes]) -> None:
    """Write `rows` (utterances, 2) as an int32 tensor, `provenance` to ``<stem>.json`` with
    ``shape_file`` before it, and (path, content) of more files.  Where one cannot be written, all
    stay as they were: UserError."""
    import torch

    check_output(path)
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    stream = io.BytesIO()
    # torch.save to a path would put its name into the archive.
    torch.save(torch.from_numpy(rows), stream)
    tensor = stream.getvalue()
    shape_file = {
        "name": path.name,
        "sha256": hashlib.sha256(tensor).hexdigest(),
        "utterances": len(rows),
        "T_min": int(rows[:, 0].min()),
        "U_min": int(rows[:, 1].min()),
        "T_max": int(rows[:, 0].max()),
        "U_max": int(rows[:, 1].max()),
    }
    text = json.dumps({"shape_file": shape_file, **provenance}, indent=2, ensure_ascii=False)
    content = f"{text}\n".encode("utf-8", "backslashreplace")
    advice = "free some space or " + another("--output")
    write_whole(advice, (path, tensor), (provenance_file(path), content), *beside)


def check_output(path: Path) -> None:
    """Raise UserError unless a shape file and its provenance can be written at `path` and replace
    no other file."""
    beside = provenance_file(path)
    problem = ""
    if path == beside:
        problem = "its provenance goes to that name; name a .pt file"
    elif os.path.isdir(path):
        problem = "a folder; name a .pt file in it"
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        problem = f"no folder {path.parent} that can be written; name a file in another one"
    elif os.path.exists(beside) and not entry(path, "shape_file"):
        problem = (
            f"its provenance would replace {beside}, which is not the provenance of a shape file; "
            "choose another name"
        )
    if problem:
        raise UserError(f"--output {path}: {problem}")


def sha256(path: Path) -> str:
    """Return the hex digest of the file's bytes; UserError where it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def subsampled(frames: Any, factor: int = 4) -> Any:
    """Return the encoder frames of `frames` feature frames (an int or an integer array); below 1:
    too short for the front end. 2, 4 and 8 are one, two and three convolutions of kernel 3 and
    stride 2, (x - 1) // 2 each, as icefall's front end (4: 1411 -> 352); 6 is one of those and one
    of kernel 5 and stride 3, as ESPnet's."""
    if factor not in FACTORS:
        raise UserError(
            f"--subsampling-factor {factor}: choose one of {', '.join(map(str, FACTORS))}"
        )
    if factor == 6:
        return ((frames - 1) // 2 - 2) // 3
    while factor > 1:
        frames, factor = (frames - 1) // 2, factor // 2
    return frames


def feature_frames(T: Any, factor: int) -> Any:
    """Return the fewest feature frames that have T encoder frames (an int or an integer array): T =
    subsampled(...)."""
    return factor * T + factor - 1


def provenance_file(shape_file: Path) -> Path:
    """Return the path of the JSON file beside a shape file."""
    return shape_file.with_suffix(".json")


def entry(shape_file: Path, name: str) -> Provenance:
    """Return the entry `name` of the file beside a shape file; {} where there is none."""
    try:
        value = json.loads(read_bytes(provenance_file(shape_file)).decode("utf-8"))[name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError, MemoryError):
        return {}
    return value if isinstance(value, dict) else {}


def versions(*packages: str) -> dict[str, str]:
    """Return versions without local parts: the same release built for another CUDA gives the same
    files."""
    modules = map(importlib.import_module, packages)
    return {module.__name__: module.__version__.split("+")[0] for module in modules}


def subsampling(shape_file: Path) -> int | None:
    """Return the subsampling factor of the frames in a shape file; None where the file beside it
    tells none."""
    factor = entry(shape_file, "options").get("subsampling_factor")
    return factor if type(factor) is int and factor in FACTORS else None


def vocab_size(shape_file: Path) -> int | None:
    """Return the vocabulary size of the model that counted the tokens; None where the file beside
    it tells none."""
    size = entry(shape_file, "bpe_model").get("vocab_size")
    return size if type(size) is int and size >= 2 else None


def frame_shift(shape_file: Path) -> float:
    """Return the seconds between feature frames; FRAME_SHIFT where the file beside a shape file
    tells none."""
    shift: Any = entry(shape_file, "options").get("frame_shift")
    return float(shift) if type(shift) in (int, float) and 0 < shift < math.inf else FRAME_SHIFT


# Seeded numbers, the same on every machine and for every numpy version: numpy guarantees the raw
# stream of a BitGenerator (NEP 19), not the numbers that Generator makes of it.  `uniform64` draws
# shapes and batches, `uniform` and `symbols` the inputs of a loss: their keys begin with the number
# of a stream.


def uniform64(seed: int, count: int) -> np.ndarray:
    """Return `count` float64 numbers in [0, 1), multiples of 2**-53, from the raw output of PCG64
    with `seed` (>= 0)."""
    return (np.random.PCG64(seed).random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(count: int, *key: int) -> np.ndarray:
    """Return (count,) float32 in [0, 1), multiples of 2^-24, from the stream that `key` names."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw((count + 1) // 2)
    return (words.astype("<u8").view("<u4")[:count] >> 8).astype(np.float32) * np.float32(2**-24)


#: First word of each stream's key, so that no two draw the same numbers; 4 and 6 once had other
#: uses.
ENCODER, DECODER, TARGETS, WEIGHTS, _, ALIGNMENT = range(6)


def symbols(shape: tuple[int, int], vocab_size: int, *key: int) -> np.ndarray:
    """Return int32 of `shape` in [1, vocab_size): never the blank, 0."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(shape[0] * shape[1])
    return (
        (1 + (words >> np.uint64(33)) % np.uint64(vocab_size - 1)).astype(np.int32).reshape(shape)
    )


# The published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1: the joint
# distribution of T and U.  A draw has the real marginal of T and the real spread of U given T; its
# order is random.


FIGURES = Path(__file__).with_name("train_clean_100_shapes.json")
#: Seed of the committed shape_info.pt.  Of seeds 0 to 299, 36 also give the published batches
#: (2,772-2,773 sorted ones at 10,000 frames, useful/padded cells 0.504-0.505 at 30); of those this
#: one has means and longest T near the published.  data/shape_info.features.pt has seed 1097,
#: chosen below 2,500 because its sorted batches at 30,000 feature frames are the published 3,733,
#: of 14, 15, 15 ... 150 utterances; draws lie between about 3,721 and 3,746.
SEED = 34


def draw(seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
    """Return as many utterances as the figures were taken from: int32 (utterances, 2), columns T
    and U, and the same with feature frames in the place of T.

    T is the inverse interpolation of its percentiles at a uniform percentage; U is T / 1000 times
    the inverse interpolation of the percentiles of the bin that holds T, at an independent uniform
    percentage; both are rounded. U is clipped to the published minimum and maximum: a product of a
    T and a U per T can miss them by a token or two. Four numbers of feature frames have the same T;
    which it is comes from what rounding takes from the drawn T.  The same seed gives the same rows
    on every machine."""
    published = json.loads(FIGURES.read_text(encoding="utf-8"))
    figures = {name: np.asarray(value) for name, value in published.items()}
    count = published["utterances"]
    percent_t, percent_u = 100.0 * uniform64(seed, 2 * count).reshape(2, count)
    quantiles = figures["T_at_percent"][np.newaxis]
    first = np.zeros(count, dtype=np.intp)
    frames = _interpolate(percent_t, figures["T_percent"], quantiles, first)
    rates = figures["U_per_1000_T_at_percent_by_T_bin"]
    bins = np.searchsorted(figures["T_bin_edges"], frames, side="right") - 1
    bins = np.clip(bins, 0, len(rates) - 1)
    rate = _interpolate(percent_u, figures["U_per_1000_T_percent"], rates, bins)
    least = [published["T_min"], published["U_min"]]
    most = [published["T_max"], published["U_max"]]
    rows = np.rint(np.stack([frames, frames / 1000.0 * rate], axis=1))
    rows = np.clip(rows, least, most).astype(np.int32)
    quarter = np.clip(np.floor(4 * (frames - rows[:, 0] + 0.5)), 0, 3).astype(np.int32)
    return rows, np.stack([4 * rows[:, 0] + 3 + quarter, rows[:, 1]], axis=1)


def _interpolate(
    x: np.ndarray, points: np.ndarray, tables: np.ndarray, table: np.ndarray
) -> np.ndarray:
    """Return row ``table[i]`` of `tables` (rows, points), the values at `points`, interpolated
    linearly at ``x[i]``.

    Not np.interp: a compiler may fuse its multiplication and addition, which rounds differently
    from machine to machine.  Single numpy operations are exact IEEE.
    """
    left = np.clip(np.searchsorted(points, x, side="right") - 1, 0, len(points) - 2)
    share = (x - points[left]) / (points[left + 1] - points[left])
    low = tables[table, left]
    return low + share * (tables[table, left + 1] - low)
