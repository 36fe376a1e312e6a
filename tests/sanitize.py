"""Random problems through the C++ code of fused_transducer under GCC's address and undefined-behaviour sanitizers, with
each instruction set of this processor, beside the plain PyTorch code.

PYTHONPATH=tests python -m sanitize (make sanitize) compiles the code, and runs it in processes into which libasan is
loaded first.  It ends with 1 where a sanitizer reports or a result is wrong, and with 2 without such a compiler.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any, List, Optional

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
INSTRUCTION_SETS = ["avx512", "avx2", "baseline"]
#: Options of lattices other than the regular one.
LATTICES = {
    "modified": {},
    "modified-last-blank": {},
    "constrained": {},
    "tdt": {"durations": [0, 1, 2, 3, 4], "sigma": 0.05},
    "multi-blank": {"durations": [2, 4, 8], "sigma": 0.05},
    "hat": {},
    "star": {"skip": -2.0},
}


def libasan() -> Optional[str]:
    """Return the path of the compiler's libasan, or None."""
    from fused_transducer import compiling

    words = [*compiling.compiler(), "-print-file-name=libasan.so"]
    path = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return path if os.path.isabs(path) else None


def _run_all(count: int, seed: int) -> int:
    from fused_transducer import compiling

    try:
        preload = libasan()
    except compiling.BuildError as error:
        print(f"sanitize: {error}", file=sys.stderr)
        return 2
    if preload is None:
        print("sanitize: the compiler has no libasan; install that of GCC, or set CXX=g++", file=sys.stderr)
        return 2
    failed: List[str] = []
    with tempfile.TemporaryDirectory() as folder:
        compiling.build(Path(folder) / compiling.library_name(), FLAGS)
        on_x86 = platform.machine().lower() in ("x86_64", "amd64")
        for instruction_set in INSTRUCTION_SETS if on_x86 else INSTRUCTION_SETS[-1:]:
            environment = {
                **os.environ,
                "LD_PRELOAD": preload,
                "ASAN_OPTIONS": "detect_leaks=0",
                "UBSAN_OPTIONS": "print_stacktrace=1",
                "FUSED_TRANSDUCER_CACHE": folder,
                "FUSED_TRANSDUCER_ISA": instruction_set,
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
            }
            command = [sys.executable, "-m", "sanitize", "--count", str(count), "--seed", str(seed), "--here"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            print(f"{instruction_set}: {done.stdout.strip()}", flush=True)
            if done.returncode != 0:
                failed.append(instruction_set)
                print(done.stderr[:8000], file=sys.stderr)
    return 1 if failed else 0


def drawn(random: Random, T: int = 40, U: int = 24, V: int = 1600, H: int = 90) -> Any:
    """Return a random problem of at most these sizes, every second time on another lattice than the regular one; its
    tensors are laid out in any order, with gaps or expanded."""
    import torch
    from fused_helpers import ACTIVATIONS, problem

    from fused_transducer.lattices import SMOOTHABLE

    def size(most: int) -> int:
        return int(most ** random.random())

    lattice = random.choice([*LATTICES, *(["regular"] * len(LATTICES))])
    of_lattice = {"topology": lattice, **LATTICES.get(lattice, {})}
    if "durations" in of_lattice and random.random() < 0.5:
        of_lattice["durations"] = [random.randint(1, 9), *(random.randint(lattice != "tdt", 9) for _ in range(size(6)))]
    V = random.choice([size(min(V, 90)), size(min(V, 90)), size(V)])
    case = problem(
        [(size(T), size(U) - 1) for _ in range(size(5))],
        H=size(H),
        V=V + len(of_lattice.get("durations", ())),
        dtype=random.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        bias=random.random() < 0.7,
        seed=random.randrange(2**30),
        scale=random.choice([0.3, 1.0]),
        blank=random.randrange(V),
        activation=random.choice(list(ACTIVATIONS)),
        tile_cells=random.choice([None, None, 1, 7, 48, 56, 112, 10_000]),
        keep_bytes=random.choice([None, 0, 20_000]),
        negligible=random.choice([0.0, 1e-8]),
        fastemit_lambda=random.choice([0.0, 0.5]),
        dropout=random.choice([0.0, 0.0, 0.4]),
        dropout_seed=random.getrandbits(64) - 2**63,
        label_smoothing=random.choice([0.0, 0.0, 0.1]) if lattice in SMOOTHABLE else 0.0,
        **of_lattice,
        delay_penalty=random.choice([0.0, 0.1]),
    )
    integers = random.choice([torch.int32, torch.int64])
    case.targets = (case.targets % V).to(integers)
    case.T_lengths, case.U_lengths = case.T_lengths.to(integers), case.U_lengths.to(integers)
    gaps, turn = random.randint(1, 3), random.randint(0, 2)
    for i, tensor in enumerate(case.tensors[:3]):
        if i < 2 and random.random() < 0.2:  # no step from one frame, or utterance, to the next
            case.tensors[i] = tensor.narrow(1 - i, 0, 1).expand(tensor.shape)
        else:
            order = [(dim + turn) % tensor.dim() for dim in range(tensor.dim())]
            spread = torch.stack([tensor.permute(order)] * gaps, -1)[..., 0]
            case.tensors[i] = spread.permute([order.index(dim) for dim in range(tensor.dim())])
    return case


def _run_here(count: int, seed: int) -> int:
    """Solve random problems in this process, and print how many; a wrong result ends it."""
    import torch
    from fused_helpers import NAMES, error, problem, speech

    from fused_transducer import native

    random = Random(seed)
    largest = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 3e-2, torch.float16: 6e-3}
    for number in range(count):
        case = drawn(random)
        dtype = case.tensors[0].dtype
        if number == 0:  # full tiles of a whole group, where AVX-512 reads beyond the last row of a block of logits
            case = problem([(20, 9)], H=20, V=16, dtype=torch.float64, tile_cells=56, negligible=0.0)
            dtype = torch.float64
        elif random.random() < 0.2 and case.tensors[3] is not None:
            # some targets, or the blank, are impossible
            case.tensors[3][random.randrange(len(case.tensors[3]))] = -float("inf")
        elif number % 5 == 2:  # few cells are computed
            stage = random.choice(["early", "middle", "trained"])
            case = speech(stage, dtype=dtype, keep_bytes=random.choice([None, 20_000]))
        torch.set_num_threads(random.choice([1, 2, 3]))
        wanted = [random.random() < 0.8 for _ in NAMES]
        results = []
        for backend in ("native", "torch"):
            leaves = case.leaves()
            for leaf, want in zip(leaves, wanted):
                if leaf is not None:
                    leaf.requires_grad_(want)
            losses = case.loss(leaves, backend=backend)
            if losses.requires_grad:
                losses.sum().backward()
            results.append([losses.detach(), *(leaf.grad for leaf in leaves if leaf is not None)])
        for made, expected in zip(*results):
            if made is None or torch.isinf(expected).any():
                assert (made is None) == (expected is None) and (
                    made is None or torch.equal(made.isinf(), expected.isinf())
                )
                continue
            scale = max([1.0, *(x.abs().max().item() for x in results[1][1:] if x is not None)])
            wrong = error(made, expected) > largest[dtype] and (made - expected).abs().max() > largest[dtype] * scale
            assert not wrong, (number, case.lengths, case.options, error(made, expected))
    print(f"{count} random problems ran clean, with {native.instruction_set()} (seed {seed})")
    return 0


def main(arguments: Optional[List[str]] = None) -> int:
    parser = argparse.ArgumentParser(prog="sanitize", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=150, help="Problems for each instruction set. Default: 150")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the problems. Default: 0")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    return (_run_here if options.here else _run_all)(options.count, options.seed)


if __name__ == "__main__":
    sys.exit(main())
