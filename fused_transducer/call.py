"""The arguments of one call as the backends take them, their checks, and the choice of a backend.

Backends are "native" (C++, CPU), "triton" (CUDA) and "torch" (PyTorch alone, any device). They are
modules with the functions that `plain` describes, and all give the same numbers.
"""

from __future__ import annotations

import importlib
import os
import warnings
from dataclasses import dataclass, fields
from functools import cache, cached_property
from numbers import Integral, Real
from types import ModuleType
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import torch

from fused_transducer import windows
from fused_transducer.lattices import TOPOLOGIES, Lattice, check_number, check_topology, lattice_of

#: The number of an activation is its place here, in csrc/activations.h and in kernels.py; the slope
#: of leaky_relu is 0.01.
ACTIVATIONS = ("none", "tanh", "relu", "sigmoid", "leaky_relu", "silu", "gelu", "selu", "hardtanh")
#: What may be done with an utterance whose loss is not finite.
NONFINITE = ("keep", "raise", "skip")

#: Most cells of a padded batch, since cells and their bytes are counted in 64 bits.
MOST_CELLS = 2**48


@dataclass(frozen=True)
class Call:
    """Hold the tensors and options of one call, which are those of `transducer_loss`.

    A row is one target sequence: there are M rows for N utterances, and V outputs.

    Attributes:
        encoder_out (N, T, H), decoder_out (M, U+1, H), weight (V, H), bias (V) or None: of one
            floating dtype
        targets (M, U), T_lengths (N), U_lengths (M): integers
        utterance_of (M): the utterance of each row; None where the rows are the utterances
        seed: an int64 number on their device for dropout; None without dropout
        window (M, U, 2): integers, the first and last frame of each label; None without a window
        tile_cells: 0 for the backend's own choice
        durations: one for each output behind those of the symbols
    """

    encoder_out: torch.Tensor
    decoder_out: torch.Tensor
    weight: torch.Tensor
    bias: Optional[torch.Tensor]
    targets: torch.Tensor
    T_lengths: torch.Tensor
    U_lengths: torch.Tensor
    utterance_of: Optional[torch.Tensor] = None
    seed: Optional[torch.Tensor] = None
    window: Optional[torch.Tensor] = None
    blank: int = 0
    activation: str = "tanh"
    fastemit_lambda: float = 0.0
    negligible: float = 0.0
    tile_cells: int = 0
    dropout: float = 0.0
    delay_penalty: float = 0.0
    label_smoothing: float = 0.0
    topology: str = "regular"
    sigma: float = 0.0
    clamp: float = 0.0
    durations: Tuple[int, ...] = ()

    @classmethod
    def of(cls, tensors: Sequence[Optional[torch.Tensor]], options: Sequence[float]) -> Call:
        """Return the call of tensors in the order of TENSORS, and of options from `packed`."""
        named: Dict[str, Any] = dict(zip(OPTIONS, options))
        named["blank"] = int(named["blank"])
        named["tile_cells"] = int(named["tile_cells"])
        named["activation"] = ACTIVATIONS[int(named["activation"])]
        named["topology"] = TOPOLOGIES[int(named["topology"])]
        return cls(*tensors, **named, durations=tuple(map(int, options[len(OPTIONS) :])))

    @property
    def lattice(self) -> Lattice:
        return lattice_of(self.topology, self.durations, self.sigma)

    @property
    def frames(self) -> torch.Tensor:
        """Return the number of frames of each row, (M,)."""
        if self.utterance_of is None:
            return self.T_lengths
        return self.T_lengths[self.utterance_of.to(self.T_lengths.device).long()]

    @cached_property
    def band(self) -> torch.Tensor:
        """Return the first and last frame of each state, (M, U+1, 2) int64, for a call with a
        window."""
        lengths = (x.to(self.device).long() for x in (self.frames, self.U_lengths))
        return windows.band_of(self.window, *lengths, self.T)

    def cells(self) -> torch.Tensor:
        """Return the number of cells of each row, (M,)."""
        if self.window is None:
            return self.frames.long() * (self.U_lengths.long() + 1)
        return (self.band[..., 1] - self.band[..., 0] + 1).sum(1)

    @property
    def drop_below(self) -> int:
        """Return a bound: an activation is dropped if its 32-bit hash is below it; 0 without
        dropout."""
        return 0 if self.seed is None else min(round(self.dropout * 2**32), 2**32 - 1)

    #: The factor of the activations that dropout keeps.
    keep_scale = property(lambda self: 1 / (1 - self.dropout))
    M = property(lambda self: self.decoder_out.shape[0])
    T = property(lambda self: self.encoder_out.shape[1])
    U1 = property(lambda self: self.decoder_out.shape[1])
    H = property(lambda self: self.encoder_out.shape[2])
    V = property(lambda self: self.weight.shape[0])
    #: The number of symbols, which are the first outputs.
    symbols = property(lambda self: self.V - len(self.durations))
    device = property(lambda self: self.encoder_out.device)


