"""The joiners of six toolkits, each as one call of `transducer_loss` or of `align`: no toolkit is
imported.

Each function takes the toolkit's own joiner (for transformers the model), and the outputs of
encoder and decoder in the toolkit's own shapes. It applies the joiner's projections to them, and
returns the loss, with gradients for all parameters of the joiner. Targets may be padded with
anything. `options` are further options of `transducer_loss`; the default reduction is "mean" over
the utterances.

Each function has an attribute `align`, such as `recipes.nemo.align(model.joint, ...)`. It takes the
same arguments and options of `fused_transducer.align`, and returns what that returns. Dropout and
masks of training stay in it: align a model in evaluation.

`nemo` and `transformers` take the five reductions of NeMo's RNNTLoss under its names: "mean_batch",
over the utterances; "mean", each loss divided by its number of targets first; "mean_volume", the
sum over the number of all targets; "sum"; "none".  An utterance without targets counts as one of 1
target: the toolkits divide by 0.

`patch` gives a loaded model of transformers this loss in place, for Trainer, DDP, FSDP and PEFT;
`unpatch` takes it back.

A joiner that computes something else (HAT, big blanks, deep biasing, adapters) is refused with a
ValueError that says what.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import random
from types import MethodType
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from fused_transducer.functional import align, transducer_loss
from fused_transducer.layers import of_linear

#: NeMo's name of a reduction -> a function that reduces the losses (N,). Its other arguments are
#: the numbers of targets (N,), 1 at least, and whether each utterance counts (N,).
REDUCTIONS: Dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean_batch": lambda losses, U, counts: losses.sum() / counts.sum().clamp(min=1),
    "mean": lambda losses, U, counts: (losses / U).sum() / counts.sum().clamp(min=1),
    "mean_volume": lambda losses, U, counts: losses.sum() / (U * counts).sum().clamp(min=1),
    "sum": lambda losses, U, counts: losses.sum(),
    "none": lambda losses, U, counts: losses,
}


#: NeMo's losses of the regular lattice and of TDT.
NEMOS_LOSSES = (
    "RNNTLoss", "RNNTLossNumba", "RNNTLossPytorch", "GraphRnntLoss", "TDTLossNumba", "TDTLossPytorch"
)  # fmt: skip


#: The names of the arguments of `align`.
OF_ALIGN = set(inspect.signature(align).parameters)
#: The names of the arguments of losses, which recipes of `align` accept and leave out.
OF_LOSS = {"omega", *inspect.signature(transducer_loss).parameters}
#: Arguments of `transducer_loss`: by position, and by name.
Inputs = Tuple[Tuple[Any, ...], Dict[str, Any]]


def _recipe(inputs: Callable[..., Inputs], loss_of: Optional[Callable[..., Any]] = None) -> Any:
    """Return a function that takes the arguments of `inputs` and computes the loss. Its attribute
    `align` is a function that takes the same arguments and aligns.

    Args
        inputs: takes a toolkit's own arguments; returns those of `transducer_loss`
        loss_of: computes the loss from the arguments that `inputs` returned; None for
            `transducer_loss`
    """

    @functools.wraps(inputs)
    def loss(*args: Any, **options: Any) -> Any:
        tensors, named = inputs(*args, **options)
        return (loss_of or transducer_loss)(*tensors, **named)

    @functools.wraps(inputs)
    def aligned(*args: Any, **options: Any) -> Any:
        with torch.no_grad():
            tensors, named = inputs(*args, **options)
        # Options that only the loss has are accepted, and left out below.
        unknown = named.keys() - OF_ALIGN - OF_LOSS
        if unknown:
            raise TypeError(f"align has no option {min(unknown)!r}")
        for_align = {name: value for name, value in named.items() if name in OF_ALIGN}
        return align(*tensors, **for_align)

    aligned.__doc__ = (
        f"Return what `fused_transducer.align` returns, from the arguments of `{inputs.__name__}`."
    )
    loss.align = aligned  # type: ignore[attr-defined]
    return loss


def _of_nemo(
    *inputs: Any, reduction: str, U_lengths: Tensor, omega: Optional[float] = None, **options: Any
) -> Any:
    """Return the losses reduced as NeMo does. If `transducer_loss` returns further results, return
    a tuple of the reduced loss and these results.

    omega: the probability that a call of TDT leaves out the durations, and computes the loss of the
        regular lattice from the symbols alone
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction: there are {', '.join(REDUCTIONS)}, not {reduction!r}")
    if omega is not None and random.uniform(0, 1) < omega:
        encoder_out, decoder_out, weight, bias, *integers = inputs
        symbols = len(weight) - len(options["durations"])
        inputs = (
            encoder_out,
            decoder_out,
            weight[:symbols],
            None if bias is None else bias[:symbols],
            *integers,
        )
        options.update(topology="regular", durations=(), sigma=0.0)
    skips = options.get("nonfinite") == "skip"
    returns_skipped = options.pop("return_skipped", False)
    options.update(U_lengths=U_lengths, reduction="none", return_skipped=skips or returns_skipped)
    results = transducer_loss(*inputs, **options)
    losses, *further = results if isinstance(results, tuple) else (results,)
    counts = torch.ones_like(losses)
    if skips:
        # `transducer_loss` returns the skipped utterances last: these do not count in the
        # reduction, so they are asked for even if the caller does not want them.
        counts = ~further[-1]
        if not returns_skipped:
            further.pop()
    loss = REDUCTIONS[reduction](losses, U_lengths.to(losses.device).clamp(min=1), counts)
    return (loss, *further) if further else loss


