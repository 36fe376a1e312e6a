"""The Triton backend: launches the kernels of `kernels`.

It runs on CUDA, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1). `plain` tells what a
backend is.

It takes float32 on any GPU, and bfloat16 and float16 from compute capability 8.0 on, since Triton
uses no tensor cores before it. Sums are in float32, the lattice in float64. Products of float32 use
TF32 where torch's own matrix products do. Those in the backward of float16 always use it, since
gradients leave the range of float16.
"""

from __future__ import annotations

import importlib
import os
from contextlib import nullcontext
from functools import cache
from typing import Any, ContextManager, Dict, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from fused_transducer import plain, windows
from fused_transducer.call import ACTIVATIONS, Call
from fused_transducer.lattices import NORMALISERS, REGULAR_ARCS

#: Blocks of a tile for each multiprocessor: so many that none waits long for the last ones.
WAVES = 3
#: Least cells of a tile, so that a small GPU needs few launches.
FEWEST_CELLS = 2**15
#: Most bytes of a tile's activations, gradients of logits and gradients of inputs.
TILE_BYTES = 3 * 2**28
#: Most programs that add a tile's gradients to the frames, or to the decoder's states.
ADDERS = 1024
#: Rows and columns of blocks that are activated or added, not multiplied.
ADDED, COLUMNS = 16, 64
#: Cells of a block whose parts are copied, or whose posteriors are computed.
OF_PARTS = 128
#: Least compute capability whose tensor cores Triton uses: before it, kernels of 16 bits spill 8 kB
#: a thread.
TENSOR_CORES_FROM = (8, 0)
#: Most splits of a tile's rows in the gradient of the weight, each with a sum of its own.
MOST_SPLITS = 16
#: Most states U + 1: an anti-diagonal is one program's vector, and passes through shared memory.
LONGEST = 2**13
#: Rows of matrices begin at multiples of so many bytes, which asynchronous copies to shared memory
#: need.
ALIGNED = 16


@cache
def _import_error() -> str:
    """Return why Triton and the kernels cannot be imported, or ""."""
    try:
        import triton.language

        import fused_transducer.kernels  # noqa: F401
    except ImportError as error:
        return f"Triton does not import ({error})"
    if hasattr(triton.language, "gather"):
        return ""
    return f"it needs Triton 3.2 or newer, not {triton.__version__}"


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why this backend cannot be used for tensors of `dtype` on `device`, or ""."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it runs on CUDA, not on {device.type}"
    if dtype == torch.float64:
        return "it has no float64"
    # AMD's GPUs are CUDA devices of torch too, of compute capability 9.0 and 9.4.
    if device.type == "cuda" and torch.version.hip:
        return "its kernels are for NVIDIA GPUs: an AMD GPU has less shared memory for a block, and no TF32"
    if device.type == "cuda" and dtype != torch.float32:
        capability = torch.cuda.get_device_capability(device)
        if capability < TENSOR_CORES_FROM:
            number = ".".join(map(str, capability))
            return f"it has no {str(dtype)[6:]} for a GPU of compute capability {number}; 8.0 is the least"
    return _import_error()


def rows(call: Call) -> int:
    """Return the number of rows of `arcs`: one for each part of a cell, and two for each softmax,
    see `forward`."""
    return call.lattice.parts + (4 if call.topology == "tdt" else 2)


def room(call: Call) -> int:
    """Return the number of columns of `arcs`: one for each cell of the padded batch.

    With a window, each frame gets as many columns as the frame with most states has states. To read
    that number, this waits for the GPU. While a CUDA graph is captured, which cannot wait, it
    returns the cells of the padded batch.
    """
    capturing = call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if call.window is None or capturing:
        return plain.room(call)
    first, end = windows.states_of_frames(call.band, call.T).unbind(-1)
    return call.M * call.T * max(1, int((end - first).max()))


def fits(call: Call, cells: int) -> bool:
    """Return whether `arcs` may have this number of columns. With a window, any number up to
    that of the padded batch will do, if it gives all frames equally many columns."""
    if call.window is None:
        return plain.fits(call, cells)
    return 0 < cells <= plain.room(call) and cells % (call.M * call.T) == 0


