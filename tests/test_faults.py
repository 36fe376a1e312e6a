"""A part of the faults of `make faults`, in every test run; and that the harness finds what is broken."""

from __future__ import annotations

import pytest
from faults import files, running, surroundings
from faults.__main__ import KINDS, happen
from faults.invariants import Broken, Ended, check

pytest.importorskip("torch")


QUICK = {**files.KINDS, **surroundings.KINDS}


@pytest.mark.parametrize("kind", [*QUICK, "streams"])
def test_nothing_breaks(kind, thorough):
    count = max(1, QUICK.get(kind, (None, 60))[1] // (5 if thorough else 20))
    assert not happen([(kind, seed) for seed in range(count)], processes=1)


@pytest.mark.parametrize(
    "done",
    [
        Ended(3, "", ""),
        Ended(1, "", "Traceback (most recent call last):\n"),
        Ended(2, "", "tool.py: error: one\ntool.py: error: two\n"),
        Ended(0, "\x1b[2J", ""),
    ],
)
def test_a_broken_invariant_is_found(done):
    with pytest.raises(Broken):
        check(done, (0, 1, 2))


def test_the_documentation_counts_each_kind():
    page = (running.ROOT / "docs" / "reliability.md").read_text().partition("| --- |")[2].partition("\n\n")[0]
    rows = [[cell.strip().split(", ") for cell in line.split("|")[1:3]] for line in page.splitlines()[1:]]
    told = {kind: int(count) for kinds, counts in rows for kind, count in zip(kinds, counts)}
    assert told == {kind: count for kind, (_, count) in KINDS.items()}


def test_a_process_that_is_left_is_found(tmp_path):
    site = running.Place(tmp_path)
    (tmp_path / "sleeper.py").write_text("import time; time.sleep(60)")
    sleeper = site.start([str(tmp_path / "sleeper.py")])
    try:
        with pytest.raises(Broken, match="sleeper"):
            site.nothing_is_left(seconds=0.1)
    finally:
        sleeper.kill()
        sleeper.communicate()
