"""Faults of a command that measures, as real processes: some seconds each.

After each fault nothing that it started is left, its scratch folder is empty, and --resume ends in the table of a run
that was not disturbed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any, Callable, Collection, Dict, Iterator, List, Tuple

from faults.invariants import CODES, Ended, check, require

ROOT = Path(__file__).resolve().parents[2]
BENCHMARK = "benchmark_all.py --only reference --in-place --preset quick --limits false --max-seconds 0.05".split()
#: What is asked of it, some jobs that take some seconds: a sweep and a search write files and end in ways of their own.
CHOICES = {
    "run": ["--passes", "correctness,memory"],
    "sweep": ["--passes", "correctness", "--sweep", "vocab-size=8,9"],
    "search": ["--find-largest", "batch-size", "--largest-cap", "2"],
}
#: What torch itself leaves in TMPDIR, for its next process.
CACHE = "torchinductor_"
#: Of a command that a signal ended.
STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGKILL: -9}


class Mark:
    """A variable of the environment by which every process is found that a command has started."""

    def __init__(self) -> None:
        self.variable = {"MARK_OF_FAULT": uuid.uuid4().hex}

    def left(self) -> List[str]:
        """Return the command lines of the processes that still run."""
        (pair,), processes = self.variable.items(), []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if "=".join(pair).encode() in (entry / "environ").read_bytes():
                    processes.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace"))
        return processes


class Place(Mark):
    """Give one command a log and a scratch folder, and a mark by which its processes are found.  choice: of CHOICES,
    for `benchmark`."""

    def __init__(self, folder: Path, choice: str = "run"):
        super().__init__()
        self.folder, self.log, self.scratch, self.choice = folder, folder / "log", folder / "scratch", choice
        self.scratch.mkdir(exist_ok=True)
        self.shapes = folder / "shapes.pt"
        if not self.shapes.exists():
            import torch

            torch.save(torch.tensor([[12 + 3 * i, 2 + i] for i in range(8)], dtype=torch.int32), self.shapes)

    def start(self, words: List[str], **options: Any) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(self.scratch), **self.variable, **options.pop("env", {})}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, str(ROOT / words[0]), *words[1:]]
        settings = {**streams, "cwd": ROOT, "env": environment, "errors": "replace", **options}
        return subprocess.Popen(command, text=True, **settings)

    def run(self, words: List[str], **options: Any) -> Ended:
        return ended(self.start(words, **options))

    def benchmark(self, *flags: str) -> List[str]:
        where = ["--shape-file", str(self.shapes), "--log-dir", str(self.log)]
        return [*BENCHMARK, *CHOICES[self.choice], *where, *flags]

    def nothing_is_left(self, scratch: bool = True, seconds: float = 5) -> None:
        deadline = time.monotonic() + seconds
        while self.left() and time.monotonic() < deadline:
            time.sleep(0.05)
        require(not self.left(), f"processes are left: {self.left()}")
        files = [path.name for path in self.scratch.iterdir() if not path.name.startswith(CACHE)] if scratch else []
        hidden = [path.name for path in self.log.rglob(".*")] if scratch and self.log.exists() else []
        require(not files and not hidden, f"files are left: {files + hidden}")

    def rows(self) -> Dict[str, Tuple[Any, ...]]:
        """Return what tables say, without what another measurement changes."""
        done = self.run(["summarize.py", str(self.log), "--format", "json"])
        check(done, CODES)
        keys = ("status", "loss_error", "grad_error", "batches", "device", "dtype")
        files: Dict[str, Tuple[Any, ...]] = {}
        for row in json.loads(done.out or "[]"):
            size = [row["largest"].get(key) for key in ("size", "limited_by")]
            name = f"{row['name']} {row['sweep'].get('vocab_size', '')}".strip()
            files[name] = tuple(map(repr, [*map(row.get, keys), *size]))
        return files

    def resumed(self) -> None:
        """--resume ends in the table of a run that was not disturbed; what was there is there still."""
        before = {path: path.read_bytes() for path in self.log.glob("*/*.jsonl")}
        again = any(before.values())
        done = self.run(self.benchmark(*(["--resume"] if again else [])))
        if again and done.code == 2 and "leave the flag out" in done.err:  # its first line was not written yet
            done = self.run(self.benchmark())
        check(done, (0,))
        for path, content in before.items():
            whole = content[: content.rfind(b'"record":"status"')] if b'"record":"status"' in content else b""
            require(path.read_bytes().startswith(whole), f"{path.parent.name}: what was complete is gone")
        rows, wanted = self.rows(), undisturbed(self.choice)[0]
        require(rows == wanted, f"another table than undisturbed: {rows}, not {wanted}")
        self.nothing_is_left(scratch=False)


def ended(process: subprocess.Popen[str]) -> Ended:
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return Ended(-1000, "", "no end within 120 s")
    return Ended(process.returncode, out or "", err or "")


@functools.lru_cache(maxsize=len(CHOICES))
def undisturbed(choice: str = "run") -> Tuple[Dict[str, Tuple[Any, ...]], float]:
    """(the rows of a run that no fault met, its seconds)"""
    site, since = Place(Path(tempfile.mkdtemp(prefix="undisturbed-")), choice), time.monotonic()
    check(site.run(site.benchmark()), (0,))
    seconds = time.monotonic() - since
    site.nothing_is_left()
    return site.rows(), seconds


def signals(seed: int, folder: Path) -> None:
    """A signal at a random moment, sometimes two."""
    chance = random.Random(f"signals {seed}")
    site, number = Place(folder, chance.choice(list(CHOICES))), chance.choice(list(STOPPED))
    wait, twice = chance.uniform(0.0, undisturbed(site.choice)[1]), chance.random() < 0.3
    process = site.start(site.benchmark())
    time.sleep(wait)
    for _ in range(2 if twice else 1):
        if process.poll() is None:
            process.send_signal(number)
            time.sleep(0.05)
    done = ended(process)
    # Before Python is up a signal kills it, and one that comes last meets a command that is done.
    check(done, (STOPPED[number], -number, 0))
    site.nothing_is_left(scratch=done.code != -signal.SIGKILL)
    site.resumed()


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """`folder` as a file system of `size` bytes; False where this user may not mount one."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True) if os.geteuid() == 0 else None
    mounted = done is not None and done.returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def disks(seed: int, folder: Path) -> None:
    """No room for the n-th byte of the log folder; then there is room again."""
    chance = random.Random(f"disks {seed}")
    site, size = Place(folder, chance.choice(list(CHOICES))), 4096 * chance.randrange(1, 14)
    with small_disk(site.log, size) as mounted:

        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        check(site.run(site.benchmark(), **({} if mounted else {"preexec_fn": limit})), CODES)
        site.nothing_is_left()
        check(site.run(["summarize.py", str(site.log)]), CODES)
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=8m", str(site.log)], check=True)
        site.resumed()


