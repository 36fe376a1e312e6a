#!/usr/bin/env python3
"""Measure how many utterances per second generate_shape_info.py reads and tokenises, and in how much memory.

Manifests of cuts are made first (the durations of shape_info.pt, 2.7 words per second out of docs/), and a BPE model of
500 tokens is trained.  The command then runs on each in turn, in a fresh process.  Seconds are of the whole command,
start and imports too; the manifest comes from the page cache.  Peak memory is that of the largest process.  Output is a
Markdown table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Dict, Iterator, List, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

WORDS_PER_SECOND = 2.7  # of LibriSpeech
TOKENS = 500
TEXTS_TO_TRAIN_ON = 5000


class Run(NamedTuple):
    seconds: float
    peak_bytes: int
    sha256: str


def texts_and_seconds(seed: int) -> Iterator[tuple]:
    from common.data import shapes

    words = re.findall(r"[A-Z']+", " ".join(path.read_text() for path in sorted(ROOT.glob("docs/*.md"))).upper())
    draw = random.Random(seed)
    for frames in cycle(shapes.load(ROOT / "shape_info.pt")[:, 0].tolist()):
        seconds = shapes.feature_frames(frames, 4) / 100
        yield " ".join(draw.choices(words, k=max(1, round(seconds * WORDS_PER_SECOND)))), seconds


def write_manifest(path: Path, count: int) -> None:
    with path.open("w") as stream:
        for number, (text, seconds) in enumerate(islice(texts_and_seconds(seed=0), count)):
            name = f"made-{number:09d}"
            whole = {"start": 0.0, "duration": seconds, "channel": 0}
            recording = {
                **{"id": name, "sources": [{"type": "file", "channels": [0], "source": f"/corpus/{name}.flac"}]},
                **{"sampling_rate": 16000, "num_samples": round(seconds * 16000), "duration": seconds},
            }
            spoken = {"id": name, "recording_id": name, **whole, "text": text, "language": "English", "speaker": "0"}
            cut = {"id": name, **whole, "supervisions": [spoken], "recording": recording, "type": "MonoCut"}
            stream.write(json.dumps(cut) + "\n")


def measure(manifest: Path, model: Path, jobs: int) -> Run:
    with tempfile.TemporaryDirectory(dir=manifest.parent) as folder:
        output = Path(folder) / "made.pt"
        flags = ["--manifest", manifest, "--bpe-model", model, "--jobs", str(jobs), "--output", output]
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, ROOT / "generate_shape_info.py", *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise SystemExit(f"shape_speed.py: error: --jobs {jobs}: exit code {process.returncode}")
        digest = hashlib.sha256(output.read_bytes()).hexdigest()
    return Run(seconds, usage.ru_maxrss * 1024, digest)


def parser() -> argparse.ArgumentParser:
    from common.cli.parser import Parser
    from common.core.flag_types import whole

    result = Parser(description=__doc__.splitlines()[0])
    add = result.add_argument
    several = {
        "--utterances": ([100_000, 1_000_000], "Numbers of utterances"),
        "--jobs": ([1, 2], "Numbers of processes"),
    }
    for flag, (default, what) in several.items():
        shown = " ".join(map(str, default))
        add(flag, default=default, type=whole(1), nargs="+", metavar="N", help=f"{what}. Default: {shown}")
    add("--repeats", type=whole(1), default=3, metavar="K", help="Runs of each. Default: 3")
    return result


def main() -> int:
    from summarize_speed import cpu_model

    from common.data.sources import bpe

    options = parser().parse_args()
    lines: List[str] = []
    with tempfile.TemporaryDirectory(prefix="shape-speed-") as scratch:
        model = Path(scratch) / "bpe.model"
        model.write_bytes(bpe.train([text for text, _ in islice(texts_and_seconds(seed=1), TEXTS_TO_TRAIN_ON)], TOKENS))
        for count in options.utterances:
            manifest = Path(scratch) / f"{count}.jsonl"
            print(f"making {count:,} utterances", file=sys.stderr, flush=True)
            write_manifest(manifest, count)
            of_jobs: Dict[int, List[Run]] = {jobs: [] for jobs in options.jobs}
            for _ in range(options.repeats):
                for jobs, runs in of_jobs.items():
                    runs.append(measure(manifest, model, jobs))
                    print(f"--jobs {jobs}: {runs[-1].seconds:.1f} s", file=sys.stderr, flush=True)
            if len({run.sha256 for runs in of_jobs.values() for run in runs}) != 1:
                raise SystemExit("shape_speed.py: error: the files differ")
            first = median(run.seconds for run in of_jobs[options.jobs[0]])
            for jobs, runs in of_jobs.items():
                seconds = [run.seconds for run in runs]
                middle, peak = median(seconds), max(run.peak_bytes for run in runs) / 1e6
                spread = f"{middle:.1f} [{min(seconds):.1f}-{max(seconds):.1f}]"
                lines.append(
                    f"| {count:,} | {jobs} | {spread} | {count / middle:,.0f} | {first / middle:.2f} | {peak:.0f} |"
                )
            manifest.unlink()
    print("| utterances | jobs | seconds, median [min-max] | utterances /s | speed-up | peak MB |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    print("\n".join(lines))
    print(f"\n{cpu_model()}; {datetime.now(timezone.utc):%Y-%m-%d}; {options.repeats} runs of each, in turn.")
    return 0


if __name__ == "__main__":
    from common.core.guard import guarded

    sys.exit(guarded("shape_speed.py", main))
