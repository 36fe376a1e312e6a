"""Rules of matrix products, convolutions, factorisations and Fourier transforms."""

from __future__ import annotations

import math
from typing import Any, Callable, Sequence, Tuple

import torch

from common.flops.rules import Call, Count, add, elements, is_sparse, products, rule, size


def _real(tensor: Any, macs: int, others: int = 0) -> Count:
    """Count multiply-accumulates, four for one of complex numbers."""
    return products(4 * macs if tensor.is_complex() else macs, others)


def _macs(first: Any, second: Any) -> int:
    """Return the MACs of (..., M, K) by (..., K, N) or by (K); a sparse matrix counts for the numbers it stores."""
    if is_sparse(second):
        return size(second) * (first.numel() // first.shape[-1])
    return size(first) * (second.shape[-1] if second.dim() > 1 else 1)


add(
    "mm bmm _int_mm",
    lambda call: _real(call.out, _macs(call["self"], call["mat2"])),
    macs="M N K, for each matrix of the batch",
    flops="2 M N K",
    reason="(M, K) times (K, N): K multiply-accumulates for each output; of complex numbers four times that; of a "
    "sparse matrix its stored elements times the columns of the other",
)
add(
    "mv dot vdot",
    lambda call: _real(call.out, size(call["self"])),
    macs="elements of the matrix, or of one vector",
    flops="2 for each MAC",
    reason="a matrix product with one column",
)


def _with_bias(inner: Callable[[Call], int]) -> Callable[[Call], Count]:
    """Count beta * self + alpha * product: 1 per output, none where beta is 0, 1 more for a factor other than 1."""

    def count(call: Call) -> Count:
        outputs = elements(call.out)
        others = (call["beta"] != 0) + (call["beta"] not in (0, 1, None)) + (call["alpha"] not in (1, None))
        return _real(call.out, inner(call), others * outputs)

    return count


_BIAS = "as the product alone, and one addition per output for the bias; one more where beta or alpha is not 1"
for _names, _inner in (
    ("addmm _sparse_addmm", lambda call: _macs(call["mat1"], call["mat2"])),
    ("addmv", lambda call: _macs(call["mat"], call["vec"])),
    ("baddbmm addbmm", lambda call: _macs(call["batch1"], call["batch2"])),
    ("addr", lambda call: call.out.numel()),
    ("sparse_sampled_addmm", lambda call: size(call.out) * call["mat1"].shape[-1]),
):
    add(_names, _with_bias(_inner), macs="those of the product", flops="2 for each MAC, 1 per output", reason=_BIAS)


@rule(
    "_trilinear",
    macs="N O I J + N O J",
    flops="2 for each MAC",
    reason="torch.nn.Bilinear: (N, I) times (O, I, J) over I, then times (N, J) over J",
)
def _trilinear(call: Call) -> Count:
    """Count a bilinear form.

    i1, i2 and i3, unsqueezed at the dimensions of their expand1, expand2 and expand3, are multiplied and summed over
    sumdim; those that i3 lacks are summed first.
    """
    expanded = [call[f"expand{number}"] for number in (1, 2, 3)]
    shapes = [list(call[f"i{number}"].shape) for number in (1, 2, 3)]
    for shape, dims in zip(shapes, expanded):
        for dim in sorted(dims):
            shape.insert(dim, 1)
    whole = [max(sizes) for sizes in zip(*shapes)]
    first = [dim for dim in call["sumdim"] if dim in expanded[2]]
    left = math.prod(size for dim, size in enumerate(whole) if dim not in first)
    return products(math.prod(whole) + left)


@rule(
    "_addmm_activation",
    macs="M N K",
    flops="2 M N K + 2 M N",
    reason="the bias and the activation function, one each per output",
)
def _addmm_activation(call: Call) -> Count:
    return products(call.out.numel() * call["mat1"].shape[-1], 2 * call.out.numel())


@rule(
    "linear mkldnn_linear",
    macs="outputs times input features",
    flops="2 for each MAC, 1 per output for the bias",
    reason="where a device has it as one operator; elsewhere it is an addmm",
)
def _linear(call: Call) -> Count:
    inputs = call["input"] if call["input"] is not None else call["self"]
    return products(call.out.numel() * inputs.shape[-1], 0 if call["bias"] is None else call.out.numel())


@rule(
    "quantized::linear quantized::linear_relu quantized::linear_dynamic quantized::linear_relu_dynamic",
    macs="outputs times input features",
    flops="2 for each MAC; 2 per output, 1 for the bias; dynamic: 2 per input too",
    reason="integers multiply and add as numbers do here; a number is scaled and rounded or shifted where it is "
    "quantized: the input, if it comes as floating point, and the output",
)
def _quantized_linear(call: Call) -> Count:
    source = call["X"]
    bias = torch.ops.quantized.linear_unpack(call["W_prepack"])[1]
    outputs = call.out.numel()
    others = outputs * (2 + (bias is not None)) + (2 * source.numel() if "dynamic" in call.name else 0)
    return products(outputs * source.shape[-1], others)


# -- convolutions ----------------------------------------------------------------------------------------------------


def _convolved(source: Any, weight: Any, out_shape: Sequence[int], transposed: bool) -> int:
    """Count MACs: each output sums over the kernel and the group's channels; transposed, each input is spread so."""
    positions = source.numel() if transposed else math.prod(out_shape)
    return positions * (weight.numel() // weight.shape[0])


@rule(
    "convolution _convolution convolution_overrideable cudnn_convolution mkldnn_convolution",
    macs="outputs (inputs, if transposed) x kernel x channels of a group",
    flops="2 for each MAC, 1 per output for the bias",
    reason="padding is computed with, as the usual formula has it",
)
def _convolution(call: Call) -> Count:
    source = call["input"] if call["input"] is not None else call["self"]
    macs = _convolved(source, call["weight"], call.out.shape, bool(call["transposed"]))
    return _real(call.out, macs, 0 if call["bias"] is None else elements(call.out))


@rule(
    "convolution_backward convolution_backward_overrideable",
    macs="the forward's, for the input's gradient and for the weights'",
    flops="2 for each MAC; the bias's gradient n - 1 per channel",
    reason="two convolutions of the same size and a sum; gradients that are not asked for are left out",
)
def _convolution_backward(call: Call) -> Count:
    upstream, wanted = call["grad_output"], call["output_mask"]
    macs = _convolved(call["input"], call["weight"], upstream.shape, bool(call["transposed"]))
    bias = elements(upstream) - upstream.shape[1] if wanted[2] else 0
    return _real(upstream, (wanted[0] + wanted[1]) * macs, bias)


# -- factorisations --------------------------------------------------------------------------------------------------


def _square(tensor: Any) -> Tuple[int, int]:
    """Return (matrices, rows) of a batch of square matrices."""
    rows = tensor.shape[-1]
    return size(tensor) // max(rows * rows, 1), rows


def _lu(rows: int) -> Count:
    """Count an elimination: MACs n (n - 1) (2 n - 1) / 6, divisions n (n - 1) / 2."""
    return products(rows * (rows - 1) * (2 * rows - 1) // 6, rows * (rows - 1) // 2)


def _triangular(rows: int, sides: int, unit: bool = False) -> Count:
    """Count a substitution for `sides` right-hand sides: n (n - 1) / 2 MACs, n divisions unless `unit`."""
    return products(sides * rows * (rows - 1) // 2, 0 if unit else sides * rows)


def _all(matrices: int, *counts: Count) -> Count:
    return Count(matrices * sum(count.macs for count in counts), matrices * sum(count.flops for count in counts))


@rule(
    "linalg_cholesky_ex cholesky",
    macs="(n^3 - n) / 6",
    flops="2 for each MAC, n (n - 1) / 2 divisions, n roots",
    reason="column by column",
)
def _cholesky(call: Call) -> Count:
    matrices, rows = _square(call["self"])
    return _all(matrices, products((rows**3 - rows) // 6, rows * (rows - 1) // 2 + rows))


@rule(
    "linalg_lu linalg_lu_factor_ex _linalg_det _linalg_slogdet",
    macs="n (n - 1) (2 n - 1) / 6",
    flops="2 for each MAC, n (n - 1) / 2 divisions; a determinant n - 1 products (and n logarithms)",
    reason="Gaussian elimination of a square matrix",
)
def _factor(call: Call) -> Count:
    matrices, rows = _square(call["A"])
    others = {"aten::_linalg_det": rows - 1, "aten::_linalg_slogdet": 2 * rows - 1}.get(call.name, 0)
    return _all(matrices, _lu(rows), Count(0, others))


@rule(
    "linalg_solve_triangular",
    macs="n (n - 1) / 2 per right-hand side",
    flops="2 for each MAC, n divisions",
    reason="substitution; no divisions where the diagonal is 1",
)
def _solve_triangular(call: Call) -> Count:
    matrices, rows = _square(call["self"])
    sides = size(call.out) // max(matrices * rows, 1)
    return _all(matrices, _triangular(rows, sides, bool(call["unitriangular"])))


@rule(
    "_linalg_solve_ex linalg_inv_ex linalg_lu_solve cholesky_solve",
    macs="a factorisation, and n (n - 1) per right-hand side",
    flops="2 for each MAC, and the divisions",
    reason="Gaussian elimination, then two substitutions (the identity's, for an inverse); the factorisation is left "
    "out where it is given",
)
def _solve(call: Call) -> Count:
    inverse = call.name == "aten::linalg_inv_ex"
    given = next(call[name] for name in ("A", "LU", "input2") if call[name] is not None)
    matrices, rows = _square(given)
    result = call.out[0] if isinstance(call.out, (list, tuple)) else call.out
    sides = rows if inverse else size(result) // max(matrices * rows, 1)
    cholesky = "cholesky" in call.name
    factor = _lu(rows) if call.name in ("aten::_linalg_solve_ex", "aten::linalg_inv_ex") else Count()
    return _all(matrices, factor, _triangular(rows, sides, not cholesky), _triangular(rows, sides))


# -- Fourier transforms ----------------------------------------------------------------------------------------------


@rule(
    "_fft_c2c _fft_r2c _fft_c2r",
    flops="5 n log2 n per transform of n complex numbers, half of it of real ones; 2 per output where it is normalised",
    reason="the usual count of the radix-2 algorithm, for every n",
)
def _fourier(call: Call) -> Count:
    real = "c2c" not in call.name
    source = call.out if "c2r" in call.name else call["self"]
    lengths = [source.shape[dim] for dim in call["dim"]]
    total = (2.5 if real else 5) * source.numel() * math.log2(max(math.prod(lengths), 1))
    return Count(0, round(total) + (elements(call.out) if call["normalization"] else 0))
