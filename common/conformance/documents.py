"""Define the types of conformance.json, which holds a matrix; fields that a newer version adds are ignored."""

from __future__ import annotations

from typing import Annotated, Dict, List, Optional

# isort: split
from msgspec import Struct

from common.conformance.records import Asked, Outcome
from common.records.schema import Machine, of


class MatrixRow(Struct, kw_only=True):
    """An implementation or variant in a conformance matrix."""

    name: Annotated[str, of("of the implementation or variant")]
    kind: Annotated[str, of("exact, the name of another lattice, pruned or additive")]
    status: Annotated[str, of('"judged", or why not: missing, unsupported or error')]
    reason: Annotated[str, of('why it was not judged, else ""')]
    cells: Annotated[
        Dict[str, Outcome],
        of("by the name of the case: pass, differs, refuses, crashes, timeout, n/a or error; errors are relative"),
    ] = {}
    version: Annotated[Optional[str], of("of the package")] = None
    torch: Annotated[Optional[str], of("version")] = None
    python: Annotated[Optional[str], of("version")] = None
    device_name: Annotated[Optional[str], of("of the GPU, or the CPU's model name")] = None
    simulator: Annotated[Optional[str], of("in which kernels for CUDA ran on a CPU")] = None
    large: Annotated[bool, of("was it asked for more than 2^31 elements?")] = False
    made: Annotated[Optional[str], of("when it was judged, where not with the document")] = None
    git_revision: Annotated[Optional[str], of("of this suite, likewise")] = None
    git_dirty: Annotated[Optional[bool], of("were there uncommitted changes? likewise")] = None


class Matrix(Struct, kw_only=True):
    """A conformance matrix, as conformance.json holds it."""

    made: Annotated[str, of("ISO 8601, UTC")]
    git_revision: Annotated[Optional[str], of("of this suite")]
    git_dirty: Annotated[Optional[bool], of("were there uncommitted changes?")]
    machine: Annotated[Machine, of("where the command ran")]
    device: Annotated[str, of('"cpu" or "cuda"')]
    command: Annotated[List[str], of("the command line")]
    cases: Annotated[
        List[Asked], of("in their order; wrong, refusal: what an answer that differs and an error mean to a user")
    ]
    implementations: Annotated[List[MatrixRow], of("in their order")]

    def __post_init__(self) -> None:
        names = {case.name for case in self.cases}
        if any(row.status == "judged" and not names <= row.cells.keys() for row in self.implementations):
            raise ValueError("an implementation has no answer to a case")


PARTS = (Matrix, MatrixRow)
