"""Judge two separate runs over the rows that did not change between them: what these moved by is
the machine's part.

A row of two runs moves by its change, by what the machine's day does to all rows (clock, memory),
and by what it does to this row alone.  Rows of the same package, version and torch show the last
two.  So a ratio of separate runs is over theirs, and its interval is as wide as they are apart; an
unchanged row is judged over the other ones.  Fewer than ratios.FEWEST_CONTROLS of them tell
nothing: then what is below doubts.SEPARATE is unclear."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rnnt_bench.analysis import ratios
from rnnt_bench.analysis.ratios import Margins
from rnnt_bench.analysis.row import Row
from rnnt_bench.analysis.standing import USUAL, Standing, stand
from rnnt_bench.core import implementations, text

#: Packages that change with this repository, whatever their version says.
OWN_PACKAGES = ("fused_transducer", "torch")


def is_unchanged(baseline: Row, row: Row) -> bool:
    """Tell whether two runs are of the same code of one loss, as far as records tell. A loss of
    this repository, or one that it does not know, is the same at one revision without uncommitted
    changes."""
    if (
        baseline.name != row.name
        or _versions(baseline) != _versions(row)
        or not row.environment.torch
    ):
        return False
    implementation = implementations.BY_NAME.get(row.loss.partition(":")[0])
    is_own = implementation is None or implementation.package in OWN_PACKAGES
    if not is_own and row.environment.implementation_version not in (None, "unknown"):
        return True
    before, after = baseline.header, row.header
    is_clean = not before.git_dirty and not after.git_dirty
    return is_clean and bool(after.git_revision) and before.git_revision == after.git_revision


def _versions(row: Row) -> tuple[object, ...]:
    return row.header.package, row.environment.implementation_version, row.environment.torch


def standings(
    pairs: Sequence[tuple[Row, Row]], scope: str, margins: Margins = USUAL
) -> list[Standing]:
    """Return how the new row of each pair (baseline, new) stands against its baseline.

    Where the two come from separate runs, `control` holds by how much the other rows moved between
    these two runs whose code did not change; the standing is judged over that."""
    result = [stand(new, baseline, scope, margins) for baseline, new in pairs]
    unchanged = unchanged_by_runs(result)
    for number, standing in enumerate(result):
        if not standing.paired:
            others = [
                other for other in unchanged.get(_runs(standing), []) if other is not standing
            ]
            result[number] = replace(standing, control=moved(others))
    return result


def unchanged_by_runs(compared: Sequence[Standing]) -> dict[tuple[str, ...], list[Standing]]:
    """Return the standings of unchanged rows of separate runs by their two runs (see `_runs`),
    without those measured beside other load."""
    usable = [
        standing
        for standing in compared
        if not standing.paired and not standing.beside_load and standing.ratio
    ]
    unchanged = [standing for standing in usable if is_unchanged(standing.baseline, standing.row)]
    return text.gathered((_runs(standing), standing) for standing in unchanged)


def moved(unchanged: Sequence[Standing]) -> ratios.Control | None:
    """Return by how much unchanged rows moved together; None if they are too few to tell."""
    return ratios.control([standing.ratio for standing in unchanged if standing.ratio])


def _runs(standing: Standing) -> tuple[str, ...]:
    """Return what rows of the same two runs share; cells of a sweep are runs of their own."""
    baseline, new = standing.baseline.header, standing.row.header
    return baseline.run_id, new.run_id, str(sorted(new.values.items()))
