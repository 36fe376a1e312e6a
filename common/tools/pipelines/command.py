"""The command `rnnt-bench pipelines`: read stages in a YAML file and flags, measure every example,
print the costs."""

from __future__ import annotations

import argparse
from pathlib import Path

from rnnt_bench.cli.parser import add_setting
from rnnt_bench.core import files, flag_types, settings
from rnnt_bench.core.arguments import Parser
from rnnt_bench.jobs import job, session
from rnnt_bench.records.schema import as_written
from rnnt_bench.setup import interpreters
from rnnt_bench.tools import commands
from rnnt_bench.tools.pipelines.datasets import READERS, examples
from rnnt_bench.tools.pipelines.rows import TOOL, General, Pipeline, Request, answer, configured

DESCRIPTION = """Measure what an utterance costs in a speech system or cascade: time, peak memory and operations.

The configuration names the stages; every stage of every example of the data set is measured in a process of its own.
docs/inference.md explains every number, and how to write stages of your own."""
EXAMPLES = """examples:
  rnnt-bench pipelines --config examples/pipelines/pipeline.yaml
  rnnt-bench pipelines --config examples/pipelines/s2s.yaml --repeats 10
  rnnt-bench pipelines --config mine.yaml --dataset-type raw --dataset-path test.tsv --dataset-size 20

A stage's own value comes first, then that of `general`, then the command line's.

Exit code: 0; 1 if an example failed; 2 for bad usage, or if something is missing."""
DEFAULT = files.ROOT / "examples" / "pipelines" / "pipeline.yaml"
#: Keys of a configuration that flags of the same name give too.
FLAGS = (*General.__struct_fields__, "warmup", "repeats")
#: Values of --preset quick, where the flags of these names give no other.
QUICK = {"dataset_size": 1, "warmup": 0, "repeats": 1}


def parser() -> Parser:
    """Return the parser of `rnnt-bench pipelines`."""
    result = Parser(description=DESCRIPTION, epilog=EXAMPLES)
    group = result.add_argument_group("the stages")
    group.add_argument(
        "--config",
        type=flag_types.path,
        default=DEFAULT,
        metavar="FILE",
        help="YAML file with the keys general and stage1 ... stageN, each with factory (module:name or file.py:name), "
        "arguments, python, builder, converter, name, warmup, repeats. Default: examples/pipelines/pipeline.yaml",
    )
    group = result.add_argument_group("the data set")
    whole = flag_types.Whole(1)
    group.add_argument(
        "--dataset-type",
        choices=("made", *READERS),
        help="Source of the examples. made: noise of --made-seconds; raw: audio of a wav2vec manifest; jsonl: text, "
        'lines {"id": "a", "tokens": [4, 5, 2]}; npy: text, as fairseq\'s benchmark saves it. Default: made',
    )
    group.add_argument(
        "--dataset-path", metavar="FILE", help="File of the data set, unless it is made."
    )
    group.add_argument(
        "--dataset-size",
        type=whole,
        metavar="K",
        help="Measure only the first K examples. Default: all",
    )
    group.add_argument(
        "--target-sr", type=whole, metavar="HZ", help="Sample rate of audio. Default: 16000"
    )
    group.add_argument(
        "--made-seconds",
        type=lambda text: list(map(flag_types.positive, flag_types.names(text))),
        metavar="A,B",
        help="Seconds of each made example. Default: 2,4,8",
    )
    group = result.add_argument_group("the run")
    add_setting(group, "threads", "Number of torch's CPU threads. Default: all")
    group.add_argument(
        "--warmup",
        type=flag_types.Whole(0),
        metavar="K",
        help="Calls before the timed ones. Default: 2",
    )
    group.add_argument(
        "--repeats", type=whole, metavar="K", help="Number of timed calls. Default: 5"
    )
    quick = "the first example, one call and none before it"
    commands.add_flags(
        group, seed="Seed of weights and noise", folder="pipeline-<config>", quick=quick
    )
    return result


def main(arguments: argparse.Namespace, executor: session.Executor | None = None) -> int:
    """Measure the pipeline of a configuration; return the exit code."""
    python = interpreters.with_torch("torchaudio", "yaml")
    flags = {
        key: value for key, value in vars(arguments).items() if key in FLAGS and value is not None
    }
    quick = {}
    if arguments.preset:  # "quick" is the only one; flags go before it
        quick = {key: value for key, value in QUICK.items() if key not in flags}
    config = configured(arguments.config, flags, quick)
    config.examples = list(examples(config.general))
    device = interpreters.resolve_device(arguments.device, [python])
    values = {"seed": arguments.seed, "threads": arguments.threads, "allocator": "system"}
    resolved = settings.resolve(values, device)
    tasks = planned(config)
    return commands.measured(
        TOOL, arguments.config.stem, config, tasks, resolved, arguments, answer, executor
    )


def planned(config: Pipeline) -> list[job.Task]:
    """Return a task for each stage of each example.

    The task of any stage but the last leaves its outputs in a file, which the next stage's task
    takes.  The file is called "0-1.pt", by the numbers of example and stage, from 0."""
    tasks = []
    for number, example in enumerate(config.examples):
        takes = None
        for index, stage in enumerate(config.stages):
            is_last = stage is config.stages[-1]
            leaves = None if is_last else f"{number}-{index}.pt"
            task = job.Task(
                config.job(example, stage),
                TOOL,
                as_written(Request(config, number, index)),
                python=Path(stage.python) if stage.python else None,
                takes=takes,
                leaves=leaves,
            )
            tasks.append(task)
            takes = leaves
    return tasks
