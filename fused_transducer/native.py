"""The C++ backend: csrc/ called through ctypes, on the CPU, with all of torch's threads."""

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
from fused_transducer.lattices import NORMALISERS, REGULAR_ARCS

#: Activations and logits of a tile take about so many bytes for each two threads, up to so many
#: cells: whole numbers of SUMMED of csrc/drivers.h, so that the gradients have the same bits with
#: any number of threads.
TILE_BYTES, SUMMED, MOST = 3 * 2**17, 448, 2240
#: With more symbols forward notes the normalisers, and backward has so many of a cell's logits at
#: once.
MANY, AT_ONCE = 1024, 512

_first = threading.Lock()


class LatticeArc(ctypes.Structure):
    """`LatticeArc` of csrc/problem.h, field by field."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("dt", "du")),
        ("parts", ctypes.c_int64 * 2),
        ("then_blank", ctypes.c_int64),
        ("weight", ctypes.c_double),
    ]


class Problem(ctypes.Structure):
    """`Problem` of csrc/problem.h, field by field."""

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


#: Function of the library, after its prefix -> the type of what it returns.
RESULTS = {
    "isa": ctypes.c_char_p, "forward_bytes": ctypes.c_int64, "backward_bytes": ctypes.c_int64, "forward": None,
    "backward": None,
}  # fmt: skip


@cache
def _first_load() -> Tuple[Optional[ctypes.CDLL], str]:
    try:
        with compiling.located() as path:
            return loaded(path), ""
    except (compiling.BuildError, OSError) as error:
        return None, f"the C++ code could not be compiled or loaded ({error})"


def _library() -> Tuple[Optional[ctypes.CDLL], str]:
    """Return (library, ""), or (None, why there is none); the first call may compile it, and others
    wait for that."""
    with _first:
        return _first_load()


def loaded(path: Path) -> ctypes.CDLL:
    """Return a library with the types of what its functions return.  Raises OSError."""
    opened = ctypes.CDLL(str(path))
    try:
        for function, kind in RESULTS.items():
            getattr(opened, f"fused_transducer_{function}").restype = kind
    except AttributeError as error:
        raise OSError(f"{path} is another library ({error}): delete it") from error
    return opened


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why this backend cannot be used, or ""."""
    return _library()[1] if device.type == "cpu" else f"it runs on the CPU, not on {device.type}"


def instruction_set() -> str:
    """ "avx512", "avx2" or "baseline": what the kernels use here."""
    return _library()[0].fused_transducer_isa().decode()


def default_tile(H: int, V: int, dtype: torch.dtype) -> int:
    """Return the cells of a tile in backward: few enough for the caches, enough to keep every
    thread busy."""
    cells = TILE_BYTES // ((H + V if V <= MANY else 2 * H + AT_ONCE) * dtype.itemsize)
    return -(-torch.get_num_threads() // 2) * min(max(-(-cells // SUMMED), 1) * SUMMED, MOST)


def rows(call: Call) -> int:
    """Return how many numbers of each cell there are between forward and backward: its parts, and
    the normalisers where there are many symbols."""
    return 2 + len(call.durations) + (0 if call.V <= MANY else 4 if call.topology == "tdt" else 2)


def room(call: Call) -> int:
    """Return for how many cells there must be room between forward and backward: for those of the
    utterances, none for padding."""
    return int(call.cells().sum())


def fits(call: Call, cells: int) -> bool:
    """Return whether there is room for the cells of the utterances in `cells`."""
    return room(call) <= cells


class _Arguments:
    """A Problem and the tensors whose memory it points to."""

    def __init__(self, call: Call, arcs: Tensor, kept: Tensor):
        dtype = accumulated(call.encoder_out.dtype)
        encoder, decoder = (x.to(dtype) for x in (call.encoder_out, call.decoder_out))
        encoder, decoder = (x if x.stride(2) == 1 else x.contiguous() for x in (encoder, decoder))
        T_lengths, U_lengths = (x.long().contiguous() for x in (call.frames, call.U_lengths))
        first_cells, of_rows = (
            torch.zeros(call.M + 1, dtype=torch.int64, device="cpu"),
            call.cells(),
        )
        torch.cumsum(of_rows, 0, out=first_cells[1:])
        cells = int(first_cells[-1])
        lattice = call.lattice
        # the C++ code knows those
        arcs_of = [] if lattice.topology in REGULAR_ARCS else lattice.arcs
        self.lattice_arcs = (LatticeArc * len(arcs_of))(
            *(
                LatticeArc(x.dt, x.du, (*x.parts, -1, -1)[:2], x.then_blank, x.weight)
                for x in arcs_of
            )
        )
        self.problem = Problem(
            N=call.M, T=call.T, U1=call.U1, H=call.H, V=call.V,
            most_cells=call.T * call.U1 if call.window is None else int(of_rows.max()), blank=call.blank,
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
        for name, tensor in tensors.items():
            if tensor is not None:
                setattr(self.problem, name, tensor.data_ptr())
                self.tensors.append(tensor)

    def run(self, function: str) -> None:
        native, at = _library()[0], ctypes.byref(self.problem)
        size = getattr(native, f"fused_transducer_{function}_bytes")(at) + 63
        workspace = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.problem.workspace = (workspace.data_ptr() + 63) // 64 * 64
        getattr(native, f"fused_transducer_{function}")(at)


def forward(call: Call, gradient: bool, losses: Tensor, arcs: Tensor, kept: Tensor) -> None:
    """Write into losses (M,), arcs (rows, cells) as `plain.forward` does, and kept (cells, V): the
    logits of as many cells as it has room for, which backward then need not compute."""
    if not arcs.numel():
        # the caller wants none, but the losses are computed from them
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
    """Add to those of `gradients` that are wanted, as `plain.backward` does; arcs and kept are those
    that forward wrote."""
    if not grad_losses.all():  # cells of no posterior are left out
        arcs = arcs.clone()
        arcs[
            : call.lattice.parts,
            (grad_losses == 0).repeat_interleave(call.cells()).nonzero().squeeze(1),
        ] = 0
    arguments = _Arguments(call, arcs, kept)
    arguments.point(
        grad_losses=grad_losses.to(arcs.dtype).contiguous(),
        **dict(zip(("d_encoder", "d_decoder", "d_weight", "d_bias"), gradients)),
    )
    arguments.run("backward")
