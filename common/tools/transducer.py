"""A Conformer transducer of the size of icefall's pruned_transducer_stateless2, with any loss of
this suite.  It is built of torchaudio.models.Conformer and torch.nn.

`profile` and `largest` run it. docs/profile.md compares its parameters with icefall's, part by
part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rnnt_bench.core import files, implementations, settings
from rnnt_bench.data.shapes import subsampled
from rnnt_bench.losses import layouts
from rnnt_bench.losses.inputs import Batch, Joiner
from rnnt_bench.tools import loading
from rnnt_bench.tools.sizes import Sizes

#: Feature frames for each frame of the encoder's output.
SUBSAMPLING = 4
#: Import path of the function that makes icefall's own model.
ICEFALL_MODEL = f"{files.ROOT / 'examples' / 'icefall.py'}:transducer"


def batch_of(targets: torch.Tensor, utterances: Iterable[tuple[int, int]]) -> Batch:
    """Return a batch for the loss, without outputs of encoder and decoder: the model adds them.

    targets: (N, U) int32; utterances: (feature frames, U) of each."""
    shapes = [(int(subsampled(frames, SUBSAMPLING)), int(U)) for frames, U in utterances]
    lengths = torch.tensor(shapes, dtype=torch.int32, device=targets.device)
    T_lengths, U_lengths = lengths.T.contiguous()
    no_output = torch.empty(0, device=targets.device)
    return Batch(targets, T_lengths, U_lengths, shapes, no_output, no_output)


class Embed(nn.Module):
    """Subsamples features (N, frames, features) to (N, T, encoder_dim), by three convolutions of
    kernel 3, of which two have stride 2."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        channels = (1, *sizes.embed_channels)
        layers = []
        for inputs, outputs, stride, padding in zip(channels, channels[1:], (1, 2, 2), (1, 0, 0)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride, padding), nn.SiLU()]
        self.convolutions = nn.Sequential(*layers)
        self.out = nn.Linear(
            channels[-1] * subsampled(sizes.features, SUBSAMPLING), sizes.encoder_dim
        )
        self.norm = nn.LayerNorm(sizes.encoder_dim)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        channels = self.convolutions(features.unsqueeze(1))
        return self.norm(self.out(channels.transpose(1, 2).flatten(2)))


class Encoder(nn.Module):
    """Subsamples features, then runs torchaudio's Conformer."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        conformer = loading.imported("torchaudio.models:Conformer")
        self.embed = Embed(sizes)
        self.conformer = conformer(
            sizes.encoder_dim,
            sizes.heads,
            sizes.feed_forward,
            sizes.layers,
            sizes.kernel,
            dropout=sizes.dropout,
        )

    def forward(
        self, features: torch.Tensor, lengths: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs (N, T, encoder_dim) and their lengths (N,).

        features: (N, frames, features); lengths: (N,), in feature frames."""
        return self.conformer(self.embed(features), subsampled(lengths, SUBSAMPLING))


class Decoder(nn.Module):
    """A stateless decoder: an embedding and a depthwise convolution over the last `context`
    symbols."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.context = sizes.context
        D = sizes.decoder_dim
        self.embedding = nn.Embedding(sizes.vocab_size, D, padding_idx=0)
        self.convolution = nn.Conv1d(D, D, sizes.context, groups=D, bias=False)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Return the outputs (N, U+1, decoder_dim) of symbols (N, U+1), the first a blank."""
        embedded = nn.functional.pad(self.embedding(symbols).transpose(1, 2), (self.context - 1, 0))
        return nn.functional.relu(self.convolution(embedded).transpose(1, 2))