#: What the loss of a stranger does, at import and at one of its calls: (there, here, the statuses that its row may
#: have).  SIZE: a number of the seed's.
ADAPTERS: Tuple[Tuple[str, str, Collection[str]], ...] = (
    ("import os; os._exit(0)", "", ["error"]),
    ("import sys; sys.exit(3)", "", ["error"]),
    ("import os; os.chdir('/')", "", ["ok"]),
    ("import time; time.sleep(600)", "", ["timeout"]),
    ("import nowhere", "", ["missing"]),
    ("raise KeyboardInterrupt", "", ["error"]),
    ("import os; os.closerange(0, 3)", "", ["ok", "error"]),
    ("import sys; sys.setrecursionlimit(50)", "", ["error"]),
    ("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", "time.sleep(600)", ["timeout"]),
    ("", "return None", ["error"]),
    ("", "return logits.sum() * float('nan')", ["error"]),
    ("", "raise MemoryError", ["oom"]),
    ("", "raise RuntimeError('x' * SIZE)", ["error"]),
    ("", "raise RuntimeError('\\x1b[2J\\udcff')", ["error"]),
    ("", "print('\\x1b]0;x\\x07' * SIZE)", ["ok"]),
    ("print('x' * 10 * SIZE)", "", ["ok"]),
    ("", "import ctypes; ctypes.string_at(0)", ["error"]),
    ("", "import os; os.kill(0, 15)", ["error"]),
    ("", "import os; os.abort()", ["error"]),
    ("", "import subprocess; subprocess.Popen(['setsid', 'sleep', '300'])", ["ok"]),
    ("", "import subprocess; subprocess.Popen(['sh', '-c', 'setsid sleep 300 & setsid sleep 300 & wait'])", ["ok"]),
    ("", "import threading, time; threading.Thread(target=time.sleep, args=(600,)).start()", ["ok"]),
    ("", "import tempfile; tempfile.mkdtemp()", ["ok"]),
    ("", "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))", ["ok", "error"]),
    ("", "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", ["error"]),
)


