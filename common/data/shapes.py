"""Read and write shape files, and draw shape_info.pt from published figures.

A shape file is an integer tensor (utterances, 2), saved by torch: a row (T, U) for each utterance.
T is the number of encoder output frames, after subsampling; U is the number of target tokens.  Its
provenance is a JSON file beside it.  `load` checks every row, so no other code has to.  torch is
imported only to read and write.
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
from rnnt_bench.core.files import advise_another, not_a_file, read_bytes, write_whole

#: The content of the JSON file beside a shape file, or one entry of it.
Provenance = dict[str, Any]
#: Subsampling factors that `subsampled` knows.
FACTORS = (1, 2, 4, 6, 8)
#: Seconds between feature frames, if the provenance does not tell.
FRAME_SHIFT = 0.01
MAKE_ONE = f"make one with {command('shapes')}"
LARGEST = np.iinfo(np.int32).max


def load(path: Path) -> np.ndarray:
    """Return the rows of a shape file: int32 (utterances, 2), columns T and U.

    No code in the file is run: torch.load has weights_only=True, and TorchScript is refused, which
    torch 1.13 would load all the same.  Raises UserError, which names the file and, for a wrong
    number, its row, counted from 0."""
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
    """Raise UserError if a number of a column is below `least` or above LARGEST.

    path: of the shape file; name: of the column, "T" or "U"."""
    wrong = np.flatnonzero((column < least) | (column > LARGEST))
    if len(wrong):
        value = column[wrong[0]]
        bound = f"at least {least}" if value < least else f"at most {LARGEST}"
        raise UserError(
            f"{path}: row {wrong[0]} (counted from 0) has {name} = {value}, {name} must be {bound}; "
            f"{len(wrong)} of {len(column)} rows are wrong; {MAKE_ONE}"
        )


def save(path: Path, rows: np.ndarray, provenance: Provenance, *beside: tuple[Path, bytes]) -> None:
    """Write a shape file, and its provenance to ``<stem>.json``.

    Raises UserError if one file cannot be written; then all stay as they were.

    Args:
        rows: (utterances, 2), columns T and U; at least one row.
        provenance: written after an entry "shape_file", which tells what is in the shape file.
        beside: (path, content) of more files to write."""
    import torch

    check_output(path)
    rows = np.ascontiguousarray(rows, dtype=np.int32)
    stream = io.BytesIO()
    # To a path, torch.save would also write the name of the file into it.
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
    advice = "free some space or " + advise_another("--output")
    write_whole((path, tensor), (provenance_file(path), content), *beside, advice=advice)


def check_output(path: Path) -> None:
    """Raise UserError if a shape file and its provenance cannot be written at `path`.

    A file at the path of the provenance may be replaced only if it is the provenance of a shape
    file."""
    if os.path.isdir(path):
        raise UserError(f"--output {path}: a folder; name a .pt file in it")
    beside = provenance_file(path)
    problem = ""
    if path == beside:
        problem = "its provenance goes to that name; name a .pt file"
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
    """Return the SHA-256 of a file as 64 hex digits.  Raises UserError if it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error


