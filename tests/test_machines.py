"""Several machines: which runs are of one, and which configurations stand side by side."""

from __future__ import annotations

import re

from fixtures_machines import LARGE, measured, side_by_side
from fixtures_runs import environment, header, status, write_records, write_run

from common.analysis import logs
from common.analysis.groups import families
from common.show.machines import TITLE, numbers
from common.show.page import page


def groups_of(folder):
    return logs.read([folder]).groups


def page_of(folder):
    return page(groups_of(folder), folder, "/* plotly */")


def test_runs_from_before_cores_were_recorded_and_of_cuda_are_of_any(tmp_path):
    measured(tmp_path / "old", "k2", 10, cores=None, started="2025-01-01T00:00:00+00:00")
    measured(tmp_path / "new", "k2", 10, cores=2)
    (row,) = logs.rows([tmp_path])
    assert row.earlier_runs == 1 and row.configuration["cores"] == 2
    first = {**header("k2", device="cuda:0"), "machine": {"cores": 8}}
    write_records(tmp_path / "gpu", [first, status("correctness", "missing", "no k2")])
    assert logs.rows([tmp_path / "gpu"])[0].configuration["cores"] is None


def test_configurations_that_differ_only_in_the_machine_stand_side_by_side(tmp_path):
    (family,) = families(groups_of(side_by_side(tmp_path)))
    assert sorted(machine.name for machine in family) == ["Some CPU, 2 cores", "Some CPU, 64 cores"]
    shown = {row[0].shown: [cell.shown for cell in row[1:5]] for row in numbers(family).rows}
    at, other = (0, 1) if "2 cores" in family[0].name else (1, 0)
    small = {name: (values[at], values[2 + at]) for name, values in shown.items()}
    large = {name: (values[other], values[2 + other]) for name, values in shown.items()}
    assert small == {"a": ("10.00", "1.00"), "b": ("20.00", "2.00"), "p (approx.)": ("5.000", "0.500")}
    assert large == {"a": ("2.000", "2.00"), "b": ("1.000", "1.00"), "p (approx.)": ("4.000", "4.00")}


def test_the_page_names_the_machines(tmp_path):
    html = page_of(side_by_side(tmp_path))
    assert html.index('id="machines-0"') < html.index('id="group-0"')
    titles = re.findall(r"<h2>(Machine .: .*?)</h2>", html)
    assert sorted(title.partition(": ")[2] for title in titles) == ["Some CPU, 2 cores", "Some CPU, 64 cores"]
    assert {title[:9] for title in titles} == {"Machine A", "Machine B"}
    assert 'href="#machines-0">Machines side by side' in html and 'download="machines.csv"' in html


def test_other_settings_and_searches_do_not_stand_side_by_side(tmp_path):
    measured(tmp_path / "a", "k2", 10)
    measured(tmp_path / "b", "k2", 10, settings={"vocab_size": 4096}, **LARGE)
    write_run(tmp_path / "c", name="k2", batch_size=7)
    groups = groups_of(tmp_path)
    assert len(groups) == 3 and families(groups) == []
    assert TITLE not in page_of(tmp_path)


def test_what_did_not_run_on_a_machine_says_so_there(tmp_path):
    measured(tmp_path / "s1", "a", 10)
    measured(tmp_path / "l1", "a", 2, **LARGE)
    first = {**header("k2"), "run_id": "small", "machine": {"cores": 2}}
    lines = [environment("correctness"), status("correctness", "unsupported", "no")]
    write_records(tmp_path / "s2", [first, *lines])
    (family,) = families(groups_of(tmp_path))
    (missing,) = (row for row in numbers(family).rows if row[0].shown == "k2")
    assert sorted(cell.shown for cell in missing[1:3]) == ["-", "unsupported"]
