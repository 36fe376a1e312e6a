"""The rows of --find-largest (see largest.py) -> text: tables of their own, by kind and throughput."""

from __future__ import annotations

import math
from typing import Callable, Dict, List, Optional, Sequence, Tuple

from common.results import remarks, tables
from common.results.exports import plain
from common.results.profiled import MB
from common.results.summary import Row
from common.results.tables import Column
from common.results.wording import number

GIB = 2**30


def amount(size: Optional[int]) -> str:
    """Bytes in GiB, or MiB where that is below one."""
    if size is None:
        return "-"
    return f"{number(size / GIB)} GiB" if size >= GIB else f"{number(size / MB)} MiB"


def largest(row: Row) -> str:
    """ "24"; ">=24" where the search did not end; "none" where not even the smallest fits."""
    found = row["largest"]
    if found["size"] is None:
        return "none" if found["too_large"] is not None else "-"
    return f"{'>=' if found['at_least'] else ''}{found['size']}"


LIMITED_BY = {"all": "all there are", "cap": "--largest-cap"}


def limited_by(row: Row) -> str:
    found = row["largest"]["limited_by"]
    return LIMITED_BY.get(found, found or "-")


def heaviest(row: Row) -> str:
    found = row["largest"]
    return "-" if found["N"] is None else f"{found['N']} x {found['T_max']} x {found['U_max'] + 1}"


def _spread(row: Row) -> str:
    scope = row["largest"]["scope"]
    return next(column.text(row) for column in tables.COLUMNS if column.title.startswith(f"{scope} ms"))


def rate(row: Row, what: str) -> Optional[float]:
    return row["largest"][f"{what}_per_second"]


COLUMNS = (
    *(column for column in tables.COLUMNS if column.title in ("implementation", "status")),
    Column("within", lambda row: amount(row["largest"]["limit_bytes"])),
    Column("largest that fits", largest),
    Column("limited by", limited_by, False),
    Column("heaviest batch N x T x U+1", heaviest),
    Column("padded cells", lambda row: str(row["largest"]["padded_cells"] or "-")),
    Column("peak MB", lambda row: number(row["largest"]["peak_mb"])),
    Column("ms median [p20-p80] n", lambda row: _spread(row)),
    Column("utterances /s", lambda row: number(rate(row, "utterances"))),
    Column("frames /s", lambda row: number(rate(row, "frames"))),
    *(column for column in tables.COLUMNS if column.title in ("version", "torch")),
)


#: What a number is sorted by and written to a CSV as, where its cell has words.
VALUES: Dict[str, Callable[[Row], Optional[float]]] = {
    "within": lambda row: row["largest"]["limit_bytes"],
    "largest that fits": lambda row: row["largest"]["size"],
    "heaviest batch N x T x U+1": lambda row: row["largest"]["padded_cells"],
    "padded cells": lambda row: row["largest"]["padded_cells"],
    "peak MB": lambda row: row["largest"]["peak_mb"],
    "ms median [p20-p80] n": lambda row: (row[f"{row['largest']['scope']}_ms"] or {}).get("median"),
    "utterances /s": lambda row: rate(row, "utterances"),
    "frames /s": lambda row: rate(row, "frames"),
}


def rank(row: Row) -> Tuple[int, float, str]:
    """Kinds apart, then the highest throughput: what a loss of another kind computes is not the same."""
    speed = rate(row, "utterances")
    return tables.kind_rank(row), math.inf if speed is None else -speed, row["name"]


def groups(rows: Sequence[Row]) -> List[List[Row]]:
    return [sorted(group, key=rank) for group in tables.groups(rows)]


def heading(group: Sequence[Row]) -> str:
    found = {tuple(sorted(over.items())) for row in group if (over := row["largest"]["timed_over"])}
    same = ""
    if len(found) == 1:
        over = dict(*found)
        same = f"; throughput over the same {over['utterances']} utterances ({over['frames']} frames)"
    elif found:
        same = "; throughput NOT over the same utterances: run these together"
    return f"{tables.heading(group)}; scope {group[0]['largest']['scope']}{same}"


def render(rows: Sequence[Row], format: str) -> str:
    """The rows as text of the "table" or "markdown" format, that ends with a newline."""
    blocks = [tables.block(heading(group), group, format, COLUMNS) for group in groups(rows)]
    return "\n\n".join([*blocks, *remarks.remarks(rows, format)]) + "\n"


def said(row: Row) -> str:
    """The largest size in words: "24 utterances", "12000 frames"."""
    unit = "frames" if row["largest"]["of"] == "max-frames" else "utterances"
    return plain(f"{largest(row)} {unit}")