@_recipe
def icefall(
    joiner: nn.Module, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_lengths: Tensor, U_lengths: Tensor,
    **options: Any,
) -> Inputs:  # fmt: skip
    """Return the loss of icefall's Joiner: encoder_proj, decoder_proj, tanh, output_linear.

    encoder_out (N, T, encoder_dim), decoder_out (N, U+1, decoder_dim), targets (N, U): `y_padded`.
    """
    outputs = joiner.encoder_proj(encoder_out), joiner.decoder_proj(decoder_out)
    named = {
        "targets": targets,
        "T_lengths": T_lengths,
        "U_lengths": U_lengths,
        "output": joiner.output_linear,
    }
    return outputs, {**named, **options}


@functools.partial(_recipe, loss_of=_of_nemo)
def nemo(
    joint: nn.Module, encoder_outputs: Tensor, decoder_outputs: Tensor, targets: Tensor, T_lengths: Tensor,
    U_lengths: Tensor, loss: Any = None, **options: Any,
) -> Inputs:  # fmt: skip
    """Return the loss of NeMo's RNNTJoint: its layers enc and pred, and joint_net, which is an
    activation, perhaps dropout, and a layer.

    encoder_outputs (N, encoder_dim, T), decoder_outputs (N, decoder_dim, U+1). The blank is the
    last symbol. The outputs behind the blank (num_extra_outputs) are of TDT's durations.
    loss: the model's RNNTLoss. It sets reduction, clamp, fastemit_lambda, durations, sigma and
    omega, except those that options has. omega is TDT's, and without TDT not used: the probability
    that a call leaves out the durations, and computes the loss of the symbols alone on the regular
    lattice.
    """
    if callable(getattr(joint, "is_adapter_available", None)) and joint.is_adapter_available():
        raise ValueError("nemo: the joint has adapters, which the loss would leave out")
    inner = getattr(loss, "_loss", loss)
    if inner is not None and type(inner).__name__ not in NEMOS_LOSSES:
        raise ValueError(
            f"nemo: loss is a {type(inner).__name__}, which sums over other paths; there are {', '.join(NEMOS_LOSSES)}"
        )
    names = ("clamp", "durations", "fastemit_lambda", "omega", "sigma")
    loss_options = {name: getattr(inner, name, None) for name in names}
    options = {
        "reduction": getattr(loss, "reduction", "mean_batch") or "none",
        **{name: value for name, value in loss_options.items() if value is not None},
        **options,
    }
    omega = options.pop("omega", 0.0)
    extra = getattr(joint, "num_extra_outputs", 0)
    if extra != len(options.get("durations", ())):
        raise ValueError(
            f"nemo: the joint has {extra} outputs behind the blank (num_extra_outputs): of TDT, give loss=model.loss, "
            "or durations and sigma; big blanks are not taken"
        )
    activation, *dropouts, output = joint.joint_net
    weight, bias = of_linear(output)
    temperature = getattr(joint, "temperature", 1.0)
    normalises = getattr(joint, "log_softmax", None)
    if normalises is None:  # NeMo's default
        normalises = not encoder_outputs.is_cuda
    if temperature != 1 and normalises:  # NeMo divides the logits that it normalises
        weight = weight / temperature
        bias = None if bias is None else bias / temperature
    if extra:
        options.update(topology="tdt", durations=tuple(options["durations"]), omega=omega)
    encoder_out = joint.enc(encoder_outputs.transpose(1, 2))
    decoder_out = joint.pred(decoder_outputs.transpose(1, 2))
    if joint.training and getattr(joint, "masking_prob", 0) > 0:  # drawn as NeMo draws it
        kept = torch.rand(decoder_out.shape[0], 1, decoder_out.shape[1], 1) > joint.masking_prob
        decoder_out = decoder_out * kept.squeeze(1).to(decoder_out.device)
    from_joint = {
        "dropout": sum(layer.p for layer in dropouts if layer.training),
        "blank": len(weight) - extra - 1,
        "activation": activation_name(activation),
    }
    tensors = encoder_out, decoder_out, weight, bias, targets, T_lengths
    return tensors, {"U_lengths": U_lengths, **from_joint, **options}


