"""Define the types of conformance.json, which holds a matrix; fields that a newer version adds are ignored.

Fields of a row with a default are absent where they have it.
"""

from __future__ import annotations

import json
from typing import Annotated, Dict, List, Optional

# isort: split
from msgspec import Struct

from common.conformance.records import Asked, Judged, Outcome
from common.records.schema import Machine, as_written, of

#: Version of the fields; 2 has the words `wrong` and `refusal` of each case.
FORMAT = 2


class MatrixRow(Struct, kw_only=True, omit_defaults=True):
    """An implementation or variant in a conformance matrix."""

    name: Annotated[str, of("name of the implementation or variant")]
    kind: Annotated[str, of("exact, the name of another lattice, pruned or additive")]
    status: Annotated[str, of('"judged", or why not: missing, unsupported or error')]
    reason: Annotated[str, of('why it was not judged, else ""')]
    made: Annotated[Optional[str], of("when it was judged, if not with the document")] = None
    git_revision: Annotated[Optional[str], of("git revision that judged it, if not the document's")] = None
    git_dirty: Annotated[Optional[bool], of("whether there were uncommitted changes then")] = None
    version: Annotated[Optional[str], of("version of the package")] = None
    torch: Annotated[Optional[str], of("version of torch")] = None
    python: Annotated[Optional[str], of("version of Python")] = None
    device_name: Annotated[Optional[str], of("name of the GPU, or model of the CPU")] = None
    cuda: Annotated[Optional[str], of("version of torch's CUDA, on a GPU")] = None
    node: Annotated[Optional[str], of("node on which it was judged, with --executor ray")] = None
    simulator: Annotated[Optional[str], of("simulator in which kernels for CUDA ran on a CPU")] = None
    large: Annotated[bool, of("whether it was asked for more than 2^31 elements")] = False
    cells: Annotated[
        Dict[str, Outcome],
        of(
            "outcome by the name of the case: pass, differs, refuses, crashes, timeout, n/a or error; errors are "
            "relative"
        ),
    ]

    @classmethod
    def from_judged(cls, judged: Judged, node: Optional[str] = None, large: bool = False) -> MatrixRow:
        """Return the row of an implementation, without when and by which revision it was judged.

        Args:
            judged: its outcomes.
            node: where it was judged with --executor ray.
            large: whether it was asked for more than 2^31 elements.
        """
        return cls(
            name=judged.name,
            kind=judged.kind,
            status=judged.status,
            reason=judged.reason,
            **vars(judged.loaded),
            simulator=judged.simulator,
            node=node,
            large=large,
            cells=judged.cells,
        )

    @property
    def is_judged(self) -> bool:
        """Return whether it has outcomes."""
        return self.status == "judged"


class Matrix(Struct, kw_only=True):
    """A conformance matrix, as conformance.json holds it."""

    format: Annotated[int, of("version of these fields")] = FORMAT
    made: Annotated[str, of("ISO 8601, UTC")]
    git_revision: Annotated[Optional[str], of("git revision of this suite")]
    git_dirty: Annotated[Optional[bool], of("whether there were uncommitted changes")]
    command: Annotated[List[str], of("the command line")]
    machine: Annotated[Machine, of("machine on which the command ran")]
    device: Annotated[str, of('"cpu" or "cuda"')]
    cases: Annotated[
        List[Asked], of("the cases in their order; wrong, refusal: what a wrong answer and an error mean to a user")
    ]
    implementations: Annotated[List[MatrixRow], of("their rows, in the order of the table of implementations")]

    def __post_init__(self) -> None:
        names = {case.name for case in self.cases}
        if any(row.is_judged and not names <= row.cells.keys() for row in self.implementations):
            raise ValueError("an implementation has no answer to a case")

    @property
    def judged(self) -> List[MatrixRow]:
        """Return the rows that were judged."""
        return [row for row in self.implementations if row.is_judged]

    @property
    def not_judged(self) -> List[MatrixRow]:
        """Return the rows that could not be judged."""
        return [row for row in self.implementations if not row.is_judged]

    def to_json(self) -> str:
        """Return the text of conformance.json."""
        content = as_written(self)
        content["machine"] = {key: value for key, value in content["machine"].items() if value is not None}
        return json.dumps(content, indent=1) + "\n"


PARTS = (Matrix, MatrixRow)
