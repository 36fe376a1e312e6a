"""Problems for the tests of fused_transducer, and what is right for them: float64, with rnnt_bench.losses.oracle."""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy
import pytest
import torch

from commands import ROOT

os.environ.setdefault("FUSED_TRANSDUCER_CACHE", str(ROOT / ".build" / "fused_transducer"))  # compiled once

from fused_transducer import compiling, native, transducer_loss, window_of  # noqa: E402
from fused_transducer.lattices import SMOOTHABLE  # noqa: E402

NAMES = ("encoder_out", "decoder_out", "weight", "bias")
ACTIVATIONS = {"none": lambda x: x, "tanh": torch.tanh, "relu": torch.relu, "sigmoid": torch.sigmoid}
FURTHER = ("leaky_relu", "silu", "gelu", "selu", "hardtanh")
ACTIVATIONS.update({name: getattr(torch.nn.functional, name) for name in FURTHER})

#: Options of lattices other than the regular one.
LATTICES = {
    "modified": {},
    "modified-last-blank": {},
    "constrained": {},
    "tdt": {"durations": [0, 1, 2, 3, 4], "sigma": 0.05},
    "multi-blank": {"durations": [2, 4, 8], "sigma": 0.05},
    "hat": {},
}


def copying_compiler(folder: Path) -> Path:
    """Return a program in the place of c++ that copies the suite's library; sources must be there all the same.  It
    adds a line to the file `links` of `folder` whenever it links."""
    whole, program = folder / "whole.so", folder / "compiler"
    whole.write_bytes(Path(native._library()[0]._name).read_bytes())
    program.write_text(
        f"""#!/bin/sh
for word; do
  test "$last" = -o && to="$word"
  test "$word" = -shared && links=1
  case "$word" in *.cpp) test -e "$word" || exit 1;; esac
  last="$word"
done
test -z "$links" || {{ sleep 0.3; echo linked >> {folder}/links; }}
cp {whole} "$to"
"""
    )
    program.chmod(0o755)
    return program


def interpret_faster() -> None:
    """Let Triton's interpreter take the place of the language's functions once a kernel, not at every call."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @functools.cache
    def patched(function: Callable) -> Any:
        scope = patch(function)
        scope._changes.clear()  # so that it restores nothing
        return scope

    interpreter._patch_lang = patched


def use(backend: str, monkeypatch: pytest.MonkeyPatch) -> str:
    reason = native.unavailable(torch.device("cpu"), torch.float32) if backend == "native" else None
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("FUSED_TRANSDUCER_BACKEND", backend)
    return backend


@dataclass
class Problem:
    """The inputs of a loss; tensors: encoder_out (N, T, H), decoder_out (M, U+1, H), weight (V, H), bias (V)."""

    tensors: list[torch.Tensor | None]
    targets: torch.Tensor
    T_lengths: torch.Tensor
    U_lengths: torch.Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def utterance_of(self) -> list[int]:
        """The utterance of each row."""
        return self.options.get("utterance_of", torch.arange(len(self.U_lengths))).tolist()

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """(T, U) of each row."""
        return list(zip(self.T_lengths[self.utterance_of].tolist(), self.U_lengths.tolist()))

    def with_options(self, **options: Any) -> Problem:
        return replace(self, options={**self.options, **options})

    def sharing(self, utterance_of: Sequence[int], dtype: torch.dtype = torch.int64) -> Problem:
        """Return the problem with the frames of row m those of utterance utterance_of[m]."""
        return self.with_options(utterance_of=torch.tensor(utterance_of, dtype=dtype))

    def copied(self) -> Problem:
        """Return the problem with a copy of encoder_out's utterance for each row."""
        options = {name: value for name, value in self.options.items() if name != "utterance_of"}
        tensors = [self.tensors[0][self.utterance_of], *self.tensors[1:]]
        return replace(self, tensors=tensors, T_lengths=self.T_lengths[self.utterance_of], options=options)

    def spoil_padding(self) -> None:
        """Write NaN, inf and -100 where no loss may read, in place."""
        for n, T in enumerate(self.T_lengths.tolist()):
            self.tensors[0][n, T:] = float("nan")
        for n, (_, U) in enumerate(self.lengths):
            self.tensors[1][n, U + 1 :] = float("inf")
            self.targets[n, U:] = -100

    def leaves(self, dtype: torch.dtype | None = None) -> list[torch.Tensor | None]:
        return [None if x is None else x.detach().to(dtype or x.dtype).requires_grad_() for x in self.tensors]

    def loss(self, leaves: list[torch.Tensor | None], **options: Any) -> torch.Tensor:
        options = {"reduction": "none", **self.options, **options}
        return transducer_loss(*leaves, self.targets, self.T_lengths, self.U_lengths, **options)


