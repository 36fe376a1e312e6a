"""What a command finds around it: files that are none, YAML that nobody writes, git's variables, a cache of code."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from common.core.errors import UserError
from common.core.files import LARGEST
from common.core.paths import ROOT
from common.system import git
from faults import files
from faults.invariants import CODES, Ended, check, require
from faults.mutations import VALUES, mutated

# -- files that are none -----------------------------------------------------------------------------------------------


def _socket(path: Path) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket is at most 107 bytes long
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(before)


def _sparse(path: Path) -> None:
    with path.open("wb") as stream:
        stream.truncate(LARGEST + 1)


#: What stands in the path of a file: a new one is a line.
STRANGE: Tuple[Callable[[Path], Any], ...] = (
    os.mkfifo,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to("/dev/random"),
    lambda path: path.symlink_to("/dev/full"),
    lambda path: path.symlink_to("/proc/self/mem"),
    lambda path: path.symlink_to(path.name),
    lambda path: path.symlink_to("nowhere"),
    Path.mkdir,
    _socket,
    _sparse,
)
#: Commands that read one file beside the log folder.  {strange}: that file; {out}: an empty folder.
TAKERS: Tuple[Tuple[str, ...], ...] = (
    ("profile_inference.py", "{strange}"),
    ("pipeline_metrics.py", "--config", "{strange}"),
    ("pipeline_metrics.py", "--dataset-type", "raw", "--dataset-path", "{strange}.tsv", "--log-dir", "{out}"),
    ("profile_model.py", "--config", "{strange}"),
    ("count_flops.py", "torch.nn:Linear", "--input-shape", "1x2", "--args", "{strange}"),
    ("generate_shape_info.py", "--manifest", "{strange}", "--bpe-vocab-size", "6", "--output", "{out}/shapes.pt"),
    ("benchmark_all.py", "--in-path", "--only", "{strange}", "--log-dir", "{out}"),
    ("summarize.py", "{strange}"),
    ("compare.py", "{strange}", "{strange}"),
)


def strange(seed: int, folder: Path) -> None:
    """A pipe, a device, a socket, a loop of links or far too many bytes in the path of a file."""
    chance, make = random.Random(f"strange {seed}"), STRANGE[seed % len(STRANGE)]
    if seed // len(STRANGE) % 3 == 2:
        script, *words = chance.choice(TAKERS)
        (folder / "out").mkdir()
        known = {"strange": str(folder / "strange"), "out": str(folder / "out")}
        given = [word.format(**known) for word in words]
        make(next((Path(word) for word in given if Path(word).name.startswith("strange")), folder / "strange"))
        done = files.inside(script, *given)
        check(done, CODES)
        require(done.code != 0 or make is Path.mkdir, f"{script} took it: {done.out[-300:]}")
        return
    log = folder / "log"
    shutil.copytree(files.whole().log, log)
    path = chance.choice(sorted(path for path in log.rglob("*") if path.is_file()))
    path.unlink()
    make(path)
    files.others_are_read(log, path)
    files.read_by(tuple(chance.sample(files.READERS, 2)), log, folder)


# -- YAML --------------------------------------------------------------------------------------------------------------

#: Documents that PyYAML answers with errors of any kind, or never.  N, M: numbers of the seed's.
YAML: Tuple[str, ...] = (
    "general: !!bool maybe\n",
    'stage1: !!int ""\n',
    'stage1: {repeats: !!float ""}\n',
    "pretrained_model: {type: !!timestamp x}\n",
    "a: 2026-13-N\n",
    "a: 0xNM\nb: 1:M:N\n",
    "a: &x [*x]\n",
    "a: &x {b: [1, {c: *x}]}\n",
    "? {a: 1}\n: 2\n",
    "<<: [1, 2]\n",
    "<<: &x {<<: *x}\n",
    "%YAML 9.9\n---\na: 1\n...\n---\nb: 2\n",
    "!!python/object/apply:os.system ['true']\n",
    "!!set {a, b}\n",
    "a: !!binary M\n",
    "a: !!omap [x: N, x: M]\n",
    "stageN: {}\n",
)


def _unfolding(chance: random.Random) -> str:
    """Return aliases of aliases, as values or as keys that are merged, at most billions of them."""
    levels, fan = chance.randint(1, 12), chance.randint(1, 12)
    form = chance.choice(["[{}]", "{{<<: [{}]}}", "{{x: [{}]}}"])
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels + 1):
        lines.append(f"a{level}: &a{level} " + form.format(", ".join([f"*a{level - 1}"] * fan)))
    return "\n".join(lines) + "\n"


def _replaced(text: bytes, chance: random.Random) -> bytes:
    """Return a configuration in which a value, at any depth, is another one."""
    import yaml

    values = yaml.safe_load(text)
    holder, key = values, chance.choice(list(values))
    while isinstance(holder[key], dict) and holder[key] and chance.random() < 0.8:
        holder = holder[key]
        key = chance.choice(list(holder))
    copied = yaml.safe_load(text)
    holder[key] = chance.choice([*VALUES, copied, [copied] * 50])
    return json.dumps(values).encode()


def configurations(seed: int, folder: Path) -> None:
    """A configuration that is damaged, or that nobody writes: one line within a moment, or values as wanted."""
    from common.tools import loading
    from common.tools.inference import command as inference
    from common.tools.inference import pipeline_command as pipeline

    chance, path = random.Random(f"configurations {seed}"), folder / "strange.yaml"
    shipped = (ROOT / chance.choice(["pipeline.yaml", "profile.yaml"])).read_bytes()
    kind = seed % 4
    if kind == 0:
        text = YAML[seed // 4 % len(YAML)].replace("N", str(10 ** chance.randrange(9)))
        path.write_text(text.replace("M", "9" * chance.choice([1, 20, 5000])))
    elif kind == 1:
        path.write_text(_unfolding(chance))
    else:
        path.write_bytes(_replaced(shipped, chance) if kind == 2 else mutated(shipped, chance)[0])
    for read in (lambda: pipeline.configured(path, {}), lambda: inference.configured(path, [])):
        _one_line(read)
    _one_line(lambda: loading.read_arguments(path))
    if seed % 16 == 0:
        script, *flags = chance.choice([words for words in TAKERS if words[-1] == "{strange}"][:4])
        check(files.inside(script, *(word.format(strange=path) for word in flags)), CODES)


def _one_line(read: Callable[[], Any]) -> None:
    try:
        with files.in_time("a configuration"), contextlib.redirect_stderr(io.StringIO()):
            read()
    except UserError as error:
        require("\n" not in str(error) and len(str(error)) < 20_000, f"more than a line: {str(error)[:500]}")


# -- git ---------------------------------------------------------------------------------------------------------------

_AUTHOR = ("-c", "user.name=Test", "-c", "user.email=test@example.org")


@functools.lru_cache(maxsize=1)
def _checkout() -> Path:
    """Return a repository with the files of this one that measure, all committed."""
    folder = Path(tempfile.mkdtemp(prefix="checkout-"))
    for path in [*ROOT.glob("*.*"), *ROOT.glob("common/**/*"), *ROOT.glob("fused_transducer/**/*")]:
        if path.is_file() and "__pycache__" not in path.parts:
            target = folder / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, target)
    git.run(folder, "init", "--quiet", "--initial-branch=main")
    git.run(folder, "add", "--all")
    git.run(folder, *_AUTHOR, "commit", "--quiet", "-m", "all")
    return folder


def _state(folder: Path) -> List[str]:
    """Return what a user of a repository has: head, branch, what is staged and what is not, work trees."""
    asked = (["rev-parse", "HEAD"], ["symbolic-ref", "HEAD"], ["diff", "--cached"], ["status", "--porcelain"])
    return [git.run(folder, *words) for words in (*asked, ["worktree", "list", "--porcelain"], ["stash", "list"])]


def git_variables(seed: int, folder: Path) -> None:
    """The variables that git gives a hook, some of another repository or of none: compare.py --rev changes nothing of
    the user's."""
    if not shutil.which("git"):
        return
    chance = random.Random(f"git {seed}")
    mine, other = folder / "mine", folder / "other"
    shutil.copytree(_checkout(), mine, symlinks=True)
    git.run(folder, "init", "--quiet", str(other))
    (other / "theirs").write_text("theirs")
    git.run(other, "add", "theirs")
    git.run(other, *_AUTHOR, "commit", "--quiet", "-m", "theirs")
    (mine / "staged.txt").write_text("staged")
    (mine / "README.md").write_text("changed")
    git.run(mine, "add", "staged.txt")
    repository = chance.choice([mine, other, folder / "nowhere"])
    values = {
        "GIT_DIR": [str(repository / ".git"), ".git", ""],
        "GIT_INDEX_FILE": [str(repository / ".git" / "index"), ".git/index", str(folder / "new-index")],
        "GIT_WORK_TREE": [str(repository), "."],
        "GIT_OBJECT_DIRECTORY": [str(repository / ".git" / "objects")],
        "GIT_COMMON_DIR": [str(repository / ".git")],
        "GIT_PREFIX": ["", "common/"],
        "GIT_NO_REPLACE_OBJECTS": ["1"],
        "GIT_SHALLOW_FILE": ["/dev/null"],
    }
    names = chance.sample(sorted(values), chance.randint(1, 4))
    environment = {**os.environ, **{name: chance.choice(values[name]) for name in names}}
    before = [_state(repository) for repository in (mine, other)]
    revisions = chance.choice([["HEAD", "HEAD"], ["HEAD", "WORKTREE"], ["HEAD", "no-such-revision"]])
    command = [sys.executable, str(mine / "compare.py"), "--rev", revisions[0], "--rev", revisions[1]]
    command += ["--", "--in-path", "--preset", "quick", "--only", "no-such-loss"]
    done = subprocess.run(command, cwd=mine, env=environment, capture_output=True, text=True, timeout=120)
    check(Ended(done.returncode, done.stdout, done.stderr), (1, 2))
    after = [_state(repository) for repository in (mine, other)]
    require(after == before, f"{names}: the repositories were {before}, are {after}")


