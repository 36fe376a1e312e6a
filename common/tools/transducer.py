"""The model of `profile`, and of `largest` where a YAML names it: a Conformer transducer of the
shape of icefall's pruned_transducer_stateless2, built of torchaudio.models.Conformer and torch.nn,
with any loss of this suite.

docs/profile.md has the parameters of both, part by part, and why they differ."""

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

SUBSAMPLING = 4
#: The file of icefall's own model.
ICEFALL_MODEL = f"{files.ROOT / 'examples' / 'icefall.py'}:transducer"


def batch_of(targets: torch.Tensor, utterances: Iterable[tuple[int, int]]) -> Batch:
    """Return a batch of int32 targets (N, U) and of (feature frames, U) of each utterance, whose
    outputs of encoder and decoder are left to the model."""
    shapes = [(int(subsampled(frames, SUBSAMPLING)), int(U)) for frames, U in utterances]
    T, U_lengths = (
        torch.tensor(column, dtype=torch.int32, device=targets.device) for column in zip(*shapes)
    )
    none = torch.empty(0, device=targets.device)
    return Batch(targets, T, U_lengths, shapes, none, none)


class Embed(nn.Module):
    """Maps (N, frames, features) to (N, T, encoder_dim): three convolutions of kernel 3, two of
    them of stride 2."""

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
    """The front end, and torchaudio's Conformer."""

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
        """Return outputs (N, T, encoder_dim) and lengths (N,) of features (N, frames, features) and
        lengths (N,)."""
        return self.conformer(self.embed(features), subsampled(lengths, SUBSAMPLING))


class Decoder(nn.Module):
    """Stateless: the last `context` symbols alone, by an embedding and a depthwise convolution."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.context = sizes.context
        D = sizes.decoder_dim
        self.embedding = nn.Embedding(sizes.vocab_size, D, padding_idx=0)
        self.convolution = nn.Conv1d(D, D, sizes.context, groups=D, bias=False)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        """Return outputs (N, U+1, decoder_dim) of symbols (N, U+1), of which the first is a
        blank."""
        embedded = nn.functional.pad(self.embedding(symbols).transpose(1, 2), (self.context - 1, 0))
        return nn.functional.relu(self.convolution(embedded).transpose(1, 2))


class Part(nn.Module):
    """A function as a module, so that it has a name, and its backward a label.  layers: those that
    it uses."""

    def __init__(self, layers: Any = None):
        super().__init__()
        self.layers = layers

    def forward(self, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        return function(*tensors)


class Criterion(nn.Module):
    """From encoder and decoder outputs to the summed loss: the joiner, and the loss of `adapter`,
    always in float32.

    Parts are `joiner` and `rnnt_loss`; of a pruned loss, as icefall's profile labels them,
    `rnnt_loss_simple` with its projections, and `rnnt_loss_pruned` with the ranges, the pruning and
    the joiner."""

    def __init__(self, adapter: Any, device: torch.device):
        super().__init__()
        self.adapter = adapter
        self.layout = layouts.of(adapter)
        layers: Joiner = self.layout.model(device, torch.float32)
        self.joiner = Part(layers)
        self.projections = layers.extra
        self.exact = partial(torch.autocast, device.type, enabled=False)
        if isinstance(self.layout, layouts.Pruned):
            self.rnnt_loss_simple = Part()
            self.rnnt_loss_pruned = Part()
        else:
            self.rnnt_loss = Part()

    def forward(self, batch: Batch, prepared: Any, scores: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the summed loss of a batch of the joiner's inputs.  scores: what the pruned loss
        projects."""
        encoder_out, decoder_out = batch.encoder_out, batch.decoder_out
        if isinstance(self.layout, layouts.Pruned):
            simple, arcs = self.rnnt_loss_simple(partial(self._simple, prepared), *scores)
            prune = partial(self._pruned, batch, prepared, arcs)
            pruned = self.rnnt_loss_pruned(prune, encoder_out, decoder_out)
            return layouts.SIMPLE_LOSS_SCALE * simple + pruned

        def run(
            function: Any, encoder_out: torch.Tensor, decoder_out: torch.Tensor
        ) -> torch.Tensor:
            inputs = replace(batch, encoder_out=encoder_out, decoder_out=decoder_out)
            return function(self.joiner.layers, inputs, prepared)

        if self.layout.tensors != ("logits",):  # the joiner is within the loss
            with self.exact():
                step = partial(run, self.layout.step)
                return self.rnnt_loss(step, encoder_out.float(), decoder_out.float())
        logits = self.joiner(partial(run, self.layout.given), encoder_out, decoder_out)
        return self.from_logits(logits, batch, prepared)

    def from_logits(self, logits: torch.Tensor, batch: Batch, prepared: Any) -> torch.Tensor:
        """Return the summed loss of the logits, as the layout gives them."""
        with self.exact():
            return self.rnnt_loss(
                lambda exact: self.layout.loss(exact, batch, prepared), logits.float()
            )

    def _simple(self, prepared: Any, to_am: torch.Tensor, to_lm: torch.Tensor) -> Any:
        """Return the simple loss, and the gradients of its arcs."""
        am, lm = self.projections["am"](to_am), self.projections["lm"](to_lm)
        with self.exact():
            return self.adapter.simple_loss(am.float(), lm.float(), prepared)

    def _pruned(self, batch: Batch, prepared: Any, arcs: Any, *outputs: torch.Tensor) -> Any:
        """Return the pruned loss, in the ranges that the gradients of the simple loss's arcs
        give."""
        prepared.ranges = self.adapter.ranges(arcs, prepared)

        def join(encoder_out: torch.Tensor, decoder_out: torch.Tensor) -> torch.Tensor:
            return self.joiner.layers(encoder_out + decoder_out)

        logits = self.joiner(join, *self.adapter.pruned(*outputs, prepared.ranges))
        with self.exact():
            return self.layout.loss(logits.float(), batch, prepared)


