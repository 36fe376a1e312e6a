"""Shared by the runs about a model once they are read: profiles of inference, and pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Optional, Sequence, TypeVar

from common.records.schema import Environment, InferenceHeader, Line, PipelineHeader

Header = TypeVar("Header", InferenceHeader, PipelineHeader)


@dataclass
class ModelRun(Generic[Header]):
    """A run.  environment: that of its last job; reason: why the file could not be read, else empty."""

    path: Path
    header: Optional[Header] = None
    environment: Optional[Environment] = None
    reason: str = ""

    @property
    def name(self) -> str:
        return self.header.name if self.header else self.path.parent.name


def environment_of(records: Sequence[Line]) -> Optional[Environment]:
    """Return the last environment of a run."""
    return next((record for record in reversed(records) if isinstance(record, Environment)), None)
