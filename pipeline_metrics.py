#!/usr/bin/env python3
"""Measure what an utterance costs a speech system: see ``pipeline_metrics.py --help`` and docs/inference.md."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # Python leaves it out with -P and PYTHONSAFEPATH

from common.command import run
from common.tools.inference import pipeline_command as pipeline

if __name__ == "__main__":
    arguments = pipeline.parser().parse_args()
    sys.exit(run("pipeline_metrics.py", lambda: pipeline.main(arguments)))
