"""Define the layouts: the kinds of input that a loss takes, how each is made, and the right answer
for it.

A layout is bound to one adapter.  It knows nothing of the lattice and of the number of the joiner's
outputs, which are the adapter's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from rnnt_bench.core.settings import SCOPES
from rnnt_bench.instruments.clock import stage
from rnnt_bench.losses import inputs, oracle
from rnnt_bench.losses.adapter import Adapter
from rnnt_bench.losses.inputs import Batch, Joiner

Shapes = Sequence[tuple[int, int]]
#: An index into a tensor: integers, slices and "...".
Region = tuple[Any, ...]


class Layout:
    """A kind of input, bound to one adapter; this one is of padded logits (N, T, U+1, V)."""

    scopes: tuple[str, ...] = SCOPES  # the scopes that such a loss has
    approximate = False  # whether the loss is approximate by design, with a `gap` to the exact loss
    tensors: tuple[str, ...] = ("logits",)  # names of the first arguments of the package's function
    projections: tuple[str, ...] = ()  # layers beside the joiner's that the step trains

    def __init__(self, adapter: Adapter):
        self.adapter = adapter

    def model(self, device: torch.device, dtype: torch.dtype) -> Joiner:
        """Return the joiner under the adapter's settings, with `projections`."""
        settings = self.adapter.settings
        further = self.adapter.outputs(settings.vocab_size) - settings.vocab_size
        output = inputs.layer("output", settings, device, dtype, further)
        return Joiner(
            output, {name: inputs.layer(name, settings, device, dtype) for name in self.projections}
        )

    def prepare(self, batch: Batch) -> Any:
        """Return what the adapter makes of targets and lengths.  Untimed, so it gets no outputs."""
        return self.adapter.prepare(batch.labels)

    def given(self, model: Joiner, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the one tensor that `loss` takes, whose gradient is the end of scope "loss"."""
        return model.logits(batch)

    def loss(self, given: torch.Tensor, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the adapter's loss of `given`.  Timed."""
        return self.adapter.loss(given, prepared)

    def step(self, model: Joiner, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the summed loss to differentiate, from encoder and decoder outputs.  Timed."""
        with stage("joiner"):
            given = self.given(model, batch, prepared)
        with stage("loss"):
            return self.loss(given, batch, prepared)

    def of_leaves(
        self, leaves: Mapping[str, torch.Tensor], batch: Batch, prepared: Any
    ) -> torch.Tensor:
        """Return the adapter's loss of the leaves of a step of the first scope."""
        return self.loss(leaves["given"], batch, prepared)

    def padding(self, shapes: Shapes) -> dict[str, list[Region]]:
        """Return the regions that belong to no utterance, perhaps empty ones, by the name of the
        leaf."""
        frames: list[Region] = [(n, slice(T, None)) for n, (T, _) in enumerate(shapes)]
        targets = [(n, slice(U + 1, None)) for n, (_, U) in enumerate(shapes)]
        cells: list[Region] = [(n, slice(None), region) for n, region in targets]
        return {"encoder_out": frames, "decoder_out": targets, "given": frames + cells}

    def cells_of(
        self, given: torch.Tensor, shapes: Shapes, n: int, begin: int, end: int
    ) -> torch.Tensor:
        """Return frames [begin, end) of utterance n, of `given` or its gradient: (frames, cells of
        a frame, V)."""
        return given[n, begin:end, : shapes[n][1] + 1]

    def take(self, logits: torch.Tensor, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return `given`, the input of `loss`, made from padded logits; may add to `prepared`."""
        return logits


class Packed(Layout):
    """The layout of packed logits (sum T_i (U_i+1), V): the cells of each utterance, row-major, in
    turn."""

    def given(self, model, batch, prepared):
        cells = [
            (
                batch.encoder_out[n, :T].unsqueeze(1) + batch.decoder_out[n, : U + 1].unsqueeze(0)
            ).flatten(0, 1)
            for n, (T, U) in enumerate(batch.shapes)
        ]
        return model(torch.cat(cells))

    def padding(self, shapes):
        return {**super().padding(shapes), "given": []}

    def cells_of(self, given, shapes, n, begin, end):
        row = shapes[n][1] + 1
        first = sum(T * (U + 1) for T, U in shapes[:n])
        return given[first + begin * row : first + end * row].view(end - begin, row, -1)

    def take(self, logits, batch, prepared):
        if all((T, U + 1) == logits.shape[1:3] for T, U in batch.shapes):
            return logits.flatten(0, 2)  # a view, where there is no padding
        return torch.cat(
            [logits[n, :T, : U + 1].flatten(0, 1) for n, (T, U) in enumerate(batch.shapes)]
        )


class Joint(Layout):
    """The layout of losses that contain the joiner: encoder and decoder outputs, and the output
    layer.

    logits = tanh(encoder_out[t] + decoder_out[u]) weight^T + bias.  Such a loss gives the gradients
    of all four, and has no scope "loss", since it takes no logits.
    """

    scopes = ("step",)
    tensors = ("encoder_out", "decoder_out", "weight", "bias")

    def step(self, model, batch, prepared):
        leaves = (batch.encoder_out, batch.decoder_out, model.output.weight, model.output.bias)
        with stage("joiner and loss"):
            return self.of_leaves(dict(zip(self.tensors, leaves)), batch, prepared)

    def of_leaves(self, leaves, batch, prepared):
        return self.adapter.loss_of(dict(zip(self.tensors, leaves.values())), prepared)


def joined(
    encoder_out: torch.Tensor, decoder_out: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return the padded logits (N, T, U+1, V) of a joiner whose output layer has this weight and
    bias."""
    hidden = torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1))
    return torch.nn.functional.linear(hidden, weight, bias)


class ByUtterance(Joint):
    """The layout of a loss of logits that is given those of one utterance at a time, cut to its own
    T and U.

    Joiner and loss of each utterance are under torch.utils.checkpoint: forward keeps no logits, and
    backward makes them again, one utterance after the other.  So the step holds the logits of one
    utterance, for one more forward.  It is how people train with such a loss when the logits of the
    batch do not fit.

    The checkpoint is the reentrant one: its forward makes no graph, so losses that compute their
    gradient there leave it out, and none is kept.  The other kind keeps what a loss stores as an
    attribute of its ctx, as optimized_transducer does: the logits of all utterances.
    """

    def __init__(self, adapter: Adapter):
        super().__init__(adapter)
        self.whole = LAYOUTS[adapter.layout](adapter)

    def prepare(self, batch):
        pieces = [batch.utterance(n) for n in range(len(batch.shapes))]
        return SimpleNamespace(
            pieces=[(piece, self.adapter.prepare(piece.labels)) for piece in pieces]
        )

    def of_leaves(self, leaves, batch, prepared):
        encoder_out, decoder_out, weight, bias = leaves.values()
        losses = []
        # By split, whose backward writes each utterance's gradient once; slices would each add one
        # of the whole batch.
        outputs = zip(encoder_out.split(1), decoder_out.split(1))
        for (of_frames, of_targets), (piece, of_piece) in zip(outputs, prepared.pieces):
            ((T, U),) = piece.shapes
            given = (of_frames[:, :T], of_targets[:, : U + 1], weight, bias, piece, of_piece)
            loss = checkpoint(self._of_one, *given, use_reentrant=True, preserve_rng_state=False)
            losses.append(loss.reshape(()))  # some packages sum to (1,)
        return self.adapter.reduced(torch.stack(losses))

    def _of_one(self, encoder_out, decoder_out, weight, bias, piece, prepared):
        logits = joined(encoder_out, decoder_out, weight, bias)
        return self.whole.loss(self.whole.take(logits, piece, prepared), piece, prepared)


#: Of the simple loss beside the pruned one in what is differentiated.
SIMPLE_LOSS_SCALE = 0.5


class Pruned(Layout):
    """The layout of pruned logits (N, T, S, V) of the S symbols in `prepared.ranges` (N, T, S).

    Kuang et al., "Pruned RNN-T for fast, memory-efficient ASR training", 2022, as icefall trains it
    (egs/librispeech/ASR/pruned_transducer_stateless2).  The smoothed simple loss of encoder and
    decoder outputs, projected to V, gives the ranges, and 0.5 x simple + pruned loss is
    differentiated.  The adapter has the methods of benchmark_k2_pruned.K2Pruned.
    """

    approximate = True
    projections = ("am", "lm")
    adapter: Any

    def scores(self, model: Joiner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores am (N, T, V) and lm (N, U+1, V) of the simple loss."""
        with stage("projections"):
            return model.extra["am"](batch.encoder_out), model.extra["lm"](batch.decoder_out)

    def both(self, model: Joiner, batch: Batch, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (summed simple loss, pruned logits); set `prepared.ranges` to the ranges that it
        gives."""
        am, lm = self.scores(model, batch)
        with stage("simple loss"):
            simple_loss, arc_gradients = self.adapter.simple_loss(am, lm, prepared)
        with stage("prune ranges"):
            prepared.ranges = self.adapter.ranges(arc_gradients, prepared)
        with stage("pruning"):
            encoder_out, decoder_out = self.adapter.pruned(
                batch.encoder_out, batch.decoder_out, prepared.ranges
            )
        with stage("joiner"):
            return simple_loss, model(encoder_out + decoder_out)

    def given(self, model, batch, prepared):
        return self.both(model, batch, prepared)[1]

    def step(self, model, batch, prepared):
        simple_loss, logits = self.both(model, batch, prepared)
        with stage("pruned loss"):
            pruned_loss = self.loss(logits, batch, prepared)
        return SIMPLE_LOSS_SCALE * simple_loss + pruned_loss

    def simple_losses(self, model: Joiner, batch: Batch) -> torch.Tensor:
        """Return the right simple losses (N,), as the step scales them: float64, differentiable."""
        am, lm = self.scores(model, batch)
        joint = (am.unsqueeze(2) + lm.unsqueeze(1)).log_softmax(-1)
        lm_alone = lm.log_softmax(-1).unsqueeze(1)
        lm_scale = self.adapter.lm_only_scale
        smoothed = (1 - lm_scale) * joint + lm_scale * lm_alone
        return SIMPLE_LOSS_SCALE * oracle.arc_losses(smoothed, batch.targets, batch.shapes)

    def padding(self, shapes):
        regions = super().padding(shapes)
        return {**regions, "given": regions["encoder_out"]}

    def cells_of(self, given, shapes, n, begin, end):
        return given[n, begin:end]

    def take(self, logits, batch, prepared):
        """Return the logits, with all of U in the range of every frame, so that the pruned loss is
        exact."""
        N, T, U1, _ = logits.shape
        prepared.ranges = torch.arange(U1, device=logits.device).expand(N, T, U1)
        return logits


#: By the names that adapters use; rnnt_bench.core.implementations.LAYOUTS has the kind of loss of
#: each.
LAYOUTS: dict[str, type[Layout]] = {
    "padded": Layout,
    "packed": Packed,
    "joint": Joint,
    "pruned": Pruned,
}


def of(adapter: Adapter) -> Layout:
    """Return the layout of an adapter, bound to it."""
    return ByUtterance(adapter) if adapter.by_utterance else LAYOUTS[adapter.layout](adapter)
