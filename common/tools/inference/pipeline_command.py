"""The command pipeline_metrics.py: from stages in a YAML and flags to what an example costs, its table and a section.

Every example is a process of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from common.cli import devices, ending, flags
from common.cli.ending import Shown
from common.cli.parser import Parser
from common.core import flag_types, paths, settings
from common.core.errors import EXIT_OK, UserError
from common.core.text import count, shown
from common.jobs import carried
from common.jobs.executor import Executor
from common.jobs.spec import Task
from common.records.run import Run
from common.setup import interpreters
from common.setup.interpreters import Choice
from common.tools import commands as model_run
from common.tools import configuration
from common.tools.inference import pipeline_section as report
from common.tools.inference import pipeline_table as tables
from common.tools.inference.pipeline_plot import figures
from common.tools.inference.pipeline_rows import read
from common.tools.inference.records import open_run

DESCRIPTION = """What an utterance costs in a speech system, end to end or a cascade: time, peak memory and operations.

The configuration names the stages; every example of the data set is measured in a process of its own.
docs/inference.md explains every number, and how to write stages of your own."""
EXAMPLES = """examples:
  pipeline_metrics.py --config pipeline.yaml
  pipeline_metrics.py --config examples/pipelines/s2s.yaml --repeats 10
  pipeline_metrics.py --config mine.yaml --dataset-type raw --dataset-path test.tsv --dataset-size 20
  pipeline_metrics.py --dataset-type raw --dataset-path test.tsv --write-subsets subsets --subset-size 50

What a stage says counts, then what `general` says, then the command line.

Exit code: 0; 1 where an example failed; 2 for bad usage, or where something is missing."""
DEFAULT = paths.ROOT / "pipeline.yaml"
#: What `general` and the command line may say of the whole, with the defaults.
WHOLE: Dict[str, Any] = {
    "model_type": None,
    "dataset_type": "made",
    "dataset_path": None,
    "dataset_size": None,
    "target_sr": 16000,
    "made_seconds": [2, 4, 8],
}
#: What a stage may say; all but its name also in `general`, the numbers on the command line too.
STAGE: Dict[str, Any] = {
    "name": None,
    "factory": None,
    "arguments": None,
    "environment": None,
    "builder": None,
    "converter": None,
    "warmup": 2,
    "repeats": 5,
}
#: What --preset quick says of the whole, and of each stage.
QUICK_WHOLE, QUICK_STAGE = {"dataset_size": 1}, {"warmup": 0, "repeats": 1}
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


def parser() -> Parser:
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    group = result.add_argument_group("the stages")
    group.add_argument(
        "--config",
        type=flag_types.path,
        default=DEFAULT,
        metavar="FILE",
        help="YAML with general and stage1 ... stageN: factory (module:name or file.py:name), arguments, "
        "environment, builder, converter, name, warmup, repeats. Default: the suite's pipeline.yaml",
    )
    group = result.add_argument_group("the data set")
    group.add_argument(
        "--dataset-type",
        choices=DATASET_TYPES,
        help="made: noise of --made-seconds; raw: a manifest of wav2vec's form; npy: arrays in npz, or "
        "pickled ones in npy. Default: made",
    )
    group.add_argument("--dataset-path", metavar="FILE", help="of raw and npy")
    group.add_argument("--dataset-size", type=int, metavar="K", help="the first K examples. Default: all")
    group.add_argument("--target-sr", type=flag_types.whole(1), metavar="HZ", help="of audio. Default: 16000")
    group.add_argument("--made-seconds", type=_seconds, metavar="A,B", help="of made examples. Default: 2,4,8")
    group.add_argument(
        "--trust-pickle", action="store_true", help="load npy files of pickled objects, which can run any code"
    )
    group.add_argument(
        "--write-subsets", type=flag_types.path, metavar="DIR", help="write random, short and long subsets, and stop"
    )
    group.add_argument(
        "--subset-size", type=flag_types.whole(1), default=10, metavar="K", help="examples of each. Default: 10"
    )
    group = result.add_argument_group("the run")
    flags.add_setting(group, "device", "auto, cpu, cuda or cuda:N. Default: auto")
    flags.add_setting(group, "threads", "of torch on a CPU. Default: all")
    flags.add_setting(group, "seed", "of weights, noise and subsets", default=settings.SETTINGS["seed"].default)
    group.add_argument("--warmup", type=flag_types.whole(0), metavar="K", help="calls before. Default: 2")
    group.add_argument("--repeats", type=flag_types.whole(1), metavar="K", help="timed calls. Default: 5")
    group.add_argument(
        "--dump-speech-waveforms-dir",
        type=flag_types.path,
        metavar="DIR",
        help="write the waveform of each example's last stage there",
    )
    group.add_argument("--dump-waveform-file-prefix", default="", metavar="TEXT", help="of their names. Default: none")
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
    dataset = _as_dataset(config, arguments)
    names = [entry.id for entry in examples.entries(dataset)]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice:
        raise UserError(f"{dataset['dataset_path']}: two examples are called {twice}; names have to differ")
    files = _carried(config, dataset, arguments) if arguments.executor == "ray" else ()
    given = Given(config, dataset, names, files)
    environment = _environment(config["stages"], arguments)
    return devices.on_each_kind(arguments, partial(measured, given), (), False, environment, executor)


def _make_quick(config: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Keep the first example, one call and none before it, over the configuration, where no flag says otherwise."""
    for part, values in ((config["general"], QUICK_WHOLE), *((stage, QUICK_STAGE) for stage in config["stages"])):
        part.update((key, value) for key, value in values.items() if getattr(arguments, key) is None)