def problem(lengths, H=12, V=11, dtype=torch.float64, bias=True, seed=0, scale=1.0, **options) -> Problem:
    """Return normal inputs for utterances of these (T, U)."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype)

    N, T, U = len(lengths), max(T for T, _ in lengths), max(U for _, U in lengths)
    tensors = [normal(N, T, H), normal(N, U + 1, H), normal(V, H), normal(V) if bias else None]
    T_lengths, U_lengths = torch.tensor(lengths).unbind(1)
    return Problem(tensors, torch.randint(0, V, (N, U), generator=generator), T_lengths, U_lengths, options)


def speech(
    stage: str, shapes=((90, 18), (60, 14), (120, 25), (40, 6)), V=128, H=128, dtype=torch.float32, **options
) -> Problem:
    """Return passages of a model in training, as `--logits trained` has them; stage: early, middle or trained."""
    from rnnt_bench.losses.inputs import Speech

    case = problem(shapes, H=H, V=V, dtype=torch.float32, **options)
    model = Speech(stage, V, H)
    outputs = model.outputs(*(x.numpy() for x in case.tensors[:2]), case.targets.numpy(), shapes, (1,))
    arrays = [numpy.ascontiguousarray(x) for x in (*outputs[:2], *model.layer("output"))]
    case.tensors, case.targets = [torch.from_numpy(x).to(dtype) for x in arrays], torch.from_numpy(outputs[2])
    return case


def lattice_problem(topology: str, lengths, **options: Any) -> Problem:
    """Return a problem on a lattice, of V symbols and the parameters of LATTICES; no target is the blank."""
    options = {"topology": topology, **LATTICES.get(topology, {}), "negligible": 0.0, **options}
    V = options.pop("V", 11)
    case = problem(lengths, V=V + len(options.get("durations", ())), **options)
    case.targets = case.targets % (V - 1)
    case.targets += case.targets >= options.get("blank", 0)
    return case


def certain(T: int, U: int, V: int, **options: Any) -> Problem:
    """Return an utterance of float32 of which one path has nearly all the probability, and logits are whole numbers."""
    case, H = problem([(T, U)], H=40, V=V, dtype=torch.float32, activation="none", negligible=0.0, **options), 40
    codes = torch.eye(V)[:, :H]
    case.targets = torch.randint(1, H, (1, U), generator=torch.Generator().manual_seed(2))
    case.tensors = [torch.zeros(1, T, H), torch.zeros(1, U + 1, H), 30 * codes, 45 * torch.eye(V)[0]]
    case.tensors[0][0, torch.arange(U) * 3] = case.tensors[1][0, :U] = codes[case.targets[0]]
    case.tensors[2][0] = 0
    return case


def mask_of(case: Problem) -> torch.Tensor:
    """Return dropout's factors (N, T, U+1, H), 0 or 1 / (1 - p), by the hash as its definition says, in numpy."""
    (_, T, H), (N, U1, _) = case.tensors[0].shape, case.tensors[1].shape
    bits = 2**32 - 1

    def mixed(x):
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & bits
        x = ((x ^ (x >> 15)) * 0xD35A2D97) & bits
        return x ^ (x >> 15)

    n, t, u, h = (numpy.arange(size, dtype=object) for size in (N, T, U1, H))
    n, t, u = n[:, None, None, None], t[:, None, None], u[:, None]
    low, high = case.options["dropout_seed"] & bits, (case.options["dropout_seed"] >> 32) & bits
    first = mixed(mixed(mixed(low ^ n) ^ t) ^ u)
    second = mixed((mixed((mixed(high ^ n) + t) & bits) + u) & bits)
    x = h ^ first
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & bits
    x = (((x ^ (x >> 15)) + second) * 0xD35A2D97) & bits
    x = x ^ (x >> 15)
    p = case.options["dropout"]
    return torch.from_numpy((x >= round(p * 2**32)).astype(numpy.float64)) / (1 - p)


def logits_of(tensors, activation: str = "tanh", mask=None) -> torch.Tensor:
    """Return the logits (N, T, U+1, V)."""
    encoder_out, decoder_out, weight, bias = tensors
    joined = ACTIVATIONS[activation](encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1))
    joined = joined if mask is None else joined * mask
    return torch.nn.functional.linear(joined, weight, bias)


