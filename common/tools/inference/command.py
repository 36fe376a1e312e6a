"""The command profile_inference.py: from a configuration and flags to the grid, its tables and a section of the report.

No torch here: every cell is a process of its own.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Annotated, Any, Dict, List, Literal, Optional, Sequence, Tuple, Type, Union

from common.cli import ending, flags
from common.cli.ending import Shown
from common.cli.parser import Parser
from common.core import flag_types, paths, settings
from common.core.errors import UserError
from common.core.guard import require
from common.core.settings import Settings
from common.core.text import count
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.jobs.spec import Task
from common.present.text import markdown
from common.records.run import Run
from common.setup import environments, interpreters
from common.tools import commands as model_run
from common.tools import configuration
from common.tools.inference import grid
from common.tools.inference import section as report
from common.tools.inference import table as tables
from common.tools.inference.model_types import TYPES
from common.tools.inference.records import open_run
from common.tools.inference.rows import Inference, read

require("msgspec")

from msgspec import Meta, Struct, field  # noqa: E402

DESCRIPTION = """Measure whether a speech model is faster than real time, for each length of audio and batch size.

The configuration names a model and a grid; every cell is measured in a process of its own. docs/inference.md explains
every number, and how to profile a model of SpeechBrain, torchaudio, Hugging Face or your own."""
EXAMPLES = """examples:
  profile_inference.py profile.yaml
  profile_inference.py profile.yaml --profiling_dimensions.batch_sizes=[1,2] --profiling_dimensions.example_audio=a.flac
  profile_inference.py profile.yaml --threads 1,2 --dtype float32,bfloat16
  profile_inference.py examples/silero_vad.yaml

