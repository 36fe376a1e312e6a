"""The command `rnnt-bench largest`: from flags to a search and its table.  No torch here."""

from __future__ import annotations

import argparse
from typing import List, Optional, Tuple

from rnnt_bench.cli import benchmark
from rnnt_bench.cli.parser import add_choice, add_setting, chosen, given_settings, standard
from rnnt_bench.core import flag_types, settings, text
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.errors import UserError
from rnnt_bench.core.implementations import find
from rnnt_bench.data import batching
from rnnt_bench.jobs import job, session
from rnnt_bench.records import store
from rnnt_bench.setup import interpreters
from rnnt_bench.system import memory
from rnnt_bench.tools import commands, kept
from rnnt_bench.tools.largest import losses
from rnnt_bench.tools.largest.losses import TOOL
from rnnt_bench.tools.largest.search import Search, limit_of

DESCRIPTION = """Find the largest batch of each loss that gets through a step within a limit on memory.

Each size is tried in a process of its own: sizes double until one does not fit, then the gap is halved.
docs/usage.md tells what fits means."""
EXAMPLES = """examples:
  rnnt-bench largest --memory-limit 16GB
  rnnt-bench largest --only fused,torchaudio --memory-limit 4GiB --vocab-size 1024
  rnnt-bench largest --sort-utterance true --memory-limit 80%
  rnnt-bench largest --only k2 --scope loss

Exit code: 0 if every loss that can run here has an answer; 1 if one failed; 2 for bad usage."""
#: Settings that have no meaning here: all steps are of the heaviest batches, and nothing is timed.
WITHOUT = ("passes", "scopes", "sort_utterance", "batch_size", "max_frames", "batches", "num_batches", "mode")
#: Utterances of the batch on which correctness is judged, before the size is known.
JUDGED = 2
#: Share of a CPU's available memory that is the limit by default. The loaded process and others need the rest.
SHARE_OF_AVAILABLE = 0.9
#: Of a process that tries a size: each further arena of glibc would reserve 64 MB of address space.
VARIABLES = {**settings.MEMORY_VARIABLES, "MALLOC_ARENA_MAX": "1"}


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    add_choice(result)
    group = result.add_argument_group("what fits")
    group.add_argument(
        "--memory-limit",
        type=flag_types.memory_size,
        metavar="SIZE",
        help="Memory that a step may take on top of the loaded process, inputs included: 4GiB, 500MB, or 80%% of the "
        "device. It is enforced: on a CPU by a limit on address space; on CUDA by holding back the rest of the device. "
        "Default: nine tenths of what is available now on a CPU, all that is free on CUDA",
    )
    whole = flag_types.whole(1)
    group.add_argument("--largest-cap", type=whole, metavar="K", help="Try no more than so many. Default: all")
    words = "Search the largest --max-frames of utterances sorted by length, not the largest --batch-size"
    add_setting(group, "sort_utterance", words)
    add_setting(group, "batch_size", "The first size to try. Default: by --preset")
    add_setting(group, "max_frames", "The first size to try with --sort-utterance true. Default: by --preset")
    add_setting(group, "scopes", "What must fit, one of loss and step. Default: step")
    for title in (settings.MEASURED, settings.BATCHES, settings.LENGTHS):
        group = result.add_argument_group(title)
        for key, setting in settings.SETTINGS.items():
            if setting.group == title and key not in (*WITHOUT, "device", "preset", "seed"):
                add_setting(group, key, setting.help_text())
    group = result.add_argument_group("the run")
    add_setting(group, "threads", "Number of torch's CPU threads. Default: all")
    group.add_argument("--in-place", action="store_true", help="Run everything in this Python, with what it has.")
    quick = "a small joiner and vocabulary"
    commands.add_flags(group, folder="largest-<what>", quick=quick, timeout=1800.0, seed="Seed of inputs and weights")
    return result


