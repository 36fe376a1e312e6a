"""Judge two separate runs with a control: the rows whose code did not change between them.

Between two runs the time of a row moves for three reasons: its code changed, the machine's day
(clock, memory) moved all rows, and the day moved this row alone. Rows of the same package, version
and torch show the last two. So the ratio of a changed row is divided by theirs, and its interval is
as wide as theirs differ from each other. An unchanged row is judged over the other unchanged ones.
With fewer than ratios.FEWEST_CONTROLS of them there is no control, and a ratio below
doubts.SEPARATE is unclear."""

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
    """Tell whether two runs are of the same code of one loss, as far as records tell.

    A package is the same at the same version. A loss of this repository, or one that is not in its
    table, is the same only at the same git revision without uncommitted changes. So is a package
    without a version."""
    if baseline.name != row.name or _versions(baseline) != _versions(row):
        return False
    if not row.environment.torch:  # neither run tells which it had
        return False
    implementation = implementations.BY_NAME.get(row.loss.partition(":")[0])
    is_own = implementation is None or implementation.package in OWN_PACKAGES
    has_version = row.environment.implementation_version not in (None, "unknown")
    if has_version and not is_own:
        return True
    before, after = baseline.header, row.header
    if before.git_dirty or after.git_dirty:
        return False
    return bool(after.git_revision) and before.git_revision == after.git_revision


def _versions(row: Row) -> tuple[object, ...]:
    """Return what tells two builds of a loss apart: its package, the package's version, torch's."""
    return row.header.package, row.environment.implementation_version, row.environment.torch


def standings(
    pairs: Sequence[tuple[Row, Row]], scope: str, margins: Margins = USUAL
) -> list[Standing]:
    """Return how the new row of each pair (baseline, new) stands against its baseline.

    If the two are of separate runs, the standing gets a control. It is made from the other rows of
    these runs whose code did not change, and is None if they are too few.

    scope: the scope whose times are compared
    """
    result = [stand(new, baseline, scope, margins) for baseline, new in pairs]
    unchanged = unchanged_by_runs(result)
    for number, standing in enumerate(result):
        if not standing.paired:
            of_same_runs = unchanged.get(_runs(standing), [])
            others = [other for other in of_same_runs if other is not standing]
            result[number] = replace(standing, control=control_of(others))
    return result


def unchanged_by_runs(compared: Sequence[Standing]) -> dict[tuple[str, ...], list[Standing]]:
    """Return the standings of unchanged rows by the key that `_runs` gives the two separate runs.

    Standings within one run, without a ratio or beside other load are left out."""
    return text.gathered(
        (_runs(standing), standing)
        for standing in compared
        if standing.ratio
        and not standing.paired
        and not standing.beside_load
        and is_unchanged(standing.baseline, standing.row)
    )


def control_of(unchanged: Sequence[Standing]) -> ratios.Control | None:
    """Return by how much the times of unchanged rows moved; None if they are too few to tell."""
    return ratios.control([standing.ratio for standing in unchanged if standing.ratio])


def _runs(standing: Standing) -> tuple[str, ...]:
    """Return a key of the two runs of a standing: that of its baseline and that of its row.  Each
    cell of a sweep has a key of its own."""
    baseline, new = standing.baseline.header, standing.row.header
    return baseline.run_id, new.run_id, str(sorted(new.values.items()))
