"""One process of one implementation: one pass, one round.  ``python -m common.running.worker JOB.json``, started by
the runner.

Reads the job, loads the adapter and the batches, runs the pass and appends each record to the job's output file as it
comes, so that what was measured outlives a crash.  Ends with a ``status`` record.  The only module that touches
torch's global state.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional

from common import scripts
from common.errors import EXIT_USAGE, NotRunnable, UserError
from common.running import machine, processes
from common.settings import Settings


@dataclass
class Context:
    """What a pass works with.  `batches`: indices, into all batches of the shape file, of those that are measured;
    limit_bytes: of the probe and throughput passes on a CPU; pool: see common.data.measured_batches."""

    settings: Settings
    adapter: Any
    device: Any
    dtype: Any
    model: Any
    all_batches: Any
    batches: List[int]
    limit_bytes: Optional[int] = None
    pool: Optional[int] = None

    def shapes(self, batch: int):
        """(N, 2) integers: T and U of each utterance of a batch."""
        return self.all_batches[batch]

    def make_batch(self, batch: int, repeat: int, utterances: Optional[int] = None):
        """Fresh inputs of a batch (or of its first `utterances`); the same for every implementation."""
        from common.losses import inputs, peaky

        return inputs.make_batch(
            self.shapes(batch)[:utterances],
            vocab_size=self.settings.vocab_size,
            encoder_dim=self.settings.encoder_dim,
            device=self.device,
            dtype=self.dtype,
            key=(self.settings.seed, batch, repeat),
            codes=peaky.codes_of(self.settings),
        )


class Output:
    """The job's record file: one line per record, written through at once."""

    def __init__(self, path: str, job: str):
        self.stream = open(path, "a", encoding="utf-8")
        self.job = job

    def write(self, record: Dict[str, Any]) -> None:
        self.stream.write(json.dumps({**record, "job": self.job}, separators=(",", ":"), allow_nan=False) + "\n")
        self.stream.flush()


def set_up_torch(settings: Settings) -> Any:
    """Threads, denormals and device as the run has them; returns the torch.device.  Raises NotRunnable."""
    try:
        import torch
    except ImportError as error:
        raise NotRunnable(
            "missing", f"torch does not import in {sys.executable} ({error}); run `make setup` or install torch"
        ) from error

    device = torch.device(settings.device)
    flushed = settings.denormals == "flush" and torch.set_flush_denormal(True)  # before the first parallel region
    if settings.denormals == "flush" and not flushed and device.type == "cpu":
        raise NotRunnable("unsupported", "this CPU cannot flush denormals: use --denormals keep")
    torch.set_num_threads(settings.threads or machine.cpu_count())
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise NotRunnable("unsupported", f"torch {torch.__version__} in {sys.prefix} sees no CUDA device")
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    return device


def prepare(job: Dict[str, Any], settings: Settings) -> Context:
    """Everything a pass needs.  Raises NotRunnable or UserError."""
    device = set_up_torch(settings)
    import torch

    dtype = getattr(torch, settings.dtype)
    adapter = scripts.load(job["script"])(settings, job["variant"])
    adapter.load(device.type)
    from common.data import measured_batches
    from common.losses.joiner import Joiner

    limit_bytes, pool = job.get("limit_bytes"), job.get("pool")
    batches, selected = measured_batches.load(settings, pool)
    model = Joiner.of(settings, adapter.weights(device, dtype), device, dtype)
    return Context(settings, adapter, device, dtype, model, batches, selected, limit_bytes, pool)