# -- the cache of the fused loss ---------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _library() -> bytes:
    """Return the library as it is compiled here."""
    from fused_transducer import native

    os.environ.setdefault("FUSED_TRANSDUCER_CACHE", str(ROOT / ".build" / "fused_transducer"))
    opened, reason = native._library()
    require(opened is not None, reason)
    return Path(str(getattr(opened, "_name", ""))).read_bytes()


def _libraries() -> Set[str]:
    """Return the compiled code that this process has loaded."""
    return {line.split()[-1] for line in open("/proc/self/maps") if "_native-" in line}


def _first_use(variables: Dict[str, str], folder: Path, limit: Optional[int]) -> List[Any]:
    """Return [backend, loss, libraries that were loaded] of a process that uses the fused loss for the first time."""
    import torch

    from fused_transducer import backend_of, native, transducer_loss

    os.chdir(folder)
    os.environ.update(variables)
    before = _libraries()
    native._first_load.cache_clear()
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    backend = backend_of("cpu", torch.float32)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(size, generator=generator) for size in ((2, 5, 4), (2, 4, 4), (6, 4))]
    given = torch.tensor([[1, 2, 3], [4, 5, 0]]), torch.tensor([5, 4]), torch.tensor([3, 2])
    losses = [float(transducer_loss(*tensors, None, *given, backend=name)) for name in (backend, "torch")]
    return [backend, losses, sorted(_libraries() - before)]