@functools.partial(_recipe, loss_of=_of_nemo)
def transformers(
    model: nn.Module, encoder_out: Any, decoder_out: Tensor, labels: Tensor, **options: Any
) -> Inputs:  # fmt: skip
    """Return the loss of transformers' ParakeetForTDT, ParakeetForRNNT, NemotronAsrStreamingForRNNT
    or Nemotron3_5AsrForRNNT. The two Nemotron classes have no loss of their own.

    The default reduction is "mean" for ParakeetForTDT, and "mean_volume" for the others.

    encoder_out: what `model.get_audio_features` returns
    decoder_out (N, U+1, H): what `model.decoder` returns for the blank and then the labels
    labels (N, U): those behind the last token of an utterance are pad ids, blank ids or negative
    """
    config = model.config
    frames = encoder_out.pooler_output
    mask = getattr(encoder_out, "attention_mask", None)
    if mask is None:
        mask = frames.new_ones(frames.shape[:2])
    is_token = (labels != config.pad_token_id) & (labels != config.blank_token_id) & (labels >= 0)
    numbers = torch.arange(1, labels.shape[1] + 1, device=labels.device)
    # The length is the number of the last token, from 1; 0 for an utterance without tokens.
    U_lengths = nn.functional.pad(is_token * numbers, (1, 0)).amax(1)
    named = {
        "targets": labels,
        "T_lengths": mask.sum(1).long(),
        "U_lengths": U_lengths,
        "output": model.joint.head,
        "blank": config.blank_token_id,
        "activation": activation_name(model.joint.activation),
        "reduction": "mean_volume",
    }
    durations = tuple(getattr(config, "durations", ()))
    if durations:
        named.update(topology="tdt", durations=durations, reduction="mean")
    return (frames, decoder_out), {**named, **options}


#: Attribute of a patched model: a dict of the arguments of `patch`, of the forward that it set, and
#: of the `accepts_loss_kwargs` that it replaced, None if the model had none of its own.
PATCHED = "_fused_transducer"


def patch(model: nn.Module, logits: Optional[bool] = None, **options: Any) -> nn.Module:
    """Replace the loss of a model in place, and return the model.

    With labels, its forward returns the usual output of its class with this loss. Without labels,
    as in `generate`, nothing changes. The class, the parameters, the configuration and what is
    saved stay. Trainer divides this loss by the number of accumulated steps.

    Args
        model: a loaded model that `transformers` takes, or PEFT's wrapper of one. If it was patched
        before, it gets the new options.
        logits: whether the output has logits beside the loss. None: it has them in evaluation
        alone, where metrics may need them.
        options: those of `transformers`

    Raises ValueError for a model of another kind, or one whose forward was replaced.
    """
    inner = _transducer_of(model)
    patched = inner.__dict__.get(PATCHED)
    if patched is None:
        if "forward" in inner.__dict__:
            raise ValueError(
                "patch: the model's forward was replaced already (by accelerate's hooks, say): patch it first"
            )
        inner.forward = _forward_of(inner)  # type: ignore[method-assign]
        accepts = inner.__dict__.get("accepts_loss_kwargs")
        patched = {"forward": inner.forward.__func__, "accepts_loss_kwargs": accepts}
    # Else Trainer would not divide the loss by the number of accumulated steps.
    inner.accepts_loss_kwargs = False  # type: ignore[assignment]
    setattr(inner, PATCHED, {**patched, "logits": logits, "options": options})
    return model


def unpatch(model: nn.Module) -> nn.Module:
    """Give a patched model its own loss again, and return the model. A model that is not patched
    stays as it is. Raises ValueError for a model of another kind."""
    inner = _transducer_of(model)
    patched = inner.__dict__.pop(PATCHED, None)
    if patched is None:
        return model
    # If forward is another function than `patch` set, a wrapper such as autocast was put around it
    # later. The wrapper stays, and calls the class's own forward from now on.
    if getattr(inner.forward, "__func__", None) is patched["forward"]:
        del inner.forward
    del inner.accepts_loss_kwargs
    if patched["accepts_loss_kwargs"] is not None:
        inner.accepts_loss_kwargs = patched["accepts_loss_kwargs"]
    return model


