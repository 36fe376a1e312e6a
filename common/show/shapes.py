"""Show how long the utterances are and how much of their batches is padding, for all of the run's kind and for the
measured ones.

The distributions are recorded with the run (see common.data.distribution), since the shape file need not be here.
Older runs have their measured batches alone: histograms of ten or more, else a sentence.
"""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

from common.analysis.row import Row
from common.present.section import Shapes
from common.present.style import Figure
from common.show.shapes_plot import batch_table, bins, distributions, of_batches, padding

FEWEST = 10  # batches: a histogram of fewer shows less than their table


def shapes(rows: Sequence[Row]) -> Tuple[Optional[Shapes], List[Figure]]:
    """Return the shapes in words and tables, and their plots; None where no batches are known."""
    measured = next((row for row in rows if row.batches), None)
    known = next((row for row in rows if row.distribution), None)
    if measured is None:
        return None, []
    batches = ("The measured batches", batch_table(measured))
    if known is not None:
        tables = [("The numbers of these plots", bins(known)), batches]
        return Shapes("Shapes of all utterances, and of the measured ones", "", tables), distributions(known)
    if len(measured.batches) >= FEWEST:
        return Shapes("Shapes of the measured batches", "", [batches]), of_batches(measured)
    return Shapes("Shapes of the measured batches", _sentence(measured), [batches]), []


def _sentence(row: Row) -> str:
    """Return a sentence on batches that are too few for plots."""
    batches = row.batches
    size = " and ".join(dict.fromkeys(str(batch.N) for batch in batches))
    longest = [f"{batch.T_max} x {batch.U_max} ({padding(batch):.0f}% padding)" for batch in batches]
    return (
        f"{len(batches)} batch{'' if len(batches) == 1 else 'es'} of {size} utterances; longest T x U of each: "
        f"{', '.join(longest)}. How all utterances of the shape file are distributed was not recorded with this run."
    )