_FIELDS = [field.name for field in fields(Call)]
#: The tensors of a Call, in their order.
TENSORS = _FIELDS[: _FIELDS.index("blank")]
#: The options of a Call, in their order, except for durations, which are the last.
OPTIONS = _FIELDS[_FIELDS.index("blank") : -1]


def packed(durations: Sequence[int] = (), **options: Any) -> List[float]:
    """Return the options of a Call as one list of numbers: OPTIONS in their order, then durations.
    PyTorch's operators take this list as one argument.

    options: by name; a missing one gets its default in Call. `tile_cells` may be None, for 0.
    """
    values = {"negligible": 0.0, "topology": "regular", "activation": "tanh", **options}
    values["activation"] = ACTIVATIONS.index(values["activation"])
    values["topology"] = TOPOLOGIES.index(values["topology"])
    values["clamp"] = max(0.0, values.get("clamp", 0.0))  # 0 or less: no limit
    return [*(float(values.get(name) or 0) for name in OPTIONS), *map(float, durations)]


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums for inputs of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_lengths(call: Call) -> None:
    """Raise ValueError for a length or utterance number that is outside its tensor; the message
    names the utterance or row.  On a GPU this waits for the stream."""
    for n, T in enumerate(call.T_lengths.tolist()):
        if not 1 <= T <= call.T:
            raise ValueError(
                f"utterance {n}: T_lengths is {T}; encoder_out has {call.T} frames, and 1 is the least"
            )
    for m, U in enumerate(call.U_lengths.tolist()):
        if not 0 <= U < call.U1:
            raise ValueError(
                f"{_row(call, m)}: U_lengths is {U}; decoder_out has states for 0 to {call.U1 - 1}"
            )
    N = len(call.encoder_out)
    if call.utterance_of is None:
        return
    for m, n in enumerate(call.utterance_of.tolist()):
        if not 0 <= n < N:
            raise ValueError(
                f"row {m}: utterance_of is {n}; encoder_out has the utterances 0 to {N - 1}"
            )


def _row(call: Call, m: int) -> str:
    """Return the name of row m in a message: "utterance 3", or "row 3" where an utterance may have
    several."""
    return f"{'utterance' if call.utterance_of is None else 'row'} {m}"


def _wrong_targets(call: Call) -> torch.Tensor:
    """Return whether each target (M, U) is within its row's length and is no symbol."""
    lengths = call.U_lengths.to(call.device).unsqueeze(1)
    is_target = torch.arange(call.U1 - 1, device=call.device) < lengths
    return is_target & ((call.targets < 0) | (call.targets >= call.symbols))


def any_outside(call: Call) -> torch.Tensor:
    """Return one bool on the call's device: whether any length, target or utterance number is out
    of range, or any window leaves no path.

    To read this bool, the host waits for a GPU once.  To read one for each of the five checks, it
    would wait five times.
    """
    ranges = [(call.T_lengths, 1, call.T), (call.U_lengths, 0, call.U1 - 1)]
    if call.utterance_of is not None:
        ranges.append((call.utterance_of, 0, len(call.encoder_out) - 1))
    wrong = _wrong_targets(call).any()
    for numbers, least, most in ranges:
        wrong = wrong | ((numbers < least) | (numbers > most)).to(call.device).any()
    if call.window is None:
        return wrong
    earliest, latest = _frames_of_labels(call)
    return wrong | (earliest > latest).any()


def _frames_of_labels(call: Call) -> Tuple[torch.Tensor, torch.Tensor]:
    """Return the earliest and the latest frame (M, U) of each label, see `windows`."""
    lengths = (x.to(call.device).long() for x in (call.frames, call.U_lengths))
    return windows.frames_of_labels(
        call.window, *lengths, call.lattice.label_step, call.lattice.label_ends
    )


def _warn_of_windows(call: Call) -> None:
    """Warn of each row whose window leaves no path, and name the first label that has no frame."""
    earliest, latest = _frames_of_labels(call)
    blocked = earliest > latest
    for m in blocked.any(1).nonzero().flatten().tolist():
        u = int(blocked[m].nonzero()[0])
        warnings.warn(
            f"{_row(call, m)}: no path fits its window, so its loss is inf: label {u} can be emitted at frame "
            f"{int(earliest[m, u])} at the earliest, and would have to be at frame {int(latest[m, u])} at the latest",
            stacklevel=2,
        )


