#!/usr/bin/env python3
"""What an utterance costs a speech system: see ``pipeline_metrics.py --help`` and docs/pipelines.md."""

from __future__ import annotations

import sys

from common.core.guard import guarded
from common.setup import interpreters

if __name__ == "__main__":
    if interpreters.lacks("msgspec"):
        interpreters.continue_in("main")  # returns where there is no such environment
    from common.cli import pipeline

    arguments = pipeline.parser().parse_args()
    sys.exit(guarded("pipeline_metrics.py", lambda: pipeline.main(arguments)))
