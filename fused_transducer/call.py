"""The arguments of one call as the backends take them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional

import torch

ACTIVATIONS = ("none", "tanh", "relu")
REDUCTIONS = ("none", "sum", "mean")


@dataclass(frozen=True)
class Call:
    """encoder_out (N, T, H), decoder_out (N, U+1, H), weight (V, H), bias (V) or None: of one floating dtype; targets
    (N, U), T_lengths, U_lengths (N): integers.  tile_cells: 0 for the backend's own choice."""

    encoder_out: torch.Tensor
    decoder_out: torch.Tensor
    weight: torch.Tensor
    bias: Optional[torch.Tensor]
    targets: torch.Tensor
    T_lengths: torch.Tensor
    U_lengths: torch.Tensor
    blank: int
    activation: str
    fastemit_lambda: float
    negligible: float
    tile_cells: int

    @property
    def N(self) -> int:
        return self.encoder_out.shape[0]

    @property
    def T(self) -> int:
        return self.encoder_out.shape[1]

    @property
    def U1(self) -> int:
        return self.decoder_out.shape[1]

    @property
    def H(self) -> int:
        return self.encoder_out.shape[2]

    @property
    def V(self) -> int:
        return self.weight.shape[0]

    @property
    def device(self) -> torch.device:
        return self.encoder_out.device


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which inputs of `dtype` are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_values(call: Call) -> None:
    """Raises ValueError, with the utterance, for lengths and targets outside their tensors.

    On a GPU this waits for the stream; while a CUDA graph is captured, which cannot wait, nothing is checked.
    """
    if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    T_lengths, U_lengths = call.T_lengths.tolist(), call.U_lengths.tolist()
    for n, (T, U) in enumerate(zip(T_lengths, U_lengths)):
        if not 1 <= T <= call.T:
            raise ValueError(f"utterance {n}: T_lengths is {T}; encoder_out has {call.T} frames, and 1 is the least")
        if not 0 <= U < call.U1:
            raise ValueError(
                f"utterance {n}: U_lengths is {U}; decoder_out has {call.U1} states, for 0 to {call.U1 - 1}"
            )
    if call.U1 == 1:
        return
    valid = torch.arange(call.U1 - 1, device=call.device) < call.U_lengths.to(call.device).unsqueeze(1)
    wrong = valid & ((call.targets < 0) | (call.targets >= call.V))
    if wrong.any():
        n, u = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"utterance {n}: target {u} is {int(call.targets[n, u])}; the {call.V} symbols are 0 to {call.V - 1}"
        )


def check_shapes(
    encoder_out: torch.Tensor,
    decoder_out: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    targets: torch.Tensor,
    T_lengths: torch.Tensor,
    U_lengths: torch.Tensor,
) -> None:
    """Raises ValueError for what a look at shapes, dtypes and devices shows."""
    for name, tensor, dimensions in (
        ("encoder_out", encoder_out, "(N, T, H)"),
        ("decoder_out", decoder_out, "(N, U+1, H)"),
        ("weight", weight, "(V, H)"),
        ("targets", targets, "(N, U)"),
        ("T_lengths", T_lengths, "(N,)"),
        ("U_lengths", U_lengths, "(N,)"),
    ):
        if tensor.dim() != len(dimensions.split(",")) - dimensions.endswith(",)"):
            raise ValueError(f"{name} must be {dimensions}; it has the shape {tuple(tensor.shape)}")
    N, T, H = encoder_out.shape
    U1, V = decoder_out.shape[1], weight.shape[0]
    if N == 0:
        raise ValueError("encoder_out has no utterance: the batch is empty")
    if T == 0 or U1 == 0 or H == 0 or V == 0:
        raise ValueError(f"T, U+1, H and V must be 1 at least; they are {T}, {U1}, {H} and {V}")
    wanted = {
        "decoder_out": (decoder_out, (N, U1, H)),
        "weight": (weight, (V, H)),
        "targets": (targets, (N, U1 - 1)),
        "T_lengths": (T_lengths, (N,)),
        "U_lengths": (U_lengths, (N,)),
    }
    if bias is not None:
        wanted["bias"] = (bias, (V,))
    for name, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have the shape {shape}, as the other arguments say; it has {tuple(tensor.shape)}"
            )
    if encoder_out.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise ValueError(f"encoder_out must be float32, float64, bfloat16 or float16; it is {encoder_out.dtype}")
    for name, (tensor, _) in wanted.items():
        if name in ("targets", "T_lengths", "U_lengths"):
            if tensor.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
                raise ValueError(f"{name} must be integers; it is {tensor.dtype}")
        elif tensor.dtype != encoder_out.dtype:
            raise ValueError(f"{name} is {tensor.dtype}, but encoder_out is {encoder_out.dtype}: give one dtype")
        if tensor.device != encoder_out.device and not (name.endswith("lengths") and tensor.device.type == "cpu"):
            raise ValueError(f"{name} is on {tensor.device}, but encoder_out is on {encoder_out.device}")


def check_options(call_blank: int, V: int, activation: str, reduction: str, numbers: List[float]) -> None:
    """Raises ValueError; numbers: fastemit_lambda, negligible, tile_cells (0: not given)."""
    if not 0 <= call_blank < V:
        raise ValueError(f"blank is {call_blank}; the {V} symbols are 0 to {V - 1}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: there are {', '.join(ACTIVATIONS)}, not {activation!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: there are {', '.join(REDUCTIONS)}, not {reduction!r}")
    for name, value in zip(("fastemit_lambda", "negligible", "tile_cells"), numbers):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be 0 or more; it is {value}")
