"""Runs the jobs of a command on this machine, or on the devices of a Ray cluster, kind by kind."""

from __future__ import annotations

import argparse
import sys
from contextlib import contextmanager
from typing import Callable, Iterator, Optional, Sequence

from common.core.errors import EXIT_FAILED, EXIT_OK, UserError
from common.core.text import count
from common.jobs import cluster
from common.jobs.executor import Executor
from common.jobs.local import Local
from common.records.run import NothingToResume


def on_each_kind(
    arguments: argparse.Namespace,
    measured: Callable[[argparse.Namespace, Executor], int],
    names: Sequence[str] = (),
    controls: bool = False,
    environment: Optional[str] = None,
    executor: Optional[Executor] = None,
) -> int:
    """Call `measured` as --executor says, with the devices of each kind by themselves; returns the exit code.  names,
    controls, environment: see cluster.kinds; executor: one in place of what --executor says."""
    if executor or arguments.executor == "local":
        return measured(arguments, executor or Local())
    _check(arguments)
    device = arguments.device.partition(":")[0]
    with cluster.kinds(arguments.ray_address, device, names, controls, environment) as kinds:
        codes = [EXIT_OK]
        for kind in kinds:
            if codes[-1] not in (EXIT_OK, EXIT_FAILED):  # Ctrl-C
                break
            _say(arguments, kind, kind.label)
            try:
                codes.append(measured(arguments, kind))
            except NothingToResume:
                if kind is kinds[0]:
                    raise
                anew = argparse.Namespace(**{**vars(arguments), "resume": False})  # the run was stopped before its turn
                codes.append(measured(anew, kind))
    return max(codes)


@contextmanager
def on_all(arguments: argparse.Namespace, names: Sequence[str]) -> Iterator[Executor]:
    """Yield the executor of a command whose results do not depend on the device: this machine, or all devices of the
    cluster as one kind.  Raises UserError."""
    if arguments.executor == "local":
        yield Local()
        return
    _check(arguments)
    with cluster.kinds(arguments.ray_address, arguments.device.partition(":")[0], names) as kinds:
        every = cluster.together(kinds)
        _say(arguments, every, ", ".join(kind.label for kind in kinds))
        yield every


def _check(arguments: argparse.Namespace) -> None:
    if getattr(arguments, "in_place", False):
        raise UserError(
            "--in-place does not go with --executor ray, whose nodes have environments of their own: remove one"
        )


def _say(arguments: argparse.Namespace, kind: cluster.Kind, label: str) -> None:
    if not getattr(arguments, "quiet", False):
        print(f"on {count(len(kind.devices), 'device')}: {label}", file=sys.stderr)