def adapters(seed: int, folder: Path) -> None:
    """A loss of a stranger's costs its own row alone."""
    chance = random.Random(f"adapters {seed}")
    amount, call = str(10 ** chance.randrange(3, 8)), chance.randrange(2)
    at_import, in_loss = (words.replace("SIZE", amount) for words in ADAPTERS[seed % len(ADAPTERS)][:2])
    statuses = ADAPTERS[seed % len(ADAPTERS)][2]
    site, text = Place(folder), (ROOT / "benchmark_mine.py").read_text()
    script = folder / "benchmark_stranger.py"
    text = text.replace("from types", f"{at_import}\nimport itertools\nCALLS = itertools.count()\nfrom types", 1)
    imports = "    import torch\n"
    now = f"    import time\n    if next(CALLS) == {call}:\n        {in_loss or 'pass'}\n"
    script.write_text(text.replace(imports, imports + now, 1))
    beside = [] if "timeout" in statuses else ["reference"]
    words = site.benchmark("--timeout", "60" if beside else "3")
    words[words.index("--only") + 1] = ",".join([str(script), *beside])
    words[words.index("--passes") + 1] = "correctness"
    check(site.run(words), CODES)
    rows = site.rows()
    require(set(rows) == {"stranger", *beside}, f"rows {rows}")
    status = rows.pop("stranger")[0]
    require(status in map(repr, statuses), f"{in_loss or at_import}: {status}, not {statuses}")
    require(all(row == undisturbed()[0][name] for name, row in rows.items()), f"beside it: {rows}")
    scratch = "mkdtemp" not in in_loss
    site.nothing_is_left(scratch)
    size = sum(path.stat().st_size for path in site.log.glob("*/results.jsonl"))
    require(size < 10**6, f"records of {size} bytes")


#: Commands that print, and need no torch: a new one is a line.
PRINTERS: Tuple[List[str], ...] = (
    ["summarize.py", "{log}"],
    ["report.py", "{log}", "--output", "{log}/../report.html"],
    ["compare.py", "{log}", "{log}"],
    ["conformance.py", "--list"],
    ["benchmark_all.py", "--list"],
    ["count_flops.py", "--rules"],
    ["benchmark_all.py", "--rounds", "none"],
)


def streams(seed: int, folder: Path) -> None:
    """stdout or stderr is full, closed, or a pipe that nobody reads."""
    from faults.files import whole

    chance, site = random.Random(f"streams {seed}"), Place(folder)
    words = [word.format(log=whole().log) for word in PRINTERS[seed % len(PRINTERS)]]
    fault, stream = chance.choice(["full", "closed", "pipe"]), chance.choice([(1,), (2,), (1, 2)])
    options: Dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        for number, name in ((1, "stdout"), (2, "stderr")):
            if number in stream and fault == "full":
                options[name] = stack.enter_context(open("/dev/full", "wb"))
            if number in stream and fault == "pipe":
                reader, writer = os.pipe()
                os.close(reader)
                stack.callback(os.close, writer)
                options[name] = writer
        if fault == "closed":
            options["preexec_fn"] = lambda: [os.close(number) for number in stream]
        done = site.run(words, **options)
    mistake = done.code == 2 and 2 in stream  # whose line nobody can read
    check(done if not mistake else done._replace(code=1), CODES)
    site.nothing_is_left()


#: Limits of a command that measures, of (a resource, or a variable of its environment, the least, the most).
LIMITS: Tuple[Tuple[Any, int, int], ...] = (
    (resource.RLIMIT_AS, 300 * 2**20, 600 * 2**20),
    (resource.RLIMIT_AS, 1000 * 2**20, 2000 * 2**20),
    (resource.RLIMIT_AS, 2000 * 2**20, 4000 * 2**20),
    (resource.RLIMIT_NOFILE, 12, 20),
    (resource.RLIMIT_NOFILE, 20, 60),
    (resource.RLIMIT_STACK, 2**18, 2**20),
    (resource.RLIMIT_CPU, 1, 4),
    (resource.RLIMIT_FSIZE, 0, 20000),
    ("TMPDIR", 0, 0),
    ("TMPDIR", 4096, 2**18),
)


def limits(seed: int, folder: Path) -> None:
    """Too little of something; then enough of it."""
    chance, (kind, least, most) = random.Random(f"limits {seed}"), LIMITS[seed % len(LIMITS)]
    size = chance.randint(least, most)
    site = Place(folder, chance.choice(["run", "sweep"]))  # what a search has no memory for is an answer, and stays
    with contextlib.ExitStack() as stack:
        options: Dict[str, Any] = {}
        if kind == "TMPDIR":
            small = folder / "small"
            mounted = bool(size) and stack.enter_context(small_disk(small, size))
            options["env"] = {"TMPDIR": str(small if mounted else folder / "nowhere")}
        else:
            options["preexec_fn"] = lambda: resource.setrlimit(kind, (size, size))
        done = site.run(site.benchmark(), **options)
    check(done, (*CODES, -signal.SIGKILL, -signal.SIGXCPU) if kind == resource.RLIMIT_CPU else CODES)
    site.nothing_is_left(scratch=done.code >= 0)
    site.resumed()


