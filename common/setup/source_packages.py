"""The table of losses that are compiled from their sdists: what of the sdist, how, and how to tell it works.

Versions and hashes are in requirements/sources.txt.  Adding one = one entry here and one line there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Tuple

from common.core.paths import ROOT

PINS = ROOT / "requirements" / "sources.txt"


@dataclass(frozen=True)
class SourcePackage:
    """Paths and globs are relative to the top of the sdist, which is also the include folder.

    package: import name, and name in the package index; python: folder of the Python package; templates: files of it
    from which ``X.in`` makes ``X`` with @TORCH_VERSION@ filled in; metadata: a folder that is kept beside the package,
    for one that asks for its own version; module: the name under which the package imports its compiled part; sources,
    flags: for every device (a .cu among them is C++ when there is no CUDA; no sources: it is for CUDA only);
    cuda_sources, cuda_define, nvcc_flags: added for CUDA (no cuda_sources: it has none); headers: a folder beside
    this file that its CUDA sources include from; loss(module, logits, length): of logits (1, 1, 2, 2); length: an
    int64 1 of shape (1,), which is the target, too; without_device: what to do where that does not run."""

    package: str
    python: str
    module: str
    sources: Tuple[str, ...]
    loss: Callable[[ModuleType, Any, Any], Any]
    without_device: str
    templates: Tuple[str, ...] = ()
    metadata: str = ""
    flags: Tuple[str, ...] = ("-O3", "-DNDEBUG")  # no -std: torch's headers decide, and torch passes what they need
    cuda_sources: Tuple[str, ...] = ()
    cuda_define: str = ""
    nvcc_flags: Tuple[str, ...] = ()
    headers: str = ""

    @property
    def devices(self) -> Tuple[str, ...]:
        """Return the devices that it can be compiled for."""
        return (*(["cpu"] if self.sources else []), *(["cuda"] if self.cuda_sources else []))

    def recipe(self, device: str) -> str:
        """Return a text that changes with what is compiled, and how."""
        path = Path(__file__).parent / self.headers
        headers = sorted(path.rglob("*.hxx")) if device == "cuda" and self.headers else []
        described = repr(replace(self, loss=len))  # type: ignore[arg-type]  # a function's repr has its address
        return described + "".join(path.read_text(encoding="utf-8") for path in headers)

    def probe(self, module: ModuleType, device: str) -> None:
        """Raise RuntimeError where the loaded package does not run on the device."""
        import torch

        # N = T = U = 1, V = 2 at zero logits: a token and a blank, each with probability 1/2.
        loss = self.loss(
            module, torch.zeros(1, 1, 2, 2, device=device), torch.ones(1, dtype=torch.int64, device=device)
        )
        if not math.isclose(loss.item(), 2 * math.log(2), rel_tol=1e-5):
            raise RuntimeError(f"a loss that must be 2 ln 2 is {loss.item()}")


def pinned(package: str) -> Tuple[str, str]:
    """Return the version of `package` and the sha256 of its sdist."""
    pattern = rf"^{re.escape(package)}==(\S+) --hash=sha256:([0-9a-f]{{64}})$"
    match = re.search(pattern, PINS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if match is None:
        raise LookupError(f"{PINS}: no line {package}==VERSION --hash=sha256:HASH")
    return match[1], match[2]


def _optimized_transducer(module: ModuleType, logits: Any, length: Any) -> Any:
    target, lengths = length.view(1, 1).int(), (length.int(), length.int())
    options = {"blank": 0, "from_log_softmax": False, "reduction": "sum"}
    return module.transducer_loss(logits.view(2, 2), target, *lengths, **options)


SOURCE_PACKAGES = {
    source.package: source
    for source in (
        SourcePackage(
            package="optimized_transducer",
            python="optimized_transducer/python/optimized_transducer",
            templates=("torch_version.py",),
            module="_optimized_transducer",
            sources=tuple(
                f"optimized_transducer/{of}" for of in ("csrc/cpu.cc", "csrc/transducer-loss.cc", "python/csrc/*.cc")
            ),
            cuda_sources=("optimized_transducer/csrc/*.cu",),
            cuda_define="-DOT_WITH_CUDA",
            # As its cmake has them.
            nvcc_flags=("-O3", "-lineinfo", "--expt-extended-lambda", "-use_fast_math", "-Xptxas=-w"),
            headers="headers",  # of the one function of moderngpu that it calls
            loss=_optimized_transducer,
            without_device="uninstall it, and `make setup` compiles it for CUDA",
        ),
        SourcePackage(
            package="fast_rnnt",
            python="fast_rnnt/python/fast_rnnt",
            module="_fast_rnnt",
            sources=("fast_rnnt/csrc/mutual_information_cpu.cu", "fast_rnnt/python/csrc/*.cu"),
            cuda_sources=("fast_rnnt/csrc/mutual_information_cuda.cu",),
            cuda_define="-DFT_WITH_CUDA",
            nvcc_flags=("-O3", "-lineinfo", "--expt-extended-lambda"),
            loss=lambda module, logits, length: module.rnnt_loss(logits, length.view(1, 1), 0, reduction="sum"),
            without_device="uninstall it, and `make setup` compiles it for CUDA",
        ),
        SourcePackage(
            package="warp_rnnt",
            python="warp_rnnt",
            metadata="warp_rnnt.egg-info",
            module="warp_rnnt._C",
            sources=(),
            cuda_sources=("binding.cpp", "core*.cu"),
            nvcc_flags=("-O3",),
            loss=lambda module, logits, length: module.rnnt_loss(
                logits.log_softmax(-1), length.view(1, 1).int(), length.int(), length.int(), reduction="sum"
            ),
            without_device="uninstall it, and it is compiled anew when it is measured",
        ),
    )
}