def topology_of(options: dict[str, Any]):
    """Return the suite's lattice of the options of a call."""
    from rnnt_bench.losses import topologies

    parameters = {"durations": tuple(options.get("durations", ())), "sigma": options.get("sigma", 0.0)}
    return replace(topologies.TOPOLOGIES[options.get("topology", "regular")], **parameters)


def within(arc, window: torch.Tensor):
    """Return the arc of an utterance without the labels outside its window (U, 2)."""
    T, U1 = arc.weight.shape
    t, (first, last) = (
        torch.arange(T).view(T, 1),
        torch.nn.functional.pad(window, (0, 0, 0, U1 - len(window))).unbind(1),
    )
    return arc._replace(weight=arc.weight.masked_fill((t < first) | (t > last), -float("inf"))) if arc.du else arc


def drawn_window(case: Problem, random: Random) -> torch.Tensor:
    """Return a window (N, U, 2) around drawn alignments, of any integer type; beyond an utterance's labels anything."""
    T, (N, U) = torch.tensor(case.lengths)[:, :1], case.targets.shape
    draw = torch.Generator().manual_seed(random.randrange(2**30))
    frames = (torch.rand(N, U, generator=draw).sort(1).values * T).long()
    frames[torch.rand(N, U, generator=draw) < 0.1] = -1
    window = window_of(frames, random.randrange(6), random.randrange(6), T.view(-1))
    window[torch.rand(N, U, generator=draw) < 0.05] += random.choice([-2, 2])
    window[torch.arange(U) >= case.U_lengths.view(-1, 1)] = -100
    return window.to(random.choice([torch.int16, torch.int32, torch.int64]))


def right(case: Problem, large: bool = False):
    """Return the losses of the oracle in float64 and the gradients of their sum by name: for any lattice, with FastEmit
    and the delay penalty as defined on its arcs.  large: those of plain PyTorch, of the regular lattice."""
    from rnnt_bench.losses import oracle, topologies

    options, leaves = case.options, case.leaves(torch.float64)
    mask, blank = mask_of(case) if options.get("dropout") else None, options.get("blank", 0)
    logits = logits_of([leaves[0][case.utterance_of], *leaves[1:]], options.get("activation", "tanh"), mask)
    if large:
        losses = topologies.transducer_loss(logits, case.targets, case.T_lengths, case.U_lengths, blank, "none")
        losses.sum().backward()
        return losses.detach(), {name: leaf.grad for name, leaf in zip(NAMES, leaves) if leaf is not None}
    topology = topology_of(options)
    if options.get("clamp"):
        kept = len(options["durations"]) if topology.name == "tdt" else 0
        sizes, most = (logits.shape[-1] - kept, kept), options["clamp"]

        def clamped(gradient):
            of_symbols, others = gradient.split(sizes, -1)
            return torch.cat([of_symbols.clamp(-most, most), others], -1)

        logits.register_hook(clamped)
    parts = topology.parts(logits, topologies.next_targets(case.targets, *logits.shape[1:3]), blank)
    if options.get("label_smoothing"):
        parts = torch.lerp(parts, logits.log_softmax(-1).mean(-1, keepdim=True), options["label_smoothing"])
    losses, derivatives = torch.zeros(len(parts), dtype=torch.float64), torch.zeros_like(parts)
    for n, (T, U) in enumerate(case.lengths):
        leaf = parts[n, :T, : U + 1].detach().clone().requires_grad_()
        early = (T - 1) / 2 - torch.arange(T, dtype=torch.float64).view(T, 1, 1)
        is_label = (torch.arange(leaf.shape[-1]) == 1).double()
        arcs = topology.arcs(leaf + options.get("delay_penalty", 0.0) * early * is_label)
        if options.get("window") is not None:
            arcs = [within(arc, options["window"][n, :U]) for arc in arcs]
        likelihood, posteriors = oracle.lattice(arcs)
        factors = [1 + arc.du * options.get("fastemit_lambda", 0.0) for arc in arcs]
        pairs = zip(arcs, posteriors, factors)
        sums = sum((arc.weight.masked_fill(mass == 0, 0) * mass * factor).sum() for arc, mass, factor in pairs)
        losses[n], (derivatives[n, :T, : U + 1],) = -likelihood, torch.autograd.grad(-sums, leaf)
    parts.backward(derivatives)
    if options.get("nonfinite") == "skip":
        losses = losses.nan_to_num(posinf=0.0)
    return losses, {name: leaf.grad for name, leaf in zip(NAMES, leaves) if leaf is not None}


