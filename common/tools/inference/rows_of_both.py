"""What the runs of a model have in common once they are read: profiles of inference, and pipelines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Optional, Sequence, TypeVar

from common.records.schema import Environment, InferenceHeader, Line, PipelineHeader

Header = TypeVar("Header", InferenceHeader, PipelineHeader)


@dataclass
class ModelRun(Generic[Header]):
    """environment: of one of the jobs; reason: why the file could not be read, else empty."""

    path: Path
    header: Optional[Header] = None
    environment: Optional[Environment] = None
    reason: str = ""

    @property
    def name(self) -> str:
        return self.header.name if self.header else self.path.parent.name


def environment_of(records: Sequence[Line]) -> Optional[Environment]:
    """The last one of a run."""
    return next((one for one in reversed(records) if isinstance(one, Environment)), None)
