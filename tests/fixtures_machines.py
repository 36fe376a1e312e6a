"""Made runs of several machines for tests."""

from __future__ import annotations

from fixtures_runs import correctness, environment, header, memory, sample, status, write_records

LARGE = {"cores": 64, "threads": 64, "run_id": "large"}


def measured(folder, name, step_ms, cores=2, threads=2, device_name="Some CPU", settings=None, **head):
    """Two rounds of `step_ms` on both batches, on a machine of so many cores."""
    device = {"device_name": device_name, "threads": threads}
    jobs = []
    for lines in (correctness(), memory(8), [environment("trace"), status("trace")]):
        jobs.append([{**line, **device} if line["record"] == "environment" else line for line in lines])
    for job in ("timing-1", "timing-2"):
        jobs.append(
            [environment(job, **device), *(sample(job, "step", batch, step_ms) for batch in (4, 9)), status(job)]
        )
    first = {**header(name, **(settings or {})), "run_id": "small", **head}
    first["machine"] = {"cpu": device_name, "cores": cores} if cores else {}
    write_records(folder, [first, *(line for lines in jobs for line in lines)])


def side_by_side(folder):
    measured(folder / "s1", "a", 10)
    measured(folder / "s2", "b", 20)
    measured(folder / "s3", "p", 5, kind="pruned")
    measured(folder / "l1", "a", 2, **LARGE)
    measured(folder / "l2", "b", 1, **LARGE)
    measured(folder / "l3", "p", 4, kind="pruned", **LARGE)
    return folder