class Transducer(nn.Module):
    """The whole model, with projections of both outputs to the joiner's dimension, where icefall's
    joiner has them.

    sizes: of the projections, and of the parts that are None; linear: makes a projection of
      (inputs, outputs)."""

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
        if criterion.projections:  # they take what encoder and decoder return
            criterion.projections["am"] = linear(sizes.encoder_dim, sizes.vocab_size)
            criterion.projections["lm"] = linear(sizes.decoder_dim, sizes.vocab_size)

    def parts(self) -> dict[str, nn.Module]:
        """Return the parts beside the encoder by name: the joiner is with both projections to its
        dimension."""
        joiner = nn.ModuleList(
            [self.encoder_proj, self.decoder_proj, self.criterion.joiner.layers.output]
        )
        projections = {
            f"simple_{key}_proj": part for key, part in self.criterion.projections.items()
        }
        return {"decoder": self.decoder, "joiner": joiner, **projections}

    def forward(self, features, feature_lengths, symbols, batch, prepared) -> torch.Tensor:
        """Return the summed loss of features (N, frames, features), their lengths (N,), symbols (N,
        U+1) with a blank first, and the batch with the arguments of the loss."""
        encoder_out, _ = self.encoder(features, feature_lengths)
        decoder_out = self.decoder(symbols)
        projected = replace(
            batch,
            encoder_out=self.encoder_proj(encoder_out),
            decoder_out=self.decoder_proj(decoder_out),
        )
        return self.criterion(projected, prepared, (encoder_out, decoder_out))


class Imported(nn.Module):
    """A model by import path: model(features, feature_lengths, symbols, symbol_lengths) returns its
    loss, or logits (N, T, U+1, V), alone or first of several, as torchaudio.models.RNNT does."""

    def __init__(self, model: nn.Module, criterion: Criterion):
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, features, feature_lengths, symbols, batch, prepared) -> torch.Tensor:
        """Return the summed loss; arguments as those of Transducer.forward."""
        symbol_lengths = (batch.U_lengths + 1).to(symbols.dtype)
        outputs = self.model(features, feature_lengths, symbols, symbol_lengths)
        first, *rest = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        if first.dim() < 3:
            return first.sum()
        N, T = first.shape[:2]
        lengths = rest[0].int() if rest else torch.full((N,), T, dtype=torch.int32)
        real = replace(
            batch,
            shapes=[(frames, U) for frames, (_, U) in zip(lengths.tolist(), batch.shapes)],
            T_lengths=lengths.to(first.device),
        )
        logits = self.criterion.layout.take(first, real, prepared)
        return self.criterion.from_logits(logits, real, self.criterion.adapter.prepare(real))


def made(sizes: Sizes, criterion: Criterion, config: str = "") -> Transducer:
    """Return the Conformer transducer of these sizes; icefall's own where a configuration is
    named."""
    make = loading.imported(ICEFALL_MODEL) if config else Transducer
    model: Transducer = make(sizes, criterion)
    return model


class Trained(nn.Module):
    """The Conformer transducer with a loss of the benchmarks; it takes a batch as
    torchaudio.models.RNNT does.

    config: "icefall", or ""; device: where it will run; sizes: as in `Sizes`.  Raises UserError,
      NotRunnable."""

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
        """Return the summed loss of features (N, frames, features), their lengths (N,), symbols (N,
        U+1) with a blank first, and their lengths (N,)."""
        utterances = zip(lengths.tolist(), (symbol_lengths - 1).tolist())
        batch = batch_of(symbols[:, 1:].int().contiguous(), utterances)
        return self.model(features, lengths, symbols, batch, self.adapter.prepare(batch))
