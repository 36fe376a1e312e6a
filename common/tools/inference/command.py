"""The command `rnnt-bench inference`: read a configuration and flags, measure the grid, print tables.
No torch here."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rnnt_bench.cli.parser import add_setting
from rnnt_bench.core import files, flag_types, settings, text
from rnnt_bench.core.arguments import Parser
from rnnt_bench.core.errors import UserError
from rnnt_bench.jobs import job, session
from rnnt_bench.records.schema import as_written
from rnnt_bench.setup import interpreters
from rnnt_bench.tools import commands, configuration
from rnnt_bench.tools.inference.rows import (
    TOOL,
    Dimensions,
    Model,
    Profile,
    Request,
    answer,
    is_skipped,
    positions,
)

DESCRIPTION = """Measure whether a speech model is faster than real time, for each length of audio and batch size.

The configuration names a model and a grid; every cell is measured in a process of its own. docs/inference.md explains
every number, and how to profile a model of SpeechBrain, torchaudio, Hugging Face or your own."""
EXAMPLES = """examples:
  rnnt-bench inference examples/profile.yaml
  rnnt-bench inference --profiling_dimensions.batch_sizes=[1,2] --profiling_dimensions.example_audio=a.flac
  rnnt-bench inference --threads 1,2 --dtype float32,bfloat16

Exit code: 0; 1 if a cell failed; 2 for bad usage, or if the model is missing."""
DEFAULT = files.ROOT / "examples" / "profile.yaml"
#: Defaults of the flags that say how many calls of a cell are timed; and those of --preset quick.
SAMPLES: dict[str, float] = {"max_seconds": 1.0, "max_samples": 200}
QUICK: dict[str, float] = {"max_seconds": 0.2, "max_samples": 20}


class _Parser(Parser):
    """A parser that takes words such as "--batch_sizes=[1,2]", which are no flags, as overrides.

    The parsed arguments have a list of these words as `overrides`."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else args
        # Overrides are kept from argparse: one with a space, `--batch_sizes=[1, 2]`, it would take
        # for CONFIG.
        overrides = [
            word
            for word in words
            if word.startswith("--") and word.partition("=")[0] not in self._option_string_actions
        ]
        arguments = super().parse_args([word for word in words if word not in overrides], namespace)
        arguments.overrides = overrides
        return arguments


def _thread_counts(text: str) -> list[int]:
    """Parse "1,2,4" as numbers of threads; one that is repeated counts once."""
    return list(dict.fromkeys(map(flag_types.threads, flag_types.names(text))))


def parser() -> Parser:
    """Return the parser of `rnnt-bench inference`."""
    usage = "%(prog)s [CONFIG] [--key=value ...] [flags]"
    result = _Parser(usage=usage, description=DESCRIPTION, epilog=EXAMPLES, allow_abbrev=False)
    result.add_argument_group("the model and its grid").add_argument(
        "config",
        nargs="?",
        type=flag_types.path,
        default=DEFAULT,
        metavar="CONFIG",
        help="YAML file with pretrained_model (source, type, arguments, sample_rate, python) and profiling_dimensions "
        "(audio_mockup_secs, batch_sizes, example_audio, triangle_only, export_logs). --key=value sets one of them. "
        "Default: the suite's examples/profile.yaml",
    )
    group = result.add_argument_group("further axes: the grid is repeated for each value")
    group.add_argument(
        "--threads",
        type=_thread_counts,
        default=[None],
        metavar="A,B",
        help="Numbers of torch's CPU threads, such as 1,2,4. Default: all CPUs",
    )
    group.add_argument(
        "--dtype",
        type=flag_types.some_of(("float32", "bfloat16", "float16")),
        default=["float32"],
        metavar="A,B",
        help="Data types: float32; bfloat16 and float16 by autocast. Default: float32",
    )
    group = result.add_argument_group("the run")
    add_setting(
        group,
        "max_seconds",
        "Most seconds of timed calls of a cell; three are always timed. Default: 1",
    )
    whole = flag_types.Whole(1)
    add_setting(
        group, "max_samples", "Most timed calls of a cell. Default: 200", type=whole, metavar="N"
    )
    quick = "the shortest two lengths of audio, the smallest batch, 0.2 s of calls"
    commands.add_flags(
        group, seed="Seed of random weights and noise", folder="inference-<config>", quick=quick
    )
    return result


