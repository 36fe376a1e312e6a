"""Define the layouts: the kinds of input that a loss takes, and how each is made.

"Given" is the one tensor that a loss of logits takes: padded, packed or pruned logits.  A layout is
bound to one adapter, which alone knows the lattice and the number of the joiner's outputs.
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
    """The layout of padded logits (N, T, U+1, V), and the base of the others."""

    scopes: tuple[str, ...] = SCOPES  # the scopes that such a loss has
    approximate = False  # whether the loss is approximate by design
    tensors: tuple[str, ...] = ("logits",)  # names of the first arguments of the package's function
    projections: tuple[str, ...] = ()  # further layers that the step trains, of inputs.LAYERS

    def __init__(self, adapter: Adapter):
        self.adapter = adapter

    def model(self, device: torch.device, dtype: torch.dtype) -> Joiner:
        """Return the joiner under the adapter's settings, with the layers of `projections`."""
        settings = self.adapter.settings
        further = self.adapter.outputs(settings.vocab_size) - settings.vocab_size
        output = inputs.layer("output", settings, device, dtype, further)
        others = {name: inputs.layer(name, settings, device, dtype) for name in self.projections}
        return Joiner(output, others)

    def prepare(self, batch: Batch) -> Any:
        """Return what the adapter makes of targets and lengths: the argument `prepared` of `loss`.

        This call is not timed.  So the adapter gets no outputs of encoder and decoder here: work on
        them belongs to the timed step."""
        return self.adapter.prepare(batch.labels)

    def given(self, model: Joiner, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the tensor that `loss` takes; may set `prepared.ranges`.

        In scope "loss" a step ends with the gradient of this tensor."""
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
        """Return the adapter's loss.

        leaves: by name, the tensors that a step in the first of `scopes` starts from; in scope
          "loss" that is "given" alone."""
        return self.loss(leaves["given"], batch, prepared)

    def padding(self, shapes: Shapes) -> dict[str, list[Region]]:
        """Return name of a leaf -> the regions of it that are padding: frames behind the T of an
        utterance, and targets behind its U.  A region may be empty."""
        frames: list[Region] = []
        targets: list[Region] = []
        cells: list[Region] = []
        for n, (T, U) in enumerate(shapes):
            frames.append((n, slice(T, None)))
            targets.append((n, slice(U + 1, None)))
            cells.append((n, slice(None), slice(U + 1, None)))
        return {"encoder_out": frames, "decoder_out": targets, "given": frames + cells}

    def cells_of(
        self, given: torch.Tensor, shapes: Shapes, n: int, begin: int, end: int
    ) -> torch.Tensor:
        """Return the cells (frames, cells of a frame, V) of frames [begin, end) of utterance n.

        given: the tensor that `loss` takes, or the gradient of that tensor."""
        return given[n, begin:end, : shapes[n][1] + 1]

    def take(self, logits: torch.Tensor, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return what `loss` takes, made from padded logits; may set `prepared.ranges`."""
        return logits


class Packed(Layout):
    """The layout of packed logits (sum T_i (U_i+1), V).

    The T x (U+1) cells of each utterance are flattened, and the utterances follow each other."""

    def given(self, model, batch, prepared):
        utterances = []
        for n, (T, U) in enumerate(batch.shapes):
            joined = batch.encoder_out[n, :T, None] + batch.decoder_out[n, None, : U + 1]
            utterances.append(joined.flatten(0, 1))
        return model(torch.cat(utterances))

    def padding(self, shapes):
        return {**super().padding(shapes), "given": []}

    def cells_of(self, given, shapes, n, begin, end):
        row = shapes[n][1] + 1
        first = sum(T * (U + 1) for T, U in shapes[:n])
        return given[first + begin * row : first + end * row].view(end - begin, row, -1)

    def take(self, logits, batch, prepared):
        if all((T, U + 1) == logits.shape[1:3] for T, U in batch.shapes):
            return logits.flatten(0, 2)  # without padding, a view
        return torch.cat(
            [logits[n, :T, : U + 1].flatten(0, 1) for n, (T, U) in enumerate(batch.shapes)]
        )


class Joint(Layout):
    """The layout of a loss that contains the joiner: outputs of encoder and decoder, weight and
    bias.

    logits = tanh(encoder_out[t] + decoder_out[u]) weight^T + bias.  Such a loss gives the gradients
    of all four.  It takes no logits, so it has no scope "loss".
    """

    scopes = ("step",)
    tensors = ("encoder_out", "decoder_out", "weight", "bias")

    def step(self, model, batch, prepared):
        leaves = (batch.encoder_out, batch.decoder_out, model.output.weight, model.output.bias)
        with stage("joiner and loss"):
            # Not `adapter.loss_of`: ByUtterance overrides `of_leaves`.
            return self.of_leaves(dict(zip(self.tensors, leaves)), batch, prepared)

    def of_leaves(self, leaves, batch, prepared):
        # The leaves of a step have other names ("output.weight"), and the same order.
        return self.adapter.loss_of(dict(zip(self.tensors, leaves.values())), prepared)


def joined(
    encoder_out: torch.Tensor, decoder_out: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return the padded logits (N, T, U+1, V) of a joiner.

    weight, bias: (V, D) and (V,), those of its output layer."""
    hidden = torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1))
    return torch.nn.functional.linear(hidden, weight, bias)


class ByUtterance(Joint):
    """The layout of a loss of logits that gets one utterance at a time, cut to its own T and U.

    The joiner and the loss of each utterance run under torch.utils.checkpoint.  Its forward keeps
    no logits, and its backward makes them again, one utterance after the other.  So the step holds
    the logits of one utterance, and takes one more forward.  People train in this way when the
    logits of the batch do not fit into memory.

    The checkpoint is the reentrant one, whose forward makes no graph.  So a loss that computes its
    gradient in forward leaves it out there.  The other kind of checkpoint would keep what a loss
    stores as an attribute of its ctx, as optimized_transducer does: the logits of all utterances.
    """

    def __init__(self, adapter: Adapter):
        super().__init__(adapter)
        self.of_logits = LAYOUTS[adapter.layout](adapter)

    def prepare(self, batch):
        utterances = [batch.utterance(n) for n in range(len(batch.shapes))]
        prepared = [self.adapter.prepare(utterance.labels) for utterance in utterances]
        return SimpleNamespace(utterances=utterances, prepared_utterances=prepared)

    def of_leaves(self, leaves, batch, prepared):
        # As in Joint, the leaves have the order of `tensors`, whatever their names.
        encoder_out, decoder_out, weight, bias = leaves.values()
        losses = []
        # The backward of a split writes each utterance's gradient once.  That of a slice would add
        # a gradient of the whole batch for each utterance.
        outputs = zip(encoder_out.split(1), decoder_out.split(1))
        for n, (encoded, decoded) in enumerate(outputs):
            T, U = batch.shapes[n]
            loss = checkpoint(
                self._of_utterance,
                encoded[:, :T],
                decoded[:, : U + 1],
                weight,
                bias,
                prepared.utterances[n],
                prepared.prepared_utterances[n],
                use_reentrant=True,
                preserve_rng_state=False,
            )
            losses.append(loss.reshape(()))  # some packages sum to (1,)
        return self.adapter.reduced(torch.stack(losses))

    def _of_utterance(self, encoder_out, decoder_out, weight, bias, utterance, prepared):
        logits = joined(encoder_out, decoder_out, weight, bias)
        taken = self.of_logits.take(logits, utterance, prepared)
        return self.of_logits.loss(taken, utterance, prepared)


#: Factor of the simple loss in the sum of losses that a step of a pruned loss differentiates.
SIMPLE_LOSS_SCALE = 0.5


class Pruned(Layout):
    """The layout of pruned logits (N, T, S, V): at each frame, those of S positions u.

    `prepared.ranges` (N, T, S) has these positions.  It is the method of Kuang et al., "Pruned RNN-T
    for fast, memory-efficient ASR training", 2022, as icefall trains it
    (egs/librispeech/ASR/pruned_transducer_stateless2).  A simple loss, smoothed, adds encoder and
    decoder outputs that are projected to V.  Its gradients give the ranges.  The step
    differentiates 0.5 x simple loss + pruned loss.  The adapter has the methods of
    benchmark_k2_pruned.K2Pruned.
    """

    approximate = True
    projections = ("am", "lm")
    adapter: Any

    def scores(self, model: Joiner, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores am (N, T, V) and lm (N, U+1, V) of the simple loss."""
        with stage("projections"):
            return model.extra["am"](batch.encoder_out), model.extra["lm"](batch.decoder_out)

    def both(self, model: Joiner, batch: Batch, prepared: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed simple loss, and the pruned logits; set `prepared.ranges`."""
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
        _, logits = self.both(model, batch, prepared)
        return logits

    def step(self, model, batch, prepared):
        simple_loss, logits = self.both(model, batch, prepared)
        with stage("pruned loss"):
            pruned_loss = self.loss(logits, batch, prepared)
        return SIMPLE_LOSS_SCALE * simple_loss + pruned_loss

    def simple_losses(self, model: Joiner, batch: Batch) -> torch.Tensor:
        """Return the right simple losses (N,), as the step scales them: differentiable, and in the
        float64 of `arc_losses`."""
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
        """Return the logits as they are; put all positions into each range, so that the loss is
        exact."""
        N, T, U1, _ = logits.shape
        prepared.ranges = torch.arange(U1, device=logits.device).expand(N, T, U1)
        return logits


#: The layouts by the names that adapters use; core.implementations.LAYOUTS has the kind of loss of
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
