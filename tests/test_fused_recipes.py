"""fused_transducer.recipes: each toolkit's joiner by its published definition, and the oracle's loss of its logits."""

from __future__ import annotations

import pytest
import torch
from fused_helpers import ACTIVATIONS, error, mask_of, problem, right
from torch import nn

from fused_transducer import recipes

LENGTHS = [(9, 4), (6, 5), (8, 1), (1, 3), (5, 0)]
E, D, H, V = 7, 6, 12, 11
LAYERS = {
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "sigmoid": nn.Sigmoid,
    "leaky_relu": nn.LeakyReLU,
    "none": nn.Identity,
}


class Icefall(nn.Module):
    """output_linear(tanh(encoder_proj(encoder_out) + decoder_proj(decoder_out)))."""

    def __init__(self):
        super().__init__()
        self.encoder_proj, self.decoder_proj, self.output_linear = nn.Linear(E, H), nn.Linear(D, H), nn.Linear(H, V)

    def forward(self, encoder_out, decoder_out):
        return self.output_linear(torch.tanh(self.encoder_proj(encoder_out) + self.decoder_proj(decoder_out)))


class Nemo(nn.Module):
    """joint_net(enc(f) + pred(g)) / temperature; the blank is the last symbol."""

    def __init__(self, activation, dropout=0.0, temperature=1.0):
        super().__init__()
        self.enc, self.pred, self.temperature = nn.Linear(E, H), nn.Linear(D, H), temperature
        self.masking_prob, self.num_extra_outputs = -1.0, 0  # the defaults of nemo-toolkit 3.0.0
        layers = [nn.Dropout(dropout)] if dropout else []
        self.joint_net = nn.Sequential(activation, *layers, nn.Linear(H, V))

    def forward(self, f, g, mask=None):
        x = self.joint_net[0](self.enc(f) + self.pred(g))
        return self.joint_net[-1](x if mask is None else x * mask) / self.temperature


class Espnet(nn.Module):
    """lin_out(joint_activation(lin_enc(encoder_out) + lin_dec(decoder_out)))."""

    def __init__(self, activation):
        super().__init__()
        self.lin_enc, self.lin_dec, self.lin_out = nn.Linear(E, H), nn.Linear(D, H, bias=False), nn.Linear(H, V)
        self.joint_activation = activation

    def forward(self, encoder_out, decoder_out):
        return self.lin_out(self.joint_activation(self.lin_enc(encoder_out) + self.lin_dec(decoder_out)))


class Wenet(nn.Module):
    """ffn_out(activation(post_ffn(enc_ffn(encoder_out) + pred_ffn(predictor_out))))."""

    def __init__(self, activation, pre, post):
        super().__init__()
        self.activatoin, self.hat_joint = activation, False
        self.enc_ffn = nn.Linear(E, H) if pre else None
        self.pred_ffn = nn.Linear(D, H) if pre else None
        self.post_ffn, self.ffn_out = nn.Linear(H, H) if post else None, nn.Linear(H, V)

    def forward(self, encoder_out, predictor_out):
        if self.enc_ffn is not None:
            encoder_out, predictor_out = self.enc_ffn(encoder_out), self.pred_ffn(predictor_out)
        x = encoder_out + predictor_out
        return self.ffn_out(self.activatoin(x if self.post_ffn is None else self.post_ffn(x)))


class Wrapped(nn.Module):
    """SpeechBrain's Linear, whose layer is `w`."""

    def __init__(self, *sizes, bias=True):
        super().__init__()
        self.w = nn.Linear(*sizes, bias=bias)

    def forward(self, x):
        return self.w(x)


class Speechbrain(nn.Module):
    """transducer_lin(nonlinearity(sum, or a layer of both side by side))."""

    def __init__(self, activation, joint):
        super().__init__()
        self.joint, self.nonlinearity = joint, activation
        self.joint_network = Wrapped(E + D, H) if joint == "concat" else None
        self.lin = Wrapped(H, V, bias=False)

    def forward(self, x, h):
        if self.joint == "sum":
            return self.lin(self.nonlinearity(x + h))
        sizes = torch.broadcast_shapes(x.shape[:-1], h.shape[:-1])
        x, h = x.expand(*sizes, x.shape[-1]), h.expand(*sizes, h.shape[-1])
        return self.lin(self.nonlinearity(self.joint_network(torch.cat([x, h], -1))))


def equal(joiner, loss_of, sizes=(E, D), blank=0, mask=None):
    """Assert that loss and gradients, of the outputs and of all parameters, are the oracle's of the joiner's logits."""
    from common.losses import oracle

    joiner = joiner.double()
    case = problem(LENGTHS, V=V)
    case.targets[case.targets == blank] = 1
    case.targets = torch.where(torch.arange(5) < case.U_lengths[:, None], case.targets, -1)  # as WeNet pads
    outputs = [torch.randn(5, length, size).double() for length, size in zip((9, 6), sizes)]
    results = []
    for by_hand in (True, False):
        leaves = [output.clone().requires_grad_() for output in outputs]
        joiner.zero_grad()
        if by_hand:
            masked = () if mask is None else (mask,)
            logits = joiner(leaves[0].unsqueeze(2), leaves[1].unsqueeze(1), *masked)
            loss = oracle.losses(logits, case.targets.clamp(min=0), case.lengths, blank).mean()
        else:
            loss = loss_of(joiner, *leaves, case.targets, case.T_lengths, case.U_lengths)
        loss.backward()
        gradients = [leaf.grad for leaf in leaves] + [parameter.grad for parameter in joiner.parameters()]
        results.append([loss.detach(), *gradients])
    assert max(error(made, expected) for expected, made in zip(*results)) < 1e-10