def main(arguments: argparse.Namespace, executor: Optional[session.Executor] = None) -> int:
    """Search the largest batch of each loss; return the exit code."""
    if len(arguments.scopes or ("step",)) != 1:
        raise UserError("--scope: one of loss and step has to fit, not both")
    names = chosen(arguments)
    choices = interpreters.choose_all(names, arguments.in_place, arguments.loss)
    interpreters.need_torch(choices)
    device = interpreters.resolve_device(arguments.device, [choice.python for choice in choices.values()])
    if tuple(arguments.only) == standard():
        names = benchmark.default_rows(names, device, False, arguments.topology)
    given = given_settings(arguments)
    kinds = {find(name).kind for name in names}
    settings.check_kinds([key for key, value in given.items() if value is not None], kinds)
    resolved = settings.resolve(
        {**given, "scopes": arguments.scopes or ("step",), "batches": "first", "num_batches": 1}, device
    )
    limit, size = memory_limit(arguments.memory_limit, device)
    config = losses.Losses(
        losses=[Search(name, *_sizes(resolved, arguments.largest_cap)) for name in names],
        kinds={name: find(name).kind for name in names},
        missing={name: choices[name].reason for name in names if choices[name].python is None},
        capped=arguments.largest_cap is not None,
        unit=_unit(resolved),
        limit=limit,
        words=[
            f"scope {resolved.scopes[0]}, V {resolved.vocab_size}, joiner {resolved.encoder_dim}, {resolved.dtype}",
            *settings.described(resolved.to_json()),
        ],
    )
    sized = "max_frames" if resolved.sort_utterance else "batch_size"

    def task(name: str, pass_name: str, tried: int, limit_bytes: Optional[int] = size) -> job.Task:
        row = find(name)
        given = {
            "implementation": name,
            "script": row.script,
            "variant": row.variant,
            "pass": pass_name,
            "limit_bytes": limit_bytes,
            "memory_limit": arguments.memory_limit,
        }
        called = f"{name} {pass_name}" + ("" if pass_name == "correctness" else f"-{tried}")
        return job.Task(called, TOOL, given, ((sized, tried),), choices[name].python, VARIABLES)

    few = config.losses[0].low if resolved.sort_utterance else JUDGED
    tasks = [task(name, "correctness", few) for name in names if name not in config.missing]

    def follow(run: kept.Kept) -> List[job.Task]:
        known = limit_of(run) if device == "cpu" else None  # that of a run that goes on
        return [task(*coming, known or size) for coming in losses.coming(config, run)]

    return commands.measured(
        TOOL, sized.replace("_", "-"), config, tasks, resolved, arguments, losses.answer, executor, False, follow
    )


def _sizes(resolved: settings.Settings, largest_cap: Optional[int]) -> Tuple[int, int, int]:
    """Return the smallest size, the largest, and the first to try.  Raises UserError for a cap below the smallest."""
    totals = batching.load(resolved)[0].totals()
    low, most, start = 1, totals.utterances, resolved.batch_size
    if resolved.sort_utterance:  # sorted batches hold at least the longest utterance
        low, most, start = totals.T_max, totals.frames, resolved.max_frames
        if resolved.max_frames_padded:
            most = totals.utterances * totals.T_max
    cap = min(most, largest_cap or most)
    if cap < low:
        longest = f"the longest utterance has {low} frames and is a batch of its own"
        raise UserError(f"--largest-cap {cap}: {longest}; give at least that")
    return low, cap, start


def _unit(resolved: settings.Settings) -> str:
    """Return what sizes count."""
    if not resolved.sort_utterance:
        return "utterances"
    return "padded frames (N x longest T)" if resolved.max_frames_padded else "frames (sum of T)"


def memory_limit(asked: Optional[str], device: str) -> Tuple[str, Optional[int]]:
    """Return the limit in words, and on a CPU in bytes: no more than is safe to use, with a warning if that is less
    than was asked for.  Raises UserError without /proc."""
    words = f"--memory-limit {asked}" if asked else "what is available"
    if device != "cpu":
        return words, None
    total, available = memory.total_memory(), memory.available_memory()
    if total is None or available is None:
        raise UserError("on a CPU it needs Linux's /proc, which tells how much memory there is")
    most = int(SHARE_OF_AVAILABLE * available)
    if asked is None:
        return words, most
    size = flag_types.bytes_of(asked, total)
    if size <= available:
        return words, size
    used = f"the limit is {most / text.GIB:.3g} GiB, {SHARE_OF_AVAILABLE:.0%} of what is available here"
    store.warn(f"{words}: {used}; larger batches may fit where all of it is free")
    return f"{words}; {used}", most
