"""The joiners of six toolkits, each as one call of `transducer_loss`: no toolkit is imported.

Each function takes the toolkit's own joiner (of transformers the model), and the outputs of encoder and decoder in the
toolkit's own shapes.  It folds the joiner's projections into them and returns the loss, with gradients for all
parameters of the joiner.  Targets may be padded with anything.  options: further options of `transducer_loss`; the
reduction is "mean" over the utterances, where none is given.

`nemo` and `transformers` take the five reductions of NeMo's RNNTLoss under its names: "mean_batch", over the
utterances; "mean", each loss divided by its number of targets first; "mean_volume", the sum over the number of all
targets; "sum"; "none".

A joiner that computes something else (HAT, big blanks, deep biasing, adapters) is refused with a ValueError that says
what.
"""

from __future__ import annotations

import random
from typing import Any, Callable, Dict

import torch
from torch import Tensor, nn

from fused_transducer.functional import of_linear, transducer_loss

#: NeMo's name of a reduction -> the loss of the losses of all utterances and their numbers of targets.
REDUCTIONS: Dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean_batch": lambda losses, U: losses.mean(),
    "mean": lambda losses, U: (losses / U).mean(),
    "mean_volume": lambda losses, U: losses.sum() / U.sum(),
    "sum": lambda losses, U: losses.sum(),
    "none": lambda losses, U: losses,
}