def _forked(answer: Path, *arguments: Any) -> int:
    """Return the number of a process, forked from this one, that writes what `_first_use` returns, or why it ended."""
    number = os.fork()
    if number:
        return number
    try:
        errors = os.open(answer.with_suffix(".err"), os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(errors, 2)
        answer.write_text(json.dumps(_first_use(*arguments)))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _plant(path: Path, whole: bytes, chance: random.Random) -> None:
    """Put something in the path of the library, its folder or its lock."""
    path.parent.mkdir(parents=True, mode=0o700)
    what = chance.randrange(9)
    if what == 0:
        path.write_bytes(whole[: chance.randrange(len(whole))])
    elif what == 1:
        path.write_bytes(chance.choice([b"", b"\x7fELF" + bytes(80), b"not a library", bytes(10**6)]))
    elif what == 2:
        path.write_bytes(whole)
        path.chmod(0o777)
    elif what == 3:
        path.write_bytes(whole)
        path.parent.chmod(0o777)
    elif what == 4:
        path.symlink_to(chance.choice(["/dev/zero", "nowhere", path.name]))
    elif what == 5:
        path.mkdir()
    elif what == 6:
        chance.choice([os.mkfifo, Path.mkdir])(path.parent / "lock")  # type: ignore[operator]
    elif what == 7:
        path.parent.rmdir()
        path.parent.write_text("a file")


def cache(seed: int, folder: Path) -> None:
    """A cache of compiled code that is damaged, planted, full or unfindable, and odd compilers: the loss is right, no
    library is loaded that others can write, and no part of one is left."""
    from fused_transducer import compiling

    chance, whole = random.Random(f"cache {seed}"), _library()
    (folder / "whole.so").write_bytes(whole)
    compiler = folder / "compiler"
    copies = (
        '#!/bin/sh\nfor word; do test "$last" = -o && to="$word"; last="$word"; done\n'
        f'cp {folder}/whole.so "$to" || exit 1\n'
    )
    compiler.write_text(chance.choice([copies, copies, copies, copies + "kill -9 $$\n", "#!/bin/sh\nexit 1\n"]))
    compiler.chmod(0o755)
    home, path = folder / "home", folder / "cache" / compiling.library_name()
    home.mkdir()
    variables = {
        "HOME": chance.choice([str(home), str(folder / "nowhere"), "/dev/null", ""]),
        "XDG_CACHE_HOME": chance.choice(["", ".", str(folder / "xdg"), "/proc/nowhere"]),
        "FUSED_TRANSDUCER_CACHE": chance.choice([str(path.parent)] * 3 + [""]),
        "CXX": chance.choice([str(compiler)] * 4 + ["g++ '", "/dev/null", "no-such-compiler"]),
        "FUSED_TRANSDUCER_BACKEND": "",
    }
    limit = chance.choice([None, None, chance.randrange(1, len(whole))])
    planted = folder / "fused_transducer" / compiling.library_name()  # in the current folder
    planted.parent.mkdir()
    planted.write_bytes(whole)
    planted.parent.chmod(0o777)
    _plant(path, whole, chance)
    answers = [folder / f"answer-{number}" for number in range(chance.choice([1, 2]))]
    with files.in_time("a first use"):
        users = [_forked(answer, variables, folder, limit) for answer in answers]
        codes = [os.waitstatus_to_exitcode(os.waitpid(user, 0)[1]) for user in users]
    for answer, code in zip(answers, codes):
        err = answer.with_suffix(".err").read_text(errors="replace")
        require(code == 0 and "Traceback" not in err, f"{variables}: {code}: {err[-800:]}")
        backend, (loss, right), libraries = json.loads(answer.read_text())
        require(backend in ("native", "torch"), f"backend {backend}")
        require(abs(loss - right) < 1e-4, f"another loss: {loss}, not {right}")
        for loaded in map(Path, libraries):
            modes = loaded.stat().st_mode | loaded.parent.stat().st_mode if loaded.exists() else 0
            require(not modes & 0o022, f"loaded what others can write: {loaded}")
    if path.parent.is_dir():
        known = {compiling.library_name(), "lock"}
        left = [path.name for path in path.parent.iterdir() if path.name not in known]
        require(not left, f"left in the cache: {left}")


#: By name: the faults, and how many of a thousand and some.
KINDS: Dict[str, Tuple[Callable[[int, Path], None], int]] = {
    "git": (git_variables, 8),
    "cache": (cache, 24),
    "strange": (strange, 120),
    "yaml": (configurations, 120),
}
