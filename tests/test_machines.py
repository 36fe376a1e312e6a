"""Several machines: which runs are of one, and which configurations stand side by side."""

from __future__ import annotations

import json
import re

import pytest
from fixtures_runs import correctness, environment, garbled, header, memory, sample, status, write_run

from common.report import machines, writing
from common.report.page import page
from common.results import ranking, records, summary, tables

LARGE = {"cores": 64, "threads": 64, "run_id": "large"}


def measured(folder, name, step_ms, cores=2, threads=2, device_name="Some CPU", settings=None, **head):
    """Two rounds of `step_ms` on both batches, on a machine of so many cores."""
    about = {"device_name": device_name, "threads": threads}
    jobs = []
    for lines in (correctness(), memory(8), [environment("trace"), status("trace")]):
        jobs.append([{**line, **about} if line["record"] == "environment" else line for line in lines])
    for job in ("timing-1", "timing-2"):
        jobs.append(
            [environment(job, **about), *(sample(job, "step", batch, step_ms) for batch in (4, 9)), status(job)]
        )
    first = {**header(name, **(settings or {})), "run_id": "small", **head}
    first["machine"] = {"cpu": device_name, "cores": cores} if cores else {}
    records.write(folder, [first, *(line for lines in jobs for line in lines)])


def groups_of(folder):
    return writing.read_groups([folder])[1]


def page_of(folder):
    return page(groups_of(folder), folder, "/* plotly */")


def side_by_side(folder):
    measured(folder / "s1", "a", 10)
    measured(folder / "s2", "b", 20)
    measured(folder / "s3", "p", 5, kind="pruned")
    measured(folder / "l1", "a", 2, **LARGE)
    measured(folder / "l2", "b", 1, **LARGE)
    measured(folder / "l3", "p", 4, kind="pruned", **LARGE)
    return folder


def test_other_cores_are_another_machine_and_not_an_earlier_run(tmp_path):
    measured(tmp_path / "a", "k2", 10, cores=2)
    measured(tmp_path / "b", "k2", 10, cores=64)  # the same CPU and threads
    found = summary.rows([tmp_path])
    assert [row["configuration"]["cores"] for row in found] == [2, 64]
    assert [row["earlier_runs"] for row in found] == [0, 0] and len(tables.groups(found)) == 2
    headings = sorted(tables.heading(group) for group in tables.groups(found))
    assert "2 threads of 64 cores, " in headings[0] and "2 threads, " in headings[1]


def test_runs_from_before_cores_were_recorded_and_of_cuda_are_of_any(tmp_path):
    measured(tmp_path / "old", "k2", 10, cores=None, started="2025-01-01T00:00:00+00:00")
    measured(tmp_path / "new", "k2", 10, cores=2)
    (row,) = summary.rows([tmp_path])
    assert row["earlier_runs"] == 1 and row["configuration"]["cores"] == 2
    first = {**header("k2", device="cuda:0"), "machine": {"cores": 8}}
    records.write(tmp_path / "gpu", [first, status("correctness", "missing", "no k2")])
    assert summary.rows([tmp_path / "gpu"])[0]["configuration"]["cores"] is None


def test_a_ratio_is_over_the_batches_that_both_have():
    def row(name, rounds):
        return {"name": name, "run_id": "one", "round_medians_ms": {"step": rounds}}

    whole = row("a", {"1": {"4": 10.0, "9": 1000.0}, "2": {"4": 10.0, "9": 1000.0}})
    half = row("b", {"1": {"4": 30.0}, "2": {"4": 30.0}})
    assert ranking.over(whole, half, "step").ratio == pytest.approx(3)
    assert ranking.over(whole, row("c", {}), "step") is None
    assert ranking.over(whole, row("d", {"1": {"7": 1.0}}), "step") is None


def test_configurations_that_differ_only_in_the_machine_stand_side_by_side(tmp_path):
    groups = groups_of(side_by_side(tmp_path))
    (family,) = machines.families(groups)
    assert sorted(one.name for one in family) == ["Some CPU, 2 cores", "Some CPU, 64 cores"]
    shown = {row[0].shown: [cell.shown for cell in row[1:5]] for row in machines.numbers(family).rows}
    at, other = (0, 1) if "2 cores" in family[0].name else (1, 0)
    small = {name: (values[at], values[2 + at]) for name, values in shown.items()}
    large = {name: (values[other], values[2 + other]) for name, values in shown.items()}
    assert small == {"a": ("10.00", "1.00"), "b": ("20.00", "2.00"), "p (approx.)": ("5.000", "0.500")}
    assert large == {"a": ("2.000", "2.00"), "b": ("1.000", "1.00"), "p (approx.)": ("4.000", "4.00")}
    figure = machines.relative_times(family)
    (bars,) = (trace for trace in figure.data if "2 cores" in trace["name"])
    assert sorted(bars["x"]) == pytest.approx([0.5, 1, 2])
    assert "b 1.00 on A, 2.00 on B" in figure.summary  # folders by name: the larger machine is first


def test_the_page_names_the_machines(tmp_path):
    html = page_of(side_by_side(tmp_path))
    assert html.index('id="machines-0"') < html.index('id="group-0"')
    titles = re.findall(r'<h2 id="title-\d">(.*?)</h2>', html)
    assert sorted(title.partition(": ")[2] for title in titles) == ["Some CPU, 2 cores", "Some CPU, 64 cores"]
    assert {title[:9] for title in titles} == {"Machine A", "Machine B"}
    assert 'href="#machines-0">Machines side by side' in html and 'download="machines.csv"' in html
    drawn = json.loads(re.search(r'id="figures">(.*?)</script>', html)[1])
    graph_objects = pytest.importorskip("plotly.graph_objects")
    graph_objects.Figure(drawn["machines-machines-0"])


def test_other_settings_and_searches_do_not_stand_side_by_side(tmp_path):
    measured(tmp_path / "a", "k2", 10)
    measured(tmp_path / "b", "k2", 10, settings={"vocab_size": 4096}, **LARGE)
    write_run(tmp_path / "c", name="k2", batch_size=7)
    groups = groups_of(tmp_path)
    assert len(groups) == 3 and machines.families(groups) == []
    assert machines.TITLE not in page_of(tmp_path)


def test_what_did_not_run_on_a_machine_says_so_there(tmp_path):
    measured(tmp_path / "s1", "a", 10)
    measured(tmp_path / "l1", "a", 2, **LARGE)
    first = {**header("k2"), "run_id": "small", "machine": {"cores": 2}}
    lines = [environment("correctness"), status("correctness", "unsupported", "no")]
    records.write(tmp_path / "s2", [first, *lines])
    (family,) = machines.families(groups_of(tmp_path))
    (missing,) = (row for row in machines.numbers(family).rows if row[0].shown == "k2")
    assert sorted(cell.shown for cell in missing[1:3]) == ["-", "unsupported"]


def test_garbled_records_never_crash_the_section(tmp_path):
    side_by_side(tmp_path)
    for _ in garbled(tmp_path / "l2", 60):
        assert "Some CPU" in page_of(tmp_path)


def test_many_machines_have_letters():
    assert [machines._letter(at) for at in (0, 25, 26, 52)] == ["A", "Z", "A2", "A3"]