def environment(context: Context, pass_name: str) -> Dict[str, Any]:
    """The ``environment`` record of a job of this pass."""
    import torch

    from common.data import distribution, measured_batches, shapes

    # The same for every job of the run, so one of them tells; a search changes the batches.
    whole = pass_name == "correctness" and not context.settings.find_largest
    cuda = context.device.type == "cuda"
    return {
        "record": "environment",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "implementation_version": context.adapter.version(),
        "options": context.adapter.described_options(),
        "device": context.device.type,
        "device_name": torch.cuda.get_device_name(context.device) if cuda else machine.describe()["cpu"],
        "cuda": torch.version.cuda if cuda else None,
        "threads": torch.get_num_threads(),
        "denormals": context.settings.denormals,
        "shape_file": context.settings.shape_file,
        "shape_file_sha256": shapes.sha256(Path(context.settings.shape_file)),
        **({} if context.pool else {"shape_file_totals": context.all_batches.totals()}),
        **({"shape_distribution": distribution.of_run(context.all_batches, context.batches)} if whole else {}),
        "batches": [context.all_batches.describe(index, context.settings.prune_range) for index in context.batches],
        "warnings": measured_batches.warnings(context.all_batches, context.batches, context.settings),
    }


def run_pass(context: Context, name: str, round_number: Optional[int], folder: Path) -> Iterator[Dict[str, Any]]:
    """Records of the pass `name`."""
    if context.adapter.simulated and name != "correctness":
        raise NotRunnable(
            "unsupported",
            f"under {context.adapter.simulator_variables} its kernels run in a simulator, whose times say nothing: use "
            "--passes correctness",
        )
    if name == "trace":
        from common.passes import trace

        return trace.run(context, folder)
    module = importlib.import_module(f"common.passes.{name}")
    return module.run(context) if name == "correctness" else module.run(context, round_number)


def reason_of(error: BaseException) -> str:
    """The first line of an error that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def is_out_of_memory(error: BaseException) -> bool:
    """CUDA and CPU allocators of all torch versions, numba's, and Python's own."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (not isinstance(error, UserError) and processes.tells_of_no_memory(str(error)))
    )


def status_of(error: BaseException) -> str:
    """oom, unsupported (a build without kernels for this GPU) or error."""
    if is_out_of_memory(error):
        return "oom"
    return "unsupported" if "no kernel image is available" in str(error) else "error"


def run_job(job: Dict[str, Any], output: Output) -> Dict[str, Any]:
    """Run the job and return status and reason."""
    settings, context = Settings.from_json(job["settings"]), None
    try:
        if job["pass"] == "limits":  # of the device alone: no loss, no batches
            device = set_up_torch(settings)
            from common.passes import limits

            for record in limits.run(settings, device):
                output.write(record)
            return {"status": "ok", "reason": ""}
        context = prepare(job, settings)
        output.write(environment(context, job["pass"]))
        for record in run_pass(context, job["pass"], job["round"], Path(job["folder"])):
            output.write(record)
            if record["record"] == "correctness" and not record["ok"]:
                from common.passes import correctness

                return {"status": "error", "reason": f"wrong result: {correctness.in_words(record)}"}
        return {"status": "ok", "reason": ""}
    except NotRunnable as error:
        return {"status": error.status, "reason": str(error)}
    except UserError:
        raise
    except Exception as error:
        traceback.print_exc()
        if context is not None and isinstance(
            error, ModuleNotFoundError
        ):  # within the loss: its own is imported by now
            return {"status": "missing", "reason": f"{context.adapter.name} needs {error.name}: {context.adapter.hint}"}
        return {"status": status_of(error), "reason": reason_of(error)}


def main(path: str) -> int:
    machine.die_with_parent()
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    output = Output(job["output"], job["job"])
    begin = time.perf_counter_ns()
    try:
        outcome = run_job(job, output)
    except UserError as error:
        output.write({"record": "user_error", "message": str(error)})
        return EXIT_USAGE
    output.write(
        {
            "record": "status",
            "pass": job["pass"],
            "round": job["round"],
            **processes.sizes(job.get("size"), job.get("pool")),
            **outcome,
            "wall_ns": time.perf_counter_ns() - begin,
        }
    )
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without Python's end: torch 1.13 waits there for the interpreter for ever after an error within backward, whose
    # graph it still holds (seen when memory ran out).  All records are on disk.
    os._exit(code)
