"""Which runs are of one machine: by the processor, else by the rates of `limits`."""

from __future__ import annotations

from pathlib import Path

import pytest
from rnnt_bench.analysis import groups, logs, machines
from rnnt_bench.records.schema import Machine
from rnnt_bench.system import machine
from rnnt_bench.tools import submit

from commands import assert_user_error, run
from fixtures_runs import change, records_of, summarize, timed, write_records

ZEN5 = {
    **{"cpu": "EPYC", "cores": 2, "family": 26, "model": 2, "stepping": 1},
    **{"vectors": ["avx2", "avx512f", "fma"], "caches": {"L1": 49152, "L2": 1048576, "L3": 33554432}},
}
NAME = {"cpu": "EPYC", "cores": 2}


def measured(folder, of, ms=10.0, year=2025, rates=None, name="k2"):
    """A run on a machine; rates: of memory in GB/s and of products in GFLOP/s, of three processes."""
    timed(folder.parent, name, [ms, 1.01 * ms, 0.99 * ms], run_id=f"{folder}", started=f"{year}-11-24T00:00:00+00:00")
    (folder.parent / name).rename(folder)
    change(folder, "run", machine=of)
    if rates:
        lines = [limits(memory, rates[1]) for memory in (0.9 * rates[0], rates[0], 2 * rates[0])]
        write_records(folder, [*records_of(folder), *lines])
    return folder


def limits(memory, products, **fields):
    stream = {"kernel": "update", "buffer_bytes": 10**9, "moved_bytes": 10**9, "ns": [1e9 / memory, 3e9 / memory]}
    return {
        **{"record": "limits", "device": "cpu", "threads": 2, "dtype": "float32", "streams": [stream]},
        **{"products": [{"n": 1000, "ns": [2e9 / products, 5e9 / products]}], **fields},
    }


def pair(tmp_path, first, other, *rates):
    """An earlier run, and a newer one that took half of the time."""
    both = rates or (None, None)
    return measured(tmp_path / "1-old", first, 20, 2024, both[0]), measured(tmp_path / "2-new", other, rates=both[1])


@pytest.mark.parametrize(
    "changed, words",
    [
        ({"cores": 64}, "64 cores"),
        ({"family": 25}, "family 26 / 25"),
        ({"model": 1}, "model 2 / 1"),
        ({"stepping": 0}, "stepping 1 / 0"),
        ({"vectors": ["avx2", "fma"]}, "avx512f fma / avx2 fma"),
        ({"caches": {"L3": 2**20}}, "L3 1024 KiB"),
        ({"cpu": "Ryzen"}, "EPYC (family 26, model 2, AVX-512), 2 cores / Ryzen"),
    ],
)
def test_another_processor_of_the_same_name_is_another_machine(tmp_path, changed, words):
    """Tables, "since ...", comparisons and what is sent tell them apart."""
    sides = pair(tmp_path, ZEN5, {**ZEN5, **changed})
    assert_user_error(run("rnnt-bench", "compare", *sides), "not comparable", words)
    assert run("rnnt-bench", "compare", "--save-baseline", "x", sides[0]).returncode == 0
    (sides[0] / "baselines").rename(sides[1] / "baselines")
    assert_user_error(run("rnnt-bench", "compare", "--baseline", "x", sides[1]), "not comparable", words)
    assert len(logs.read([tmp_path]).groups) == 2 and "since" not in summarize(tmp_path, details=False)
    sent = run("rnnt-bench", "submit", "--check", tmp_path)
    assert sent.returncode == 1 and "machines" in sent.stderr and words in sent.stderr


def test_other_cores_are_another_machine_and_not_an_earlier_run(tmp_path):
    pair(tmp_path, NAME, {**NAME, "cores": 64}, (40, 200), (40, 200))
    rows = logs.read([tmp_path]).rows
    assert [len(row.earlier) for row in rows] == [0, 0] and len(groups.groups(rows)) == 2


