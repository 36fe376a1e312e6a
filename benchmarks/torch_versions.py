#!/usr/bin/env python3
"""Try each loss under several versions of torch, each in an environment of its own that is thrown away.

For each version: a temporary folder with torch from the package index, this suite, and what the losses need; then the
correctness pass of each on a CPU.  A loss is tried as its row installs it: from the index, or compiled from its source
package.  Writes docs/_torch_versions.json, which docs/_figures.py shows in docs/losses.md.  A version takes 6 GB of
disk while it is tried, and some minutes.  Leaves out times, other devices, and packages of several gigabytes (NeMo).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.core.text import plain  # noqa: E402
from common.present.text import markdown_of  # noqa: E402
from common.setup.environments import last_error  # noqa: E402
from common.setup.uv import Uv  # noqa: E402
from common.system import machine  # noqa: E402

FILE = ROOT / "docs" / "_torch_versions.json"
VERSIONS = ("2.4.1", "2.8.0", "2.11.0", "2.13.0", "2.15.0")
#: Row -> what the index is asked for beside torch; "=TORCH" stands for the version of torch.  () where the suite
#: compiles it, or has it.
PACKAGES: Mapping[str, Sequence[str]] = {
    "torchaudio": ("torchaudio=TORCH",),
    "optimized_transducer": (),
    "fast_rnnt": (),
    "k2": ("k2==1.23.4", "--no-deps"),  # the newest wheel of the index; it asks for torch 1.13.1
    "warprnnt_numba": ("warprnnt_numba==0.4.1", "numba"),
    "fused": (f"{ROOT / 'fused_transducer'}", "--no-deps", "--no-build-isolation"),
    "reference": (),
    "transformers": ("transformers==5.23.0",),
    "fast_rnnt-pruned": (),
}
#: Outcomes, the best first.
RIGHT, WRONG, NO_ANSWER = "right", "wrong", "no answer in time"
NO_IMPORT, NO_INSTALL = "does not run", "does not install"
#: What torch leaves out of its own requirements, and the suite needs to compile losses.
TOOLS = ("numpy", "setuptools<82", "wheel", "ninja", "pip")


def tried(version: str, names: Sequence[str], log: Path) -> Dict[str, Any]:
    """Return what became of each loss under a version of torch: {"torch", "python", "losses": {name: outcome}}.

    Raises subprocess.CalledProcessError where torch itself does not install; the error is in `log`.
    """
    with tempfile.TemporaryDirectory(prefix="torch-") as folder, log.open("a", encoding="utf-8") as stream:
        variables = {"UV_CACHE_DIR": f"{folder}/cache", "XDG_CACHE_HOME": f"{folder}/built", "UV_LINK_MODE": "hardlink"}
        os.environ.update(variables)
        uv, python = Uv(stream), Path(folder) / "env" / "bin" / "python"
        uv.run("venv", "--python", sys.executable, f"{folder}/env")

        def install(*words: str) -> None:
            uv.run("pip", "install", "--python", str(python), *words)

        install(f"torch=={version}", *TOOLS)
        install(str(ROOT))
        losses: Dict[str, Dict[str, str]] = {}
        for name in names:
            words = [word.replace("=TORCH", f"=={version}") for word in PACKAGES[name]]
            try:
                if words:
                    install(f"torch=={version}", *words)
            except subprocess.CalledProcessError:
                stream.flush()
                reason = plain(last_error(log))
                if "there is no version of" in reason:
                    reason = f"{name} has no release for this torch"
                losses[name] = {"outcome": NO_INSTALL, "reason": reason}
        left = [name for name in names if name not in losses]
        losses.update(_measured(python, left, Path(folder)))
        torch = _printed(python, "import torch; print(torch.__version__)")
        return {"torch": torch, "python": platform.python_version(), "losses": {name: losses[name] for name in names}}


def _measured(python: Path, names: Sequence[str], folder: Path) -> Dict[str, Dict[str, str]]:
    """Return the outcome of the correctness pass of each loss in the environment of `python`."""
    suite, log = python.with_name("rnnt-bench"), folder / "log"
    flags = ("--only", ",".join(names), "--passes", "correctness", "--preset", "quick", "--device", "cpu")
    subprocess.run([str(suite), "run", *flags, "--log-dir", str(log), "--timeout", "900"], cwd=folder, check=False)
    rows = json.loads(
        subprocess.run(
            [str(suite), "summarize", str(log), "--format", "json"], cwd=folder, stdout=subprocess.PIPE, check=True
        ).stdout
    )
    return {row["name"]: outcome_of(row) for row in rows}


def outcome_of(row: Mapping[str, Any]) -> Dict[str, str]:
    """Return {"outcome", "version", "reason"} of a row of summarize.py."""
    reason = row.get("reason") or ""
    if row["status"] == "ok":
        outcome = RIGHT
    elif "wrong result" in reason:
        outcome = WRONG
    else:
        outcome = NO_ANSWER if row["status"] == "timeout" else NO_IMPORT
    version = row.get("implementation_version") or row.get("version") or ""
    return {"outcome": outcome, "version": str(version), "reason": "" if outcome == RIGHT else plain(reason)}


def _printed(python: Path, code: str) -> str:
    """Return what a line of Python prints."""
    return subprocess.run([str(python), "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def table(results: Mapping[str, Any]) -> str:
    """Return the Markdown table of what FILE holds, with the reasons below it."""
    versions = results["versions"]
    heads = ["loss", *(f"torch {each['torch'].partition('+')[0]}" for each in versions)]
    names = [name for name in PACKAGES if any(name in each["losses"] for each in versions)]
    notes: List[str] = []
    lines = [[name, *(_cell(each["losses"].get(name), notes) for each in versions)] for name in names]
    explained = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([markdown_of(heads, lines), *([""] if notes else []), *explained])


def _cell(loss: Optional[Mapping[str, str]], notes: List[str]) -> str:
    """Return the outcome in words with the number of its reason in `notes`, to which a new reason is added."""
    if loss is None:
        return "-"
    reason = loss["reason"].replace("|", "\\|").replace("<", "&lt;")
    if not reason:
        return loss["outcome"]
    if reason not in notes:
        notes.append(reason)
    return f"{loss['outcome']} ({notes.index(reason) + 1})"


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "versions",
        nargs="*",
        metavar="VERSION",
        default=VERSIONS,
        help=f"Versions of torch. Default: {', '.join(VERSIONS)}",
    )
    versions = parser.parse_args(arguments).versions
    results: Dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {"versions": []}
    computer = machine.describe()
    results["machine"] = {"cpu": computer["cpu"], "cores": computer["cores"]}
    for version in versions:
        print(f"torch {version}", file=sys.stderr)
        try:
            result = tried(version, list(PACKAGES), Path("torch_versions.log"))
        except subprocess.CalledProcessError:
            print(f"torch {version}: left out; see torch_versions.log", file=sys.stderr)
            continue
        others = [each for each in results["versions"] if each["torch"] != result["torch"]]
        results["versions"] = sorted([*others, result], key=lambda each: _numbers(each["torch"]))
        FILE.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


def _numbers(version: str) -> List[int]:
    """Return [2, 11, 0] of "2.11.0+cu130"."""
    return [int(part) for part in version.partition("+")[0].split(".")]


if __name__ == "__main__":
    sys.exit(main())