def _transducer_of(model: Any) -> Any:
    """Return the model itself, or the model within PEFT's wrapper. Raises ValueError if the
    returned model would be no transducer."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    missing = [
        name
        for name in ("get_audio_features", "decoder", "joint", "config")
        if not hasattr(inner, name)
    ]
    if missing:
        raise ValueError(
            f"patch takes the transducers of transformers (ParakeetForTDT, ParakeetForRNNT, Nemotron...ForRNNT); a "
            f"{type(inner).__name__} has no {missing[0]}"
        )
    return inner


def _forward_of(model: Any) -> MethodType:
    """Return the patched forward of a model, as a bound method, which accelerate expects.

    The patched forward has the signature of the class's own: Trainer reads from the signature which
    columns of a data set the model takes. Without labels, or after `unpatch`, it calls the class's
    own.
    """
    signature = inspect.signature(type(model).forward)
    [kwargs_name] = [
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind is parameter.VAR_KEYWORD
    ]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        # bind puts keywords that have no parameter into a dict of their own: join both dicts.
        arguments.update(arguments.pop(kwargs_name, {}))
        if PATCHED not in self.__dict__ or arguments.get("labels") is None:
            return type(self).forward(self, *args, **kwargs)
        del arguments["self"]
        return _patched_forward(self, signature.return_annotation, **arguments)

    forward.__signature__ = signature  # type: ignore[attr-defined]
    return MethodType(forward, model)


def _patched_forward(
    model: Any, output: Any, labels: Tensor, decoder_input_ids: Tensor, decoder_cache: Any = None,
    use_decoder_cache: Any = None, encoder_outputs: Any = None, return_dict: Optional[bool] = None, **features: Any,
):  # fmt: skip
    """Return the output of the model for labels, as its class does, but with this package's loss.

    output: the class of the output; features: of the audio, for `model.get_audio_features`;
    use_decoder_cache: not used
    """
    patched = model.__dict__[PATCHED]
    features.pop("num_items_in_batch", None)  # of Trainer; get_audio_features does not take it
    if encoder_outputs is None:
        encoder_outputs = model.get_audio_features(**features, return_dict=True)
    decoder_out = model.decoder(decoder_input_ids, cache=decoder_cache)
    loss = transformers(model, encoder_outputs, decoder_out, labels, **patched["options"])
    logits = None
    with_logits = not model.training if patched["logits"] is None else patched["logits"]
    if with_logits:
        logits = model.joint(decoder_out[:, None], encoder_outputs.pooler_output[:, :, None])
    values = {}
    for field in dataclasses.fields(output):
        # A streaming encoder calls its caches past_..., the model's output encoder_past_...
        name_in_encoder = field.name.replace("encoder_past", "past")
        values[field.name] = getattr(encoder_outputs, name_in_encoder, None)
    values.update(loss=loss, logits=logits, decoder_cache=decoder_cache)
    result = output(**values)
    as_dict = model.config.return_dict if return_dict is None else return_dict
    return result if as_dict else result.to_tuple()


@_recipe
def espnet(
    joint_network: nn.Module, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_lengths: Tensor,
    U_lengths: Tensor, **options: Any,
) -> Inputs:  # fmt: skip
    """Return the loss of ESPnet's JointNetwork (espnet2.asr and espnet2.asr_transducer): its layers
    lin_enc, lin_dec, joint_activation and lin_out.

    encoder_out (N, T, encoder_size), decoder_out (N, U+1, decoder_size): not unsqueezed.
    """
    if getattr(joint_network, "deepbiasing", False):
        raise ValueError(
            "espnet: deep biasing adds a vector for each pair of frame and token; the loss cannot add one"
        )
    named = {
        "targets": targets, "T_lengths": T_lengths, "U_lengths": U_lengths, "output": joint_network.lin_out,
        "activation": activation_name(joint_network.joint_activation),
    }  # fmt: skip
    return (joint_network.lin_enc(encoder_out), joint_network.lin_dec(decoder_out)), {
        **named,
        **options,
    }


@_recipe
def wenet(
    joint: nn.Module, encoder_out: Tensor, predictor_out: Tensor, targets: Tensor, T_lengths: Tensor,
    U_lengths: Tensor, **options: Any,
) -> Inputs:  # fmt: skip
    """Return the loss of WeNet's TransducerJoint. Its layers are enc_ffn and pred_ffn, then
    post_ffn of their sum if it has this layer, and ffn_out.

    encoder_out (N, T, encoder_dim), predictor_out (N, U+1, predictor_dim).
    """
    if getattr(joint, "hat_joint", False):
        raise ValueError(
            "wenet: hat_joint has a probability of its own for the blank, which the loss does not"
        )
    if joint.enc_ffn is not None:
        encoder_out, predictor_out = joint.enc_ffn(encoder_out), joint.pred_ffn(predictor_out)
    # post_ffn of a sum is the sum of post_ffn of both parts, but with its bias once.
    if joint.post_ffn is not None:
        weight, bias = of_linear(joint.post_ffn)
        encoder_out = nn.functional.linear(encoder_out, weight, bias)
        predictor_out = nn.functional.linear(predictor_out, weight)
    named = {
        "targets": targets, "T_lengths": T_lengths, "U_lengths": U_lengths, "output": joint.ffn_out,
        "activation": activation_name(joint.activatoin),  # WeNet spells it so
    }  # fmt: skip
    return (encoder_out, predictor_out), {**named, **options}


@_recipe
def speechbrain(
    joint: nn.Module, output: nn.Module, encoder_out: Tensor, decoder_out: Tensor, targets: Tensor, T_shares: Tensor,
    U_shares: Tensor, **options: Any,
) -> Inputs:  # fmt: skip
    """Return the loss of SpeechBrain's Transducer_joint and of the output layer behind it
    (`transducer_lin`).

    encoder_out (N, T, H), decoder_out (N, U+1, H): projected, not unsqueezed
    T_shares, U_shares (N,): SpeechBrain's lengths, which are shares of the padded length

    Raises ValueError if a layer is in a DistributedDataParallel or DataParallel of its own.
    """
    for layer in (joint, output):
        if isinstance(layer, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ValueError(
                f"{type(layer).__name__} reduces no gradients of a layer that is not called: call this within the "
                "forward of a module that has both layers"
            )
    if joint.joint == "concat":  # one layer takes both outputs, concatenated: it is split in two
        linear = _inner(joint.joint_network)
        weight, bias = of_linear(linear)
        sizes = [encoder_out.shape[-1], decoder_out.shape[-1]]
        encoder_weight, decoder_weight = weight.split(sizes, 1)
        encoder_out = nn.functional.linear(encoder_out, encoder_weight, bias)
        decoder_out = nn.functional.linear(decoder_out, decoder_weight)
    named = {
        "targets": targets, "T_lengths": (T_shares * encoder_out.shape[1]).round().long(),
        "U_lengths": (U_shares * targets.shape[1]).round().long(), "output": _inner(output),
        "activation": activation_name(joint.nonlinearity),
    }  # fmt: skip
    return (encoder_out, decoder_out), {**named, **options}


def _inner(layer: nn.Module) -> nn.Module:
    """Return the nn.Linear that SpeechBrain's own Linear wraps; an nn.Linear itself."""
    return getattr(layer, "w", layer)