def _environment(stages: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> Optional[str]:
    """Return the environment that the stages need beside the main one, if any.  Raises UserError where a cluster would
    have to make several."""
    names = sorted({stage["environment"] for stage in stages} - {None, "main"})
    if len(names) > 1 and arguments.executor == "ray":
        raise UserError(
            f"--executor ray: takes one environment beside main, not {', '.join(names)}; leave the flag out"
        )
    return names[0] if names else None


class Given(NamedTuple):
    """config: of the whole and of each stage; dataset: as common.tools.examples takes it; names: of its examples;
    files: that every example reads."""

    config: Mapping[str, Any]
    dataset: Mapping[str, Any]
    names: Sequence[str]
    files: Tuple[str, ...]


def measured(given: Given, arguments: argparse.Namespace, executor: Executor) -> int:
    """On the devices of one executor."""
    config, dataset, names, files = given
    python = executor.python()
    device = executor.resolve_device(arguments.device, {"": Choice(python)})
    resolved = settings.resolve({"seed": arguments.seed, "threads": arguments.threads, "allocator": "system"}, device)
    tasks = [_task(name, dataset, config["stages"], arguments, files) for name in names]
    header = {
        "record": "pipeline",
        "name": arguments.config.stem,
        "config": {"dataset": dataset, **config},
        "stages": [stage["name"] for stage in config["stages"]],
        "examples": names,
        "settings": {"device": resolved.device, "threads": resolved.threads, "seed": resolved.seed},
    }
    with open_run(header, arguments.log_dir, arguments.resume, executor.machine) as run:
        if not arguments.quiet:
            stages = " -> ".join(header["stages"])
            print(f"measuring {stages} on {resolved.device}: {count(len(names), 'example')}", file=sys.stderr)
        return model_run.finish(run, tasks, python, resolved, arguments, executor, lambda: show(run, arguments))


def _carried(config: Mapping[str, Any], dataset: Mapping[str, Any], arguments: argparse.Namespace) -> Tuple[str, ...]:
    """See carried.files.  Raises UserError for what stays on this machine."""
    if dataset["dataset_type"] == "raw":
        raise UserError(
            "--executor ray: the audio files of a manifest do not go to nodes; store npz, or leave the flag out"
        )
    if arguments.dump_speech_waveforms_dir:
        raise UserError("--dump-speech-waveforms-dir: is a folder of this machine; leave it or --executor ray out")
    return carried.files([dataset["dataset_path"], list(config["stages"])])


def _task(
    name: str, dataset: Mapping[str, Any], stages: Sequence[Any], arguments: argparse.Namespace, files: Tuple[str, ...]
) -> Task:
    dump = arguments.dump_speech_waveforms_dir
    if dump:
        file = f"{arguments.dump_waveform_file_prefix}{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}"
        dump = str((dump / file).absolute()) + ".wav"
    given = {"dataset": dataset, "example": name, "stages": list(stages), "dump": dump}
    subject = "cascade" if any(stage["environment"] for stage in stages) else "pipeline"
    return Task(name, subject, given, files=files)


def _of_flags(arguments: argparse.Namespace) -> Dict[str, Any]:
    """What the command line says of the whole and of every stage."""
    found = {key: getattr(arguments, key, None) for key in (*WHOLE, "warmup", "repeats")}
    return {key: value for key, value in found.items() if value is not None}


def _as_dataset(config: Mapping[str, Any], arguments: argparse.Namespace) -> Dict[str, Any]:
    """As common.tools.examples takes it."""
    found = {key: config["general"][key] for key in WHOLE if key != "model_type"}
    return {**found, "seed": arguments.seed, "trust_pickle": arguments.trust_pickle}


def _write_subsets(arguments: argparse.Namespace) -> int:
    from common.tools import examples

    whole = {**WHOLE, **{key: value for key, value in _of_flags(arguments).items() if key in WHOLE}}
    dataset = _as_dataset({"general": whole}, arguments)
    for path in examples.write_subsets(dataset, arguments.write_subsets, arguments.subset_size):
        print(path)
    return EXIT_OK


def configured(path: Path, flags: Mapping[str, Any]) -> Dict[str, Any]:
    """{"general": every key of WHOLE, "stages": of each, every key of STAGE}: a stage over `general` over `flags` over
    the defaults.  Raises UserError."""
    found = configuration.read(path)
    places = _stages(found, path)
    general = configuration.mapping(found.get("general"), f"{path}: general")
    shared = [key for key in STAGE if key != "name"]
    configuration.check_keys(general, [*WHOLE, *shared], f"{path}: general")
    whole = {**WHOLE, **{key: value for key, value in {**flags, **general}.items() if key in WHOLE}}
    _check_whole(whole, path, len(places))
    stages: List[Dict[str, Any]] = []
    for place in places:
        own = configuration.mapping(found[place], f"{path}: {place}")
        configuration.check_keys(own, list(STAGE), f"{path}: {place}")
        under = {key: value for key, value in {**flags, **general}.items() if key in STAGE}
        stages.append(_stage({**STAGE, "name": place, **under, **own}, path, place))
    names = [stage["name"] for stage in stages]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise UserError(f"{path}: two stages are called {shown(name)}; give each a name of its own")
    return {"general": whole, "stages": stages}


def _stages(found: Mapping[str, Any], path: Path) -> List[str]:
    """stage1 ... stageN.  Raises UserError for a gap and for other keys."""
    numbers = sorted(int(name[5:]) for name in found if re.fullmatch(r"stage[1-9]\d{0,3}", name))
    known = ["general", *(f"stage{number}" for number in sorted({*numbers, *range(1, len(numbers) + 2)}))]
    configuration.check_keys(found, known, str(path))
    if not numbers:
        raise UserError(f"{path}: has no stage1; a system that is end to end has one stage")
    for place, number in enumerate(numbers, 1):
        if number != place:
            raise UserError(f"{path}: stage{place} is missing, but there is a stage{number}; number them without a gap")
    return [f"stage{number}" for number in numbers]


def _check_whole(whole: Dict[str, Any], path: Path, stages: int) -> None:
    where = f"{path}: general"
    kind = whole["model_type"]
    if kind is not None and kind not in [*MODEL_TYPES]:
        near = configuration.nearest(str(kind), list(MODEL_TYPES))
        raise UserError(f"{where}.model_type: unknown {shown(kind)}{near}; there are {', '.join(MODEL_TYPES)}")
    if kind is not None and stages not in MODEL_TYPES[kind]:
        wanted = " or ".join(map(str, MODEL_TYPES[kind]))
        raise UserError(
            f"{where}.model_type: {kind} has {wanted} {'stage' if wanted == '1' else 'stages'}, not {stages}"
        )
    if whole["dataset_type"] not in DATASET_TYPES:
        near = configuration.nearest(str(whole["dataset_type"]), DATASET_TYPES)
        raise UserError(f"{where}.dataset_type: unknown {shown(whole['dataset_type'])}{near}")
    if whole["dataset_size"] is not None:
        configuration.whole(whole["dataset_size"], "dataset_size")
    configuration.whole(whole["target_sr"], f"{where}.target_sr")
    configuration.several(whole["made_seconds"], f"{where}.made_seconds", configuration.positive)
    if whole["dataset_path"] is not None:
        located = configuration.located(configuration.text(whole["dataset_path"], f"{where}.dataset_path"), path)
        whole["dataset_path"] = str(located)


def _stage(values: Dict[str, Any], path: Path, place: str) -> Dict[str, Any]:
    where = f"{path}: {place}"
    if values["factory"] is None:
        raise UserError(f"{where}: has no factory; give module:name or file.py:name of what makes it")
    for key in ("name", "factory", *(key for key in ("builder", "converter") if values[key] is not None)):
        configuration.text(values[key], f"{where}.{key}")
    for key in ("factory", "builder", "converter"):
        if values[key] is not None:
            values[key] = configuration.python_name(values[key], path)
    values["arguments"] = configuration.mapping(values["arguments"], f"{where}.arguments")
    configuration.environment(values["environment"], f"{where}.environment")
    configuration.whole(values["warmup"], f"{where}.warmup", 0)
    configuration.whole(values["repeats"], f"{where}.repeats")
    return values


def show(run: Run, arguments: argparse.Namespace) -> Shown:
    """Print the table, and write it beside the records."""
    found = read(run.path)
    files = {f"stages.{end}": tables.render(found, how) for end, how in FILES}
    model_run.write(run.path, files, report.TITLE, [report.section([found])], figures([found]), arguments)
    text = tables.render(found, arguments.format)
    return ending.printed(text, text, found.statuses, arguments)


FILES: Tuple[Tuple[str, str], ...] = (("md", "markdown"), ("csv", "csv"), ("json", "json"))