def check_values(call: Call) -> None:
    """Raise ValueError for a length, target or utterance number that is out of range; warn of
    windows that leave no path.

    On a GPU this waits for the stream. While a CUDA graph is captured, which cannot wait, nothing
    is checked.
    """
    if call.device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return
        # The checks below find out which value is wrong, and wait for the GPU several times.
        if not any_outside(call):
            return
    check_lengths(call)
    wrong = _wrong_targets(call).nonzero().tolist()
    if wrong:
        m, u = wrong[0]
        raise ValueError(
            f"{_row(call, m)}: target {u} is {int(call.targets[m, u])}; the {call.symbols} symbols are 0 to "
            f"{call.symbols - 1}"
        )
    if call.window is not None:
        _warn_of_windows(call)


def check_tensors(**tensors: Any) -> None:
    """Raise ValueError for an argument that is no dense tensor; only bias and utterance_of may be
    None."""
    first = tensors.get("encoder_out")
    if isinstance(first, torch.Tensor) and first.dim() == 4:
        raise ValueError(
            "encoder_out has 4 dimensions, as the logits of torchaudio's rnnt_loss: transducer_loss takes encoder_out "
            "(N, T, H), decoder_out (N, U+1, H), the weight and bias of the output layer (or output=layer), targets, "
            "T_lengths and U_lengths, in this order"
        )
    for name, tensor in tensors.items():
        if tensor is None and name in ("bias", "utterance_of"):
            continue
        if tensor is None:
            raise ValueError(f"{name} is missing")
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor; it is of type {type(tensor).__name__}")
        # torch 2.4 cannot trace hasattr
        if not torch.compiler.is_compiling() and hasattr(tensor, "full_tensor"):
            raise ValueError(
                f"{name} is sharded (DTensor): call the loss within the forward of the module that FSDP wraps, and do "
                "not wrap the output layer by itself"
            )
        if tensor.is_nested:
            raise ValueError(
                f"{name} is a nested tensor: pad it, with torch.nested.to_padded_tensor"
            )
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name} has the layout {tensor.layout}: give a dense tensor, with to_dense()"
            )


def check_shapes(
    encoder_out: torch.Tensor, decoder_out: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor],
    targets: torch.Tensor, T_lengths: torch.Tensor, U_lengths: torch.Tensor,
    utterance_of: Optional[torch.Tensor] = None, window: Optional[torch.Tensor] = None,
) -> None:  # fmt: skip
    """Raise ValueError for shapes, dtypes and devices that do not fit together, and for those that
    the loss does not take.

    Values are not looked at (see `check_values`).
    """
    for name, tensor, dimensions in (
        ("encoder_out", encoder_out, "(N, T, H)"),
        ("decoder_out", decoder_out, "(N, U+1, H)"),
        ("weight", weight, "(V, H)"),
        *([] if utterance_of is None else [("utterance_of", utterance_of, "(M)")]),
    ):
        if tensor.dim() != len(dimensions.split(",")):
            raise ValueError(f"{name} must be {dimensions}; it has the shape {tuple(tensor.shape)}")
    N, T, H = encoder_out.shape
    M = N if utterance_of is None else len(utterance_of)
    U1 = decoder_out.shape[1]
    V = weight.shape[0]
    if N == 0 or M == 0:
        raise ValueError(
            f"{'utterance_of' if N else 'encoder_out'} has no utterance: the batch is empty"
        )
    if T == 0 or U1 == 0 or H == 0 or V == 0:
        raise ValueError(f"T, U+1, H and V must be 1 at least; they are {T}, {U1}, {H} and {V}")
    if M * T * U1 > MOST_CELLS:
        raise ValueError(f"N * T * (U+1) is {M * T * U1}; 2^48 cells are the most")
    if tuple(targets.shape) == (M, U1):
        raise ValueError(
            f"decoder_out has {U1} positions, as many as targets: it needs U + 1, the first for the start"
        )
    dtype, device = encoder_out.dtype, encoder_out.device
    if dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ValueError(
            f"encoder_out must be float32, float64, bfloat16 or float16; it is {dtype}"
        )
    for name, tensor, shape in (
        ("decoder_out", decoder_out, (M, U1, H)),
        ("weight", weight, (V, H)),
        ("bias", bias, (V,)),
        ("targets", targets, (M, U1 - 1)),
        ("T_lengths", T_lengths, (N,)),
        ("U_lengths", U_lengths, (M,)),
        ("utterance_of", utterance_of, (M,)),
        ("window", window, (M, U1 - 1, 2)),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have the shape {shape} by the others; it has {tuple(tensor.shape)}"
            )
        if name in ("targets", "T_lengths", "U_lengths", "utterance_of", "window"):
            if tensor.dtype not in windows.INTEGERS:
                raise ValueError(f"{name} must be integers; it is {tensor.dtype}")
        elif tensor.dtype != dtype:
            raise ValueError(
                f"{name} is {tensor.dtype}, but encoder_out is {dtype}: give one dtype"
            )
        may_be_on_cpu = name in ("T_lengths", "U_lengths", "utterance_of")
        if tensor.device != device and not (may_be_on_cpu and tensor.device.type == "cpu"):
            raise ValueError(f"{name} is on {tensor.device}, but encoder_out is on {device}")


