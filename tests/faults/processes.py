"""Faults of a command that measures, as real processes: nothing is left, and --resume ends in the same table."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from commands import ROOT, command, own_loss, piped, read
from faults import CODES, check, require

BENCHMARK = "--only reference --in-place --preset quick --limits false --max-seconds 0.05".split()
#: The other commands that measure, on the models of `MODELS`.  {folder}: that of the workspace.
TOOLS = {
    "flops": "{folder}/models.py:Net --input-shape 3x4",
    "check": "--only reference --in-place --preset quick",
    "profile": "--preset quick --model {folder}/models.py:Whole --loss torchaudio --size vocab_size=11 --batch-size 2 "
    "--shape-file {folder}/s.pt --steps 1 --trace-steps 1 --device cpu --threads 1",
    "inference": "{folder}/grid.yaml --device cpu --threads 1 --max-seconds 0.05 --max-samples 3",
    "pipelines": "--config {folder}/stages.yaml --device cpu --threads 1",
}
MODELS = """
import torch
from torch import nn

class Net(nn.Linear):
    sample_rate = 1000
    def __init__(self):
        super().__init__(4, 4)
    def forward(self, rows):
        return super().forward(rows.reshape(-1, 4))

class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.front, self.symbols, self.out = nn.Linear(80, 8), nn.Embedding(11, 8), nn.Linear(8, 11)
    def forward(self, features, lengths, symbols, symbol_lengths):
        frames, tokens = self.front(features[:, ::4]), self.symbols(symbols)
        return self.out(torch.tanh(frames[:, :, None] + tokens[:, None])), (lengths + 3) // 4

def rows_of(source):
    return source["src_tokens"] if isinstance(source, dict) else source
"""
GRID = """
pretrained_model: {source: "models.py:Net"}
profiling_dimensions: {audio_mockup_secs: [0.1, 0.2], batch_sizes: [1], triangle_only: false}
"""
STAGES = """
general: {made_seconds: [0.1, 0.2], target_sr: 1000, warmup: 0, repeats: 1, builder: "models.py:rows_of"}
stage1: {name: a, factory: "models.py:Net"}
stage2: {name: b, factory: "models.py:Net"}
stage3: {name: c, factory: "models.py:Net"}
"""
#: What a table says that no other measurement changes.
TOLD = "name label phase size case result status stage examples failed macs flops audio_mockup_secs dtype loss".split()
#: What torch itself leaves in TMPDIR, for its next process.
CACHE = "torchinductor_"
#: Exit code of a command that a signal ended.
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}


class Workspace:
    """Give one command a log and a scratch folder, and a variable by which all processes that it starts are found.

    tool: a key of TOOLS, or "run", the benchmark; table: what the last command printed, as far as it is always the
    same."""

    def __init__(self, folder: Path, tool: str = "run"):
        import torch

        self.tool, self.table = tool, ""
        for name, text in {"models.py": MODELS, "grid.yaml": GRID, "stages.yaml": STAGES}.items():
            (folder / name).write_text(text)
        self.mark = f"MARK_OF_FAULT={uuid.uuid4().hex}"
        self.folder, self.log, self.scratch, self.shapes = folder, folder / "log", folder / "scratch", folder / "s.pt"
        self.scratch.mkdir(exist_ok=True)
        torch.save(torch.tensor([[12 + 3 * i, 2 + i] for i in range(8)], dtype=torch.int32), self.shapes)

    def start(self, *words: Any, **options: Any) -> subprocess.Popen[str]:
        """Start the command; words: more flags, or others of the same name."""
        line = ["benchmark_all.py", *BENCHMARK, "--passes", "correctness,memory", "--shape-file", self.shapes]
        if self.tool != "run":
            flags = TOOLS[self.tool].format(folder=self.folder).split()
            line = ["rnnt-bench", self.tool, *flags, "--format", "json"]
        variables = {"TMPDIR": str(self.scratch), "PYTHONDONTWRITEBYTECODE": "1", **dict([self.mark.split("=")])}
        env = {**os.environ, **variables, **options.pop("env", {})}
        line = command(*line, "--log-dir", self.log, *words)
        return piped(line, cwd=ROOT, env=env, errors="replace", **options)

    def run(self, *words: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        done = ended(self.start(*words, **options))
        if self.tool != "run" and done.returncode == 0:
            rows = json.loads(done.stdout)
            self.table = json.dumps([{key: row[key] for key in TOLD if key in row} for row in rows], indent=1)
        return done

    def left(self) -> list[str]:
        """Return the command lines of its processes that still run."""
        processes = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in (entry / "environ").read_bytes():
                    processes.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        return processes

    def nothing_is_left(self, scratch: bool = True, seconds: float = 5) -> None:
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        require(not self.left(), f"processes are left: {self.left()}")
        files = [path.name for path in self.scratch.iterdir() if not path.name.startswith(CACHE)] if scratch else []
        hidden = [path.name for path in self.log.rglob(".*")] if scratch and self.log.exists() else []
        require(not files and not hidden, f"files are left: {files + hidden}")

    def rows(self) -> dict[str, tuple[Any, ...]]:
        """Return what the table says, without what another measurement changes."""
        done = read(command("summarize.py", self.log, "--format", "json"))
        check(done)
        keys = ("status", "loss_error", "grad_error", "batches", "device", "dtype")
        return {row["name"]: tuple(row.get(key) for key in keys) for row in json.loads(done.stdout or "[]")}

    def resumed(self) -> None:
        """--resume ends in the table of a run that was not disturbed; what was complete is there still."""
        before = {path: path.read_bytes() for path in self.log.glob("*/*.jsonl")}
        done = self.run(*(["--resume"] if any(before.values()) else []))
        if done.returncode == 2 and "--resume: no run" in done.stderr:  # its first line was not written yet
            done = self.run()
        check(done, (0,))
        for path, content in before.items():
            complete = content[: content.rfind(b'"record":"status"')] if b'"record":"status"' in content else b""
            require(path.read_bytes().startswith(complete), f"{path.parent.name}: what was complete is gone")
        table, _, files = undisturbed(self.tool)
        require(self.told() == table, f"another table: {self.told()}, not {table}")
        require(self.files() == files, f"other files: {self.files()}, not {files}")
        self.nothing_is_left(scratch=False)

    def told(self) -> Any:
        return self.rows() if self.tool == "run" else self.table

    def files(self) -> set[str]:
        names = {path.name for path in self.log.rglob("[!.]*") if path.is_file()}
        return {name for name in names if "trace" not in name}  # which are named by time


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for a process; return how it ended and what it printed."""
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return subprocess.CompletedProcess(process.args, -1000, "", "no end within 120 s")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


