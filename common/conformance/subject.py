"""One implementation in all cases, as a job; the cases have processes of their own (common.conformance.isolated)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Mapping

from common.conformance.cases import BY_NAME
from common.conformance.isolated import examine
from common.core.implementations import find


def run(job: Mapping[str, Any], python: Path, timeout: float, note: Callable[[str], None]) -> Iterator[Dict[str, Any]]:
    """The ``judged`` record.  The settings are `device`, `cases` by their names, and `large`; timeout: seconds for one
    case."""
    given = job["settings"]
    judged = examine(
        find(job["implementation"]),
        python,
        given["device"],
        [BY_NAME[name] for name in given["cases"]],
        timeout=timeout,
        large=given["large"],
        note=note,
    )
    yield {"record": "judged", "judged": judged.to_json()}