class Blocks(NamedTuple):
    """Hold the sizes of a matrix product's blocks, named as the kernels' arguments: BM cells, BV
    outputs and BH columns of the joiner."""

    BM: int
    BV: int
    BH: int
    num_warps: int = 8
    num_stages: int = 3


#: GPUs of compute capabilities from the first to below the second have 227 kB of shared memory for
#: a block; others have 99 to 163 kB.
LARGE_SHARED = (9, 0), (12, 0)
#: (product, bytes of a number) -> its blocks on other GPUs, and on those of LARGE_SHARED.
BLOCKS = {
    ("logits", 4): (Blocks(BM=128, BV=64, BH=32), Blocks(BM=128, BV=128, BH=32)),
    ("inputs", 4): (Blocks(BM=128, BV=32, BH=64), Blocks(BM=128, BV=32, BH=128)),
    ("weight", 4): (Blocks(BM=32, BV=128, BH=64), Blocks(BM=32, BV=128, BH=128)),
    ("logits", 2): (Blocks(BM=128, BV=128, BH=64),) * 2,
    ("inputs", 2): (Blocks(BM=128, BV=64, BH=128),) * 2,
    ("weight", 2): (Blocks(BM=64, BV=128, BH=128),) * 2,
}


def _blocks(product: str, dtype: torch.dtype, launch: _Launch) -> Blocks:
    """Return the blocks of a product for numbers of `dtype`, with BV and BH no larger than V and H
    need.

    product: "logits", "inputs" or "weight", as in BLOCKS
    """
    first, below = LARGE_SHARED
    is_large = launch.gpu is not None and first <= launch.gpu.capability < below
    for_others, for_large = BLOCKS[product, torch.finfo(dtype).bits // 8]
    blocks = for_large if is_large else for_others
    BV, BH = (max(16, _power_of_two(size)) for size in (launch.call.V, launch.call.H))
    return blocks._replace(BV=min(blocks.BV, BV), BH=min(blocks.BH, BH))


def _ceil(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def _power_of_two(size: int) -> int:
    """Return the least power of two that is not below `size`."""
    return 1 << (size - 1).bit_length()


class Gpu(NamedTuple):
    """Describe a GPU; capability: its compute capability, (major, minor)."""

    multiprocessors: int
    capability: Tuple[int, int]


def _gpu(device: torch.device) -> Optional[Gpu]:
    """Return the Gpu of a CUDA device; None for the CPU, where Triton's interpreter runs."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, (properties.major, properties.minor))


def _precision(gpu: Optional[Gpu], dtype: torch.dtype) -> str:
    """Return Triton's `input_precision` for float32 products in a call with inputs of `dtype`.

    "tf32" rounds operands to TF32: a product is within 2**-10 of the exact one. "ieee" multiplies
    in float32, within 2**-24. "tf32x3" splits each operand into two halves in TF32, and adds three
    products of them: 22 bits of an operand count, so a product is within 2**-21. For products with
    the weight, kernels get "halves" in place of "tf32x3": the products are the same, but the weight
    is split once, not in each block.
    """
    settings = torch.backends.cuda.matmul
    # torch 2.9 has fp32_precision; once that is set, reading allow_tf32 raises.
    chosen = getattr(settings, "fp32_precision", None)
    if dtype == torch.float16 or (settings.allow_tf32 if chosen is None else chosen == "tf32"):
        return "tf32"
    return "tf32x3" if gpu and gpu.capability >= TENSOR_CORES_FROM else "ieee"


def _on_its_device(device: torch.device) -> ContextManager[None]:
    """Return a context in which `device` is CUDA's current one: Triton launches on the current
    device and its stream, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Launch:
    """Holds what the kernels of one call share.

    Attributes:
        kernels: the module of the kernels
        cells: columns of `arcs`
        states: columns of `arcs` for each frame
        T_lengths, U_lengths (M,): int32, on the device of the call; both of each row
        band (M, T, 2): the range of states of each frame under a window; None without a window
        HP, VP: H and V with the columns that pad rows to multiples of ALIGNED bytes
        strides: of utterances and frames of the encoder's outputs, of rows and states of the
            decoder's
    """

    def __init__(self, call: Call, cells: int):
        # Triton takes long to import, and is not there on every computer.
        self.kernels = importlib.import_module("fused_transducer.kernels")
        self.call, self.gpu = call, _gpu(call.device)
        # The interpreter's tiles are small, as for 2 multiprocessors.
        self.multiprocessors = self.gpu.multiprocessors if self.gpu else 2
        # Without a bias the kernels get the weight in its place, and do not read it.
        self.bias = call.weight if call.bias is None else call.bias.contiguous()
        integers = [call.targets, call.T_lengths, call.U_lengths]
        integers += [] if call.utterance_of is None else [call.utterance_of]
        # A capture cannot copy integers from the host.
        on_host = any(x.device != call.device for x in integers)
        if on_host and call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"a CUDA graph is captured: targets and lengths must be on {call.device} before"
            )
        self.targets = call.targets.int().contiguous()
        self.T_lengths, self.U_lengths = (
            x.to(call.device, torch.int32).contiguous() for x in (call.frames, call.U_lengths)
        )
        # If utterance_of is None, Triton compiles kernels that do not read it.
        self.utterance_of = None
        if call.utterance_of is not None:
            self.utterance_of = call.utterance_of.to(self.T_lengths)
        self.cells = cells
        self.states = cells // (call.M * call.T)
        self.band = None
        if call.window is not None:
            first, end = windows.states_of_frames(call.band, call.T).unbind(-1)
            # Where `cells` is less than `room`, see `fits`, the last states have no column.
            end = torch.minimum(end, first + self.states)
            self.band = torch.stack([first, end], -1).to(torch.int32)
        self.sizes = call.T, self.states
        step = ALIGNED // call.weight.element_size()
        self.HP, self.VP = (_ceil(size, step) * step for size in (call.H, call.V))
        self.encoder, self.decoder = (self._rows(x) for x in (call.encoder_out, call.decoder_out))
        self.strides = (*self.encoder.stride()[:2], *self.decoder.stride()[:2])
        if max(self.HP * self.VP, call.T * self.states) >= 2**31:
            raise ValueError(
                "the Triton kernels take weights and utterances of up to 2^31 numbers: backend='torch'"
            )
        self.padded = {"HP": self.HP, "VP": self.VP}
        # Without dropout the kernels get the lengths in place of the seed, and do not read them.
        self.seed = self.T_lengths if call.seed is None else call.seed
        self.activation = {
            "KIND": ACTIVATIONS.index(call.activation), "DROP_BELOW": call.drop_below,
            "KEEP_SCALE": call.keep_scale,
        }  # fmt: skip
        self.smoothing = {
            "label_smoothing": float(call.label_smoothing),
            "SMOOTHS": bool(call.label_smoothing),
        }
        self.groups = {"EXTRA": call.lattice.extra, "NORMALISER": NORMALISERS.get(call.topology, 0)}
        self.flags = {"V": call.V, **self.padded, "HAS_BIAS": call.bias is not None, **self.groups}

    def _rows(self, x: Tensor) -> Tensor:
        """Return x (N, rows, H) with rows that begin at multiples of ALIGNED bytes: x itself, a
        copy, or a copy (N, rows, HP) that is padded with zeros."""
        if self.HP != self.call.H:
            return torch.nn.functional.pad(x.detach(), (0, self.HP - self.call.H))
        strides = [stride * x.element_size() for stride in x.stride()[:2]]
        is_aligned = x.stride(2) == 1 and not any(stride % ALIGNED for stride in strides)
        return x if is_aligned else x.contiguous()

    def products(self, operands: torch.dtype) -> Dict[str, Any]:
        """Return the kernels' arguments that say how operands of a dtype are multiplied."""
        # Triton's interpreter would multiply the bits of bfloat16 as if they were integers.
        dtype = operands if self.gpu else torch.float32
        operand = getattr(self.kernels.tl, str(dtype)[len("torch.") :])
        return {"PRECISION": _precision(self.gpu, self.call.weight.dtype), "OPERAND": operand}

    def weights(self, operands: torch.dtype, along: str) -> Tuple[Tensor, Dict[str, Any]]:
        """Return the weight, padded with zeros, and the kernels' arguments that say how it is
        stored and multiplied. With PRECISION "tf32x3" the weight is split into two halves
        (2, ...), and PRECISION becomes "halves".

        operands: the dtype in which the weight is multiplied
        along: the dimension, "H" or "V", that products with the weight sum over. In float32, tensor
            cores want this dimension contiguous; products without tensor cores want the other one
            contiguous. In 16 bits either may be.
        """
        call, how = self.call, self.products(operands)
        weight = call.weight.detach().to(operands)
        if (self.VP, self.HP) != (call.V, call.H):
            weight = torch.nn.functional.pad(weight, (0, self.HP - call.H, 0, self.VP - call.V))
        # float32 is contiguous along V for sums over V on tensor cores, and over H without them.
        if operands == torch.float32 and (along == "V") == (how["PRECISION"] != "ieee"):
            weight, strides = weight.t().contiguous(), {"WV": 1, "WH": self.VP}
        else:
            weight, strides = weight.contiguous(), {"WV": self.HP, "WH": 1}
        if operands == torch.float32 and how["PRECISION"] == "tf32x3":
            # TF32 lacks the last 13 bits of float32, to which the high half is rounded.
            high = ((weight.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
            weight = torch.stack([high, weight - high])
            how["PRECISION"] = "halves"
        return weight, {**strides, **how}

    def rows(self, size: int, BM: int) -> int:
        """Return the number of cells of a tile in backward.

        size: bytes of a number
        BM: cells of a block

        The caller may set it as `tile_cells`. Else a tile has the cells that keep all
        multiprocessors busy, or the whole blocks that fit in TILE_BYTES if these are fewer. It has
        256 cells at least. A
        batch of few cells has one tile. The size of this tile is a power of two, since kernels are
        compiled for each size.
        """
        fitting = TILE_BYTES // self.bytes_of_cell(size) // BM * BM
        wanted = max(WAVES * BM * self.multiprocessors, FEWEST_CELLS)
        tile = self.call.tile_cells or max(256, min(wanted, fitting))
        return min(tile, _power_of_two(self.cells))

    def bytes_of_cell(self, size: int) -> int:
        """Return the bytes of a cell's activations, gradients of logits and gradients of inputs,
        with numbers of `size` bytes."""
        return size * (2 * self.HP + self.VP)

    def activate(
        self, activations: Tensor, tile: int, blocks: int, listed: Sequence[Tensor], BM: int
    ) -> None:
        """Write the activations (cells, HP) of a tile.

        Args
            tile: the first block of the tile in forward, the first listed cell in backward
            blocks: blocks of a row of the batch in forward, not used in backward
            listed: in backward `numbers` and `positions` of the listed cells (see kernels); else ()
            BM: cells of a block
        """
        # In forward the kernel reads neither, but takes tensors.
        numbers, positions = listed or (self.T_lengths, self.T_lengths)
        self.kernels.activate[(_ceil(len(activations), BM), _ceil(self.HP, COLUMNS))](
            self.encoder, self.decoder, self.utterance_of, self.T_lengths, self.U_lengths, self.band, numbers,
            positions, activations, self.cells, tile, len(activations), blocks, *self.sizes, *self.strides,
            self.seed, HP=self.HP, **self.activation, LISTED=bool(listed), BM=BM, BH=COLUMNS,
        )  # fmt: skip


def forward(call: Call, gradient: bool, losses: Tensor, arcs: Tensor, kept: Tensor) -> None:
    """Write losses (M,) and arcs (rows, cells) as `plain.forward` does, which describes all
    arguments.

    Behind the rows of the parts, arcs has two rows that normalise the softmax of a cell: the
    largest logit, and the log of the sum of exp(logit - largest). Durations with a softmax of their
    own have two more.
    """
    with _on_its_device(call.device):
        _forward(call, gradient, losses, arcs)


def _forward(call: Call, gradient: bool, losses: Tensor, arcs: Tensor) -> None:
    """Do what `forward` does, on the current device. Raises ValueError for too many states.

    First the log-probabilities of all cells are written to arcs. Each launch writes those of at
    most `at_once` blocks of cells, since it needs the activations of its cells in memory. Then the
    walk through the lattice computes the losses from the log-probabilities.
    """
    if call.U1 > LONGEST:
        raise ValueError(
            f"decoder_out has {call.U1} states; the Triton kernels take {LONGEST}: use backend='torch'"
        )
    launch = _Launch(call, arcs.shape[1] if arcs.numel() else room(call))
    # The padding has posteriors of 0.
    arcs = arcs.zero_() if arcs.numel() else arcs.new_zeros(rows(call), launch.cells)
    blocks = _blocks("logits", call.weight.dtype, launch)
    blocks_each = _ceil(call.T * launch.states, blocks.BM)  # blocks of an utterance
    # The activations may take as many bytes as a tile of backward does in all.
    size = call.weight.element_size()
    tile_bytes = launch.rows(size, blocks.BM) * launch.bytes_of_cell(size)
    rows_at_once = call.tile_cells or tile_bytes // (size * launch.HP)
    at_once = min(call.M * blocks_each, _ceil(rows_at_once, blocks.BM))
    activations = call.weight.new_empty(at_once * blocks.BM, launch.HP)
    weight, of_weight = launch.weights(call.weight.dtype, "H")
    for block in range(0, call.M * blocks_each, at_once):
        count = min(at_once, call.M * blocks_each - block)
        launch.activate(activations[: count * blocks.BM], block, blocks_each, (), blocks.BM)
        launch.kernels.log_probabilities[(count,)](
            activations, weight, launch.bias, launch.targets, launch.T_lengths, launch.U_lengths, launch.band, arcs,
            launch.cells, block, blocks_each, call.T, call.U1, launch.states, call.blank, float(call.delay_penalty),
            **launch.smoothing, **launch.flags, **of_weight, **blocks._asdict(),
        )  # fmt: skip
    width = max(16, _power_of_two(call.U1))  # of the vector that holds an anti-diagonal
    if call.topology not in REGULAR_ARCS:
        return _walk(launch, width, gradient, losses, arcs)
    launch.kernels.lattice[(call.M,)](
        arcs, launch.cells, launch.T_lengths, launch.U_lengths, launch.band, losses, *launch.sizes,
        1 + call.fastemit_lambda,
        GRADIENT=gradient, BLOCK=width, num_warps=min(16, max(1, width // 64)),
    )  # fmt: skip


def _walk(launch: _Launch, width: int, gradient: bool, losses: Tensor, arcs: Tensor) -> None:
    """Write the losses of any lattice to `losses`, from the log-probabilities in `arcs`. With
    `gradient`, replace the log-probabilities by the posteriors.

    width: number of elements of the vector that holds an anti-diagonal.
    """
    call, cells, lattice = launch.call, launch.cells, launch.call.lattice
    of_rows = launch.T_lengths, launch.U_lengths, launch.band
    parts = arcs.new_empty(lattice.parts, cells)
    blocks = _ceil(call.T * launch.states, OF_PARTS)
    launch.kernels.by_diagonals[(call.M * blocks,)](
        arcs, parts, *of_rows, cells, blocks, *launch.sizes, PARTS=lattice.parts, BM=OF_PARTS
    )
    passes = 2 if gradient else 1  # alpha, and for the posteriors beta
    mantissas = arcs.new_empty(passes, cells, dtype=torch.float64)
    exponents = torch.empty_like(mantissas, dtype=torch.int64)
    # The kernels take each arc as (dt, du, two parts, then_blank, constant); a part -1 is none.
    rows = tuple(
        (arc.dt, arc.du, *(*arc.parts, -1, -1)[:2], arc.then_blank, arc.weight)
        for arc in lattice.arcs
    )
    table = {"ARCS": rows, "COUNT": len(rows), "LABEL_ENDS": lattice.label_ends}
    launch.kernels.walk[(call.M, passes)](
        parts, mantissas, exponents, losses, *of_rows, cells, *launch.sizes,
        **table, BLOCK=width, num_warps=min(16, max(1, width // 32)),
    )  # fmt: skip
    if not gradient:
        return
    launch.kernels.posteriors[(call.M * blocks,)](
        arcs, parts, mantissas, exponents, *of_rows, cells, blocks, *launch.sizes, 1 + call.fastemit_lambda,
        **table, PARTS=lattice.parts, BM=OF_PARTS,
    )  # fmt: skip


def backward(
    call: Call,
    grad_losses: Tensor,
    arcs: Tensor,
    kept: Tensor,
    gradients: Sequence[Optional[Tensor]],
) -> None:
    """Add the gradients that are wanted to `gradients`. Arguments as in `plain.backward`, but arcs
    has the rows that `forward` of this backend wrote; kept is not used.
    """
    # The gradient of `losses.sum()` is one number that is expanded to (M,): it is not contiguous.
    with _on_its_device(call.device):
        _backward(call, grad_losses.contiguous(), arcs, gradients)


def _backward(
    call: Call, grad_losses: Tensor, arcs: Tensor, gradients: Sequence[Optional[Tensor]]
) -> None:
    """Add the gradients that are wanted to `gradients`, see `backward`. Only cells that have a
    gradient are listed, and the list is worked through tile by tile. In each tile the gradients of
    the logits are computed first; the weight's (`layer`) and the inputs' (`sums`) follow from them.

    grad_losses: contiguous
    """
    d_encoder, d_decoder, d_weight, d_bias = gradients
    cells = arcs.shape[1]
    launch = _Launch(call, cells)
    kernels = launch.kernels
    counted = plain.has_gradient(call, arcs).view(call.M, -1) & (grad_losses != 0).unsqueeze(1)
    # For each cell the number of cells that are counted up to this one, itself included.
    index_dtype = torch.int64 if cells >= 2**31 else torch.int32
    positions = counted.flatten().cumsum(0, dtype=index_dtype)
    count = _Count(positions)
    numbers = torch.empty_like(positions)  # of the listed cells; what follows is not read
    kernels.list_cells[(_ceil(cells, 1024),)](numbers, positions, cells, BLOCK=1024)

    dtype = torch.bfloat16 if call.weight.dtype == torch.bfloat16 else torch.float32
    blocks = _blocks("inputs", dtype, launch)
    back, of_back = launch.weights(dtype, "V")
    weight, of_weight = launch.weights(call.weight.dtype, "H")
    # The logits are computed again exactly as in forward.
    of_forward = _blocks("logits", call.weight.dtype, launch)
    rows = launch.rows(torch.finfo(dtype).bits // 8, blocks.BM)
    of_inputs = d_encoder is not None or d_decoder is not None
    activations = torch.empty(rows, launch.HP, dtype=dtype, device=call.device)
    of_logits = torch.empty(rows, launch.VP, dtype=dtype, device=call.device)
    sums = torch.empty(rows if of_inputs else 0, launch.HP, dtype=dtype, device=call.device)
    layer = None
    if d_weight is not None or d_bias is not None:
        layer = _WeightGradients(
            call, launch, dtype, rows, d_weight is not None, d_bias is not None
        )
    across = _ceil(call.H, COLUMNS)
    for tile in range(0, cells, rows):
        # The host waits for the count after the first tile: then the GPU has work meanwhile.
        if tile and tile >= count.wait():
            break
        launch.activate(activations, tile, 1, (numbers, positions), ADDED)
        kernels.logit_gradients[(_ceil(rows, of_forward.BM),)](
            activations, weight, launch.bias, launch.targets, launch.U_lengths, launch.band, arcs, grad_losses, numbers,
            positions, of_logits, cells, tile, rows, call.T, call.U1, launch.states, call.blank, **launch.smoothing,
            clamp=float(call.clamp), CLAMPS=bool(call.clamp),
            **launch.flags, **of_weight, **of_forward._asdict(),
        )  # fmt: skip
        if layer is not None:
            layer.add(activations, of_logits, positions, tile)
        if not of_inputs:
            continue
        kernels.input_gradients[(_ceil(rows, blocks.BM), _ceil(call.H, blocks.BH))](
            launch.encoder, launch.decoder, launch.utterance_of, back, launch.band, numbers, positions, of_logits, sums,
            cells, tile, rows, *launch.sizes, *launch.strides, launch.seed, **launch.padded, **launch.activation,
            **of_back, **blocks._asdict(),
        )  # fmt: skip
        how = {"BM": ADDED, "BH": COLUMNS}
        if d_encoder is not None:
            adders = min(ADDERS, call.M * call.T) if launch.utterance_of is None else call.T
            kernels.add_to_encoder[(adders, across)](
                sums, numbers, positions, d_encoder, launch.utterance_of, cells, tile, rows, *launch.sizes, call.H,
                launch.HP, **how,
            )  # fmt: skip
        if d_decoder is not None:
            kernels.add_to_decoder[(min(ADDERS, call.M * call.U1), across)](
                sums, numbers, positions, d_decoder, launch.band, cells, tile, rows, call.T, call.U1, launch.states,
                call.H, launch.HP, **how,
            )  # fmt: skip
    if layer is not None and d_weight is not None:
        torch.sum(layer.weight[..., : call.H], 0, out=d_weight)
    if layer is not None and d_bias is not None:
        torch.sum(layer.bias, 0, out=d_bias)


class _Count:
    """Holds the number of cells that have a gradient. It is copied from the GPU while the host goes
    on."""

    def __init__(self, positions: Tensor):
        """Start to copy the number, which is the last of the positions (cells,).

        While a CUDA graph is captured, the host cannot wait for a copy. Then the count is of all
        cells. Programs for more cells than have a gradient do nothing.
        """
        self.count: Optional[int] = None
        if positions.device.type != "cuda":
            self.count = int(positions[-1])
        elif torch.cuda.is_current_stream_capturing():
            self.count = len(positions)
        else:
            self.copy = torch.empty(1, dtype=positions.dtype, pin_memory=True, device="cpu")
            self.copy.copy_(positions[-1:], non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record()

    def wait(self) -> int:
        """Return the number of cells; wait until it is copied, if need be."""
        if self.count is None:
            self.copied.synchronize()
            self.count = int(self.copy)
        return self.count


def _splits(programs: int, blocks: int, most: int, multiprocessors: int) -> Tuple[int, int]:
    """Return the best split of the rows: (number of splits, blocks of each split).

    Each of `programs` programs goes through `blocks` blocks of rows. A split into n parts makes n
    times as many programs, each with an n-th of the blocks, its share. The best is the smallest n,
    thus the largest share, whose time is at most 1.1 times the shortest time. A time is the number
    of blocks that the busiest multiprocessor goes through: its programs times their share.

    most: the largest number of splits to try
    """
    # Rounded up, several numbers of splits have one share; the smallest of them does for it.
    shares = {_ceil(blocks, wanted) for wanted in range(1, most + 1)}
    times = {
        share: _ceil(programs * _ceil(blocks, share), multiprocessors) * share for share in shares
    }
    share = max(share for share in shares if times[share] <= 1.1 * min(times.values()))
    return _ceil(blocks, share), share


class _WeightGradients:
    """Holds the gradients of weight (splits, V, HP) and bias (splits, V).

    The blocks of a V x H matrix make few programs. So the rows of each tile are split, and each
    split has a sum of its own. The caller adds these sums at the end.
    """

    def __init__(
        self, call: Call, launch: _Launch, dtype: torch.dtype, rows: int, weight: bool, bias: bool
    ):
        """Set the gradients to 0.

        rows: cells of a tile; weight, bias: whether each gradient is computed.
        """
        self.rows, self.cells = rows, launch.cells
        blocks = _blocks("weight", dtype, launch)
        self.kernel = launch.kernels.weight_gradients
        self.blocks = {**blocks._asdict(), **launch.products(dtype)}
        down = _ceil(call.V, blocks.BV)
        # Without the gradient of the weight, one column of blocks sums that of the bias.
        across = _ceil(call.H, blocks.BH) if weight else 1
        most = min(MOST_SPLITS, _ceil(rows, 256))  # at most one split for each 256 rows
        splits, share = _splits(down * across, _ceil(rows, blocks.BM), most, launch.multiprocessors)
        self.grid = (down, across, splits)
        self.flags = {
            "V": call.V, **launch.padded, "SHARE": share * blocks.BM, "COMPILED": launch.gpu is not None,
            "WEIGHT": weight, "BIAS": bias,
        }  # fmt: skip
        self.weight = torch.zeros(
            splits if weight else 0, call.V, launch.HP, dtype=torch.float32, device=call.device
        )
        self.bias = torch.zeros(
            splits if bias else 0, call.V, dtype=torch.float32, device=call.device
        )

    def add(self, activations: Tensor, of_logits: Tensor, positions: Tensor, tile: int) -> None:
        """Add what a tile adds to the gradients of weight and bias. The tile begins with the listed
        cell number `tile`."""
        self.kernel[self.grid](
            activations, of_logits, positions, self.weight, self.bias, self.cells, tile, self.rows,
            **self.flags, **self.blocks,
        )  # fmt: skip