def check_options(
    V: int, blank: Any = 0, activation: Any = "tanh", reduction: Any = "mean", nonfinite: Any = "keep",
    fastemit_lambda: Any = 0.0,
    negligible: Any = 0.0, tile_cells: Any = None, dropout: Any = 0.0, delay_penalty: Any = 0.0,
    label_smoothing: Any = 0.0, keep_bytes: Any = None, topology: Any = "regular", durations: Any = (),
    sigma: Any = 0.0, clamp: Any = 0.0, backend: Any = None,
) -> None:  # fmt: skip
    """Raise ValueError for an option of a wrong type or out of its range.

    V: the number of all outputs, those of durations included. The others are options of
    `transducer_loss`.
    """
    check_topology(topology, durations, sigma, label_smoothing)
    symbols = V - len(durations)
    if symbols < 1:
        raise ValueError(
            f"durations: {len(durations)} of them take all {V} outputs, and leave none to the symbols"
        )
    for name, value, allowed in (
        ("activation", activation, ACTIVATIONS),
        ("reduction", reduction, ("none", "sum", "mean")),
        ("nonfinite", nonfinite, NONFINITE),
        ("backend", backend, (None, *MODULES)),
    ):
        if value not in allowed:
            raise ValueError(f"{name}: there are {', '.join(filter(None, allowed))}, not {value!r}")
    if isinstance(blank, Integral) and -symbols <= blank < 0:
        raise ValueError(
            f"blank must be 0 or more; it is {blank}, which elsewhere means blank={symbols + int(blank)}"
        )
    check_number("blank", blank, Integral, 0, symbols)
    check_number("tile_cells", tile_cells or 0, Integral, 0, 2**63)
    check_number("keep_bytes", keep_bytes or 0, Integral, 0, 2**63)
    check_number("fastemit_lambda", fastemit_lambda, Real, 0)
    check_number("negligible", negligible, Real, 0)
    check_number("delay_penalty", delay_penalty, Real, 0)
    check_number("clamp", clamp, Real)
    check_number("dropout", dropout, Real, 0, 1)
    check_number("label_smoothing", label_smoothing, Real, 0, 1)


#: Backend -> its module.
MODULES = {"native": "native", "triton": "triton_backend", "torch": "plain"}
#: Backend -> whether it has no numbers for cells of the padding.
PACKED = {"native": True, "triton": False, "torch": False}
#: Backend that keeps logits for backward -> its default of keep_bytes.
KEPT_BYTES = {"native": 2**24}


def module_of(backend: str) -> ModuleType:
    """Import the module of a backend, and return it."""
    return importlib.import_module("fused_transducer." + MODULES[backend])


@cache
def _warn_of_torch(reason: str) -> None:
    """Warn, once for each reason, that the plain PyTorch code runs."""
    warnings.warn(
        f"fused_transducer: {reason}; the plain PyTorch code runs instead, slower", stacklevel=4
    )


def backend_of(
    device: Union[str, torch.device], dtype: torch.dtype, wanted: Optional[str] = None
) -> str:
    """Return the name of the backend for tensors of a device ("cpu", "cuda:1", ...) and dtype.

    wanted: a name of MODULES. None stands for the name in the environment variable
    FUSED_TRANSDUCER_BACKEND. Without a name, return the fastest backend of the device if it is
    available. Else return "torch", and warn the user that it is slower, though not of float64 on a
    GPU. Raises ValueError if there is a name, but no such backend, or it is not available.
    """
    wanted = wanted or os.environ.get("FUSED_TRANSDUCER_BACKEND") or None
    check_options(V=1, backend=wanted)
    device = torch.device(device)
    backend = wanted or {"cpu": "native", "cuda": "triton"}.get(device.type, "torch")
    reason = module_of(backend).unavailable(device, dtype)
    if not reason:
        return backend
    if wanted:
        raise ValueError(f"backend {wanted!r} cannot be used: {reason}")
    if dtype != torch.float64 or backend != "triton":
        _warn_of_torch(reason)
    return "torch"


# torch.compiler.assume_constant_result does this too, but imports all of torch._dynamo and sympy.
backend_of._dynamo_marked_constant = True  # type: ignore[attr-defined]