class Part(nn.Module):
    """Calls a function, so that hooks on modules see its forward and its backward.

    layers: the modules whose parameters the function uses."""

    def __init__(self, layers: Any = None):
        super().__init__()
        self.layers = layers

    def forward(self, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        return function(*tensors)


class Criterion(nn.Module):
    """Computes the summed loss of encoder and decoder outputs: the joiner, then the loss of an
    adapter, always in float32.

    It has a Part for each thing that `profile` labels: `joiner` and `rnnt_loss`; for a pruned loss,
    as in icefall's profile, `joiner`, `rnnt_loss_simple` (the projections and the simple loss) and
    `rnnt_loss_pruned` (the ranges, the pruning, the joiner and the pruned loss)."""

    def __init__(self, adapter: Any, device: torch.device):
        super().__init__()
        self.adapter = adapter
        self.layout = layouts.of(adapter)
        layers: Joiner = self.layout.model(device, torch.float32)
        self.joiner = Part(layers)
        self.projections = layers.extra  # "am" and "lm" of a pruned loss, else none
        # A function that returns a new context at each call.
        self.without_autocast = partial(torch.autocast, device.type, enabled=False)
        # The losses have no parameters.  Each has a Part so that the hooks of a label see it.
        if isinstance(self.layout, layouts.Pruned):
            self.rnnt_loss_simple = Part()
            self.rnnt_loss_pruned = Part()
        else:
            self.rnnt_loss = Part()

    def forward(
        self, batch: Batch, prepared: Any, unprojected: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Return the summed loss.

        batch: its outputs of encoder and decoder are projected to the joiner's dimension; prepared:
        what the adapter's `prepare` returned; unprojected: these outputs before that projection,
        which a pruned loss projects to V."""
        outputs = (batch.encoder_out, batch.decoder_out)
        if isinstance(self.layout, layouts.Pruned):
            simple, arcs = self.rnnt_loss_simple(partial(self._simple, prepared), *unprojected)
            pruned_loss = partial(self._pruned, batch, prepared, arcs)
            pruned = self.rnnt_loss_pruned(pruned_loss, *outputs)
            return layouts.SIMPLE_LOSS_SCALE * simple + pruned

        takes_logits = self.layout.tensors == ("logits",)
        # `given` returns the logits, `step` the loss: there the layout contains the joiner.
        method = self.layout.given if takes_logits else self.layout.step

        def run(encoder_out: torch.Tensor, decoder_out: torch.Tensor) -> torch.Tensor:
            """Return the logits, or the loss of a layout that contains the joiner.

            The outputs are arguments, since the hooks of a Part see only the tensors it is called
            with."""
            inputs = replace(batch, encoder_out=encoder_out, decoder_out=decoder_out)
            return method(self.joiner.layers, inputs, prepared)

        if takes_logits:
            return self.from_logits(self.joiner(run, *outputs), batch, prepared)
        with self.without_autocast():
            return self.rnnt_loss(run, *(output.float() for output in outputs))

    def from_logits(self, logits: torch.Tensor, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the summed loss.

        logits: in the shape of those that `layout.given` returns; prepared: what the adapter's
        `prepare` returned."""
        loss = partial(self.layout.loss, batch=batch, prepared=prepared)
        with self.without_autocast():
            return self.rnnt_loss(loss, logits.float())

    def _simple(self, prepared: Any, to_am: torch.Tensor, to_lm: torch.Tensor) -> Any:
        """Return (simple loss, its gradients with respect to the arcs of the lattice).

        to_am, to_lm: outputs of encoder and decoder, before their projections to V."""
        am, lm = self.projections["am"](to_am), self.projections["lm"](to_lm)
        with self.without_autocast():
            return self.adapter.simple_loss(am.float(), lm.float(), prepared)

    def _pruned(self, batch: Batch, prepared: Any, arcs: Any, *outputs: torch.Tensor) -> Any:
        """Return the pruned loss of encoder and decoder outputs; set `prepared.ranges`.

        arcs: the gradients that `_simple` returned, by which the adapter chooses the range of
        symbols of each frame."""
        prepared.ranges = self.adapter.ranges(arcs, prepared)

        # A function, which the Part `joiner` calls, so that hooks see the joiner run.  It gets
        # outputs that are pruned already, so their sum has the shape of the cells.
        def join(encoder_out: torch.Tensor, decoder_out: torch.Tensor) -> torch.Tensor:
            return self.joiner.layers(encoder_out + decoder_out)

        logits = self.joiner(join, *self.adapter.pruned(*outputs, prepared.ranges))
        with self.without_autocast():
            return self.layout.loss(logits.float(), batch, prepared)


class Transducer(nn.Module):
    """The whole model: encoder, decoder, a projection of the outputs of each to the joiner's
    dimension, joiner and loss.

    encoder, decoder: None for those of this file; linear: makes a projection of (inputs, outputs).
    The criterion of a pruned loss gets its projections here."""

    def __init__(
        self,
        sizes: Sizes,
        criterion: Criterion,
        encoder: nn.Module | None = None,
        decoder: nn.Module | None = None,
        linear: Callable[[int, int], nn.Module] = nn.Linear,
    ):
        super().__init__()
        self.encoder = encoder or Encoder(sizes)
        self.decoder = decoder or Decoder(sizes)
        self.encoder_proj = linear(sizes.encoder_dim, sizes.joiner_dim)
        self.decoder_proj = linear(sizes.decoder_dim, sizes.joiner_dim)
        self.criterion = criterion
        if criterion.projections:  # of a pruned loss; they project what encoder and decoder return
            criterion.projections["am"] = linear(sizes.encoder_dim, sizes.vocab_size)
            criterion.projections["lm"] = linear(sizes.decoder_dim, sizes.vocab_size)

    def parts(self) -> dict[str, nn.Module]:
        """Return name -> module of each part but the encoder.

        The part "joiner" includes the projections to the joiner's dimension."""
        joiner = nn.ModuleList(
            [self.encoder_proj, self.decoder_proj, self.criterion.joiner.layers.output]
        )
        projections = {
            f"simple_{key}_proj": part for key, part in self.criterion.projections.items()
        }
        return {"decoder": self.decoder, "joiner": joiner, **projections}

    def forward(self, features, feature_lengths, symbols, batch, prepared) -> torch.Tensor:
        """Return the summed loss.

        Args:
            features: (N, frames, features)
            feature_lengths: (N,), in frames
            symbols: (N, U+1), a blank before the targets
            batch: targets and lengths, as `batch_of` returns them
            prepared: what the adapter made of the targets and lengths
        """
        encoder_out, _ = self.encoder(features, feature_lengths)
        decoder_out = self.decoder(symbols)
        projected = replace(
            batch,
            encoder_out=self.encoder_proj(encoder_out),
            decoder_out=self.decoder_proj(decoder_out),
        )
        return self.criterion(projected, prepared, (encoder_out, decoder_out))


class Imported(nn.Module):
    """A model of the user's, with a loss of this suite where it returns logits.

    model(features, feature_lengths, symbols, symbol_lengths) returns its loss, or logits (N, T,
    U+1, V) and perhaps their lengths (N,), as torchaudio.models.RNNT does."""

    def __init__(self, model: nn.Module, criterion: Criterion):
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, features, feature_lengths, symbols, batch, prepared) -> torch.Tensor:
        """Return the summed loss.

        Args:
            features: (N, frames, features)
            feature_lengths: (N,), in frames
            symbols: (N, U+1), a blank before the targets
            batch: targets and lengths, as `batch_of` returns them
            prepared: what the adapter made of the batch, for the layout alone; the loss itself gets
                what the adapter makes of the T that the model returns
        """
        symbol_lengths = (batch.U_lengths + 1).to(symbols.dtype)
        outputs = self.model(features, feature_lengths, symbols, symbol_lengths)
        first, *rest = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        if first.dim() < 3:  # the model's own loss; logits have 4 dimensions
            return first.sum()
        N, T = first.shape[:2]
        lengths = rest[0].int() if rest else torch.full((N,), T, dtype=torch.int32)
        # The model may subsample otherwise than `batch` assumes: its T are those that count.
        real = replace(
            batch,
            shapes=[(frames, U) for frames, (_, U) in zip(lengths.tolist(), batch.shapes)],
            T_lengths=lengths.to(first.device),
        )
        logits = self.criterion.layout.take(first, real, prepared)
        return self.criterion.from_logits(logits, real, self.criterion.adapter.prepare(real))


def made(sizes: Sizes, criterion: Criterion, config: str = "") -> Transducer:
    """Return a Conformer transducer of these sizes.

    config: "" for that of this module, "icefall" for icefall's own."""
    make = loading.imported(ICEFALL_MODEL) if config else Transducer
    model: Transducer = make(sizes, criterion)
    return model


class Trained(nn.Module):
    """The Conformer transducer with a loss of the benchmarks, called as torchaudio.models.RNNT is.

    config: "icefall", or ""; loss: a row of the benchmarks; device: where it will run; sizes: the
    fields of `Sizes`.  Raises UserError, and NotRunnable for a loss that cannot run here."""

    def __init__(self, config: str = "", loss: str = "fused", device: str = "cpu", **sizes: Any):
        super().__init__()
        dimensions = Sizes(**sizes)
        where = torch.device(device)
        row = implementations.find(loss)
        workload = {"vocab_size": dimensions.vocab_size, "encoder_dim": dimensions.joiner_dim}
        self.adapter = implementations.load(row.script)(
            settings.resolve(workload, device), row.variant
        )
        self.adapter.load(where.type)
        self.model = made(dimensions, Criterion(self.adapter, where), config)

    def forward(self, features, lengths, symbols, symbol_lengths) -> torch.Tensor:
        """Return the summed loss.

        Args:
            features: (N, frames, features)
            lengths: (N,), in frames
            symbols: (N, U+1), a blank before the targets
            symbol_lengths: (N,), U+1 of each utterance
        """
        utterances = zip(lengths.tolist(), (symbol_lengths - 1).tolist())
        batch = batch_of(symbols[:, 1:].int().contiguous(), utterances)
        return self.model(features, lengths, symbols, batch, self.adapter.prepare(batch))