def subsampled(frames: Any, factor: int = 4) -> Any:
    """Return the number of encoder frames that a front end makes of feature frames.

    Factors 2, 4 and 8 are one, two and three convolutions of kernel 3 and stride 2, as icefall has
    them: each makes (x - 1) // 2 frames of x.  Factor 6 is one of these and one of kernel 5 and
    stride 3, as ESPnet has them.  Below 1, the audio is too short for the front end.  Raises
    UserError for a factor that is not in FACTORS.

    frames: an int or an integer array."""
    if factor not in FACTORS:
        raise UserError(
            f"--subsampling-factor {factor}: choose one of {', '.join(map(str, FACTORS))}"
        )
    if factor == 6:
        return ((frames - 1) // 2 - 2) // 3
    while factor > 1:
        frames = (frames - 1) // 2
        factor //= 2
    return frames


def feature_frames(T: Any, factor: int) -> Any:
    """Return the fewest feature frames of which `subsampled` makes T encoder frames.

    T: an int or an integer array."""
    # A convolution of `subsampled` makes x frames of 2 x + 1, that of stride 3 of 3 x + 2.  One
    # after the other they add up to this for each factor.
    return factor * T + factor - 1


def provenance_file(shape_file: Path) -> Path:
    """Return the path of a shape file's provenance."""
    return shape_file.with_suffix(".json")


def entry(shape_file: Path, name: str) -> Provenance:
    """Return the entry `name` of a shape file's provenance; {} if the provenance cannot be read, or
    if its entry is missing or no dict."""
    try:
        value = json.loads(read_bytes(provenance_file(shape_file)).decode("utf-8"))[name]
    except (OSError, ValueError, LookupError, TypeError, RecursionError, MemoryError):
        return {}
    return value if isinstance(value, dict) else {}


def versions(*packages: str) -> dict[str, str]:
    """Import packages and return their versions by name, without the build: "2.11.0" of
    "2.11.0+cu130".

    Builds of one release for different CUDA versions make the same shape file, so they must make
    the same provenance too."""
    modules = map(importlib.import_module, packages)
    return {module.__name__: module.__version__.split("+")[0] for module in modules}


def subsampling(shape_file: Path) -> int | None:
    """Return the subsampling factor of T in a shape file; None if its provenance does not tell."""
    factor = entry(shape_file, "options").get("subsampling_factor")
    return factor if type(factor) is int and factor in FACTORS else None


def vocab_size(shape_file: Path) -> int | None:
    """Return the vocabulary size with which the tokens of a shape file were counted.

    None if its provenance does not tell."""
    size = entry(shape_file, "bpe_model").get("vocab_size")
    return size if type(size) is int and size >= 2 else None


def frame_shift(shape_file: Path) -> float:
    """Return the seconds between feature frames; FRAME_SHIFT if the provenance does not tell."""
    shift: Any = entry(shape_file, "options").get("frame_shift")
    return float(shift) if type(shift) in (int, float) and 0 < shift < math.inf else FRAME_SHIFT


# Random numbers from a seed, the same on every machine and with every numpy version: numpy
# guarantees the raw output of PCG64 (NEP 19), but not the numbers that Generator makes of it.
# `uniform64` draws shapes and batches; `uniform` and `symbols` draw the inputs of a loss.


def uniform64(seed: int, count: int) -> np.ndarray:
    """Return random float64 numbers in [0, 1), multiples of 2^-53: (count,).

    seed: at least 0."""
    words = np.random.PCG64(seed).random_raw(count)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def uniform(count: int, *key: int) -> np.ndarray:
    """Return random float32 numbers in [0, 1), multiples of 2^-24: (count,).

    key: the seed.  Its first number is ENCODER or another constant below, one for each kind of
    input, so that no two kinds get the same numbers."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw((count + 1) // 2)
    halves = words.astype("<u8").view("<u4")[:count]  # 32 bits each
    return (halves >> 8).astype(np.float32) * np.float32(2**-24)


#: First numbers of the keys of inputs.  4 and 6 are not used again: they were of other inputs once.
ENCODER, DECODER, TARGETS, WEIGHTS = range(4)
ALIGNMENT = 5


def symbols(shape: tuple[int, int], vocab_size: int, *key: int) -> np.ndarray:
    """Return random symbols in [1, vocab_size), so never the blank (0): int32 of `shape`.

    key: the seed.  Its first number is TARGETS or another of the constants above."""
    words = np.random.PCG64(np.random.SeedSequence(key)).random_raw(shape[0] * shape[1])
    bits = words >> np.uint64(33)  # the upper 31 of each word
    numbers = 1 + bits % np.uint64(vocab_size - 1)
    return numbers.astype(np.int32).reshape(shape)


#: Published figures of LibriSpeech train-clean-100 at speeds 0.9, 1.0 and 1.1: percentiles of T,
#: and of U per 1000 T for utterances whose T is within a bin.
FIGURES = Path(__file__).with_name("train_clean_100_shapes.json")
#: Seed of the committed shape_info.pt.  Of the seeds 0 to 299, 36 give the published batches:
#: 2,772 or 2,773 sorted ones at 10,000 frames, and 0.504 or 0.505 useful/padded cells in batches of
#: 30.  Of those 36, this one has means and a longest T near the published ones.
#:
#: data/shape_info.features.pt has seed 1097, chosen among the seeds below 2,500.  Sorted at 30,000
#: feature frames it has the published 3,733 batches, of 14, 15, 15 ... 150 utterances; other seeds
#: give 3,721 to 3,746.
SEED = 34


def draw(seed: int = SEED) -> tuple[np.ndarray, np.ndarray]:
    """Draw the utterances of a corpus like that of FIGURES, in random order.

    Returns two int32 arrays (utterances, 2): one with columns T and U, one with columns feature
    frames and U.  The same seed gives the same rows on every machine.

    T is a quantile of the published T, at a uniform percentage.  U is T / 1000 times a quantile of
    the published U per 1000 T in the bin of that T, at another uniform percentage.  Both are
    rounded, then clipped to the published minimum and maximum: U may be a token or two beyond them.

    Four numbers of feature frames have the same T.  The value that was rounded to T chooses one:
    the least of the four for a value just above T - 0.5, the most for one just below T + 0.5."""
    published = json.loads(FIGURES.read_text(encoding="utf-8"))
    figures = {name: np.asarray(value) for name, value in published.items()}
    count = published["utterances"]
    percent_t, percent_u = 100.0 * uniform64(seed, 2 * count).reshape(2, count)
    quantiles = figures["T_at_percent"][np.newaxis]
    only_table = np.zeros(count, dtype=np.intp)  # T has one table, number 0
    exact_T = _interpolate(percent_t, figures["T_percent"], quantiles, only_table)
    rates = figures["U_per_1000_T_at_percent_by_T_bin"]
    bins = np.searchsorted(figures["T_bin_edges"], exact_T, side="right") - 1
    bins = np.clip(bins, 0, len(rates) - 1)
    rate = _interpolate(percent_u, figures["U_per_1000_T_percent"], rates, bins)
    least = [published["T_min"], published["U_min"]]
    most = [published["T_max"], published["U_max"]]
    rows = np.rint(np.stack([exact_T, exact_T / 1000.0 * rate], axis=1))
    rows = np.clip(rows, least, most).astype(np.int32)
    # In which quarter of [T - 0.5, T + 0.5) the exact T lies; beyond, if it was clipped.
    quarter = np.clip(np.floor(4 * (exact_T - rows[:, 0] + 0.5)), 0, 3).astype(np.int32)
    features = feature_frames(rows[:, 0], 4) + quarter
    return rows, np.stack([features, rows[:, 1]], axis=1)


def _interpolate(
    x: np.ndarray, points: np.ndarray, tables: np.ndarray, rows: np.ndarray
) -> np.ndarray:
    """Return the values (count,) at each ``x[i]`` of the table ``tables[rows[i]]``, interpolated
    linearly.

    np.interp is not used: a compiler may fuse its multiplication and addition, so that it rounds
    differently on another machine.  Single operations of numpy round as IEEE 754 says.

    Args:
        x: (count,), where to interpolate.
        points: (points,), ascending: the x of the columns of `tables`.
        tables: (tables, points): each row is a table, the values at `points`.
        rows: (count,), for each x the number of its table."""
    left = np.clip(np.searchsorted(points, x, side="right") - 1, 0, len(points) - 2)
    share = (x - points[left]) / (points[left + 1] - points[left])
    low = tables[rows, left]
    return low + share * (tables[rows, left + 1] - low)