@functools.cache
def undisturbed(tool: str = "run") -> tuple[Any, float, set[str]]:
    """Return (the table of a command that no fault met, its seconds, the names of its files)."""
    workspace, since = Workspace(Path(tempfile.mkdtemp(prefix="undisturbed-")), tool), time.monotonic()
    check(workspace.run(), (0,))
    seconds = time.monotonic() - since
    workspace.nothing_is_left()
    return workspace.told(), seconds, workspace.files()


def signals(seed: int, folder: Path) -> None:
    """A signal at a random moment of a command that measures."""
    commands = ["run", *TOOLS]
    chance, workspace = random.Random(f"signals {seed}"), Workspace(folder, commands[seed % len(commands)])
    number = list(STOPPED)[(seed + seed // len(commands)) % len(STOPPED)]
    wait = chance.uniform(0.0, undisturbed(workspace.tool)[1])
    process = workspace.start()
    time.sleep(wait)
    process.send_signal(number)
    done = ended(process)
    # Before Python is up a signal kills it, and one that comes last meets a command that is done.
    check(done, (STOPPED[number], -number, 0))
    workspace.nothing_is_left(scratch=done.returncode != -signal.SIGKILL)
    workspace.resumed()


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """`folder` as a file system of `size` bytes; False where this user may not mount one."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def disks(seed: int, folder: Path) -> None:
    """No room for the n-th page of the log folder; then there is room again."""
    workspace, size = Workspace(folder), 4096 * random.Random(f"disks {seed}").randrange(1, 14)
    with small_disk(workspace.log, size) as mounted:
        check(workspace.run(**({} if mounted else {"preexec_fn": lambda: _limit(resource.RLIMIT_FSIZE, size)})))
        workspace.nothing_is_left()
        workspace.rows()
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=8m", str(workspace.log)], check=True)
        workspace.resumed()


def _limit(kind: int, size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(kind, (size, size))


#: Limits of a command that measures: (a resource, or a variable of its environment, the least, the most).
LIMITS: tuple[tuple[Any, int, int], ...] = (
    (resource.RLIMIT_AS, 300 * 2**20, 1000 * 2**20),
    (resource.RLIMIT_AS, 1000 * 2**20, 4000 * 2**20),
    (resource.RLIMIT_NOFILE, 7, 30),
    (resource.RLIMIT_FSIZE, 0, 20000),
    ("TMPDIR", 4096, 2**18),
)


def limits(seed: int, folder: Path) -> None:
    """Too little of something; then enough of it."""
    chance, (kind, least, most) = random.Random(f"limits {seed}"), LIMITS[seed % len(LIMITS)]
    size, workspace = chance.randint(least, most), Workspace(folder)
    with contextlib.ExitStack() as stack:
        options: dict[str, Any] = {"preexec_fn": lambda: _limit(kind, size)}
        if kind == "TMPDIR":
            mounted = stack.enter_context(small_disk(folder / "small", size))
            options = {"env": {"TMPDIR": str(folder / ("small" if mounted else "nowhere"))}}
        done = workspace.run(**options)
    check(done, (0, 1) if kind == "TMPDIR" else CODES)
    if kind == resource.RLIMIT_NOFILE:
        require("TMPDIR" not in done.stderr, f"a disk that is not full: {done.stderr}")
    workspace.nothing_is_left()
    workspace.resumed()


#: Ends a loop over descriptors that are not the loss's, as after a double close in C.
OTHERS = "\n    for number in range(3, 20):\n        try: os.{}\n        except OSError: pass"
#: What the loss of a stranger does at its first call, and the statuses that its row may have.
ADAPTERS: tuple[tuple[str, Collection[str]], ...] = (
    ("import os" + OTHERS.format("write(number, b'7\\n')"), ["error"]),
    ("import os" + OTHERS.format("close(number)"), ["error"]),
    ("from rnnt_bench.core.errors import UserError\n    raise UserError('mine')", ["error"]),
    ("time.sleep(600)", ["timeout"]),
    ("import subprocess; subprocess.Popen(['sh', '-c', 'sleep 300 & sleep 300 & wait'])", ["ok"]),
    ("import ctypes; ctypes.string_at(0)", ["error"]),
    ("raise MemoryError", ["oom"]),
    ("import nowhere", ["missing"]),
    ("return None", ["error"]),
    ("return logits.sum() * float('nan')", ["error"]),
    ("raise RuntimeError('\\x1b[2J' + 'x' * 10**7)", ["error"]),
    ("print('\\x1b]0;x\\x07' * 10**7)", ["ok"]),
    ("import os; os.kill(0, 15)", ["error"]),
    ("import os; os._exit(0)", ["error"]),
    ("import threading; threading.Thread(target=time.sleep, args=(600,)).start()", ["ok"]),
    ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", ["error"]),
)


def adapters(seed: int, folder: Path) -> None:
    """A loss of a stranger's costs its own row alone."""
    workspace, (does, statuses) = Workspace(folder), ADAPTERS[seed % len(ADAPTERS)]
    script = own_loss(folder, in_loss=f"import time, torch\n    {does}")
    beside = [] if "timeout" in statuses else ["reference"]
    name = script.stem[len("benchmark_") :]
    names = ",".join([str(script), *beside])
    done = workspace.run("--only", names, "--passes", "correctness", "--timeout", "60" if beside else "3")
    check(done, (0, 1))  # whatever a loss does is no mistake of the user's
    require("no room" not in done.stderr, f"a disk that is not full: {done.stderr}")
    rows = workspace.rows()
    require(set(rows) == {name, *beside}, f"rows {rows}")
    status = rows.pop(name)[0]
    require(status in statuses, f"{does}: {status}, not {statuses}")
    require(all(row == undisturbed()[0][other] for other, row in rows.items()), f"beside it: {rows}")
    workspace.nothing_is_left()
    size = sum(path.stat().st_size for path in workspace.log.glob("*/results.jsonl"))
    require(size < 10**6, f"records of {size} bytes")


#: By name: the faults, and how many of them `make faults` tries.
KINDS = {"signals": (signals, 24), "disks": (disks, 9), "limits": (limits, 10), "adapters": (adapters, len(ADAPTERS))}
