"""The Triton backend: launches `kernels`.

It runs on CUDA, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1).

float32 on any GPU; bfloat16 and float16 from compute capability 8.0 on, since Triton has no tensor
cores before it. Sums are in float32, the lattice in float64.  Products of float32 use TF32 where
torch's own matrix products do; those of float16's backward always do, since gradients leave the
range of float16.
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

#: A tile has this many blocks for each multiprocessor, so that none of them waits long for the last
#: ones, ...
WAVES = 3
#: ... and so many cells on a small GPU, so that launches stay few, ...
FEWEST_CELLS = 2**15
#: ... and its activations, gradients of logits and gradients of inputs take no more bytes than
#: this.
TILE_BYTES = 3 * 2**28
#: Programs that share the frames, or the decoder's states, of a tile.
ADDERS = 1024
#: Rows and columns of blocks that are activated or added, not multiplied.
ADDED, COLUMNS = 16, 64
#: Cells of a block whose parts are copied, or whose posteriors are computed.
OF_PARTS = 128
#: Least compute capability whose tensor cores Triton uses: before it, kernels of 16 bits spill 8 kB
#: a thread.
TENSOR_CORES_FROM = (8, 0)
#: Most sums of their own that the rows of a tile have in the gradients of the weight.
MOST_SPLITS = 16
#: Longest U + 1: a diagonal is one program's vector, and passes through shared memory.
LONGEST = 2**13
#: Rows of what is multiplied begin at multiples of so many bytes, as asynchronous copies to shared
#: memory ask.
ALIGNED = 16


@cache
def _import_error() -> str:
    try:
        import triton.language

        import fused_transducer.kernels  # noqa: F401
    except ImportError as error:
        return f"Triton does not import ({error})"
    return (
        ""
        if hasattr(triton.language, "gather")
        else f"it needs Triton 3.2 or newer, not {triton.__version__}"
    )


def unavailable(device: torch.device, dtype: torch.dtype) -> str:
    """Return why this backend cannot be used for tensors of `dtype` on `device`, or ""."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it runs on CUDA, not on {device.type}"
    if dtype == torch.float64:
        return "it has no float64"
    # whose compute capability, 9.0 and 9.4, is none of NVIDIA's
    if device.type == "cuda" and torch.version.hip:
        return "its kernels are for NVIDIA GPUs: an AMD GPU has less shared memory for a block, and no TF32"
    if device.type == "cuda" and dtype != torch.float32:
        capability = torch.cuda.get_device_capability(device)
        if capability < TENSOR_CORES_FROM:
            number = ".".join(map(str, capability))
            return f"it has no {str(dtype)[6:]} for a GPU of compute capability {number}; 8.0 is the least"
    return _import_error()


def rows(call: Call) -> int:
    """Return how many numbers of each cell there are between forward and backward, see `forward`."""
    return call.lattice.parts + (4 if call.topology == "tdt" else 2)


def room(call: Call) -> int:
    """Return for how many cells there must be room, as `plain.room` does; with a window, for the
    states of the frame that has the most.  This waits for the GPU."""
    capturing = call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if call.window is None or capturing:
        return plain.room(call)
    first, end = windows.states_of_frames(call.band, call.T).unbind(-1)
    return call.M * call.T * max(1, int((end - first).max()))


def fits(call: Call, cells: int) -> bool:
    """Return whether `cells` is the number of cells for which there is room; with a window, whether
    it is the same number of states for each frame."""
    if call.window is None:
        return plain.fits(call, cells)
    return 0 < cells <= plain.room(call) and cells % (call.M * call.T) == 0


class Blocks(NamedTuple):
    """Sizes of the blocks of a product, in cells, symbols and columns: as the kernels' arguments
    are named."""

    BM: int
    BV: int
    BH: int
    num_warps: int = 8
    num_stages: int = 3


