"""Windows: the frames at which each label may be emitted, and the cells that are left of the
lattice.

A window (N, U, 2) has the first and the last frame of each label. It leaves a *band* (N, U+1, 2) of
the lattice: the first and the last frame of each state u, which is the state after u labels. Both
frames grow with u. A label may leave a cell (t, u) exactly if (t, u+1) is in the band too. So the
band says all that the window says, on every lattice.
"""

from __future__ import annotations

from numbers import Integral
from typing import Tuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fused_transducer.lattices import check_number

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def window_of(frames: Tensor, left: int, right: int, T_lengths: Tensor) -> Tensor:
    """Return the window (N, U, 2) int64 around an alignment.

    Args
        frames (N, U): integers, the frame of each label, such as from `align` or from the CTM of
        another system. Where it is negative, the label may be emitted at any frame.
        left, right: how many frames before and after its frame a label may be emitted
        T_lengths (N,): the number of frames of each utterance

    Raises ValueError for bad arguments.
    """
    for name, tensor, dimensions in (("frames", frames, 2), ("T_lengths", T_lengths, 1)):
        if (
            not isinstance(tensor, Tensor)
            or tensor.dtype not in INTEGERS
            or tensor.dim() != dimensions
        ):
            raise ValueError(f"{name} must be a tensor of integers of {dimensions} dimensions")
    if len(frames) != len(T_lengths):
        raise ValueError(f"frames has {len(frames)} utterances, but T_lengths {len(T_lengths)}")
    check_number("left", left, Integral, 0)
    check_number("right", right, Integral, 0)
    frames = frames.long()
    last = T_lengths.to(frames.device).long().unsqueeze(1) - 1
    window = torch.stack([(frames - left).clamp(min=0), torch.minimum(frames + right, last)], -1)
    anywhere = torch.stack([torch.zeros_like(frames), last.expand_as(frames)], -1)
    return torch.where((frames < 0).unsqueeze(-1), anywhere, window)


def limits(
    window: Tensor, T_lengths: Tensor, U_lengths: Tensor, step: int = 0
) -> Tuple[Tensor, Tensor]:
    """Return the first and the last frame of each state, two tensors (N, U+1), whether or not there
    is a path. States beyond an utterance's own get the frames of its last state.

    step: the least number of frames that the arc of a label goes ahead
    """
    U = window.shape[1]
    u = torch.arange(U + 1, device=window.device)
    last_frame = T_lengths.unsqueeze(1) - 1
    is_label = u[:U] < U_lengths.unsqueeze(1)
    opens = window[..., 0].long().masked_fill(~is_label, 0).clamp(min=0)
    closes = torch.where(is_label, torch.minimum(window[..., 1].long(), last_frame), last_frame)
    # As the labels next to a state limit it: a path comes to state u by label u - 1, and leaves it
    # by label u.
    begin = pad(opens + step, (1, 0))
    end = torch.cat([closes, last_frame], 1)
    # As the other states limit it too: a state begins at least `step` frames after the state before
    # it, and ends at least `step` frames before the state behind it. `ahead` is the least number of
    # frames that the labels up to a state go ahead: less `ahead`, frames only must not decrease.
    ahead = step * torch.minimum(u, U_lengths.unsqueeze(1))
    begin = (begin - ahead).cummax(1).values + ahead
    end = (end - ahead).flip(1).cummin(1).values.flip(1) + ahead
    return begin, end


def frames_of_labels(
    window: Tensor, T_lengths: Tensor, U_lengths: Tensor, step: int = 0, ends: bool = True
) -> Tuple[Tensor, Tensor]:
    """Return the earliest and the latest frame at which each label can be emitted, two tensors
    (N, U).

    The earliest follows from the windows of the label and of those before it, the latest from the
    windows of the label and of those behind it. If any earliest frame is later than the label's
    latest, there is no path.

    step: the least number of frames that the arc of a label goes ahead
    ends: whether a path may end with a label
    """
    # The arc of a label that ends a path goes from the last frame to `step` frames behind it, as if
    # the utterance had so many more frames.
    begin, end = limits(window, T_lengths + step * ends, U_lengths, step)
    # A label goes from the state before it to the state behind it.
    return begin[:, 1:] - step, end[:, :-1]


def band_of(window: Tensor, T_lengths: Tensor, U_lengths: Tensor, T: int) -> Tensor:
    """Return the first and last frame of each state, (N, U+1, 2) int64. States without a cell get
    (T, T - 1): those in the padding, and all states of an utterance that has no path."""
    earliest, latest = frames_of_labels(window, T_lengths, U_lengths)
    has_path = (earliest <= latest).all(1, keepdim=True)
    is_state = torch.arange(window.shape[1] + 1, device=window.device) <= U_lengths.unsqueeze(1)
    band = torch.stack(limits(window, T_lengths, U_lengths), -1)
    return torch.where((is_state & has_path).unsqueeze(-1), band, band.new_tensor([T, T - 1]))


def states_of_frames(band: Tensor, T: int) -> Tensor:
    """Return the states in the band at each frame, (N, T, 2): the number of the first, and that of
    the last plus 1. Both are 0 in an utterance that has no path.

    band: as `band_of` returns it
    """
    t = torch.arange(T, device=band.device).expand(len(band), -1).contiguous()
    begin, end = (x.contiguous() for x in band.unbind(-1))
    # Both rise with the state: searchsorted counts the states that end before t, and those that
    # begin at t or before.
    return torch.stack([torch.searchsorted(end, t), torch.searchsorted(begin, t, right=True)], -1)


def diagonals_of(band: Tensor, T: int) -> Tensor:
    """Return (N, T+U+2, 2): for each anti-diagonal d = t + u of an utterance, the number of cells
    on earlier diagonals, and the first state u on this one (see `Diagonal` of csrc/problem.h).

    State u is on the diagonals `begin` to `end`, from its first cell to its last. Both grow with u,
    so the states on d are those that have begun by d, without the `first` states, which ended."""
    u = torch.arange(band.shape[1], device=band.device)
    d = torch.arange(T + len(u) + 1, device=band.device).expand(len(band), -1).contiguous()
    begin, end = (x.contiguous() for x in (band + u.unsqueeze(-1)).unbind(-1))
    first = torch.searchsorted(end, d)
    count = torch.searchsorted(begin, d, right=True) - first
    return torch.stack([count.cumsum(1) - count, first], -1)