Exit code: 0; 1 if a cell failed; 2 for bad usage, or if the model is missing."""
DEFAULT = paths.ROOT / "profile.yaml"
#: Settings of a cell, where the flags of these names give no other.
SAMPLES: Dict[str, float] = {"max_seconds": 1.0, "max_samples": 200}


class Model(Struct, forbid_unknown_fields=True, kw_only=True):
    """The model of a configuration, as common.tools.inference.recognisers loads it."""

    source: configuration.Text
    type: Literal[TYPES] = "factory"  # type: ignore[valid-type]
    arguments: Optional[Dict[str, Any]] = None
    sample_rate: Optional[configuration.Positive] = None
    environment: Optional[str] = None


class Dimensions(Struct, forbid_unknown_fields=True, kw_only=True):
    """The grid of a configuration."""

    audio_mockup_secs: Annotated[List[Union[int, float]], Meta(min_length=1)] = field(
        default_factory=lambda: [1, 2, 5, 8, 32]
    )
    batch_sizes: Annotated[List[configuration.Positive], Meta(min_length=1)] = field(default_factory=lambda: [1, 4, 8])
    example_audio: Optional[configuration.Text] = None
    triangle_only: bool = True
    export_logs: bool = False

    def __post_init__(self) -> None:
        configuration.check_positive(self.audio_mockup_secs, grid.SECONDS)
        configuration.check_distinct(self.audio_mockup_secs, grid.SECONDS)
        configuration.check_distinct(self.batch_sizes, grid.BATCH)


class Profile(Struct, forbid_unknown_fields=True, kw_only=True):
    """A configuration."""

    pretrained_model: Model
    profiling_dimensions: Dimensions = field(default_factory=Dimensions)


DTYPES, QUANTIZE = ("float32", "bfloat16", "float16"), ("none", "dynamic")


def parsed(words: Sequence[str]) -> Tuple[argparse.Namespace, List[str]]:
    """Return (flags, overrides).  argparse would take an override with a space, `--batch_sizes=[1, 2]`, for CONFIG."""
    known = parser()
    spaced = [
        word
        for word in words
        if word.startswith("--") and " " in word and word.partition("=")[0] not in known._option_string_actions
    ]
    arguments, others = known.parse_known_args([word for word in words if word not in spaced])
    return arguments, [*others, *spaced]


def parser() -> Parser:
    result = Parser(
        usage="%(prog)s [CONFIG] [--key=value ...] [flags]",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        allow_abbrev=False,
    )
    result.add_argument_group("the model and its grid").add_argument(
        "config",
        nargs="?",
        type=flag_types.path,
        default=DEFAULT,
        metavar="CONFIG",
        help="YAML file with pretrained_model (source, type, arguments, sample_rate, environment) and "
        "profiling_dimensions (audio_mockup_secs, batch_sizes, example_audio, triangle_only, export_logs). --key=value "
        "sets one of them. Default: the suite's profile.yaml",
    )
    group = result.add_argument_group("further axes: the grid is repeated for each value")
    group.add_argument(
        "--threads",
        type=_listed(flag_types.threads),
        default=(None,),
        metavar="A,B",
        help="Numbers of torch's CPU threads, such as 1,2,4. Default: all CPUs",
    )
    group.add_argument(
        "--dtype",
        type=_listed(_one_of(DTYPES)),
        default=("float32",),
        metavar="A,B",
        help="Data types: float32; bfloat16 and float16 by autocast. Default: float32",
    )
    group.add_argument(
        "--quantize",
        type=_listed(_one_of(QUANTIZE)),
        default=("none",),
        metavar="A,B",
        help="Quantization: none; dynamic for weights of Linear and LSTM in int8, on a CPU. Default: none",
    )
    group.add_argument(
        "--compile",
        nargs="?",
        const=(True,),
        type=_listed(flag_types.str2bool),
        default=(False,),
        metavar="BOOL,BOOL",
        help="Whether to run torch.compile on the parts of the model that take tensors alone; false,true measures "
        "both. Outputs are checked against those in float32 before anything is timed. Default: false",
    )
    group = result.add_argument_group("the run")
    flags.add_setting(group, "device", "Device to measure on: auto, cpu, cuda or cuda:N. Default: auto")
    seed = settings.SETTINGS["seed"].default
    flags.add_setting(group, "seed", f"Seed of random weights and noise. Default: {seed}", default=seed)
    flags.add_setting(
        group, "max_seconds", "Most seconds of timed calls of a cell; one call is always timed. Default: 1"
    )
    flags.add_setting(group, "max_samples", "Most timed calls of a cell. Default: 200")
    quick = "the shortest two lengths of audio, the smallest batch, 0.2 s of calls"
    model_run.add_flags(group, folder="inference-<config>", quick=quick)
    return result


def _listed(check: Any) -> Any:
    """Return the type of a comma-separated list of what `check` takes, which drops repetitions."""

    def parse(text: str) -> Tuple[Any, ...]:
        return tuple(dict.fromkeys(check(word) for word in flag_types.words(text)))

    return parse


def _one_of(choices: Sequence[str]) -> Any:
    def check(word: str) -> str:
        if word not in choices:
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(choices)}")
        return word

    return check


def main(arguments: argparse.Namespace, overrides: Sequence[str], executor: Optional[Executor] = None) -> int:
    """Profile the model of a configuration; return the exit code.  overrides: words "--key=value" that are no flags."""
    interpreters.with_torch("torchaudio", "yaml")
    model_run.set_quick(arguments, {"max_seconds": 0.2, "max_samples": 20})
    config = configured(arguments.config, overrides)
    if arguments.preset:
        _make_quick(config.profiling_dimensions, overrides)
    executor, environment = executor or Local(), config.pretrained_model.environment
    python = (environments.interpreter(environment) if environment else None) or Path(sys.executable)
    device = interpreters.resolve_device(arguments.device, [python])
    axes: Dict[str, List[Any]] = {name: list(getattr(arguments, name)) for name in grid.VARIANTS}
    axes.update({key: list(getattr(config.profiling_dimensions, key)) for key in (grid.SECONDS, grid.BATCH)})
    given = {"seed": arguments.seed, **SAMPLES}
    given.update((key, getattr(arguments, key)) for key in SAMPLES if getattr(arguments, key) is not None)
    resolved = settings.resolve({**given, "allocator": "system"}, device)
    tasks = planned(config, axes)
    header = {
        "record": "inference",
        "name": arguments.config.stem,
        "config": configuration.as_data(config),
        "grid": axes,
        "settings": {key: getattr(resolved, key) for key in ("device", *given)},
    }
    with open_run(header, arguments.log_dir, arguments.resume) as run:
        if not arguments.quiet:
            _announce(tasks, axes, config, resolved)
        return model_run.finish(run, tasks, python, resolved, arguments, executor, lambda: show(run, arguments))


def _make_quick(dimensions: Dimensions, overrides: Sequence[str]) -> None:
    """Keep the shortest two lengths of audio and the smallest batch, where no override says what to measure."""
    for key, count_kept in ((grid.SECONDS, 2), (grid.BATCH, 1)):
        if not any(word.partition("=")[0].endswith(key) for word in overrides):
            setattr(dimensions, key, sorted(getattr(dimensions, key))[:count_kept])


def configured(path: Path, overrides: Sequence[str]) -> Profile:
    """Return the configuration in a YAML file, with the values of --key=value over it.  Raises UserError."""
    values = configuration.read(path)
    parts: Dict[str, Type[Struct]] = {"pretrained_model": Model, "profiling_dimensions": Dimensions}
    configuration.override(values, overrides, {part: configuration.keys_of(kind) for part, kind in parts.items()})
    config = configuration.converted(values, Profile, str(path))
    model, dimensions = config.pretrained_model, config.profiling_dimensions
    configuration.check_environment(model.environment, f"{path}: pretrained_model.environment")
    model.source = _located(model.source, model.type, path)
    model.arguments = model.arguments or {}
    if dimensions.example_audio is not None:
        audio = configuration.located(dimensions.example_audio, path)
        if not audio.is_file():
            where = f"{path}: profiling_dimensions.example_audio"
            raise UserError(f"{where}: {audio}: no such file; give another, or null for random data")
        dimensions.example_audio = str(audio)
    return config


def _located(source: str, kind: str, path: Path) -> str:
    """Return a factory or a folder with its absolute path, where it is one; any other name as it is."""
    if kind == "factory":
        return configuration.python_name(source, path)
    here = configuration.located(source, path)
    return str(here) if here.exists() else source


def planned(config: Profile, axes: grid.Grid) -> List[Task]:
    """Return a task for each cell that is not skipped."""
    data, triangle = configuration.as_data(config), config.profiling_dimensions.triangle_only
    return [
        Task(
            position.job,
            "inference",
            {"config": data, "cell": position.to_json()},
            (("threads", position.variant.threads),),
        )
        for position in grid.positions(axes)
        if not (triangle and grid.is_skipped(position, axes))
    ]


def _announce(tasks: Sequence[Task], axes: grid.Grid, config: Profile, resolved: Settings) -> None:
    seconds, sizes = (", ".join(f"{value:g}" for value in axes[key]) for key in (grid.SECONDS, grid.BATCH))
    print(
        f"profiling {config.pretrained_model.source} on {resolved.device}: {count(len(tasks), 'cell')}", file=sys.stderr
    )
    print(f"audio of {seconds} s x batches of {sizes}, each in a process of its own", file=sys.stderr)


def show(run: Run, arguments: argparse.Namespace) -> Shown:
    """Print the tables, and write them beside the records."""
    profile = read(run.path)
    files = {
        f"{name}.md": "\n\n".join(f"{table.title}\n\n{markdown(table)}" for table in _of(profile, name)) + "\n"
        for name in tables.GRIDS
    }
    files.update({"cells.csv": tables.render(profile, "csv"), "cells.json": tables.render(profile, "json")})
    model_run.write(run.path, files, report.TITLE, [report.section(profile, 0)])
    text = tables.render(profile, arguments.format)
    return ending.printed(text, text, profile.statuses, arguments)


def _of(profile: Inference, name: str) -> List[Any]:
    return [table for table in tables.grids(profile) if table.name == name]
