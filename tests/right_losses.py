"""Losses of all kinds that are right: each is accepted.  loss(logits, targets, T_lengths, U_lengths) -> losses (N,)."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import torch
from rnnt_bench.losses.topologies import transducer_loss
from torch.utils.checkpoint import checkpoint


def reference(logits, targets, T_lengths, U_lengths):
    return transducer_loss(logits, targets, T_lengths, U_lengths, 0, "none")


def arcs(logits, targets, dtype=None):
    """Log-probabilities of blank (N, T, U+1) and of the next target (N, T, U)."""
    log_probs = logits.log_softmax(-1, dtype)
    U = logits.size(2) - 1
    index = targets[:, :U].long()[:, None, :, None].expand(-1, logits.size(1), -1, 1)
    return log_probs[..., 0], log_probs[:, :, :U].gather(3, index).squeeze(3)


def last(alphas, blank, T_lengths, U_lengths):
    """The losses of the forward variables (N, T, U+1) in log space."""
    n = torch.arange(len(blank))
    end = n, T_lengths.long() - 1, U_lengths.long()
    return -(alphas[end] + blank[end])


def cumulative_sums(logits, targets, T_lengths, U_lengths):
    """A column of the lattice at a time, whose recursion over t is a sum: alpha[t, u] = s[t] + logcumsumexp(...)."""
    blank, label = arcs(inside(logits, T_lengths, U_lengths), targets)
    sums = torch.nn.functional.pad(blank.cumsum(1), (0, 0, 1, 0))[:, :-1]
    columns = [sums[..., 0]]
    for u in range(label.size(2)):
        entering = columns[-1] + label[..., u] - sums[..., u + 1]
        columns.append(sums[..., u + 1] + entering.logcumsumexp(1))
    return last(torch.stack(columns, 2), blank, T_lengths, U_lengths)


def inside(logits, T_lengths, U_lengths):
    """The logits with 0 in the padding."""
    t, u = torch.arange(logits.size(1)), torch.arange(logits.size(2))
    outside = (t[:, None] >= T_lengths.view(-1, 1, 1)) | (u > U_lengths.view(-1, 1, 1))
    return logits.masked_fill(outside.unsqueeze(-1), 0)


def rows(logits, targets, T_lengths, U_lengths, dtype=None):
    """A frame at a time in log space, whose recursion over u is a sum too."""
    blank, label = arcs(inside(logits, T_lengths, U_lengths), targets, dtype)
    sums = torch.nn.functional.pad(label.cumsum(2), (1, 0))
    alphas = [sums[:, 0]]
    for t in range(1, logits.size(1)):
        alphas.append(sums[:, t] + (alphas[-1] + blank[:, t - 1] - sums[:, t]).logcumsumexp(1))
    return last(torch.stack(alphas, 1), blank, T_lengths, U_lengths)


def float32_sums(logits, targets, T_lengths, U_lengths):
    return rows(logits, targets, T_lengths, U_lengths, torch.float32)


class Probabilities(torch.autograd.Function):
    """Probabilities in float64 in place of log space, scaled by diagonal; gradient by the backward variables."""

    @staticmethod
    def forward(ctx, blank, label, T_lengths, U_lengths):
        losses, gradients = [], []
        for n, (T, U) in enumerate(zip(T_lengths.tolist(), U_lengths.tolist())):
            with torch.enable_grad():
                leaves = [arc[n, :T].detach().double().requires_grad_() for arc in (blank, label)]
                losses.append(probability(*(leaf.exp() for leaf in leaves), T, U))
                gradients.append(torch.autograd.grad(losses[-1], leaves, allow_unused=True))
        saved = torch.zeros_like(blank), torch.zeros_like(label)
        for n, (T, of_utterance) in enumerate(zip(T_lengths.tolist(), gradients)):
            for whole, gradient in zip(saved, of_utterance):
                if gradient is not None:
                    whole[n, :T] = gradient
        ctx.save_for_backward(*saved)
        return torch.stack(losses).detach().to(blank)

    @staticmethod
    def backward(ctx, upstream):
        return *(upstream.view(-1, 1, 1) * saved for saved in ctx.saved_tensors), None, None


def probability(blank, label, T, U):
    """-log of the sum over all paths of products of probabilities, scaled after each diagonal."""
    alpha, scale = blank.new_ones(1), blank.new_zeros(())
    u_of = torch.zeros(1, dtype=torch.int64)
    for d in range(1, T + U):
        u = torch.arange(max(0, d - T + 1), min(U, d) + 1)
        t = d - u
        wide = torch.zeros(U + 2, dtype=blank.dtype).scatter(0, u_of, alpha)
        stays = torch.where(t > 0, wide[u] * blank[(t - 1).clamp(min=0), u], wide[u] * 0)
        moved = (u - 1).clamp(min=0)
        moves = torch.where(u > 0, wide[moved] * label[t, moved], wide[u] * 0) if U else wide[u] * 0
        alpha, u_of = stays + moves, u
        largest = alpha.max().clamp(min=1e-300)
        alpha, scale = alpha / largest, scale + largest.log()
    return -(alpha[-1].log() + scale + blank[T - 1, U].log())


def probabilities(logits, targets, T_lengths, U_lengths):
    blank, label = arcs(inside(logits, T_lengths, U_lengths), targets, torch.float64)
    return Probabilities.apply(blank, label, T_lengths, U_lengths).to(logits)


def checkpointed(logits, targets, T_lengths, U_lengths):
    return checkpoint(reference, logits, targets, T_lengths, U_lengths, use_reentrant=False)


def threaded(logits, targets, T_lengths, U_lengths):
    """An utterance a thread."""
    with ThreadPoolExecutor(4) as pool:
        pieces = [
            (logits[n : n + 1], targets[n : n + 1], T_lengths[n : n + 1], U_lengths[n : n + 1])
            for n in range(len(logits))
        ]
        return torch.cat(list(pool.map(lambda piece: reference(*piece), pieces)))


def several_streams(logits, targets, T_lengths, U_lengths):
    """Halves of the batch as tasks of their own, which end in any order."""
    half = -(-len(logits) // 2)
    tasks = [
        torch.jit.fork(reference, logits[part], targets[part], T_lengths[part], U_lengths[part])
        for part in (slice(0, half), slice(half, None))
        if len(logits[part])
    ]
    return torch.cat([torch.jit.wait(task) for task in tasks])


class Cells(torch.autograd.Function):
    """One cell after the other in Python, as a textbook has it; its gradient by alpha and beta, kept in ctx."""

    @staticmethod
    def forward(ctx, blank, label, T_lengths, U_lengths):
        of_blank, of_label = torch.zeros_like(blank), torch.zeros_like(label)
        losses = []
        for n, (T, U) in enumerate(zip(T_lengths.tolist(), U_lengths.tolist())):
            b, y = blank[n].tolist(), label[n].tolist()
            alpha = [[-math.inf] * (U + 1) for _ in range(T)]
            for t in range(T):
                for u in range(U + 1):
                    stay = alpha[t - 1][u] + b[t - 1][u] if t else -math.inf
                    move = alpha[t][u - 1] + y[t][u - 1] if u else -math.inf
                    alpha[t][u] = 0.0 if t == u == 0 else log_add(stay, move)
            total = alpha[T - 1][U] + b[T - 1][U]
            beta = [[-math.inf] * (U + 2) for _ in range(T + 1)]
            for t in reversed(range(T)):
                for u in reversed(range(U + 1)):
                    stay = b[t][u] + (0.0 if (t, u) == (T - 1, U) else beta[t + 1][u])
                    move = y[t][u] + beta[t][u + 1] if u < U else -math.inf
                    beta[t][u] = log_add(stay, move)
                    of_blank[n, t, u] = -math.exp(alpha[t][u] + stay - total)
                    if u < U:
                        of_label[n, t, u] = -math.exp(alpha[t][u] + move - total)
            losses.append(-total)
        ctx.save_for_backward(of_blank, of_label)
        return torch.tensor(losses, dtype=blank.dtype)

    @staticmethod
    def backward(ctx, upstream):
        of_blank, of_label = ctx.saved_tensors
        factors = upstream.view(-1, 1, 1)
        return factors * of_blank, factors * of_label, None, None


def log_add(a, b):
    largest = max(a, b)
    return largest if largest == -math.inf else largest + math.log(math.exp(a - largest) + math.exp(b - largest))


def slow_python(logits, targets, T_lengths, U_lengths):
    return Cells.apply(*arcs(inside(logits, T_lengths, U_lengths), targets), T_lengths, U_lengths)


WORKSPACE = {}


class KeptWorkspace(torch.autograd.Function):
    """Computes in a buffer that grows and stays, and keeps nothing there for backward."""

    @staticmethod
    def forward(ctx, logits, *given):
        size = logits.numel()
        if WORKSPACE.get(logits.dtype, logits.new_empty(0)).numel() < size:
            WORKSPACE[logits.dtype] = logits.new_empty(size)
        buffer = WORKSPACE[logits.dtype][:size].view_as(logits)
        buffer.copy_(logits)
        with torch.enable_grad():
            leaf = buffer.detach().requires_grad_()
            losses = reference(leaf, *given)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        ctx.save_for_backward(gradient)
        return losses.detach()

    @staticmethod
    def backward(ctx, upstream):
        return upstream.view(-1, 1, 1, 1) * ctx.saved_tensors[0], None, None, None


def kept_workspace(logits, targets, T_lengths, U_lengths):
    return KeptWorkspace.apply(logits, targets, T_lengths, U_lengths)


class InPlace(torch.autograd.Function):
    """Writes its gradient over the logits, as it documents."""

    @staticmethod
    def forward(ctx, logits, *given):
        with torch.enable_grad():
            leaf = logits.detach().clone().requires_grad_()
            losses = reference(leaf, *given)
            (gradient,) = torch.autograd.grad(losses.sum(), leaf)
        ctx.gradient = logits.detach().copy_(gradient)
        return losses.detach()

    @staticmethod
    def backward(ctx, upstream):
        return ctx.gradient.mul_(upstream.view(-1, 1, 1, 1)), None, None, None


def in_place(logits, targets, T_lengths, U_lengths):
    return InPlace.apply(logits, targets, T_lengths, U_lengths)


RIGHT = (
    *(reference, cumulative_sums, rows, probabilities, checkpointed, threaded, several_streams, slow_python),
    *(kept_workspace, in_place),
)