def test_one_processor_is_one_machine_whatever_its_rates_are(tmp_path):
    """Memory differs by a fifth between two days of one host."""
    sides = pair(tmp_path, ZEN5, {**ZEN5, "os": "a newer kernel"}, (47, 207), (37, 206))
    assert run("rnnt-bench", "compare", *sides).returncode == 0
    (group,) = logs.read([tmp_path]).groups
    assert "EPYC (family 26, model 2, AVX-512)" in machines.described(group.rows[0].header.machine)
    assert "since 24 Nov 2024" in summarize(tmp_path, details=False)
    assert "(family 26, model 2, AVX-512)" in group.heading
    assert run("rnnt-bench", "report", tmp_path, "--output", tmp_path / "page.html").returncode == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("(family 26, model 2, AVX-512)") >= 3  # above, in the heading, in the facts


@pytest.mark.parametrize(
    "rates, words",
    [
        (((40, 200), (45, 220)), ""),
        (((40, 200), (47, 200)), "rate of memory 40 / 47 GB/s"),
        (((40, 200), (40, 160)), "rate of products 200 / 160 GFLOP/s"),
        (((40, 200), None), "known by its name alone"),
        ((None, None), "known by its name alone"),
    ],
)
def test_machines_known_by_name_alone_are_one_if_their_rates_agree(tmp_path, rates, words):
    for first, other in ((NAME, NAME), (ZEN5, NAME)):
        folder = tmp_path / f"{len(first)}"
        folder.mkdir()
        done = run("rnnt-bench", "compare", *pair(folder, first, other, *rates))
        assert done.returncode == (2 if words else 0) and words in done.stderr
        assert len(logs.read([folder]).groups) == (2 if words else 1)
        assert ("since" in summarize(folder, details=False)) == (not words)


def test_the_heading_of_a_machine_known_by_name_alone_has_its_rates(tmp_path):
    measured(tmp_path / "a", NAME, rates=(40, 200))
    (group,) = logs.read([tmp_path]).groups
    assert "(memory 40 GB/s, products 200 GFLOP/s)" in group.heading


def test_one_processor_that_multiplies_at_another_rate_is_another_machine(tmp_path):
    """By the suite's own loop; that of torch depends on its version."""
    for loops, code in (((280, 250), 0), ((280, 240), 2)):
        (tmp_path / str(code)).mkdir()
        sides = pair(tmp_path / str(code), ZEN5, ZEN5)
        for folder, torch, loop in zip(sides, (100, 200), loops):
            line = limits(40, torch)
            line["products"] += [{"n": 1000, "ns": [2e9 / loop], "by": "loop"}]
            write_records(folder, [*records_of(folder), line])
        assert run("rnnt-bench", "compare", *sides).returncode == code


def test_a_row_that_was_not_timed_is_of_the_machine_of_its_run(tmp_path):
    for folder, memory in (("a", 40), ("b", 80)):
        measured(tmp_path / folder, NAME, rates=(memory, 200))
        failed = measured(tmp_path / f"{folder}-2", NAME, name="torchaudio")
        change(failed, "run", run_id=str(tmp_path / folder))
    shown = [sorted(row.name for row in group.rows) for group in logs.read([tmp_path]).groups]
    assert shown == [["k2", "torchaudio"]] * 2


def test_the_processor_is_read_from_the_system(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "model name\t: EPYC\ncpu family\t: 26\nmodel\t\t: 2\nstepping\t: 1\nflags\t\t: fpu sse4_2 avx512f avx2 fma\n"
    )
    known = machine.processor(str(cpuinfo))
    assert [known[key] for key in ("family", "model", "stepping")] == [26, 2, 1]
    assert known["vectors"] == ["avx2", "avx512f", "fma", "sse4_2"]
    cpuinfo.write_text("Features\t: fp asimd sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\nCPU revision\t: 1\n")
    arm = machine.processor(str(cpuinfo))
    assert [arm[key] for key in ("family", "model", "stepping")] == [0x41, 0xD40, 1]
    assert "SVE" in machines.processor(Machine(**{key: arm[key] for key in ("family", "model", "vectors")}))
    none = machine.processor(str(tmp_path / "none"))
    assert none["family"] is None and none["vectors"] == []
    here = machine.describe()
    assert machines.is_known(Machine(**here)) == Path("/proc/cpuinfo").exists()
    sent = submit.kept(here, "machine")
    assert [sent[key] for key in machines.FIELDS] == [here[key] for key in machines.FIELDS]