def paths_of(arcs, T: int, U: int):
    """Yield (log-weight, frames of the targets) of every path of an utterance."""

    def walk(t, u, weight, frames):
        if (t, u) == (T, U):
            yield weight, tuple(frames)
            return
        for arc in arcs:
            inside = t < T and t + arc.dt <= T and u + arc.du <= U
            if inside and arc.weight[t, u] > -torch.inf:
                added = [t] if arc.du else []
                yield from walk(t + arc.dt, u + arc.du, weight + arc.weight[t, u], [*frames, *added])

    yield from walk(0, 0, torch.zeros((), dtype=torch.float64), [])


def arcs_of(case: Problem, leaves: list[torch.Tensor | None]):
    """Yield the arcs of each row's lattice, without what options change in them."""
    from rnnt_bench.losses import topologies

    blank, lattice = case.options.get("blank", 0), topology_of(case.options)
    logits = logits_of([leaves[0][case.utterance_of], *leaves[1:]], case.options.get("activation", "tanh"))
    parts = lattice.parts(logits, topologies.next_targets(case.targets, *logits.shape[1:3]), blank)
    for of_row, (T, U) in zip(parts, case.lengths):
        yield lattice.arcs(of_row[:T, : U + 1])


def by_all_paths(case: Problem):
    """Return the losses in float64 by a sum over every path, and the gradients of their sum by name."""
    leaves = case.leaves(torch.float64)
    pairs = zip(arcs_of(case, leaves), case.lengths)
    weights = [torch.stack([weight for weight, _ in paths_of(arcs, *lengths)]) for arcs, lengths in pairs]
    losses = torch.stack([-of_row.logsumexp(0) for of_row in weights])
    losses.sum().backward()
    return losses.detach(), {name: leaf.grad for name, leaf in zip(NAMES, leaves) if leaf is not None}


