"""The table of faults of `make mutants`.  It is no test of the readers, which each of its faults would end."""

import mutants


def test_each_fault_of_make_mutants_still_fits_its_file():
    stale = [
        fault
        for fault in mutants.FAULTS
        if (mutants.ROOT / "common" / fault.file).read_text(encoding="utf-8").count(fault.old) != 1
    ]
    assert stale == []