def exact(recipe):
    return lambda *given: recipe(*given, negligible=0.0)


def test_icefall():
    equal(Icefall(), exact(recipes.icefall))


@pytest.mark.parametrize("activation", ["relu", "tanh", "sigmoid"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_nemo(activation, temperature):
    def loss(joint, f, g, *integers):
        return recipes.nemo(joint, f.transpose(1, 2), g.transpose(1, 2), *integers, negligible=0.0)

    equal(Nemo(LAYERS[activation](), temperature=temperature), loss, blank=V - 1)
    equal(Nemo(LAYERS[activation](), dropout=0.2, temperature=temperature).eval(), loss, blank=V - 1)


def test_nemo_with_its_dropout():
    case = problem(LENGTHS, H=H, dropout=0.2, dropout_seed=17)

    def loss(joint, f, g, *integers):
        return recipes.nemo(joint, f.transpose(1, 2), g.transpose(1, 2), *integers, negligible=0.0, dropout_seed=17)

    equal(Nemo(nn.ReLU(), dropout=0.2), loss, blank=V - 1, mask=mask_of(case))


@pytest.mark.parametrize("activation", [layer() for layer in LAYERS.values()], ids=str)
def test_espnet(activation):
    equal(Espnet(activation), exact(recipes.espnet))


@pytest.mark.parametrize("pre, post", [(True, False), (True, True), (False, True), (False, False)])
def test_wenet(pre, post):
    equal(Wenet(nn.Tanh(), pre, post), exact(recipes.wenet), sizes=(E, D) if pre else (H, H))


@pytest.mark.parametrize("joint", ["sum", "concat"])
@pytest.mark.parametrize("activation", ["leaky_relu", "tanh"])
def test_speechbrain(joint, activation):
    def loss(joiner, x, h, targets, T_lengths, U_lengths):
        shares = T_lengths / x.shape[1], U_lengths / targets.shape[1]
        return recipes.speechbrain(joiner, joiner.lin, x, h, targets, *shares, negligible=0.0)

    equal(Speechbrain(LAYERS[activation](), joint), loss, sizes=(H, H) if joint == "sum" else (E, D))


def test_speechbrains_own_joint_with_its_defaults():
    """Of speechbrain 1.1.2, whose nonlinearity is LeakyReLU."""
    joint = pytest.importorskip("speechbrain.nnet.transducer.transducer_joint", exc_type=ImportError)
    own, ours = joint.Transducer_joint(), Speechbrain(nn.LeakyReLU(), "sum").double()
    case = problem(LENGTHS, H=H)
    case.tensors[2:] = [ours.lin.w.weight.detach(), None]
    shares = case.T_lengths / 9, case.U_lengths / 5
    options = {"reduction": "none", "negligible": 0.0}
    losses = recipes.speechbrain(own, ours.lin, *case.tensors[:2], case.targets, *shares, **options)
    assert error(losses.detach(), right(case.with_options(activation="leaky_relu"))[0]) < 1e-12


def test_every_activation_of_torch_has_its_name():
    assert {name: recipes.activation_name(layer()) for name, layer in LAYERS.items()} == {name: name for name in LAYERS}
    assert set(LAYERS) == set(ACTIVATIONS)


@pytest.mark.parametrize(
    "recipe, joiner, change, words",
    [
        (recipes.nemo, Nemo(nn.ReLU()), {"num_extra_outputs": 5}, "durations"),
        (recipes.nemo, Nemo(nn.ReLU()), {"masking_prob": 0.5}, "masking_prob"),
        (recipes.nemo, Nemo(nn.ReLU()), {"is_adapter_available": lambda: True}, "adapters"),
        (recipes.nemo, Nemo(nn.ELU()), {}, "ELU"),
        (recipes.espnet, Espnet(nn.Tanh()), {"deepbiasing": True}, "biasing"),
        (recipes.espnet, Espnet(nn.GELU()), {}, "GELU"),
        (recipes.wenet, Wenet(nn.Tanh(), True, False), {"hat_joint": True}, "hat_joint"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_loss_would_leave_out_is_refused(recipe, joiner, change, words):
    for name, value in change.items():
        setattr(joiner, name, value)
    case = problem(LENGTHS, V=V)
    sizes = (5, E, 9), (5, D, 6)
    outputs = [torch.zeros(size) if recipe is recipes.nemo else torch.zeros(size).transpose(1, 2) for size in sizes]
    with pytest.raises(ValueError, match=words):
        recipe(joiner, *outputs, case.targets, case.T_lengths, case.U_lengths)