def computed(case: Problem, **options):
    """Return the losses of fused_transducer and the gradients of their sum by name."""
    leaves = case.leaves()
    losses = case.loss(leaves, **options)
    losses.sum().backward()
    return losses.detach(), {name: leaf.grad for name, leaf in zip(NAMES, leaves) if leaf is not None}


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference over the largest expected magnitude; inf where a value is not finite."""
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).abs().max().item() if expected.numel() else 0.0
    if difference != difference:
        return float("inf")
    return difference / max(expected.abs().max().item(), 1e-30) if difference else 0.0


def errors(case: Problem, expected=None, **options) -> dict[str, float]:
    """Return the error of the losses ("loss") and of each gradient, by name."""
    right_losses, right_gradients = expected or right(case)
    losses, gradients = computed(case, **options)
    result = {"loss": error(losses, right_losses)}
    return {**result, **{name: error(gradients[name], gradient) for name, gradient in right_gradients.items()}}


def drawn(random: Random, T: int = 40, U: int = 24, V: int = 1600, H: int = 90) -> Problem:
    """Return a random problem of at most these sizes on any lattice; its tensors have any strides."""

    def size(most: int) -> int:
        return int(most ** random.random())

    lattice = random.choice([*LATTICES, *(["regular"] * len(LATTICES))])
    of_lattice = {"topology": lattice, **LATTICES.get(lattice, {})}
    if "durations" in of_lattice and random.random() < 0.5:
        of_lattice["durations"] = [random.randint(1, 9), *(random.randint(lattice != "tdt", 9) for _ in range(size(6)))]
    V = random.choice([size(min(V, 90)), size(min(V, 90)), size(V)])
    case = problem(
        [(size(T), size(U) - 1) for _ in range(size(5))], H=size(H), V=V + len(of_lattice.get("durations", ())),
        dtype=random.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]),
        bias=random.random() < 0.7, seed=random.randrange(2**30), scale=random.choice([0.3, 1.0]),
        blank=random.randrange(V), activation=random.choice(list(ACTIVATIONS)),
        tile_cells=random.choice([None, None, 1, 7, 48, 56, 112, 10_000]),
        keep_bytes=random.choice([None, 0, 20_000]), negligible=random.choice([0.0, 1e-8]),
        fastemit_lambda=random.choice([0.0, 0.5]), clamp=random.choice([0.0, 0.0, 0.1]),
        nonfinite=random.choice(["keep", "skip"]),
        dropout=random.choice([0.0, 0.0, 0.4]), dropout_seed=random.getrandbits(64) - 2**63,
        label_smoothing=random.choice([0.0, 0.0, 0.1]) if lattice in SMOOTHABLE else 0.0,
        **of_lattice, delay_penalty=random.choice([0.0, 0.1]),
    )  # fmt: skip
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
    if random.random() < 0.3:
        M = len(case.U_lengths)
        N = random.randint(1, M)
        case.tensors[0], case.T_lengths = case.tensors[0][:N], case.T_lengths[:N]
        case = case.sharing([random.randrange(N) for _ in range(M)], integers)
    of_window = Random(case.options["dropout_seed"])
    return case.with_options(window=drawn_window(case, of_window)) if of_window.random() < 0.3 else case


def solve_random(count: int, seed: int) -> None:
    """Solve random problems by the C++ code and by plain PyTorch, and print how many; assert that they are equal."""
    random = Random(seed)
    largest = {torch.float32: 2e-5, torch.float64: 1e-10, torch.bfloat16: 3e-2, torch.float16: 6e-3}
    for number in range(count):
        case = drawn(random)
        dtype = case.tensors[0].dtype
        if number == 0:  # full tiles of a whole group, where AVX-512 reads beyond the last row of a block of logits
            case = problem([(20, 9)], H=20, V=16, dtype=torch.float64, tile_cells=56, negligible=0.0)
            dtype = torch.float64
        elif random.random() < 0.2 and case.tensors[3] is not None and len(case.tensors[3]) > 2:  # some are impossible
            case.tensors[3][random.randrange(len(case.tensors[3]))] = -float("inf")
        elif random.random() < 0.1:
            case = case.with_options(nonfinite="skip")
            case.tensors[0][0, 0] = random.choice([float("nan"), float("inf")])
        elif number % 5 == 2:  # few cells are computed
            stage = random.choice(["early", "middle", "trained"])
            case = speech(stage, dtype=dtype, keep_bytes=random.choice([None, 20_000]))
        torch.set_num_threads(random.choice([1, 2, 3]))
        wanted = [random.random() < 0.8 for _ in NAMES]
        results = []
        for backend in ("native", "torch"):
            leaves = [None if x is None else x.requires_grad_(want) for x, want in zip(case.leaves(), wanted)]
            losses = case.loss(leaves, backend=backend)
            if losses.requires_grad:
                losses.sum().backward()
            results.append([losses.detach(), *(leaf.grad for leaf in leaves if leaf is not None)])
        scale = max([1.0, *(x.abs().max().item() for x in results[1][1:] if x is not None)])
        for made, expected in zip(*results):
            if made is None or expected is None:
                assert made is expected
            elif not expected.isfinite().all():
                assert torch.equal(made.isfinite(), expected.isfinite())
            elif error(made, expected) > largest[dtype]:
                assert (made - expected).abs().max() <= largest[dtype] * scale, (number, case.lengths, case.options)
    print(f"{count} random problems ran clean, with {native.instruction_set()} (seed {seed})")


#: Of the compiler, for `sanitize`.
FLAGS = ["-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]


def sanitize() -> int:
    """Solve random problems under GCC's sanitizers, with each instruction set; return 1 where a result is wrong."""
    parser = argparse.ArgumentParser(prog="sanitize")
    parser.add_argument("--count", type=int, default=150, help="Problems for each instruction set. Default: 150")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the problems. Default: 0")
    options = parser.parse_args()
    try:
        words = [*compiling.compiler(), "-print-file-name=libasan.so"]
    except compiling.BuildError as error:
        parser.error(str(error))
    preload = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    if not os.path.isabs(preload):
        parser.error("the compiler has no libasan; install that of GCC, or set CXX=g++")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        compiling.build(Path(folder) / compiling.library_name(), FLAGS)
        for instruction_set in ["avx512", "avx2", "baseline"][-len(compiling.instruction_sets()) :]:
            environment = {
                **os.environ, "LD_PRELOAD": preload, "ASAN_OPTIONS": "detect_leaks=0",
                "UBSAN_OPTIONS": "print_stacktrace=1", "FUSED_TRANSDUCER_CACHE": folder,
                "FUSED_TRANSDUCER_ISA": instruction_set, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
            }  # fmt: skip
            script = f"import fused_helpers; fused_helpers.solve_random({options.count}, {options.seed})"
            done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
            print(f"{instruction_set}: {done.stdout.strip()}", flush=True)
            failed |= done.returncode != 0
            print(done.stderr[:8000] if done.returncode else "", end="", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(sanitize())
