"""Values that are too large, in flags and in files: one clear line, at once."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest
from commands import ROOT, assert_user_error, run
from fixtures_runs import records_of, timed


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["benchmark_torchaudio.py", "--device", "cuda:³"], ["--device", "cuda:N"]),
        (["count_flops.py", "x:y", "--input-shape", "1", "--device", "cuda:³"], ["--device", "cuda:³"]),
        (["benchmark_torchaudio.py", "--memory-limit", "1e308GiB"], ["--memory-limit", "at most"]),
        (["benchmark_torchaudio.py", "--rounds", "1000000000"], ["--rounds", "at most 10000"]),
        (["benchmark_torchaudio.py", "--sweep", "batch-size=1,99999999999"], ["batch-size", "at most 2147483647"]),
        (["benchmark_torchaudio.py", "--shape-file", 5000 * "x"], ["--shape-file", "too long"]),
        (["summarize.py", 5000 * "x"], ["too long"]),
        (["compare.py", 5000 * "x", "log"], ["too long"]),
        (["report.py", 5000 * "x"], ["too long"]),
        (["benchmark_all.py", "--only", 5000 * "x" + ".py"], ["too long"]),
        (["generate_shape_info.py", "--manifest", "x", "--bpe-vocab-size", "2147483648"], ["--bpe-vocab-size"]),
        (["generate_shape_info.py", "--from-figures", "--output", 5000 * "x" + ".pt"], ["--output", "x"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:60],
)
def test_flags(arguments, words):
    assert_user_error(run(*arguments), *words)


def test_a_port_that_is_none():
    viewer = [sys.executable, "-m", "common.cli.trace_viewer", "k2", "--port", "99999"]
    done = subprocess.run(viewer, cwd=ROOT, capture_output=True, text=True)
    assert_user_error(done, "--port", "65535")


def manifest(folder, seconds):
    """Supervisions and their recordings, one of each."""
    recording = {"id": "r", "sources": [], "sampling_rate": 16000, "num_samples": 16000, "duration": seconds}
    supervision = {"id": "s", "recording_id": "r", "start": 0.0, "duration": seconds, "channel": 0, "text": "a b"}
    for name, entry in {"recordings": recording, "supervisions": supervision}.items():
        (folder / f"{name}.jsonl").write_text(json.dumps(entry) + "\n")
    return folder / "supervisions.jsonl"


def generate(folder, path, *flags):
    pytest.importorskip("lhotse")
    pytest.importorskip("sentencepiece")
    output = folder / "shapes.pt"
    done = run("generate_shape_info.py", "--manifest", path, "--bpe-vocab-size", "8", "--output", output, *flags)
    assert not output.exists()
    return done


@pytest.mark.parametrize("speeds", [["1.0"], ["0.9", "1.1"]], ids=" ".join)
@pytest.mark.parametrize("seconds", [1e300, 1e12])
def test_an_utterance_of_more_frames_than_can_be(seconds, speeds, tmp_path):
    done = generate(tmp_path, manifest(tmp_path, seconds), "--speed-perturbation", *speeds)
    assert_user_error(done, tmp_path / "supervisions.jsonl", "entry 1")


def test_a_manifest_that_unpacks_without_end(tmp_path):
    path = tmp_path / "cuts.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "' + 2**26 * b"x", compresslevel=1))
    assert_user_error(generate(tmp_path, path), path, "entry 1", "characters")


@pytest.mark.parametrize(
    "text",
    [
        100_000 * "[",
        '{"device": "cpu", "machine": {"cpu": "x"}, "implementations": [{"name": "a", "status": "judged"}]}',
        '{"device": "cpu", "machine": [], "implementations": []}',
        '{"device": "cpu", "machine": {"cpu": "x"}, "implementations": ["a"]}',
    ],
    ids=["nested", "without cells", "a list", "a word"],
)
def test_a_matrix_that_is_none_cannot_be_updated(text, tmp_path):
    (tmp_path / "conformance.json").write_text(text)
    flags = ["--in-place", "--device", "cpu", "--only", "reference", "--output", tmp_path, "--update"]
    assert_user_error(run("conformance.py", *flags), "--update", tmp_path / "conformance.json", "cannot be read")
    assert (tmp_path / "conformance.json").read_text() == text


@pytest.mark.parametrize("spoiled, code", [("new", 1), ("baseline", 0)])
def test_times_that_are_no_numbers_on_the_new_side_do_not_pass(spoiled, code, tmp_path):
    for side in ("baseline", "new"):
        timed(tmp_path / side, "torchaudio", [10, 11, 12])
    records = records_of(tmp_path / spoiled / "torchaudio")
    for record in records:
        if record["record"] == "sample":
            record["total_wall_ns"] = float("nan")
    (tmp_path / spoiled / "torchaudio" / "results.jsonl").write_text("".join(map(line, records)))
    done = run("compare.py", tmp_path / "baseline", tmp_path / "new", "--fail-on-slower", "2%")
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert ("no times" in done.stderr) is bool(code)


def line(record):
    return json.dumps(record) + "\n"