def _reduced(reduction: str, *inputs: Tensor, U_lengths: Tensor, **options: Any):
    """Return the loss, with a reduction of NeMo's; further results of `transducer_loss` behind it."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: there are {', '.join(REDUCTIONS)}, not {reduction!r}")
    made = transducer_loss(*inputs, U_lengths=U_lengths, reduction="none", **options)
    losses, *further = made if isinstance(made, tuple) else (made,)
    loss = REDUCTIONS[reduction](losses, U_lengths.to(losses.device))
    return (loss, *further) if further else loss


def icefall(
    joiner: nn.Module, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_lengths: Tensor, U_lengths: Tensor,
    **options: Any,
):  # fmt: skip
    """Return the loss of icefall's Joiner: encoder_proj, decoder_proj, tanh, output_linear.

    encoder_out (N, T, encoder_dim), decoder_out (N, U+1, decoder_dim), targets (N, U): `y_padded`.
    """
    return transducer_loss(
        joiner.encoder_proj(encoder_out), joiner.decoder_proj(decoder_out), targets=targets, T_lengths=T_lengths,
        U_lengths=U_lengths, output=joiner.output_linear, **options,
    )  # fmt: skip


def nemo(
    joint: nn.Module, encoder_outputs: Tensor, decoder_outputs: Tensor, targets: Tensor, T_lengths: Tensor,
    U_lengths: Tensor, loss: Any = None, **options: Any,
):  # fmt: skip
    """Return the loss of NeMo's RNNTJoint: enc, pred, and joint_net of an activation, perhaps dropout, and a layer.

    encoder_outputs (N, encoder_dim, T), decoder_outputs (N, decoder_dim, U+1).  The blank is the last symbol; outputs
    behind it (num_extra_outputs) are of TDT's durations.
    loss: the model's RNNTLoss, of which reduction, clamp, fastemit_lambda, durations, sigma and omega are taken where
    options do not say otherwise.  omega: the share of steps that are of the symbols' regular lattice alone.
    """
    if callable(getattr(joint, "is_adapter_available", None)) and joint.is_adapter_available():
        raise ValueError("nemo: the joint has adapters, which the loss would leave out")
    names = ("clamp", "durations", "fastemit_lambda", "omega", "sigma")
    of_loss = {
        name: value for name in names if (value := getattr(getattr(loss, "_loss", None), name, None)) is not None
    }
    options = {"reduction": getattr(loss, "reduction", "mean_batch") or "none", **of_loss, **options}
    extra, omega = getattr(joint, "num_extra_outputs", 0), options.pop("omega", 0.0)
    if extra != len(options.get("durations", ())):
        raise ValueError(
            f"nemo: the joint has {extra} outputs behind the blank (num_extra_outputs): of TDT, give loss=model.loss, "
            "or durations and sigma; big blanks are not taken"
        )
    activation, *dropouts, output = joint.joint_net
    weight, bias = of_linear(output)
    temperature, normalises = getattr(joint, "temperature", 1.0), getattr(joint, "log_softmax", None)
    if temperature != 1 and (not encoder_outputs.is_cuda if normalises is None else normalises):  # as NeMo does
        weight, bias = weight / temperature, None if bias is None else bias / temperature
    symbols = len(weight) - extra
    if extra and random.uniform(0, 1) < omega:
        weight, bias = weight[:symbols], None if bias is None else bias[:symbols]
        options.update(durations=(), sigma=0.0)
    elif extra:
        options.update(topology="tdt", durations=tuple(options["durations"]))
    encoder_out, decoder_out = joint.enc(encoder_outputs.transpose(1, 2)), joint.pred(decoder_outputs.transpose(1, 2))
    if joint.training and getattr(joint, "masking_prob", 0) > 0:  # drawn as NeMo draws it
        kept = torch.rand(decoder_out.shape[0], 1, decoder_out.shape[1], 1) > joint.masking_prob
        decoder_out = decoder_out * kept.squeeze(1).to(decoder_out.device)
    options = {"dropout": sum(layer.p for layer in dropouts if layer.training), "blank": symbols - 1, **options}
    return _reduced(
        options.pop("reduction"), encoder_out, decoder_out, weight, bias, targets, T_lengths, U_lengths=U_lengths,
        activation=activation_name(activation), **options,
    )  # fmt: skip


def transformers(model: nn.Module, encoder_out: Any, decoder_out: Tensor, labels: Tensor, **options: Any):
    """Return the loss of transformers' ParakeetForRNNT (reduction "mean_volume") or ParakeetForTDT ("mean").

    encoder_out: what `model.get_audio_features` returns; decoder_out (N, U+1, H): what `model.decoder` returns of the
    blank and the labels; labels (N, U), of which the last ones of an utterance may be pad or blank ids.
    """
    config, durations = model.config, tuple(getattr(model.config, "durations", ()))
    frames = encoder_out.pooler_output
    mask = frames.new_ones(frames.shape[:2]) if encoder_out.attention_mask is None else encoder_out.attention_mask
    is_token = (labels != config.pad_token_id) & (labels != config.blank_token_id) & (labels >= 0)
    places = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    lattice = {"topology": "tdt", "durations": durations, "reduction": "mean"} if durations else {}
    options = {"reduction": "mean_volume", **lattice, "blank": config.blank_token_id, **options}
    return _reduced(
        options.pop("reduction"), frames, decoder_out, *of_linear(model.joint.head), labels, mask.sum(1).long(),
        U_lengths=nn.functional.pad(is_token * places, (1, 0)).amax(1),
        activation=activation_name(model.joint.activation), **options,
    )  # fmt: skip


def espnet(
    joint_network: nn.Module, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_lengths: Tensor,
    U_lengths: Tensor, **options: Any,
):  # fmt: skip
    """Return the loss of ESPnet's JointNetwork (espnet2.asr and espnet2.asr_transducer): lin_enc, lin_dec,
    joint_activation, lin_out.

    encoder_out (N, T, encoder_size), decoder_out (N, U+1, decoder_size): not unsqueezed.
    """
    if getattr(joint_network, "deepbiasing", False):
        raise ValueError("espnet: deep biasing adds a vector for each pair of frame and token, which the loss cannot")
    return transducer_loss(
        joint_network.lin_enc(encoder_out), joint_network.lin_dec(decoder_out), targets=targets, T_lengths=T_lengths,
        U_lengths=U_lengths, output=joint_network.lin_out,
        activation=activation_name(joint_network.joint_activation), **options,
    )  # fmt: skip


def wenet(
    joint: nn.Module, encoder_out: Tensor, predictor_out: Tensor, targets: Tensor, T_lengths: Tensor,
    U_lengths: Tensor, **options: Any,
):  # fmt: skip
    """Return the loss of WeNet's TransducerJoint: enc_ffn and pred_ffn, perhaps post_ffn of their sum, ffn_out.

    encoder_out (N, T, encoder_dim), predictor_out (N, U+1, predictor_dim).
    """
    if getattr(joint, "hat_joint", False):
        raise ValueError("wenet: hat_joint has a probability of its own for the blank, which the loss does not")
    if joint.enc_ffn is not None:
        encoder_out, predictor_out = joint.enc_ffn(encoder_out), joint.pred_ffn(predictor_out)
    if joint.post_ffn is not None:  # of the sum: its bias counts once
        encoder_out = joint.post_ffn(encoder_out)
        predictor_out = nn.functional.linear(predictor_out, joint.post_ffn.weight)
    return transducer_loss(
        encoder_out, predictor_out, targets=targets, T_lengths=T_lengths, U_lengths=U_lengths, output=joint.ffn_out,
        activation=activation_name(joint.activatoin), **options,  # its name there
    )  # fmt: skip


def speechbrain(
    joint: nn.Module, output: nn.Module, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_shares: Tensor,
    U_shares: Tensor, **options: Any,
):  # fmt: skip
    """Return the loss of SpeechBrain's Transducer_joint and of the layer behind it (`transducer_lin`).

    encoder_out (N, T, H), decoder_out (N, U+1, H): projected, not unsqueezed; T_shares, U_shares (N,): the lengths over
    those of the longest, as SpeechBrain has them.
    """
    if joint.joint == "concat":  # a layer of both, one behind the other
        linear = _inner(joint.joint_network)
        weight, bias = of_linear(linear)
        of_encoder, of_decoder = weight.split([encoder_out.shape[-1], decoder_out.shape[-1]], 1)
        encoder_out = nn.functional.linear(encoder_out, of_encoder, bias)
        decoder_out = nn.functional.linear(decoder_out, of_decoder)
    T_lengths = (T_shares * encoder_out.shape[1]).round().long()
    U_lengths = (U_shares * targets.shape[1]).round().long()
    return transducer_loss(
        encoder_out, decoder_out, targets=targets, T_lengths=T_lengths, U_lengths=U_lengths, output=_inner(output),
        activation=activation_name(joint.nonlinearity), **options,
    )  # fmt: skip


def _inner(layer: nn.Module) -> nn.Module:
    """Return the nn.Linear that SpeechBrain's own Linear wraps."""
    return getattr(layer, "w", layer)


#: Name of an activation -> whether a layer is that.
_NAMES: Dict[str, Callable[[Any], bool]] = {
    "tanh": lambda layer: isinstance(layer, nn.Tanh),
    "relu": lambda layer: isinstance(layer, nn.ReLU),
    "sigmoid": lambda layer: isinstance(layer, nn.Sigmoid),
    "leaky_relu": lambda layer: isinstance(layer, nn.LeakyReLU) and layer.negative_slope == 0.01,
    "none": lambda layer: isinstance(layer, nn.Identity),
}


def activation_name(layer: nn.Module) -> str:
    """Return the name that `transducer_loss` has for an activation layer.  Raises ValueError where it has none."""
    for name, matches in _NAMES.items():
        if matches(layer):
            return name
    raise ValueError(f"the joiner's activation {layer} is none of {', '.join(_NAMES)}")
