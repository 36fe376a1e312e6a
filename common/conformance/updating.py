"""A matrix of today with the rows of an earlier one that were not judged again.  No torch.

A row is judged as a whole, by one revision of this suite, which it names; a case that is newer than its row is n/a.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Mapping

from common.conformance.outcomes import NOT_APPLICABLE, Outcome
from common.errors import UserError
from common.implementations import with_variants

#: Of the run that judged a row; a document of the time before rows had them has them for all.
ORIGIN = ("made", "git_revision", "git_dirty")


def read(path: Path, device: str, cpu: str) -> Dict[str, Any]:
    """The document in `path`, {} where there is none.  Raises UserError for another device's or computer's."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        there = (found["device"], found["machine"]["cpu"])
        rows = {entry["name"]: entry["status"] for entry in found["implementations"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"--update: {path} cannot be read ({type(error).__name__}); leave the flag out") from error
    if there != (device, cpu) and rows:
        raise UserError(
            f"--update: {path} is of {there[0]} on {there[1]}, this run of {device} on {cpu}; name another --output"
        )
    return found


def updated(document: Mapping[str, Any], earlier: Mapping[str, Any]) -> Dict[str, Any]:
    """`document` with what it leaves out of `earlier`: rows that it has not, and those that are missing here but were
    judged then."""
    rows = {entry["name"]: entry for entry in document["implementations"]}
    for entry in earlier.get("implementations", ()):
        today = rows.get(entry["name"])
        if today is None or (today["status"] == "missing" and entry["status"] == "judged"):
            rows[entry["name"]] = _kept(entry, document, earlier)
    order = {one.name: place for place, one in enumerate(with_variants())}
    return {**document, "implementations": sorted(rows.values(), key=lambda row: order.get(row["name"], len(order)))}


def _kept(entry: Mapping[str, Any], document: Mapping[str, Any], earlier: Mapping[str, Any]) -> Dict[str, Any]:
    row = {**{key: earlier.get(key) for key in ORIGIN}, **entry}
    if row["status"] != "judged":
        return row
    unasked = Outcome(NOT_APPLICABLE, f"not asked (judged at {str(row['git_revision'])[:12]})").to_json()
    cells = {case["name"]: entry["cells"].get(case["name"], unasked) for case in document["cases"]}
    return {**row, "cells": cells}
