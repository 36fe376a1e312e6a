"""The command pipeline_metrics.py: from stages in a YAML and flags to what an example costs, its table and a section.

Every example is a process of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Literal, Mapping, NamedTuple, Optional, Sequence, Tuple, Type, TypeVar, Union

from common.cli import ending, flags
from common.cli.ending import Shown
from common.cli.parser import Parser
from common.core import flag_types, paths, settings
from common.core.errors import EXIT_OK, UserError
from common.core.guard import require
from common.core.text import count, shown
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.jobs.spec import Task
from common.records.run import Run
from common.setup import interpreters
from common.tools import commands as model_run
from common.tools import configuration
from common.tools.dataset import Dataset
from common.tools.inference import pipeline_section as report
from common.tools.inference import pipeline_table as tables
from common.tools.inference.pipeline_rows import read
from common.tools.inference.records import open_run

require("msgspec")

from msgspec import UNSET, Struct, UnsetType, defstruct, field, structs  # noqa: E402

Value = TypeVar("Value")
DESCRIPTION = """Measure what an utterance costs in a speech system or cascade: time, peak memory and operations.

The configuration names the stages; every example of the data set is measured in a process of its own.
docs/inference.md explains every number, and how to write stages of your own."""
EXAMPLES = """examples:
  pipeline_metrics.py --config pipeline.yaml
  pipeline_metrics.py --config examples/pipelines/s2s.yaml --repeats 10
  pipeline_metrics.py --config mine.yaml --dataset-type raw --dataset-path test.tsv --dataset-size 20
  pipeline_metrics.py --dataset-type raw --dataset-path test.tsv --write-subsets subsets --subset-size 50

A stage's own value comes first, then that of `general`, then the command line's.

