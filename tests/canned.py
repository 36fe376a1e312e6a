"""An executor that answers with canned records where processes are not the point, and the benchmark run with it."""

from __future__ import annotations

import json

from rnnt_bench.cli.benchmark import benchmark
from rnnt_bench.cli.parser import add_choice, add_flags
from rnnt_bench.core.arguments import Parser
from rnnt_bench.jobs.session import Executor, Interrupted
from rnnt_bench.records.schema import Line, typed

from fixtures_runs import correctness, memory, status, timing, trace

LIMITS = {"record": "limits", "products": [], "reason": ""}
QUICK = ["--device", "cpu", "--in-place", "--preset", "quick", "--limits", "false", "--quiet"]


class Canned(Executor):
    """Answer each job at once: answer(job, settings) gives its records, None the usual; seen: what would start."""

    def __init__(self, answer=lambda job, chosen: None):
        self.answer, self.seen = answer, []

    def execute(self, job, python, folder, chosen, timeout, note):
        self.seen.append((job.row_pass.row, job.name))
        records = self.answer(job, chosen)
        if records is None:
            usual = {"correctness": correctness(), "memory": memory(8), "trace": trace([])}
            pass_name = job.row_pass.pass_name
            usual["timing"] = timing(job.name, [10, 20], [1, 2]) if pass_name == "timing" else []
            records = usual.get(pass_name, [LIMITS, status(job.name)])
        return [record if isinstance(record, Line) else typed(record) for record in records]

    def disturbance(self, settings, seconds=0.0):
        return ""

    def get_ready(self, *_):
        pass

    def rounds(self, name):
        """Return the rounds that an implementation was timed in, in order."""
        return [int(job[7:]) for of, job in self.seen if of == name and job.startswith("timing-")]


def stop(job):
    """End a job as Ctrl-C does."""
    raise Interrupted([job.status("interrupted", "stopped by the user")])


def parsed(*words):
    """Return the arguments of benchmark_all.py."""
    parser = Parser(prog="x.py")
    add_choice(parser)
    add_flags(parser)
    return parser.parse_args([str(word) for word in words])


def measured(folder, executor, *words, names=("torchaudio", "reference")):
    """Run a benchmark of `names` with canned processes; return its exit code."""
    arguments = parsed(*QUICK, "--log-dir", folder, "--only", ",".join(names), *words)
    return benchmark(list(names), arguments, executor=executor)


def statuses(folder):
    """Return the records' statuses by folder, in order."""
    lines = {path.parent.name: path.read_text().splitlines() for path in sorted(folder.glob("*/results.jsonl"))}
    records = {name: map(json.loads, of) for name, of in lines.items()}
    return {name: [line["status"] for line in of if line["record"] == "status"] for name, of in records.items()}