#: Compute capabilities, from and below, of GPUs with 227 kB of shared memory for a block; others
#: have 99 to 163 kB.
LARGE_SHARED = (9, 0), (12, 0)
#: Blocks of each product by bytes of a number, for other GPUs and for those of LARGE_SHARED.
BLOCKS = {
    ("logits", 4): (Blocks(BM=128, BV=64, BH=32), Blocks(BM=128, BV=128, BH=32)),
    ("inputs", 4): (Blocks(BM=128, BV=32, BH=64), Blocks(BM=128, BV=32, BH=128)),
    ("weight", 4): (Blocks(BM=32, BV=128, BH=64), Blocks(BM=32, BV=128, BH=128)),
    ("logits", 2): (Blocks(BM=128, BV=128, BH=64),) * 2,
    ("inputs", 2): (Blocks(BM=128, BV=64, BH=128),) * 2,
    ("weight", 2): (Blocks(BM=64, BV=128, BH=128),) * 2,
}


def _blocks(product: str, dtype: torch.dtype, launch: _Launch) -> Blocks:
    """Return the blocks of a product, no larger than V and H ask."""
    large = launch.gpu is not None and LARGE_SHARED[0] <= launch.gpu.capability < LARGE_SHARED[1]
    blocks = BLOCKS[product, torch.finfo(dtype).bits // 8][large]
    BV, BH = (max(16, 1 << (size - 1).bit_length()) for size in (launch.call.V, launch.call.H))
    return blocks._replace(BV=min(blocks.BV, BV), BH=min(blocks.BH, BH))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


class Gpu(NamedTuple):
    """capability: (major, minor)."""

    multiprocessors: int
    capability: Tuple[int, int]


def _gpu(device: torch.device) -> Optional[Gpu]:
    """Return what `device` is; None for the CPU, where Triton's interpreter runs."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, (properties.major, properties.minor))


def _precision(gpu: Optional[Gpu], dtype: torch.dtype) -> str:
    """Return Triton's `input_precision` for products of float32 that come from tensors of `dtype`.

    tf32x3 adds three products of TF32 halves on tensor cores: 22 bits of each operand count, so a
    product is within 2**-21 of the exact one, where one in float32 is within 2**-24 and one in TF32
    within 2**-10.  For products with the weight it becomes "halves": the same, with the weight's
    halves made once instead of in each block.
    """
    settings = torch.backends.cuda.matmul
    # torch 2.9; once it is set, reading allow_tf32 raises
    chosen = getattr(settings, "fp32_precision", None)
    if dtype == torch.float16 or (settings.allow_tf32 if chosen is None else chosen == "tf32"):
        return "tf32"
    return "tf32x3" if gpu and gpu.capability >= TENSOR_CORES_FROM else "ieee"


def _on_its_device(device: torch.device) -> ContextManager[None]:
    """Return a context in which `device` is CUDA's current one: Triton launches on the current
    device and its stream, wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class _Launch:
    """Holds what the kernels of one call share.  cells: for which there is room."""

    def __init__(self, call: Call, cells: int):
        # Triton is imported where it is needed
        self.kernels = importlib.import_module("fused_transducer.kernels")
        self.call, self.gpu = call, _gpu(call.device)
        #: 2 for the interpreter, whose tiles are small
        self.multiprocessors = self.gpu.multiprocessors if self.gpu else 2
        self.bias = call.weight if call.bias is None else call.bias.contiguous()
        integers = [call.targets, call.T_lengths, call.U_lengths]
        integers += [] if call.utterance_of is None else [call.utterance_of]
        on_host = any(x.device != call.device for x in integers)
        if on_host and call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                f"a CUDA graph is captured: targets and lengths must be on {call.device} before"
            )
        self.targets = call.targets.int().contiguous()
        self.T_lengths, self.U_lengths = (
            x.to(call.device, torch.int32).contiguous() for x in (call.frames, call.U_lengths)
        )
        # None is no argument of a kernel's: it is a constant of its code
        self.utterance_of = (
            call.utterance_of if call.utterance_of is None else call.utterance_of.to(self.T_lengths)
        )
        self.cells = cells
        #: for which each frame has room, and which it has
        self.states, self.band = cells // (call.M * call.T), None
        if call.window is not None:
            first, end = windows.states_of_frames(call.band, call.T).unbind(-1)
            end = torch.minimum(end, first + self.states)
            self.band = torch.stack([first, end], -1).to(torch.int32)
        self.sizes = call.T, self.states
        of_16_bytes = ALIGNED // call.weight.element_size()
        self.HP, self.VP = (_ceil(size, of_16_bytes) * of_16_bytes for size in (call.H, call.V))
        self.encoder, self.decoder = (self._rows(x) for x in (call.encoder_out, call.decoder_out))
        self.strides = (*self.encoder.stride()[:2], *self.decoder.stride()[:2])
        if max(self.HP * self.VP, call.T * self.states) >= 2**31:
            raise ValueError(
                "the Triton kernels take weights and utterances of up to 2^31 numbers: backend='torch'"
            )
        self.padded = {"HP": self.HP, "VP": self.VP}
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
        """Return x (N, rows, H), copied and padded with zeros to (N, rows, HP) where its rows are
        not ALIGNED."""
        if self.HP != self.call.H:
            return torch.nn.functional.pad(x.detach(), (0, self.HP - self.call.H))
        of_row = [stride * x.element_size() for stride in x.stride()[:2]]
        return (
            x
            if x.stride(2) == 1 and not any(stride % ALIGNED for stride in of_row)
            else x.contiguous()
        )

    def products(self, operands: torch.dtype) -> Dict[str, Any]:
        """Return how operands of a dtype are multiplied, as the kernels' arguments are named."""
        # Triton's interpreter multiplies the bits of bfloat16 as if they were integers
        operand = getattr(
            self.kernels.tl, str(operands if self.gpu else torch.float32)[len("torch.") :]
        )
        return {"PRECISION": _precision(self.gpu, self.call.weight.dtype), "OPERAND": operand}

    def weights(self, operands: torch.dtype, along: str) -> Tuple[Tensor, Dict[str, Any]]:
        """Return the weight as kernels take it, its rows and columns padded with zeros, and their
        arguments for it.

        along: the dimension that products with it sum over, "H" or "V".  Tensor cores want numbers
        of 32 bits to follow each other along it, plain products to follow each other across it, and
        16 bits are free to choose."""
        call, how = self.call, self.products(operands)
        weight = call.weight.detach().to(operands)
        if (self.VP, self.HP) != (call.V, call.H):
            weight = torch.nn.functional.pad(weight, (0, self.HP - call.H, 0, self.VP - call.V))
        if operands == torch.float32 and (along == "V") == (how["PRECISION"] != "ieee"):
            weight, strides = weight.t().contiguous(), {"WV": 1, "WH": self.VP}
        else:
            weight, strides = weight.contiguous(), {"WV": self.HP, "WH": 1}
        if operands == torch.float32 and how["PRECISION"] == "tf32x3":
            high = ((weight.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
            weight, how = torch.stack([high, weight - high]), {**how, "PRECISION": "halves"}
        return weight, {**strides, **how}

    def rows(self, size: int, BM: int) -> int:
        """Return the number of cells of a tile of backward, in blocks of BM, whose numbers have
        `size` bytes; a power of two where the batch has fewer cells, since kernels are compiled for
        it."""
        call = self.call
        fit = TILE_BYTES // self.bytes_of_cell(size) // BM * BM
        tile = call.tile_cells or max(
            256, min(max(WAVES * BM * self.multiprocessors, FEWEST_CELLS), fit)
        )
        return min(tile, 1 << (self.cells - 1).bit_length())

    def bytes_of_cell(self, size: int) -> int:
        """Return the bytes of a cell's activations, gradients of logits and gradients of inputs."""
        return size * (2 * self.HP + self.VP)

    def activate(
        self, activations: Tensor, tile: int, blocks: int, listed: Sequence[Tensor], BM: int
    ) -> None:
        numbers, positions = listed or (self.T_lengths, self.T_lengths)
        self.kernels.activate[(_ceil(len(activations), BM), _ceil(self.HP, COLUMNS))](
            self.encoder, self.decoder, self.utterance_of, self.T_lengths, self.U_lengths, self.band, numbers,
            positions, activations, self.cells, tile, len(activations), blocks, *self.sizes, *self.strides,
            self.seed, HP=self.HP, **self.activation, LISTED=bool(listed), BM=BM, BH=COLUMNS,
        )  # fmt: skip


def forward(call: Call, gradient: bool, losses: Tensor, arcs: Tensor, kept: Tensor) -> None:
    """Write into losses (M,) and arcs (rows, cells) as `plain.forward` does.  Behind the parts arcs
    has each cell's largest logit and the log of the sum beside it, and the same of durations that
    have a softmax of their own."""
    with _on_its_device(call.device):
        _forward(call, gradient, losses, arcs)


def _forward(call: Call, gradient: bool, losses: Tensor, arcs: Tensor) -> None:
    if call.U1 > LONGEST:
        raise ValueError(
            f"decoder_out has {call.U1} states; the Triton kernels take {LONGEST}: use backend='torch'"
        )
    launch = _Launch(call, arcs.shape[1] if arcs.numel() else room(call))
    # in the padding, arcs of no path
    arcs = arcs.zero_() if arcs.numel() else arcs.new_zeros(rows(call), launch.cells)
    blocks = _blocks("logits", call.weight.dtype, launch)
    blocks_each = _ceil(call.T * launch.states, blocks.BM)  # blocks of an utterance
    size = call.weight.element_size()  # the activations take the bytes of a tile of backward
    rows_at_once = call.tile_cells or launch.rows(size, blocks.BM) * launch.bytes_of_cell(size) // (
        size * launch.HP
    )
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
    # of the vector that holds a diagonal of the lattice
    width = max(16, 1 << (call.U1 - 1).bit_length())
    if call.topology not in REGULAR_ARCS:
        return _walk(launch, width, gradient, losses, arcs)
    launch.kernels.lattice[(call.M,)](
        arcs, launch.cells, launch.T_lengths, launch.U_lengths, launch.band, losses, *launch.sizes,
        1 + call.fastemit_lambda,
        GRADIENT=gradient, BLOCK=width, num_warps=min(16, max(1, width // 64)),
    )  # fmt: skip


def _walk(launch: _Launch, width: int, gradient: bool, losses: Tensor, arcs: Tensor) -> None:
    """Fill the losses from the arcs of any lattice; with `gradient` arcs with the posteriors."""
    call, cells, lattice = launch.call, launch.cells, launch.call.lattice
    of_rows = launch.T_lengths, launch.U_lengths, launch.band
    parts = arcs.new_empty(lattice.parts, cells)
    blocks = _ceil(call.T * launch.states, OF_PARTS)
    launch.kernels.by_diagonals[(call.M * blocks,)](
        arcs, parts, *of_rows, cells, blocks, *launch.sizes, PARTS=lattice.parts, BM=OF_PARTS
    )
    passes = 2 if gradient else 1
    mantissas = arcs.new_empty(passes, cells, dtype=torch.float64)
    exponents = torch.empty_like(mantissas, dtype=torch.int64)
    # dt, du, two parts (-1 for none), then_blank, constant
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
    """Add to those of `gradients` that are wanted, as `plain.backward` does; arcs are those that
    forward wrote."""
    with _on_its_device(call.device):
        _backward(call, grad_losses.contiguous(), arcs, gradients)


def _backward(
    call: Call, grad_losses: Tensor, arcs: Tensor, gradients: Sequence[Optional[Tensor]]
) -> None:
    """grad_losses: contiguous, since the gradient of `losses.sum()` is one number expanded to
    (N,)."""
    d_encoder, d_decoder, d_weight, d_bias = gradients
    cells = arcs.shape[1]
    launch = _Launch(call, cells)
    kernels = launch.kernels
    counts = (
        plain.has_gradient(call, arcs).view(call.M, -1) & (grad_losses != 0).unsqueeze(1)
    ).flatten()
    # how many count up to each
    positions = counts.cumsum(0, dtype=torch.int64 if cells >= 2**31 else torch.int32)
    count = _Count(positions)
    numbers = torch.empty_like(positions)
    kernels.list_cells[(_ceil(cells, 1024),)](numbers, positions, cells, BLOCK=1024)

    dtype = torch.bfloat16 if call.weight.dtype == torch.bfloat16 else torch.float32
    blocks = _blocks("inputs", dtype, launch)
    back, of_back = launch.weights(dtype, "V")
    weight, of_weight = launch.weights(call.weight.dtype, "H")
    # the logits are made again as forward made them
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
        # the first tile does not ask, so that the GPU works while the host waits
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
    """Holds the number of cells that have a gradient, which comes from the GPU while the host goes
    on."""

    def __init__(self, positions: Tensor):
        """positions (cells,): the last is the number.  A CUDA graph that is captured cannot wait:
        it takes all cells, and what is over returns."""
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
        """Return the number, once it is here."""
        if self.count is None:
            self.copied.synchronize()
            self.count = int(self.copy)
        return self.count


def _splits(programs: int, blocks: int, most: int, multiprocessors: int) -> Tuple[int, int]:
    """Return (splits, blocks of rows of each) with which `programs` that go through `blocks` of
    rows end soonest: the fewest splits, at most `most`, that are within a tenth of the shortest
    time, in blocks of rows of a multiprocessor.
    """
    shares = {_ceil(blocks, wanted) for wanted in range(1, most + 1)}
    waves = {
        share: _ceil(programs * _ceil(blocks, share), multiprocessors) * share for share in shares
    }
    share = max(share for share in shares if waves[share] <= 1.1 * min(waves.values()))
    return _ceil(blocks, share), share


class _WeightGradients:
    """The gradients of weight and bias.  V x H alone makes few programs: so splits of a tile's rows
    have sums of their own, which are added at the end."""

    def __init__(
        self, call: Call, launch: _Launch, dtype: torch.dtype, rows: int, weight: bool, bias: bool
    ):
        self.rows, self.cells = rows, launch.cells
        blocks = _blocks("weight", dtype, launch)
        self.launch, self.blocks = (
            launch.kernels.weight_gradients,
            {**blocks._asdict(), **launch.products(dtype)},
        )
        programs = _ceil(call.V, blocks.BV), _ceil(call.H, blocks.BH) if weight else 1
        most = min(MOST_SPLITS, _ceil(rows, 256))
        splits, share = _splits(
            programs[0] * programs[1], _ceil(rows, blocks.BM), most, launch.multiprocessors
        )
        self.grid, share = (*programs, splits), share * blocks.BM
        self.flags = {
            "V": call.V, **launch.padded, "SHARE": share, "COMPILED": launch.gpu is not None, "WEIGHT": weight,
            "BIAS": bias,
        }  # fmt: skip
        self.weight = torch.zeros(
            splits if weight else 0, call.V, launch.HP, dtype=torch.float32, device=call.device
        )
        self.bias = torch.zeros(
            splits if bias else 0, call.V, dtype=torch.float32, device=call.device
        )

    def add(self, activations: Tensor, of_logits: Tensor, positions: Tensor, tile: int) -> None:
        self.launch[self.grid](
            activations, of_logits, positions, self.weight, self.bias, self.cells, tile, self.rows,
            **self.flags, **self.blocks,
        )  # fmt: skip