def main(arguments: argparse.Namespace, executor: session.Executor | None = None) -> int:
    """Profile the model of a configuration; return the exit code."""
    here = interpreters.with_torch("torchaudio", "yaml")
    commands.set_quick(arguments, QUICK, others=SAMPLES)
    config = configured(arguments.config, arguments.overrides, quick=bool(arguments.preset))
    config.variants = {"threads": arguments.threads, "dtype": list(arguments.dtype)}
    python = Path(config.pretrained_model.python or here)
    flags = {key: getattr(arguments, key) for key in ("seed", *SAMPLES)}
    device = interpreters.resolve_device(arguments.device, [python])
    # "system" since a task gets no variables of the allocator (job.Task.variables).
    resolved = settings.resolve({"allocator": "system", **flags}, device)
    tasks = planned(config, python)
    return commands.measured(
        TOOL, arguments.config.stem, config, tasks, resolved, arguments, answer, executor
    )


def planned(config: Profile, python: Path) -> list[job.Task]:
    """Return a task for each cell of the grid, without those that `triangle_only` leaves out."""
    tasks = []
    for position in positions(config):
        if not is_skipped(position, config.profiling_dimensions):
            request = as_written(Request(config, position))
            threads = (("threads", position.threads),)
            tasks.append(job.Task(position.job, TOOL, request, overrides=threads, python=python))
    return tasks


def configured(path: Path, overrides: Sequence[str], quick: bool = False) -> Profile:
    """Return the configuration in a YAML file, with the values of `overrides` (see `overridden`).
    Raises UserError.

    quick: keep only the shortest two durations, unless an override sets the durations, and only
    the smallest batch size, unless an override sets the batch sizes."""
    changes = overridden(overrides)
    content = configuration.read(path)
    values = {part: of_part for part, of_part in content.items() if of_part is not None}
    for part, changes_of_part in changes.items():
        of_part = values.setdefault(part, {})
        if isinstance(of_part, dict):  # `converted` below refuses any other type
            of_part.update(changes_of_part)
    config = configuration.converted(values, Profile, str(path))
    _locate_files(config, path)
    if quick:
        dimensions = config.profiling_dimensions
        changed = changes.get("profiling_dimensions", ())
        if "audio_mockup_secs" not in changed:
            dimensions.audio_mockup_secs = sorted(dimensions.audio_mockup_secs)[:2]
        if "batch_sizes" not in changed:
            dimensions.batch_sizes = [min(dimensions.batch_sizes)]
    return config


def _locate_files(config: Profile, path: Path) -> None:
    """Make the paths in `config` absolute.  A source that is no path stays: it is a name on a hub.

    Raises UserError where the Python or the example audio is not there.

    path: the file of the configuration."""
    model = config.pretrained_model
    if model.python:
        model.python = configuration.file(model.python, path, f"{path}: pretrained_model.python")
    if model.type == "factory":
        model.source = configuration.python_name(model.source, path)
    elif configuration.located(model.source, path).exists():
        model.source = str(configuration.located(model.source, path))
    dimensions = config.profiling_dimensions
    if dimensions.example_audio is not None:
        where = f"{path}: example_audio"
        advice = "another, or null for random data"
        dimensions.example_audio = configuration.file(dimensions.example_audio, path, where, advice)


def overridden(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the values of words "--part.key=value" or "--key=value", by part and key.

    Values are YAML.  Raises UserError."""
    part_of = dict.fromkeys(configuration.keys_of(Model), "pretrained_model")
    part_of.update(dict.fromkeys(configuration.keys_of(Dimensions), "profiling_dimensions"))
    values: dict[str, dict[str, Any]] = {}
    for word in words:
        flag, equals, value = word.removeprefix("--").partition("=")
        part, _, key = flag.rpartition(".")
        is_key = key in part_of and part in ("", part_of[key])
        if not (is_key and equals):
            raise UserError(
                f"{word}: give --key=value{text.closest(key, part_of)}; there are {', '.join(part_of)}"
            )
        values.setdefault(part_of[key], {})[key] = configuration.parsed(value, f"--{key}")
    return values
