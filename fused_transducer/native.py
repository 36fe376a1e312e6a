"""The C++ backend: calls csrc/ through ctypes, on the CPU, with all of torch's threads.

`plain` tells what a backend is. Here `arcs` has a column for each cell within the lengths of its
row, in the order of csrc/cells.h.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from fused_transducer import compiling, windows
from fused_transducer.call import ACTIVATIONS, Call, accumulated
from fused_transducer.lattices import NORMALISERS, REGULAR_ARCS, Arc

#: Bytes of the activations and logits of a tile, for each two threads.
TILE_BYTES = 3 * 2**17
#: A tile has a multiple of so many cells, as in csrc/drivers.h, so that the gradients have the same
#: bits with any number of threads.
SUMMED = 448
#: Most cells of a tile, for each two threads.
MOST_CELLS = 2240
#: With more outputs than this, forward stores the normalisers of each cell, ...
MANY_OUTPUTS = 1024
#: ... and backward computes so many of a cell's logits at once.
LOGITS_AT_ONCE = 512

CACHE_LINE = 64  # bytes, at which the C++ code's memory begins

_first = threading.Lock()


class LatticeArc(ctypes.Structure):
    """The struct `LatticeArc` of csrc/problem.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dt", "du")),
        ("parts", ctypes.c_int64 * 2),
        ("then_blank", ctypes.c_int64),
        ("weight", ctypes.c_double),
    ]


class Problem(ctypes.Structure):
    """The struct `Problem` of csrc/problem.h, field by field."""

    _fields_ = [
        (name, kind)
        for kind, names in (
            (
                ctypes.c_int64,
                "N T U1 H V most_cells blank activation drop_below is_double is_bfloat16 gradient threads tile_cells "
                "kept_cells normalised extra of_symbols normaliser label_ends arc_count encoder_n encoder_t decoder_n "
                "decoder_u",
            ),
            (
                ctypes.c_double,
                "negligible fastemit_lambda delay_penalty label_smoothing clamp keep_scale",
            ),
            (
                ctypes.c_void_p,
                "encoder decoder weight bias grad_losses targets T_lengths U_lengths utterance_of lattice_arcs "
                "first_cells diagonals seed arcs kept losses d_encoder d_decoder d_weight d_bias workspace",
            ),
        )
        for name in names.split()
    ]


#: Function of the library, without its prefix -> the type that it returns.
RESULTS = {
    "isa": ctypes.c_char_p, "forward_bytes": ctypes.c_int64, "backward_bytes": ctypes.c_int64, "forward": None,
    "backward": None,
}  # fmt: skip


@cache
def _first_load() -> Tuple[Optional[ctypes.CDLL], str]:
    """Load the library, and compile it if need be; return it and "", or None and the reason."""
    try:
        with compiling.located() as path:
            return loaded(path), ""
    except (compiling.BuildError, OSError) as error:
        return None, f"the C++ code could not be compiled or loaded ({error})"


def _library() -> Tuple[Optional[ctypes.CDLL], str]:
    """Return the library and "", or None and the reason why there is none. The first call may take
    long, since it compiles; calls from other threads wait for it."""
    with _first:
        return _first_load()


