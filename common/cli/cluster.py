"""Run each cell of a sweep on a node of a Ray cluster (--executor ray).

A cell is one combination of the values of --sweep.  It is a plain run of benchmark_all.py, which
measures all losses on one device, so no comparison crosses devices.  The folders of the run come
back into --log-dir.  This module never imports Ray: it starts rnnt_bench.cli.ray_driver in a Python
that has Ray.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rnnt_bench.core import settings
from rnnt_bench.core.errors import EXIT_FAILED, EXIT_OK, EXIT_USAGE, UserError, say
from rnnt_bench.core.files import ROOT
from rnnt_bench.core.text import count, plain
from rnnt_bench.records.run import claim_folder
from rnnt_bench.setup import environments

#: The environment variable that names a Python with Ray, where that is not the ray environment: the
#: cluster may have another version of Ray.
PYTHON = "RAY_PYTHON"


class Answer(NamedTuple):
    """Hold a line that the driver writes when the command of a cell has ended.

    Attributes:
        cell: index of the command
        code: its exit code
        message: the last line of its stderr
        node: the computer that ran it
        folder: its log folder, a .tar.gz in base64
    """

    cell: int
    code: int
    message: str
    node: str
    folder: str


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags that say where cells are run."""
    group = parser.add_argument_group("a cluster")
    group.add_argument(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="Where cells of --sweep are run. local: one after the other on this machine; ray: each on a GPU, or a CPU "
        "slot, of a Ray cluster, in the checkout of that node (docs/clusters.md). Default: local",
    )
    group.add_argument(
        "--ray-address",
        default="auto",
        metavar="auto|HOST:PORT",
        help="Address of the cluster's head; auto: the one that runs on this machine. Default: auto",
    )


def measured(arguments: Namespace) -> Iterator[Path]:
    """Run every cell on the cluster, with the flags of this command; yield each run folder that
    comes back.

    Raises UserError for flags that a cluster cannot have, and if the cluster cannot be used.  Also
    raises UserError if some cells could not be measured, but only when all cells have ended."""
    if arguments.resume or arguments.in_place:
        flag = "--resume" if arguments.resume else "--in-place"
        raise UserError(
            f"{flag} does not go with --executor ray, whose runs are of the nodes' checkouts: remove one"
        )
    cells = settings.cells(arguments.sweep)
    commands = []
    for cell in cells:
        axes = [
            f"--sweep={settings.flag(key)}={settings.worded(value)}" for key, value in cell.items()
        ]
        commands.append([*shared(sys.argv[1:]), *axes])
    lost = 0
    device_type = arguments.device.partition(":")[0]
    for answer in _answers(commands, device_type, arguments.ray_address):
        name = settings.words(cells[answer.cell]) or "the run"
        if answer.folder:  # a command that failed or was stopped may have measured a part
            yield from unpacked(base64.b64decode(answer.folder), arguments.log_dir)
        # EXIT_FAILED is of a cell that was measured, with a loss that failed.
        if answer.code not in (EXIT_OK, EXIT_FAILED):
            lost += 1
            say(f"warning: {name}: {plain(answer.message)} ({answer.node})")
        elif not arguments.quiet:
            say(f"{name}: measured on {answer.node}")
    if lost:
        raise UserError(
            f"--executor ray: {lost} of {count(len(cells), 'cell')} could not be measured, see above"
        )


def shared(words: Sequence[str]) -> list[str]:
    """Return the words of a command line that each run on the cluster gets too, and "--quiet".

    The name of the command, what is swept, and flags that concern this machine alone are left out:
    a parser of these flags takes them with their values, and returns the words it does not know.

    words: "sweep", "vocab-size=500,4096", "--only", "k2", "--log-dir", "here"."""
    left_out = ArgumentParser(add_help=False)
    for flag in ("--executor", "--ray-address", "--log-dir", "--sweep"):
        left_out.add_argument(flag)
    for flag in ("--quiet", "--details"):
        left_out.add_argument(flag, action="store_true")
    flags = words[1:] if words[:1] in (["run"], ["sweep"]) else words
    _, kept = left_out.parse_known_args(flags)
    return [*(word for word in kept if not _is_axis(word)), "--quiet"]


def _is_axis(word: str) -> bool:
    """Return whether a word is an axis of the command `sweep`: "vocab-size=500,4096"."""
    try:
        settings.axis(word)
    except UserError:
        return False
    return not word.startswith("-")


def _answers(commands: list[list[str]], device_type: str, address: str) -> Iterator[Answer]:
    """Run commands on the cluster; yield an answer when each has ended.  Raises UserError.

    device_type: "cpu", "cuda" or "auto"; address: of the cluster's head."""
    chosen = os.environ.get(PYTHON)
    python = Path(chosen) if chosen else environments.interpreter("ray")
    if python is None:
        raise UserError(f"--executor ray: {environments.reason('ray')}")
    command = [str(python), "-m", "rnnt_bench.cli.ray_driver"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as stdin, tempfile.TemporaryFile("w+") as errors:
        json.dump({"address": address, "device": device_type, "commands": commands}, stdin)
        stdin.seek(0)
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=variables,
                text=True,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        except OSError as error:
            raise UserError(f"--executor ray: {python} cannot be run: {error.strerror}") from error
        try:
            for line in process.stdout or ():
                yield Answer(**json.loads(line))
            code = process.wait()
        finally:
            process.kill()  # Ray ends its tasks then; it does nothing to a process that has ended
            process.wait()
        if code:
            errors.seek(0)
            message = (errors.read().strip().splitlines() or [f"exit code {code}"])[-1]
            doubt = "" if code == EXIT_USAGE else f" (does {python} have Ray?)"
            raise UserError(f"--executor ray: {plain(message)}{doubt}")


def unpacked(packed: bytes, log_dir: Path) -> Iterator[Path]:
    """Write the run folders of a packed log folder into `log_dir`, each under a name that is free;
    yield their paths.

    packed: a .tar.gz with FOLDER/FILE of each run; other members are left out."""
    runs: dict[str, dict[str, bytes]] = {}
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            folder, _, name = member.name.partition("/")
            stream = archive.extractfile(member)
            if stream and name and "/" not in name:
                runs.setdefault(folder, {})[name] = stream.read()
    for folder, files in sorted(runs.items()):
        claim = claim_folder(log_dir, folder)  # its path is that of a lock in the new folder
        for name, content in files.items():
            claim.path.with_name(name).write_bytes(content)
        claim.release()
        yield claim.path.parent
