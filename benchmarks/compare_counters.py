#!/usr/bin/env python3
"""Print the tables of docs/flops.md: this counter beside torch.utils.flop_counter, fvcore and DeepSpeed's profiler.

    python benchmarks/compare_counters.py

It runs in any Python that has torch and torchaudio, and names the counters that are not installed on stderr:
`pip install fvcore` and `DS_BUILD_OPS=0 pip install deepspeed`, in an environment of its own.  Each counter counts one
forward, in evaluation, on the CPU; rows of FAST run without gradients, so that torch takes one operator for the layer.
The second table is of forward and backward, which only this counter and torch's see.  Output is Markdown.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import logging
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from common.cli.parser import Parser  # noqa: E402
from common.core.errors import EXIT_OK, UserError  # noqa: E402
from common.core.guard import guarded  # noqa: E402
from common.core.text import first_line  # noqa: E402
from common.present.table import Cell, Table, tabulated  # noqa: E402
from common.present.text import markdown  # noqa: E402
from common.setup import interpreters  # noqa: E402

Counts = Callable[[Any, Sequence[Any]], List[int]]
Made = Tuple[Any, Sequence[Any]]  # a module, its inputs
FAST = ", fast path"
#: What the second table tells beside the rows of the first.
GROUPED = {
    "Conv1d(16, 16, 3) on length 10": (16, 16, 3, 1),
    "Conv1d(16, 16, 3, groups=4) on length 10": (16, 16, 3, 4),
    "Conv1d(16, 16, 3, groups=16) on length 10": (16, 16, 3, 16),
}
BOTH_WAYS = ("MLP", "LSTM", "GRU", "MultiheadAttention", "TransformerEncoderLayer", "Conformer", "hubert_base")


def models() -> Dict[str, Callable[[], Made]]:
    """Return what makes each model and its inputs, by the name of its row."""
    import torch
    import torchaudio
    from torch import nn
    from torch.nn import functional as F

    class Function(nn.Module):
        def __init__(self, function: Callable[..., Any]):
            super().__init__()
            self.function = function

        def forward(self, *inputs: Any) -> Any:
            return self.function(*inputs)

    def layer(made: Any, *shapes: Tuple[int, ...]) -> Callable[[], Made]:
        return lambda: (made(), [torch.randn(shape) for shape in shapes])

    def function(called: Callable[..., Any], *shapes: Tuple[int, ...]) -> Callable[[], Made]:
        return layer(lambda: Function(called), *shapes)

    def attention() -> Made:
        x = torch.randn(2, 5, 8)
        return nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x)

    def loss() -> Made:
        targets, U_lengths, T_lengths = (torch.tensor(values, dtype=torch.int32) for values in ([[3]], [1], [2]))
        rnnt_loss = torchaudio.functional.rnnt_loss
        model = Function(lambda logits: rnnt_loss(logits, targets, T_lengths, U_lengths, blank=0))
        return model, [torch.randn(1, 2, 2, 13)]

    def conformer() -> Made:
        return torchaudio.models.Conformer(80, 4, 128, 2, 31), (torch.randn(2, 50, 80), torch.tensor([50, 50]))

    def encoder_layer() -> Made:
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), [torch.randn(2, 5, 8)]

    on_both = {
        "MultiheadAttention(8, 2) on (2, 5, 8)": attention,
        "TransformerEncoderLayer(8, 2, 16) on (2, 5, 8)": encoder_layer,
    }
    return {
        "Linear(3, 5) on (2, 3)": layer(lambda: nn.Linear(3, 5), (2, 3)),
        "MLP 3-5-ReLU-2 on (4, 3)": layer(lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), (4, 3)),
        "Conv1d(2, 4, 3, padding=1) on length 10": layer(lambda: nn.Conv1d(2, 4, 3, padding=1), (1, 2, 10)),
        "ConvTranspose1d(2, 3, 4) on length 5": layer(lambda: nn.ConvTranspose1d(2, 3, 4), (1, 2, 5)),
        "(3, 4) @ (4)": function(lambda a, b: torch.matmul(a, b), (3, 4), (4,)),
        "(3, 4) @ (5, 4, 6)": function(lambda a, b: torch.matmul(a, b), (3, 4), (5, 4, 6)),
        "einsum ij,jk of (2, 3), (3, 4)": function(lambda a, b: torch.einsum("ij,jk", a, b), (2, 3), (3, 4)),
        "softmax of (2, 5)": layer(lambda: nn.Softmax(-1), (2, 5)),
        "LayerNorm(5) on (2, 5)": layer(lambda: nn.LayerNorm(5), (2, 5)),
        "sum over the last dimension of (2, 3)": function(lambda a: a.sum(-1), (2, 3)),
        "GELU of (2, 5)": function(lambda a: F.gelu(a), (2, 5)),
        "LSTM(3, 4) on 2 x 5 steps": layer(lambda: nn.LSTM(3, 4, batch_first=True), (2, 5, 3)),
        "GRU(3, 4) on 2 x 5 steps": layer(lambda: nn.GRU(3, 4, batch_first=True), (2, 5, 3)),
        "scaled_dot_product_attention, 2 heads, 5 x 4": function(
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v), *((1, 2, 5, 4),) * 3
        ),
        **{name + path: make for name, make in on_both.items() for path in ("", FAST)},
        "torchaudio rnnt_loss, T 2, U 1, V 13": loss,
        "Conformer 80, 4 heads, 128, 2 layers, 2 x 50 frames": conformer,
        "hubert_base on 1 s": layer(torchaudio.models.hubert_base, (1, 16000)),
    }


def grouped() -> Dict[str, Callable[[], Made]]:
    """Return what makes the convolutions of GROUPED, by name."""
    import torch
    from torch import nn

    def make(inputs: int, outputs: int, kernel: int, groups: int) -> Made:
        return nn.Conv1d(inputs, outputs, kernel, padding=1, groups=groups), [torch.randn(1, inputs, 10)]

    return {name: partial(make, *sizes) for name, sizes in GROUPED.items()}


def there_and_back(module: Any, inputs: Sequence[Any]) -> None:
    """Run the forward, and the backward from ones for each output."""
    import torch

    leaves = torch.utils._pytree.tree_flatten(module(*inputs))[0]
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def both_ways(made: Dict[str, Callable[[], Made]]) -> Table:
    """Return the table of MACs of forward and backward, by this counter and by torch's."""
    rows = []
    for name, make in made.items():
        print(f"{name}, forward and backward ...", file=sys.stderr)
        (macs, _), (flops,) = (
            counter(partial(there_and_back, module.eval()), [inputs])
            for counter, (module, inputs) in ((ours, make()), (torchs, make()))
        )
        values = {"MACs": macs, "torch.utils. flop_counter FLOPs / 2": flops // 2, "more": flops // 2 - macs}
        cells = {title: Cell(str(value), value) for title, value in values.items()}
        rows.append({"forward and backward": Cell(name), **cells})
    return tabulated("both-ways", "", rows)


def ours(module: Any, inputs: Sequence[Any]) -> List[int]:
    from common.flops.counter import FlopCounter

    with FlopCounter() as counter:
        module(*inputs)
    return list(counter.total())


def torchs(module: Any, inputs: Sequence[Any]) -> List[int]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        module(*inputs)
    return [counter.get_total_flops()]


def fvcores(module: Any, inputs: Sequence[Any]) -> List[int]:
    from fvcore.nn import FlopCountAnalysis

    counter = FlopCountAnalysis(module, tuple(inputs))
    return [counter.unsupported_ops_warnings(False).uncalled_modules_warnings(False).total()]


def deepspeeds(module: Any, inputs: Sequence[Any]) -> List[int]:
    from deepspeed.profiling.flops_profiler import FlopsProfiler

    counter = FlopsProfiler(module)
    counter.start_profile()
    try:
        module(*inputs)
        counter.stop_profile()
        return [counter.get_total_flops(), counter.get_total_macs()]
    finally:
        counter.end_profile()


#: By the package that it needs: what counts, and its columns.
COUNTERS: Dict[str, Tuple[Counts, Tuple[str, ...]]] = {
    "": (ours, ("MACs", "FLOPs")),
    "torch": (torchs, ("torch.utils. flop_counter FLOPs",)),
    "fvcore": (fvcores, ('fvcore "flops"',)),
    "deepspeed": (deepspeeds, ("DeepSpeed FLOPs", "DeepSpeed MACs")),
}


def version(package: str) -> Optional[str]:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def counted(counter: Counts, make: Callable[[], Made], fast: bool, columns: int) -> List[Any]:
    """Each on a model of its own, as some leave something behind."""
    import torch

    module, inputs = make()
    try:
        with torch.set_grad_enabled(not fast):
            return list(map(int, counter(module.eval(), inputs)))
    except Exception as failure:  # whatever another counter raises
        print(f"  {counter.__name__}: {type(failure).__name__}: {first_line(failure)}", file=sys.stderr)
        return ["error"] * columns


def main(arguments: argparse.Namespace) -> int:
    if interpreters.lacks("torch", "torchaudio"):
        raise UserError(
            "torch and torchaudio are not installed here: take another Python, such as .venv/main/bin/python"
        )
    known = models()
    chosen = {name: make for name, make in known.items() if arguments.only in name}
    if not chosen:
        raise UserError(f"--only {arguments.only}: no row is called so; there are {', '.join(models())}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    installed = {}
    for package, (counter, columns) in COUNTERS.items():
        if package and version(package) is None:
            print(f"skipped: {package} is not installed here (pip install {package})", file=sys.stderr)
        else:
            installed[package] = counter, columns
    rows = []
    for name, make in chosen.items():
        print(f"{name} ...", file=sys.stderr)
        row = {"model": Cell(name)}
        for counter, columns in installed.values():
            counts = counted(counter, make, name.endswith(FAST), len(columns))
            row.update({column: Cell(str(value), value) for column, value in zip(columns, counts)})
        rows.append(row)
    print(", ".join(f"{package} {version(package)}" for package in installed if package), end="\n\n")
    print(markdown(tabulated("counters", "", rows)))
    told = {name: make for name, make in chosen.items() if name.startswith(BOTH_WAYS) and not name.endswith(FAST)}
    told.update((name, make) for name, make in grouped().items() if arguments.only in name)
    if told:
        print(f"\n{markdown(both_ways(told))}")
    return EXIT_OK


if __name__ == "__main__":
    parser = Parser(prog=Path(sys.argv[0]).name, description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--only", default="", metavar="WORDS", help="Compare only rows with these words in their name.")
    given = parser.parse_args()
    raise SystemExit(guarded("compare_counters.py", lambda: main(given)))