def loaded(path: Path) -> ctypes.CDLL:
    """Open a library and declare what its functions return.  Raises OSError."""
    opened = ctypes.CDLL(str(path))
    try:
        for function, kind in RESULTS.items():
            getattr(opened, f"fused_transducer_{function}").restype = kind
    except AttributeError as error:
        raise OSError(f"{path} is another library ({error}): delete it") from error
    return opened


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why this backend cannot be used on `device`, or ""."""
    return _library()[1] if device.type == "cpu" else f"it runs on the CPU, not on {device.type}"


def instruction_set() -> str:
    """Return the instruction set that the kernels use here: "avx512", "avx2" or "baseline"."""
    return _library()[0].fused_transducer_isa().decode()


def default_tile(H: int, V: int, dtype: torch.dtype) -> int:
    """Return the number of cells of a tile in backward: few enough for the caches, and enough to
    keep every thread busy.

    TILE_BYTES and MOST_CELLS limit the cells of each two threads, a multiple of SUMMED."""
    numbers = H + V if V <= MANY_OUTPUTS else 2 * H + LOGITS_AT_ONCE  # in memory, of each cell
    cells = TILE_BYTES // (numbers * dtype.itemsize)
    rounded = max(_ceil(cells, SUMMED), 1) * SUMMED
    pairs_of_threads = _ceil(torch.get_num_threads(), 2)
    return pairs_of_threads * min(rounded, MOST_CELLS)


def _ceil(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def rows(call: Call) -> int:
    """Return the number of rows of `arcs`: one for each part of a cell. With more than MANY_OUTPUTS
    outputs, each softmax has two rows more, its normaliser: the largest logit, and the sum of
    exp(logit - largest) over the other logits."""
    parts = 2 + len(call.durations)
    if call.V <= MANY_OUTPUTS:
        return parts
    softmaxes = 2 if call.topology == "tdt" else 1
    return parts + 2 * softmaxes


def room(call: Call) -> int:
    """Return the number of columns that `arcs` needs: one for each cell, none for padding."""
    return int(call.cells().sum())


def fits(call: Call, cells: int) -> bool:
    """Return whether `arcs` may have this number of columns; it may have more than are needed."""
    return room(call) <= cells


class _Arguments:
    """Holds a Problem and the tensors that it points to, which must live as long."""

    def __init__(self, call: Call, arcs: Tensor, kept: Tensor):
        """Point to the tensors of a call. Where the C++ code takes another dtype or other strides
        than a tensor has, point to a copy of that tensor.

        csrc/problem.h says what the fields of the Problem are. `arcs` has rows of the normaliser,
        too (`normalised`), if it has more rows than a cell has parts."""
        dtype = accumulated(call.encoder_out.dtype)
        encoder, decoder = (x.to(dtype) for x in (call.encoder_out, call.decoder_out))
        encoder, decoder = (x if x.stride(2) == 1 else x.contiguous() for x in (encoder, decoder))
        T_lengths, U_lengths = (x.long().contiguous() for x in (call.frames, call.U_lengths))
        cells_of_rows = call.cells()
        first_cells = torch.zeros(call.M + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(cells_of_rows, 0, out=first_cells[1:])
        cells = int(first_cells[-1])
        lattice = call.lattice
        # The C++ code has the regular arcs built in.
        lattice_arcs = [] if lattice.topology in REGULAR_ARCS else lattice.arcs
        self.lattice_arcs = (LatticeArc * len(lattice_arcs))(*map(_c_arc, lattice_arcs))
        self.problem = Problem(
            N=call.M, T=call.T, U1=call.U1, H=call.H, V=call.V,
            most_cells=call.T * call.U1 if call.window is None else int(cells_of_rows.max()), blank=call.blank,
            activation=ACTIVATIONS.index(call.activation), drop_below=call.drop_below, is_double=dtype == torch.float64,
            is_bfloat16=call.encoder_out.dtype == torch.bfloat16,
            threads=torch.get_num_threads(), kept_cells=min(len(kept), cells), normalised=len(arcs) > lattice.parts,
            extra=lattice.extra, of_symbols=lattice.of_symbols, label_ends=lattice.label_ends,
            normaliser=NORMALISERS.get(call.topology, 0),
            arc_count=len(self.lattice_arcs), lattice_arcs=ctypes.addressof(self.lattice_arcs),
            tile_cells=max(1, min(cells, call.tile_cells or default_tile(call.H, call.V, dtype))),
            encoder_n=encoder.stride(0), encoder_t=encoder.stride(1),
            decoder_n=decoder.stride(0), decoder_u=decoder.stride(1),
            negligible=call.negligible, fastemit_lambda=call.fastemit_lambda, delay_penalty=call.delay_penalty,
            label_smoothing=call.label_smoothing, clamp=call.clamp, keep_scale=call.keep_scale,
        )  # fmt: skip
        self.tensors: List[Tensor] = []
        self.point(
            encoder=encoder, decoder=decoder,
            weight=(call.weight if call.weight.dtype == torch.bfloat16 else call.weight.to(dtype)).contiguous(),
            bias=None if call.bias is None else call.bias.to(dtype).contiguous(),
            targets=call.targets.long().contiguous(), T_lengths=T_lengths, U_lengths=U_lengths,
            utterance_of=None if call.utterance_of is None else call.utterance_of.long().contiguous(),
            first_cells=first_cells, seed=call.seed, arcs=arcs, kept=kept,
            diagonals=None if call.window is None else windows.diagonals_of(call.band, call.T).contiguous(),
        )  # fmt: skip

    def point(self, **tensors: Optional[Tensor]) -> None:
        """Point fields of the Problem to tensors; None leaves a field null.

        The tensors are kept, so they live as long as the Problem."""
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self.problem, name, tensor.data_ptr())
                self.tensors.append(tensor)

    def run(self, function: str) -> None:
        """Call "forward" or "backward" of the library, with as much memory as it asks for."""
        library, _ = _library()
        problem = ctypes.byref(self.problem)
        size = getattr(library, f"fused_transducer_{function}_bytes")(problem)
        workspace = torch.empty(size + CACHE_LINE - 1, dtype=torch.uint8, device="cpu")
        self.problem.workspace = _ceil(workspace.data_ptr(), CACHE_LINE) * CACHE_LINE
        getattr(library, f"fused_transducer_{function}")(problem)


def _c_arc(arc: Arc) -> LatticeArc:
    """Return an arc as the C++ code takes it: with two parts, where -1 is none."""
    return LatticeArc(arc.dt, arc.du, (*arc.parts, -1, -1)[:2], arc.then_blank, arc.weight)


def forward(call: Call, gradient: bool, losses: Tensor, arcs: Tensor, kept: Tensor) -> None:
    """Write losses (M,), and arcs (rows, cells) for backward, unless arcs is empty. For `gradient`
    see `plain.forward`.

    kept: (number, V), gets the logits of this number of cells, the first ones. Backward then need
        not compute these logits.
    """
    if not arcs.numel():  # the caller wants no arcs, but the losses are computed from them
        arcs = arcs.new_empty(call.lattice.parts, room(call))
    arguments = _Arguments(call, arcs, kept)
    arguments.problem.gradient = gradient
    arguments.point(losses=losses)
    arguments.run("forward")


def backward(
    call: Call,
    grad_losses: Tensor,
    arcs: Tensor,
    kept: Tensor,
    gradients: Sequence[Optional[Tensor]],
) -> None:
    """Add the gradients that are wanted to `gradients`, as `plain.backward` does.

    arcs, kept: what `forward` wrote; they are not changed
    """
    if not grad_losses.all():  # the C++ code leaves out cells whose posteriors are 0
        arcs = arcs.clone()
        is_left_out = (grad_losses == 0).repeat_interleave(call.cells())
        arcs[: call.lattice.parts, is_left_out.nonzero().squeeze(1)] = 0
    arguments = _Arguments(call, arcs, kept)
    arguments.point(
        grad_losses=grad_losses.to(arcs.dtype).contiguous(),
        **dict(zip(("d_encoder", "d_decoder", "d_weight", "d_bias"), gradients)),
    )
    arguments.run("backward")