SMALL = ["layers=1", "encoder_dim=16", "heads=2", "feed_forward=16", "decoder_dim=16", "joiner_dim=16", "vocab_size=9"]
#: A command that measures, what it leaves, and the further words of a second call, which goes on after the fault.
Measurer = Tuple[List[str], str, List[str]]
#: Others than the benchmarks: a new one is a line.  {log}: its log folder; {shapes}: a shape file.
MEASURERS: Tuple[Measurer, ...] = (
    (
        ["profile_inference.py", "--audio_mockup_secs=[0.1]", "--batch_sizes=[1]", "--arguments={layers: 1, dim: 16}"]
        + ["--max-seconds", "0.05", "--log-dir", "{log}"],
        "*/inference.jsonl",
        ["--resume"],
    ),
    (
        ["pipeline_metrics.py", "--made-seconds", "0.1,0.2", "--repeats", "1", "--log-dir", "{log}"],
        "*/pipeline.jsonl",
        ["--resume"],
    ),
    (
        ["profile_model.py", "--shape-file", "{shapes}", "--steps", "1", "--trace-steps", "1", "--limits", "false"]
        + [word for size in SMALL for word in ("--size", size)]
        + ["--log-dir", "{log}"],
        "*/*.json",
        [],
    ),
    (
        ["conformance.py", "--only", "reference", "--cases", "ragged", "--in-place", "--output", "{log}"],
        "conformance.json",
        [],
    ),
)


_seconds: Dict[str, float] = {}


def _seconds_of(measurer: Measurer) -> float:
    """Return how long it takes where no fault meets it."""
    if str(measurer) not in _seconds:
        site, since = Place(Path(tempfile.mkdtemp(prefix="measured-"))), time.monotonic()
        check(site.run(_words(site, measurer)), (0,))
        _seconds[str(measurer)] = time.monotonic() - since
    return _seconds[str(measurer)]


def _words(site: Place, measurer: Measurer) -> List[str]:
    known = {"{log}": str(site.log), "{shapes}": str(site.shapes)}
    return [known.get(word, word) for word in measurer[0]]


def measurers(seed: int, folder: Path) -> None:
    """Another command that measures is stopped, has no room, or nobody listens; called again it comes to its end."""
    _goes_on(MEASURERS[seed % len(MEASURERS)], seed // len(MEASURERS), random.Random(f"measurers {seed}"), folder)


def _goes_on(measurer: Measurer, which: int, chance: random.Random, folder: Path) -> None:
    """Let the fault number `which` meet a command that measures; called again it comes to its end."""
    fault, site = ("signal", "room", "streams")[which % 3], Place(folder)
    words, (_, result, again) = _words(site, measurer), measurer
    number, size = chance.choice(list(STOPPED)), 4096 * chance.randrange(1, 8)
    wait = chance.uniform(0.0, _seconds_of(measurer)) if fault == "signal" else 0.0
    options: Dict[str, Any] = {}
    if fault == "room":

        def limit() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))

        options["preexec_fn"] = limit
    elif fault == "streams":
        options["preexec_fn"] = lambda: [os.close(number) for number in (1, 2)]
    process = site.start(words, **options)
    if fault == "signal":
        time.sleep(wait)
        if process.poll() is None:
            process.send_signal(number)
    done = ended(process)
    check(done, (STOPPED[number], -number, 0) if fault == "signal" else CODES)
    killed = done.code == -signal.SIGKILL
    site.nothing_is_left(scratch=not killed)
    for path in site.log.rglob("*.jsonl") if site.log.exists() else ():
        lines = path.read_bytes().split(b"\n")
        require(all(map(json.loads, lines[:-1])), f"{path.name}: a broken line")
        require(killed or not lines[-1], f"{path.name}: half a line is left")
    started = any(site.log.glob(result)) if site.log.exists() else False
    last = site.run([*words, *(again if started else [])])
    if started and last.code == 2 and "--resume" in last.err:  # its first line was not written yet
        last = site.run(words)
    check(last, (0,))
    require(any(site.log.glob(result)), f"no {result}")
    site.nothing_is_left(scratch=not killed)


#: By name: the faults, and how many of a thousand and some.
KINDS: Dict[str, Tuple[Callable[[int, Path], None], int]] = {
    "signals": (signals, 16),
    "measurers": (measurers, 3 * len(MEASURERS)),
    "disks": (disks, 9),
    "adapters": (adapters, len(ADAPTERS)),
    "streams": (streams, 28),
    "limits": (limits, len(LIMITS)),
}
