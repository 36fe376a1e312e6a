"""Find configurations that were measured on several machines."""

from __future__ import annotations

from string import ascii_uppercase
from typing import Dict, List, NamedTuple, Optional, Sequence

from common.analysis.groups import OWN, Group, grouped, kind_rank, known_configuration, same_configuration
from common.analysis.row import Configuration, Row
from common.analysis.verdict import by_time, over_other
from common.core.text import plain

#: Of a configuration, what is of the machine.
MACHINE = ("device", "device_name", "cores", "threads")


class Machine(NamedTuple):
    """Describe a group of the report as one of several machines.

    Attributes:
        letter: "A", "B", ...
        name: of the machine.
        number: of the group in the report.
        rows: of the group.
        fastest: the exact loss with the fastest step; None where none was timed.
    """

    letter: str
    name: str
    number: int
    rows: List[Row]
    fastest: Optional[Row]

    @property
    def title(self) -> str:
        return f"Machine {self.letter}: {self.name}"

    def row(self, name: str) -> Optional[Row]:
        """Return the row of an implementation; of several (two prune ranges, say) the fastest.  None where it has
        none."""
        return next((row for row in self.rows if row.name == name), None)

    def over_fastest(self, row: Optional[Row]) -> Optional[float]:
        """Return a row's step time over that of the fastest, as measured; None where they cannot be compared."""
        if row is None or self.fastest is None or not row.is_comparable:
            return None
        if row is self.fastest:
            return 1.0
        ratio = over_other(row, self.fastest, "step") if row.torch == self.fastest.torch else None
        return ratio and ratio.ratio


def families(groups: Sequence[Group]) -> List[List[Machine]]:
    """Return lists of groups that differ only in their machine, without groups that are alone."""
    rest: Dict[int, Configuration] = {}
    for index, group in enumerate(groups):
        known = known_configuration(group.rows)
        if known and not group.search:
            rest[index] = {key: value for key, value in known.items() if key not in (*MACHINE, *OWN)}
    families = grouped(rest, lambda family, index: same_configuration(rest[family[0]], rest[index]))
    several = [family for family in families if len(family) > 1]
    return [[_machine(letter(at), index, groups[index].rows) for at, index in enumerate(family)] for family in several]


def _machine(called: str, index: int, rows: List[Row]) -> Machine:
    exact = by_time([row for row in rows if row.is_exact], "step")
    return Machine(called, _name(rows), index, rows, exact.row if exact else None)


def letter(at: int) -> str:
    """Return A, B, ..., Z, A2, ... for 0, 1, ..., 25, 26, ..."""
    turn, index = divmod(at, len(ascii_uppercase))
    return ascii_uppercase[index] + (str(turn + 1) if turn else "")


def _name(rows: Sequence[Row]) -> str:
    """Return the name of the rows' machine, such as "AMD EPYC, 2 threads of 4 cores"."""
    known = known_configuration(rows)
    name = plain(known.get("device_name") or known.get("device") or "unknown")
    if known.get("device") != "cpu":
        return name
    cores, threads = known.get("cores"), known.get("threads")
    if cores is None:
        return f"{name}, {threads} threads"
    return f"{name}, {cores} cores" if threads in (None, cores) else f"{name}, {threads} threads of {cores} cores"


def shared_configuration(row: Row) -> Configuration:
    """Return the configuration of a row without the machine's part."""
    return {key: value for key, value in row.configuration.items() if key not in MACHINE}


def rows_by_name(family: Sequence[Machine]) -> Dict[str, Row]:
    """Return the first row of every implementation by its name, sorted by kind."""
    met: Dict[str, Row] = {}
    for machine in family:
        for row in machine.rows:
            met.setdefault(row.name, row)
    return dict(sorted(met.items(), key=lambda item: kind_rank(item[1])))