#: Name of an activation -> a function that tells whether a layer is that.
_NAMES: Dict[str, Callable[[Any], bool]] = {
    "tanh": lambda layer: isinstance(layer, nn.Tanh),
    "relu": lambda layer: isinstance(layer, nn.ReLU),
    "sigmoid": lambda layer: isinstance(layer, nn.Sigmoid),
    "leaky_relu": lambda layer: isinstance(layer, nn.LeakyReLU) and layer.negative_slope == 0.01,
    "none": lambda layer: isinstance(layer, nn.Identity),
    "silu": lambda layer: isinstance(layer, nn.SiLU) or _is_swish(layer),
    "gelu": lambda layer: isinstance(layer, nn.GELU) and layer.approximate == "none",
    "selu": lambda layer: isinstance(layer, nn.SELU),
    "hardtanh": lambda layer: (
        isinstance(layer, nn.Hardtanh) and (layer.min_val, layer.max_val) == (-1, 1)
    ),
}


def _is_swish(layer: nn.Module) -> bool:
    """Return whether a layer is a Swish that computes x * sigmoid(x).

    Its values tell this. ESPnet, WeNet and SpeechBrain each have a class Swish, and `beta` does not
    mean the same in all of them.
    """
    x = torch.linspace(-3, 3, 7)
    return type(layer).__name__ == "Swish" and torch.allclose(layer(x), nn.functional.silu(x))


def activation_name(layer: nn.Module) -> str:
    """Return the name of an activation layer, for the argument `activation` of `transducer_loss`.
    Raises ValueError for a layer that has no name there."""
    for name, matches in _NAMES.items():
        if matches(layer):
            return name
    raise ValueError(f"the joiner's activation {layer} is none of {', '.join(_NAMES)}")
