"""fused_transducer.recipes: each toolkit's joiner by its published definition, and the oracle's loss of its logits."""

from __future__ import annotations

import pytest
import torch
from fused_helpers import ACTIVATIONS, error, mask_of, problem, right
from torch import nn

from common.losses import oracle
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


class Joiner(nn.Module):
    """Holds layers and settings under the toolkit's names; of(self, ...) computes logits as it is published."""

    def __init__(self, of, **parts):
        super().__init__()
        self.of = of
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given):
        return self.of(self, *given)


def icefall():
    def of(self, encoder_out, decoder_out):
        return self.output_linear(torch.tanh(self.encoder_proj(encoder_out) + self.decoder_proj(decoder_out)))

    return Joiner(of, encoder_proj=nn.Linear(E, H), decoder_proj=nn.Linear(D, H), output_linear=nn.Linear(H, V))


def nemo(activation, dropout=0.0, temperature=1.0):
    """The blank is the last symbol.  What masks and adds outputs has the defaults of nemo-toolkit 3.0.0."""

    def of(self, f, g, mask=None):
        x = self.joint_net[0](self.enc(f) + self.pred(g))
        return self.joint_net[-1](x if mask is None else x * mask) / self.temperature

    net = nn.Sequential(activation, *([nn.Dropout(dropout)] if dropout else []), nn.Linear(H, V))
    others = {"temperature": temperature, "masking_prob": -1.0, "num_extra_outputs": 0}
    return Joiner(of, enc=nn.Linear(E, H), pred=nn.Linear(D, H), joint_net=net, **others)


def espnet(activation):
    def of(self, encoder_out, decoder_out):
        return self.lin_out(self.joint_activation(self.lin_enc(encoder_out) + self.lin_dec(decoder_out)))

    layers = {"lin_enc": nn.Linear(E, H), "lin_dec": nn.Linear(D, H, bias=False), "lin_out": nn.Linear(H, V)}
    return Joiner(of, joint_activation=activation, **layers)


def wenet(pre, post):
    def of(self, encoder_out, predictor_out):
        if self.enc_ffn is not None:
            encoder_out, predictor_out = self.enc_ffn(encoder_out), self.pred_ffn(predictor_out)
        x = encoder_out + predictor_out
        return self.ffn_out(self.activatoin(x if self.post_ffn is None else self.post_ffn(x)))

    layers = {"enc_ffn": nn.Linear(E, H), "pred_ffn": nn.Linear(D, H)} if pre else {"enc_ffn": None, "pred_ffn": None}
    post_ffn = nn.Linear(H, H) if post else None
    return Joiner(of, **layers, post_ffn=post_ffn, ffn_out=nn.Linear(H, V), activatoin=nn.Tanh(), hat_joint=False)


def speechbrain(activation, joint):
    """Layers are SpeechBrain's own Linear, which wraps torch's as `w`."""

    def of(self, x, h):
        if self.joint == "concat":
            sizes = torch.broadcast_shapes(x.shape[:-1], h.shape[:-1])
            both = torch.cat([x.expand(*sizes, x.shape[-1]), h.expand(*sizes, h.shape[-1])], -1)
        return self.lin.w(self.nonlinearity(x + h if self.joint == "sum" else self.joint_network.w(both)))

    layers = {"joint_network": nn.Linear(E + D, H), "lin": nn.Linear(H, V, bias=False)}
    layers = {name: Joiner(None, w=layer) for name, layer in layers.items() if joint == "concat" or name == "lin"}
    return Joiner(of, joint=joint, nonlinearity=activation, **layers)


def equal(joiner, loss_of, sizes=(E, D), blank=0, mask=None):
    """Assert that loss and gradients, of the outputs and of all parameters, are the oracle's of the joiner's logits."""
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


def by_recipe(recipe, **options):
    """Return the recipe's loss of a joiner and outputs (N, length, features), in the toolkit's shapes."""

    def loss(joiner, x, h, targets, T_lengths, U_lengths):
        given = [joiner, x, h, targets, T_lengths, U_lengths]
        if recipe is recipes.nemo:
            given[1:3] = x.transpose(1, 2), h.transpose(1, 2)
        if recipe is recipes.speechbrain:
            given = [joiner, joiner.lin, x, h, targets, T_lengths / x.shape[1], U_lengths / targets.shape[1]]
        return recipe(*given, negligible=0.0, **options)

    return loss


#: Recipe, joiner, further options of `equal`.
JOINERS = [
    (recipes.icefall, icefall(), {}),
    *(
        (recipes.nemo, joiner, {"blank": V - 1})
        for activation, temperature in (("relu", 1.0), ("tanh", 2.5), ("sigmoid", 1.0))
        for joiner in (
            nemo(LAYERS[activation](), temperature=temperature),
            nemo(LAYERS[activation](), dropout=0.2, temperature=temperature).eval(),
        )
    ),
    *((recipes.espnet, espnet(layer()), {}) for layer in LAYERS.values()),
    *((recipes.wenet, wenet(True, post), {}) for post in (False, True)),
    *((recipes.wenet, wenet(False, post), {"sizes": (H, H)}) for post in (False, True)),
    (recipes.speechbrain, speechbrain(nn.LeakyReLU(), "sum"), {"sizes": (H, H)}),
    *((recipes.speechbrain, speechbrain(layer, "concat"), {}) for layer in (nn.LeakyReLU(), nn.Tanh())),
]


@pytest.mark.parametrize("recipe, joiner, options", JOINERS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_recipe_is_its_joiner(recipe, joiner, options):
    equal(joiner, by_recipe(recipe), **options)


def test_nemo_with_its_dropout():
    mask = mask_of(problem(LENGTHS, H=H, dropout=0.2, dropout_seed=17))
    equal(nemo(nn.ReLU(), dropout=0.2), by_recipe(recipes.nemo, dropout_seed=17), blank=V - 1, mask=mask)


def test_speechbrains_own_joint_with_its_defaults():
    """Of speechbrain 1.1.2, whose nonlinearity is LeakyReLU."""
    joint = pytest.importorskip("speechbrain.nnet.transducer.transducer_joint", exc_type=ImportError)
    own, ours = joint.Transducer_joint(), speechbrain(nn.LeakyReLU(), "sum").double()
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
        (recipes.nemo, nemo(nn.ReLU()), {"num_extra_outputs": 5}, "durations"),
        (recipes.nemo, nemo(nn.ReLU()), {"masking_prob": 0.5}, "masking_prob"),
        (recipes.nemo, nemo(nn.ReLU()), {"is_adapter_available": lambda: True}, "adapters"),
        (recipes.nemo, nemo(nn.ELU()), {}, "ELU"),
        (recipes.espnet, espnet(nn.Tanh()), {"deepbiasing": True}, "biasing"),
        (recipes.espnet, espnet(nn.GELU()), {}, "GELU"),
        (recipes.wenet, wenet(True, False), {"hat_joint": True}, "hat_joint"),
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