Exit code: 0; 1 if an example failed; 2 for bad usage, or if something is missing."""
DEFAULT = paths.ROOT / "pipeline.yaml"
#: What --preset quick changes.
QUICK = {"dataset_size": 1, "warmup": 0, "repeats": 1}
DATASET_TYPES = ("made", "raw", "npy")
#: How many stages each of the classic types has.
MODEL_TYPES = {
    "S2S": (1,),
    "S2T": (1,),
    "TTS": (1,),
    "MT": (1,),
    "S2UT": (1, 2),
    "2StageS2ST": (2,),
    "3StageS2ST": (3,),
}


class Whole(Struct, kw_only=True):
    """Keys of the whole pipeline, which `general` and the command line may give."""

    model_type: Optional[Literal[tuple(MODEL_TYPES)]] = None  # type: ignore[valid-type]
    dataset_type: Literal[DATASET_TYPES] = "made"  # type: ignore[valid-type]
    dataset_path: Optional[configuration.Text] = None
    dataset_size: Optional[configuration.Positive] = None
    target_sr: configuration.Positive = 16000
    made_seconds: configuration.Numbers = field(default_factory=lambda: [2, 4, 8])

    def __post_init__(self) -> None:
        if self.made_seconds is not UNSET:  # in General
            configuration.check_positive(self.made_seconds, "made_seconds")
            configuration.check_distinct(self.made_seconds, "made_seconds")


class Stage(Struct, forbid_unknown_fields=True, kw_only=True):
    """Keys of a stage; `general` may give all but its name, the command line the numbers."""

    name: configuration.Text
    factory: configuration.Text
    arguments: Optional[Dict[str, Any]] = None
    environment: Optional[str] = None
    builder: Optional[configuration.Text] = None
    converter: Optional[configuration.Text] = None
    warmup: configuration.Count = 2
    repeats: configuration.Positive = 5


#: `general`: any key of the whole, and what all stages share.
General = defstruct(
    "General",
    [
        (part.name, Union[part.type, UnsetType], UNSET)
        for part in (*structs.fields(Whole), *structs.fields(Stage))
        if part.name != "name"
    ],
    namespace={"__post_init__": Whole.__post_init__},
    forbid_unknown_fields=True,
    kw_only=True,
)


class Pipeline(Struct, kw_only=True):
    """A configuration, whose stages say everything that `general` or the command line say for them."""

    general: Whole
    stages: List[Stage]


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    group = result.add_argument_group("the stages")
    group.add_argument(
        "--config",
        type=flag_types.path,
        default=DEFAULT,
        metavar="FILE",
        help="YAML file with the keys general and stage1 ... stageN, each with factory (module:name or file.py:name), "
        "arguments, environment, builder, converter, name, warmup, repeats. Default: the suite's pipeline.yaml",
    )
    group = result.add_argument_group("the data set")
    group.add_argument(
        "--dataset-type",
        choices=DATASET_TYPES,
        help="Source of the examples. made: noise of --made-seconds; raw: a manifest as wav2vec's; npy: arrays in "
        "npz, or pickled ones in npy. Default: made",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="Manifest or file of arrays, for raw and npy.")
    group.add_argument(
        "--dataset-size", type=flag_types.whole(1), metavar="K", help="Measure only the first K examples. Default: all"
    )
    group.add_argument(
        "--target-sr", type=flag_types.whole(1), metavar="HZ", help="Sample rate of audio. Default: 16000"
    )
    group.add_argument(
        "--made-seconds", type=_seconds, metavar="A,B", help="Seconds of each made example. Default: 2,4,8"
    )
    group.add_argument(
        "--trust-pickle", action="store_true", help="Load npy files of pickled objects, which can run any code."
    )
    group.add_argument(
        "--write-subsets",
        type=flag_types.path,
        metavar="DIR",
        help="Write random, short and long subsets of the data set, and stop.",
    )
    group.add_argument(
        "--subset-size", type=flag_types.whole(1), default=10, metavar="K", help="Examples of each subset. Default: 10"
    )
    group = result.add_argument_group("the run")
    flags.add_setting(group, "device", "Device to measure on: auto, cpu, cuda or cuda:N. Default: auto")
    flags.add_setting(group, "threads", "Number of torch's CPU threads. Default: all")
    seed = settings.SETTINGS["seed"].default
    flags.add_setting(group, "seed", f"Seed of weights, noise and subsets. Default: {seed}", default=seed)
    group.add_argument(
        "--warmup", type=flag_types.whole(0), metavar="K", help="Calls before the timed ones. Default: 2"
    )
    group.add_argument("--repeats", type=flag_types.whole(1), metavar="K", help="Number of timed calls. Default: 5")
    group.add_argument(
        "--dump-speech-waveforms-dir",
        type=flag_types.path,
        metavar="DIR",
        help="Write the waveform of each example's last stage into DIR.",
    )
    group.add_argument(
        "--dump-waveform-file-prefix",
        default="",
        metavar="TEXT",
        help="Prefix of the names of these files. Default: none",
    )
    quick = "the first example, one call and none before it"
    model_run.add_flags(group, folder="pipeline-<config>", quick=quick)
    return result


def _seconds(text: str) -> List[float]:
    """Parse lengths in seconds, with commas between them."""
    return [flag_types.positive(word) for word in flag_types.words(text)]


def main(arguments: argparse.Namespace, executor: Optional[Executor] = None) -> int:
    interpreters.with_torch("torchaudio", "yaml")
    if arguments.write_subsets:
        return _write_subsets(arguments)
    from common.tools import examples

    config = configured(arguments.config, _of_flags(arguments))
    if arguments.preset:
        _make_quick(config, arguments)
    dataset = _as_dataset(config.general, arguments)
    names = [entry.id for entry in examples.entries(dataset)]
    repeated = next((name for number, name in enumerate(names) if name in names[:number]), None)
    if repeated:
        raise UserError(f"{dataset.dataset_path}: two examples are called {repeated}; names have to differ")
    return measured(Given(config, dataset, names), arguments, executor or Local())


def _make_quick(config: Pipeline, arguments: argparse.Namespace) -> None:
    """Keep the first example, one call and none before it, over the configuration, where no flag says otherwise."""
    for part in (config.general, *config.stages):
        for key, value in _with_keys_of(type(part), QUICK).items():
            if getattr(arguments, key) is None:
                setattr(part, key, value)


class Given(NamedTuple):
    """The parts of a run."""

    config: Pipeline
    dataset: Dataset
    names: Sequence[str]  # of its examples


def measured(given: Given, arguments: argparse.Namespace, executor: Executor) -> int:
    """Measure, and return the exit code."""
    config, dataset, names = given
    python = Path(sys.executable)
    device = interpreters.resolve_device(arguments.device, [python])
    resolved = settings.resolve({"seed": arguments.seed, "threads": arguments.threads, "allocator": "system"}, device)
    data = configuration.as_data(config)
    tasks = [_task(name, dataset, data["stages"], arguments) for name in names]
    header = {
        "record": "pipeline",
        "name": arguments.config.stem,
        "config": {"dataset": vars(dataset), **data},
        "stages": [stage.name for stage in config.stages],
        "examples": names,
        "settings": {"device": resolved.device, "threads": resolved.threads, "seed": resolved.seed},
    }
    with open_run(header, arguments.log_dir, arguments.resume) as run:
        if not arguments.quiet:
            stages = " -> ".join(header["stages"])
            print(f"measuring {stages} on {resolved.device}: {count(len(names), 'example')}", file=sys.stderr)
        return model_run.finish(run, tasks, python, resolved, arguments, executor, lambda: show(run, arguments))


def _task(name: str, dataset: Dataset, stages: Sequence[Any], arguments: argparse.Namespace) -> Task:
    dump = arguments.dump_speech_waveforms_dir
    if dump:
        file = f"{arguments.dump_waveform_file_prefix}{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
        dump = str((dump / file).absolute()) + ".wav"
    given = {"dataset": vars(dataset), "example": name, "stages": list(stages), "dump": dump}
    subject = "cascade" if any(stage["environment"] for stage in stages) else "pipeline"
    return Task(name, subject, given)


def _of_flags(arguments: argparse.Namespace) -> Dict[str, Any]:
    """Return what the command line gives for the whole and for every stage."""
    values = {key: getattr(arguments, key, None) for key in (*configuration.keys_of(Whole), "warmup", "repeats")}
    return {key: value for key, value in values.items() if value is not None}


def _as_dataset(whole: Whole, arguments: argparse.Namespace) -> Dataset:
    """Return the data set that a configuration and flags name."""
    values = structs.asdict(whole)
    del values["model_type"]
    return Dataset(**values, seed=arguments.seed, trust_pickle=arguments.trust_pickle)


def _write_subsets(arguments: argparse.Namespace) -> int:
    from common.tools import examples

    dataset = _as_dataset(Whole(**_with_keys_of(Whole, _of_flags(arguments))), arguments)
    for path in examples.write_subsets(dataset, arguments.write_subsets, arguments.subset_size):
        print(path)
    return EXIT_OK


def configured(path: Path, flags: Mapping[str, Any]) -> Pipeline:
    """Return the configuration in a YAML file: a stage over `general` over `flags` over the defaults.  Raises
    UserError."""
    values = configuration.read(path)
    names = _stage_names(values, path)
    general = configuration.converted(values.get("general", {}), General, f"{path}: general")
    shared = {**flags, **{key: value for key, value in structs.asdict(general).items() if value is not UNSET}}
    whole = configuration.converted(_with_keys_of(Whole, shared), Whole, f"{path}: general")
    accepted = MODEL_TYPES.get(whole.model_type or "")
    if accepted and len(names) not in accepted:
        wanted = " or ".join(map(str, accepted)) + (" stage" if accepted == (1,) else " stages")
        raise UserError(f"{path}: general.model_type: {whole.model_type} has {wanted}, not {len(names)}")
    if whole.dataset_path is not None:
        whole.dataset_path = str(configuration.located(whole.dataset_path, path))
    stages = [_stage(values.get(name, {}), _with_keys_of(Stage, shared), path, name) for name in names]
    for number, stage in enumerate(stages):
        if stage.name in [other.name for other in stages[:number]]:
            raise UserError(f"{path}: two stages are called {shown(stage.name)}; give each a name of its own")
    return Pipeline(general=whole, stages=stages)


def _with_keys_of(kind: Type[Struct], values: Mapping[str, Value]) -> Dict[str, Value]:
    """Return the values whose keys a Struct has."""
    return {key: value for key, value in values.items() if key in configuration.keys_of(kind)}


def _stage_names(values: Mapping[str, Any], path: Path) -> List[str]:
    """Return stage1 ... stageN.  Raises UserError for a gap and for other keys."""
    numbers = sorted(int(name[5:]) for name in values if re.fullmatch(r"stage[1-9]\d{0,3}", name))
    known = ["general", *(f"stage{number}" for number in sorted({*numbers, *range(1, len(numbers) + 2)}))]
    configuration.check_keys(values, known, str(path))
    if not numbers:
        raise UserError(f"{path}: has no stage1; a system that is end to end has one stage")
    for expected, number in enumerate(numbers, 1):
        if number != expected:
            raise UserError(
                f"{path}: stage{expected} is missing, but there is a stage{number}; number them without a gap"
            )
    return [f"stage{number}" for number in numbers]


def _stage(values: Any, shared: Mapping[str, Any], path: Path, key: str) -> Stage:
    """Return a stage: its own values over the shared ones.  Raises UserError."""
    where = f"{path}: {key}"
    if not isinstance(values, dict):
        raise UserError(f"{where}: give keys and values, not {shown(values)}")
    stage = configuration.converted({"name": key, **shared, **values}, Stage, where)
    configuration.check_environment(stage.environment, f"{where}.environment")
    stage.arguments = stage.arguments or {}
    stage.factory = configuration.python_name(stage.factory, path)
    stage.builder = stage.builder and configuration.python_name(stage.builder, path)
    stage.converter = stage.converter and configuration.python_name(stage.converter, path)
    return stage


def show(run: Run, arguments: argparse.Namespace) -> Shown:
    """Print the table, and write it beside the records."""
    pipeline = read(run.path)
    files = {f"stages.{end}": tables.render(pipeline, how) for end, how in FILES}
    model_run.write(run.path, files, report.TITLE, [report.section([pipeline])])
    text = tables.render(pipeline, arguments.format)
    return ending.printed(text, text, pipeline.statuses, arguments)


FILES: Tuple[Tuple[str, str], ...] = (("md", "markdown"), ("csv", "csv"), ("json", "json"))
