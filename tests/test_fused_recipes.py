"""fused_transducer.recipes: the lines of docs/switching.md as they stand, those that go beside those that come.  Each
toolkit has its own classes, or their definitions of the version that is named, with every default."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import random
import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rnnt_bench.losses import oracle, topologies
from rnnt_bench.setup import extensions
from torch import nn

from commands import ROOT

pytest.importorskip("torch", minversion="2.4")  # k2's environment has an older one
from fused_transducer import TransducerLoss, recipes  # noqa: E402

from fused_helpers import error, mask_of, paths_of, problem  # noqa: E402

PAGE = (ROOT / "docs" / "switching.md").read_text()
LENGTHS = [(9, 4), (6, 4), (8, 1), (1, 2), (5, 0)]
E, D, H, V = 7, 6, 12, 11
LAYERS = {
    "tanh": nn.Tanh, "relu": nn.ReLU, "sigmoid": nn.Sigmoid, "leaky_relu": nn.LeakyReLU, "none": nn.Identity,
    "silu": nn.SiLU, "gelu": nn.GELU, "selu": nn.SELU, "hardtanh": nn.Hardtanh,
}  # fmt: skip


def hunks_of(toolkit, number=0):
    """Return the pieces of diff number `number` of a section: of each the lines, with their first letter."""
    section = PAGE.split(f"\n## {toolkit}\n")[1].split("\n## ")[0]
    diff = re.findall(r"```diff\n(.*?)```", section, re.DOTALL)[number]
    return [piece.splitlines() for piece in re.split(r"^ \.\.\.\n", diff, flags=re.MULTILINE)]


def lines_of(toolkit, sign, number=0):
    """Return the code of the lines of a diff that go ("-") or come ("+"), and the name of the loss."""
    pieces = []
    for lines in hunks_of(toolkit, number):
        kept = [line[1:] for line in lines if line[0] == sign and not re.match(r"[+-](from| +return)", line)]
        pieces.append(textwrap.dedent("\n".join(kept)))
    code = "\n".join(pieces)
    return code, [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Assign)][-1].targets[0].id


def changed(path, folder, toolkit, number=0):
    """Return the module of an installed file, in `folder` with the changes of a diff."""
    source = Path(path).read_text()
    for lines in hunks_of(toolkit, number):
        gone, come = ("\n".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        assert not gone or source.count(gone) == 1, gone
        source = source.replace(gone, come) if gone else f"{come}\n{source}"
    (folder / f"changed_{number}.py").write_text(source)
    spec = importlib.util.spec_from_file_location(f"changed_{number}", folder / f"changed_{number}.py")
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # typeguard looks for its source there
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("toolkit", ["transformers", "NeMo", "ESPnet", "SpeechBrain", "WeNet", "icefall"])
def test_the_table_counts_the_lines_of_each_diff(toolkit):
    cell = re.search(rf"^\| {toolkit}.*\| (.+) \|$", PAGE, re.MULTILINE)[1]
    for number, counts in enumerate(cell.split("; ")):
        signs = [line[0] for lines in hunks_of(toolkit, number) for line in lines]
        assert counts == f"-{signs.count('-')} +{signs.count('+')}"


class Joiner(nn.Module):
    """Holds layers and settings under the toolkit's names; of(self, ...) computes logits as it is published."""

    def __init__(self, of, **parts):
        super().__init__()
        self.of = of
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *given, **named):
        return self.of(self, *given, **named)


def exact(logits, targets, T_lengths, U_lengths, blank=0, topology=topologies.TOPOLOGIES["regular"]):
    lengths = list(zip(T_lengths.tolist(), U_lengths.tolist()))
    return oracle.losses(logits, targets.long().clamp(min=0), lengths, blank, topology)


def icefall():
    """Return the joiner of k2-fsa/icefall, zipformer/joiner.py of 2023."""

    def of(self, encoder_out, decoder_out, project_input=True):
        if project_input:
            encoder_out, decoder_out = self.encoder_proj(encoder_out), self.decoder_proj(decoder_out)
        return self.output_linear(torch.tanh(encoder_out + decoder_out))

    return Joiner(of, encoder_proj=nn.Linear(E, H), decoder_proj=nn.Linear(D, H), output_linear=nn.Linear(H, V))


def nemo(activation="relu", dropout=0.0, temperature=1.0, masking_prob=-1.0, durations=(), mask=None, log_softmax=None):
    """Return nemo-toolkit 3.0.0's RNNTJoint; the blank is the last symbol.  log_softmax: False, as None is on CUDA."""

    def of(self, encoder_outputs, decoder_outputs):
        f = self.enc(encoder_outputs.transpose(1, 2)).unsqueeze(2)
        g = self.pred(decoder_outputs.transpose(1, 2)).unsqueeze(1)
        if self.training and self.masking_prob > 0:
            g = g * torch.gt(torch.rand([g.shape[0], 1, g.shape[2], 1]), self.masking_prob)
        x = self.joint_net[0](f + g)
        res = self.joint_net[-1](x if mask is None else x * mask)
        return res if self.log_softmax is False else (res / self.temperature).log_softmax(-1)

    net = [LAYERS[activation](), *([nn.Dropout(dropout)] if dropout else []), nn.Linear(H, V + len(durations))]
    return Joiner(
        of, enc=nn.Linear(E, H), pred=nn.Linear(D, H), joint_net=nn.Sequential(*net), temperature=temperature,
        log_softmax=log_softmax, masking_prob=masking_prob, num_extra_outputs=len(durations),
        is_adapter_available=lambda: False,
    )  # fmt: skip


class RNNTLossNumba(SimpleNamespace):
    """Holds what NeMo's loss of this name, or of TDT, is given."""


class RNNTLoss:
    """The RNNTLoss of nemo-toolkit 3.0.0, with the losses of CUDA where they differ (clamp; TDT has no other)."""

    def __init__(self, reduction="mean_batch", fastemit_lambda=0.0, clamp=-1.0, durations=(), sigma=0.0, omega=0.0):
        self.reduction = reduction
        self._loss = RNNTLossNumba(fastemit_lambda=fastemit_lambda, clamp=max(clamp, 0.0))
        if durations:
            vars(self._loss).update(durations=list(durations), sigma=sigma, omega=omega)

    def __call__(self, log_probs, targets, input_lengths, target_lengths):
        own, count = self._loss, len(getattr(self._loss, "durations", ()))
        topology = topologies.TOPOLOGIES["regular"]
        if count and random.uniform(0, 1) < own.omega:
            log_probs = log_probs[..., :-count]
        elif count:
            topology = replace(topologies.TOPOLOGIES["tdt"], durations=tuple(own.durations), sigma=own.sigma)
        if own.clamp:
            scaled, log_probs = log_probs, log_probs.detach().requires_grad_()
        losses = exact(log_probs, targets, input_lengths, target_lengths, V - 1, topology)
        if own.clamp:  # of CUDA: the gradient of each utterance's own loss, of the symbols' logits
            (gradient,) = torch.autograd.grad(losses.sum(), log_probs)
            gradient[..., :V] = gradient[..., :V].clamp(-own.clamp, own.clamp)
            products = (gradient * scaled).sum((1, 2, 3))
            losses = losses.detach() + products - products.detach()
        total = losses.sum()
        of_each = {"mean_volume": total / target_lengths.sum(), "sum": total, None: losses}
        of_each.update(mean_batch=losses.mean(), mean=torch.div(losses, target_lengths).mean())
        return of_each[self.reduction]


def espnet(activation="tanh"):
    """Return espnet 202511's espnet2.asr_transducer.joint_network.JointNetwork."""

    def of(self, enc_out, dec_out):
        return self.lin_out(self.joint_activation(self.lin_enc(enc_out) + self.lin_dec(dec_out)))

    layers = {"lin_enc": nn.Linear(E, H), "lin_dec": nn.Linear(D, H), "lin_out": nn.Linear(H, V)}
    return Joiner(of, joint_activation=LAYERS[activation](), **layers)


def wenet(pre=True, post=False):
    """Return the TransducerJoint of wenet-e2e/wenet, transducer/joint.py of 2023."""

    def of(self, enc_out, pred_out):
        if self.enc_ffn is not None:
            enc_out, pred_out = self.enc_ffn(enc_out), self.pred_ffn(pred_out)
        out = enc_out.unsqueeze(2) + pred_out.unsqueeze(1)
        return self.ffn_out(self.activatoin(out if self.post_ffn is None else self.post_ffn(out)))

    layers = {"enc_ffn": nn.Linear(E, H), "pred_ffn": nn.Linear(D, H)} if pre else {"enc_ffn": None, "pred_ffn": None}
    post_ffn = nn.Linear(H, H) if post else None
    return Joiner(of, **layers, post_ffn=post_ffn, ffn_out=nn.Linear(H, V), activatoin=nn.Tanh(), hat_joint=False)


def speechbrain_joiner(joint="sum", **options):
    """SpeechBrain's own Transducer_joint and Linear."""
    joints = pytest.importorskip("speechbrain.nnet.transducer.transducer_joint", exc_type=ImportError)
    from speechbrain.nnet.linear import Linear

    network = {"joint_network": Linear(input_size=E + D, n_neurons=H), "joint": "concat"} if joint == "concat" else {}
    layers = {"Tjoint": joints.Transducer_joint(**network, **options), "transducer_lin": Linear(V, input_size=H)}
    return nn.ModuleDict(layers)


def both(
    toolkit,
    joiner,
    names,
    sizes=(E, D),
    transposed=False,
    blank=0,
    lengths=LENGTHS,
    dtype=torch.float64,
    go=None,
    come=None,
):
    """Return (value, gradients of the outputs and of the joiner's parameters) of the lines that go and that come.
    names(joiner, encoder_out, decoder_out, case): what the page names; go, come: other lines than of its first diff."""
    joiner, results = joiner.to(dtype), []
    case = problem(lengths, V=V)
    case.targets[case.targets == blank] = 1
    case.targets = torch.where(torch.arange(4) < case.U_lengths[:, None], case.targets, -1)  # as WeNet pads
    outputs = [torch.randn(5, length, size, dtype=dtype) for length, size in zip((9, 5), sizes)]
    for code, loss in (go or lines_of(toolkit, "-"), come or lines_of(toolkit, "+")):
        torch.manual_seed(3)
        random.seed(3)
        leaves = [output.clone().requires_grad_() for output in outputs]
        joiner.zero_grad()
        given = [leaf.transpose(1, 2) for leaf in leaves] if transposed else leaves
        space = {"recipes": recipes, **names(joiner, *given, case)}
        exec(code, space)
        space[loss].sum().backward()
        gradients = [x.grad for x in [*leaves, *joiner.parameters()] if x.grad is not None]
        results.append((space[loss].detach(), gradients))
    return results


def same(results, allowed=1e-10):
    (value, gradients), (made, made_gradients) = results
    return error(made, value) < allowed and max(map(error, made_gradients, gradients)) < allowed


def of_nemo(loss):
    def names(joiner, x, h, case):
        lengths = {"encoded_len": case.T_lengths.contiguous(), "target_length": case.U_lengths.contiguous()}
        return {"self": SimpleNamespace(joint=joiner, loss=loss), "encoded": x, "decoder": h,
                "transcript": case.targets.clamp(min=0), **lengths}  # fmt: skip

    return {"names": names, "transposed": True, "blank": V - 1}


TDT = {"durations": (0, 1, 2, 4), "sigma": 0.05}
AT_LEAST_ONE = [(9, 4), (6, 4), (8, 1), (2, 2), (5, 1)]


@pytest.mark.parametrize("reduction", ["mean_batch", "mean", "mean_volume", "sum", None])
@pytest.mark.parametrize("lattice", [{}, TDT], ids=["rnnt", "tdt"])
def test_nemos_reductions_and_options(lattice, reduction):
    def compared(joint, **options):
        joint, loss = nemo(durations=lattice.get("durations", ()), **joint), RNNTLoss(reduction, **lattice, **options)
        return both("NeMo", joint, **of_nemo(loss), lengths=AT_LEAST_ONE)

    assert same(compared({"activation": "tanh", "temperature": 2.5}))
    for omega in (0.0, 1.0) if lattice else (0.0,):
        joint = {"masking_prob": 0.4, "log_softmax": False, "temperature": 2.5}
        assert same(compared(joint, clamp=0.05, **({"omega": omega} if lattice else {})))
    (value, _), (with_fastemit, _) = compared({}, fastemit_lambda=0.1)
    assert error(with_fastemit, value) < 1e-10  # the value stays; NeMo's is 1 + lambda times as much


@pytest.mark.parametrize("reduction", ["mean", "mean_volume"])
def test_an_empty_transcript_counts_as_one_target(reduction):
    """Their toolkits divide by 0, which makes the loss of the batch infinite, and all gradients NaN."""
    joint, case = nemo().double(), problem([(9, 4), (6, 0)], V=V)
    outputs = [torch.randn(2, size, length, dtype=torch.float64) for size, length in ((E, 9), (D, 5))]
    given = joint, *outputs, case.targets, case.T_lengths, case.U_lengths
    losses, loss = recipes.nemo(*given, reduction="none"), recipes.nemo(*given, reduction=reduction)
    U = torch.tensor([4, 1])
    assert error(loss, losses.sum() / 5 if reduction == "mean_volume" else (losses / U).mean()) < 1e-12
    loss.backward()
    assert all(x.grad.isfinite().all() for x in joint.parameters())


@pytest.mark.environment_contract
@pytest.mark.parametrize("reduction", ["mean_batch", "mean", "mean_volume", "sum", None])
def test_nemos_own_classes(reduction, monkeypatch):
    """The environment is NeMo's; its TDT loss of numba is for CUDA alone, and tdt_pytorch runs here."""
    modules = pytest.importorskip("nemo.collections.asr.modules.rnnt", exc_type=ImportError)
    losses = pytest.importorskip("nemo.collections.asr.losses.rnnt", exc_type=ImportError)
    sizes = {"encoder_hidden": E, "pred_hidden": D, "joint_hidden": H, "activation": "relu"}
    for masking_prob in (-1.0, 0.4):
        joint, loss = modules.RNNTJoint(sizes, V - 1, masking_prob=masking_prob), losses.RNNTLoss(V - 1, reduction)
        assert same(both("NeMo", joint, **of_nemo(loss), lengths=AT_LEAST_ONE, dtype=torch.float32), 2e-5)
    joint = modules.RNNTJoint(sizes, V - 1, num_extra_outputs=len(TDT["durations"]))
    assert same(both("NeMo", joint, **of_nemo(RNNTLoss(reduction, **TDT)), lengths=AT_LEAST_ONE))
    options = {**TDT, "durations": list(TDT["durations"])}
    tdt = losses.RNNTLoss(V - 1, reduction, "tdt", {**options, "omega": 0.1})
    assert vars(RNNTLoss(reduction, **TDT, omega=0.1)._loss).items() <= vars(tdt._loss).items()
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)  # as which it is written
    tdt = losses.RNNTLoss(V - 1, reduction, "tdt_pytorch", options)
    assert same(both("NeMo", joint.float(), **of_nemo(tdt), lengths=AT_LEAST_ONE, dtype=torch.float32), 2e-5)
    if reduction == "mean":  # k2, of which this environment has none, would make the W-Transducer
        tdt._loss = type("GraphWTransducerLoss", (nn.Module,), {})()
        with pytest.raises(ValueError, match="GraphWTransducerLoss"):
            both("NeMo", joint, **of_nemo(tdt), go=("loss = encoded.sum()", "loss"))


def test_nemos_dropout_and_what_is_not_in_training(monkeypatch):
    mask = mask_of(problem(LENGTHS, H=H, dropout=0.2, dropout_seed=17))
    loss, seeded = recipes.transducer_loss, {"dropout_seed": 17}
    monkeypatch.setattr(recipes, "transducer_loss", lambda *given, **options: loss(*given, **options, **seeded))
    assert same(both("NeMo", nemo("sigmoid", 0.2, mask=mask), **of_nemo(RNNTLoss())))
    assert same(both("NeMo", nemo(dropout=0.2, masking_prob=0.4).eval(), **of_nemo(RNNTLoss())))


@pytest.mark.parametrize("file", [0, 1])
@pytest.mark.parametrize("activation", LAYERS)
def test_espnet(activation, file):
    def names(joiner, encoder_out, decoder_out, case):
        of_self = SimpleNamespace(joint_network=joiner, blank_id=0, criterion_transducer=lambda *x: exact(*x).mean())
        of_self._calc_transducer_loss = lambda encoder_out, *given: exact(*given).mean()
        of_self.fastemit_lambda = 0.0
        return {"self": of_self, "encoder_out": encoder_out, "decoder_out": decoder_out, "target": case.targets,
                "t_len": case.T_lengths, "u_len": case.U_lengths}  # fmt: skip

    go, come = (lines_of("ESPnet", sign, file) for sign in "-+")
    assert same(both("ESPnet", espnet(activation), names, go=go, come=come))


class WarpRNNT:
    """The RNNTLoss of warprnnt_pytorch, by its definition."""

    def __init__(self, blank=0, fastemit_lambda=0.0, reduction="mean"):
        assert reduction == "mean"
        self.blank = blank

    def __call__(self, acts, labels, act_lens, label_lens):
        return exact(acts, labels, act_lens, label_lens, self.blank).mean()


@pytest.mark.parametrize("file", [0, 1])
def test_espnets_own_models(file, monkeypatch, tmp_path):
    """Their forward, from features to the loss, with the lines that the page names changed in their files."""
    pytest.importorskip("espnet2.asr_transducer.espnet_transducer_model", exc_type=ImportError)
    from espnet2.asr import espnet_model
    from espnet2.asr_transducer import espnet_transducer_model
    from espnet2.asr_transducer.joint_network import JointNetwork

    monkeypatch.setitem(sys.modules, "warprnnt_pytorch", SimpleNamespace(RNNTLoss=WarpRNNT))
    tokens = ["<blank>", "<unk>", "a", "b", "c", "d", "<space>", "<sos/eos>"]
    own, results = (espnet_model, espnet_transducer_model)[file], []
    for module in (own, changed(own.__file__, tmp_path, "ESPnet", file)):
        torch.manual_seed(0)
        if file == 0:
            from espnet2.asr.ctc import CTC
            from espnet2.asr.decoder.transducer_decoder import TransducerDecoder
            from espnet2.asr.encoder.rnn_encoder import RNNEncoder

            decoder = TransducerDecoder(8, hidden_size=6, dropout=0.0, embed_pad=0)
            parts = {"preencoder": None, "postencoder": None, "ctc": CTC(8, 5), "ctc_weight": 0.0}
            parts["encoder"] = RNNEncoder(4, hidden_size=5, output_size=5, num_layers=1, dropout=0.0, subsample=None)
            kind = module.ESPnetASRModel
        else:
            from espnet2.asr_transducer.decoder.rnn_decoder import RNNDecoder
            from espnet2.asr_transducer.encoder.encoder import Encoder

            decoder = RNNDecoder(8, embed_size=6, hidden_size=6)
            block = {"block_type": "conformer", "hidden_size": 8, "linear_size": 8, "conv_mod_kernel_size": 3}
            parts = {"encoder": Encoder(16, [block], {"vgg_like": False, "conv_size": 8})}
            kind = module.ESPnetASRTransducerModel
        joint = JointNetwork(8, 5 if file == 0 else 8, 6, 12, "swish")
        model = kind(
            8, tokens, frontend=None, specaug=None, normalize=None, decoder=decoder, joint_network=joint,
            report_cer=False, report_wer=False, **parts,
        )  # fmt: skip
        text = torch.tensor([[2, 3, 4], [5, 2, -1]])
        loss, stats, _ = model(
            torch.randn(2, 40, 4 if file == 0 else 16), torch.tensor([40, 32]), text, torch.tensor([3, 2])
        )
        loss.backward()
        results.append((loss.detach(), [x.grad for x in model.parameters() if x.grad is not None]))
    (value, gradients), (made, made_gradients) = results
    largest = max(x.abs().max() for x in gradients)
    assert error(made, value) < 1e-6 and len(gradients) == len(made_gradients) > 8
    assert all((x - y).abs().max() < 1e-5 * largest for x, y in zip(gradients, made_gradients))


@pytest.mark.skipif(not os.environ.get("TORCH_FROM_INDEX"), reason="with TORCH_FROM_INDEX=1: packages are fetched")
def test_espnet_and_watchers_from_the_index(tmp_path, monkeypatch):
    from rnnt_bench.setup.environments import Uv

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    packages = ("espnet==202511", "torch==2.11.0", "torchaudio==2.11.0", "setuptools<82", "pytest", "msgspec", "tqdm")
    packages += ("torchinfo==1.8.0", "wandb==0.31.0")
    way = ["run", "--no-project", "--isolated", "--python", sys.executable]
    for package in packages:
        way += ["--with", package]
    tests = [str(ROOT / "tests" / "test_fused_recipes.py"), "-k", "espnets_own or torchinfo or wandb"]
    with (tmp_path / "log").open("w") as log:
        printed = Uv(log).output(*way, "python", "-m", "pytest", *tests, "-q", "-rs", "-p", "no:cacheprovider")
    assert "14 passed" in printed and "failed" not in printed, printed  # without SpeechBrain


@pytest.mark.parametrize("pre, post", [(True, False), (True, True), (False, False), (False, True)])
def test_wenet(pre, post):
    torchaudio = pytest.importorskip("torchaudio")

    def names(joiner, encoder_out, predictor_out, case):
        outputs = {"encoder_out": encoder_out, "predictor_out": predictor_out, "encoder_out_lens": case.T_lengths.int()}
        return {"self": SimpleNamespace(joint=joiner, blank=0), "torchaudio": torchaudio, **outputs,
                "text": case.targets, "rnnt_text": case.targets.clamp(min=0).int(), "text_lengths": case.U_lengths,
                "rnnt_text_lengths": case.U_lengths.int()}  # fmt: skip

    sizes = (E, D) if pre else (H, H)
    assert same(both("WeNet", wenet(pre, post), names, sizes, dtype=torch.float32), 1e-5)  # torchaudio's least


def test_icefall():
    """The pruned loss over all of U is that of the whole lattice; over less, it is larger.  fast_rnnt's functions take
    the arguments of k2's, whose torch is too old."""
    fast_rnnt = extensions.load("fast_rnnt", "cpu")
    of_simple = {"lm": nn.Linear(D, V), "am": nn.Linear(E, V)}

    def names(joiner, encoder_out, decoder_out, case, prune_range=5):
        symbols, lengths = case.targets.clamp(min=0), (case.U_lengths, case.T_lengths)
        boundary = torch.stack([torch.zeros_like(lengths[0])] * 2 + [*lengths], 1)
        scores = {"lm": of_simple["lm"](decoder_out), "am": of_simple["am"](encoder_out)}
        _, (px_grad, py_grad) = fast_rnnt.rnnt_loss_smoothed(
            **scores, symbols=symbols, termination_symbol=0, boundary=boundary, reduction="sum", return_grad=True
        )
        return {"self": SimpleNamespace(joiner=joiner), "encoder_out": encoder_out, "decoder_out": decoder_out,
                "y_padded": symbols, "encoder_out_lens": case.T_lengths, "y_lens": case.U_lengths, "blank_id": 0,
                "boundary": boundary, "px_grad": px_grad, "py_grad": py_grad, "prune_range": prune_range,
                "k2": fast_rnnt, "torch_autocast": partial(torch.autocast, "cpu")}  # fmt: skip

    options = {"lengths": AT_LEAST_ONE, "dtype": torch.float32}
    assert same(both("icefall", icefall(), names, **options), 1e-5)
    (pruned, _), (whole, _) = both("icefall", icefall(), partial(names, prune_range=2), **options)
    assert pruned > whole * 1.001


def test_speechbrains_own_loss():
    """Its kernels are for CUDA: numba's simulator runs them, in a process of its own."""
    pytest.importorskip("speechbrain.nnet.transducer.transducer_joint", exc_type=ImportError)
    pytest.importorskip("numba")
    variables = {"NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [sys.executable, "-c", "import test_fused_recipes; test_fused_recipes.of_speechbrain()"]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def of_speechbrain():
    """The gradient of the page's "sum" is SpeechBrain's; its value is the mean of each loss over its T."""
    from speechbrain.nnet import losses

    values = []

    def names(joiner, x, h, case):
        hparams = SimpleNamespace(transducer_cost=lambda *given: losses.transducer_loss(*given, 0), blank_index=0)
        shares = {"wav_lens": case.T_lengths / 9, "token_lens": case.U_lengths / 4}
        tokens = case.targets.clamp(min=0)
        each = recipes.speechbrain(
            joiner.Tjoint, joiner.transducer_lin, x, h, tokens, *shares.values(), reduction="none"
        )
        values.append((each / case.T_lengths).mean().detach())
        return {"self": SimpleNamespace(modules=joiner, hparams=hparams), "x": x, "h": h, "tokens": tokens, **shares}

    for joint, sizes in (("sum", (H, H)), ("concat", (E, D))):
        (value, gradients), (_, made) = both("SpeechBrain", speechbrain_joiner(joint), names, sizes)
        assert error(value, values[-1]) < 1e-10 and max(map(error, made, gradients)) < 1e-10
    go, come = (trained_by_speechbrain(sign, names) for sign in "-+")
    assert len(go) == 2 and go[0].abs().max() > 0.01 and max(map(error, come, go)) < 1e-10


@pytest.mark.parametrize("joint, name", [("sum", "transducer_lin"), ("concat", "Tjoint")])
def test_a_layer_that_speechbrain_has_put_into_data_parallel_alone_is_refused(joint, name):
    """Its gradients would differ between GPUs: Brain wraps each of its modules, and none of them is called."""
    layers = speechbrain_joiner(joint)
    layers[name] = nn.DataParallel(layers[name])
    case = problem(LENGTHS, V=V)
    x, h, shares = torch.zeros(5, 9, E), torch.zeros(5, 5, D), torch.ones(5)
    with pytest.raises(ValueError, match="DataParallel reduces no gradients"):
        recipes.speechbrain(layers.Tjoint, layers.transducer_lin, x, h, case.targets, shares, shares)


def trained_by_speechbrain(sign, names):
    """Return what a step of Brain.fit_batch adds to the parameters, with GELU as in the recipe for LibriSpeech."""
    import speechbrain

    forward, training = (
        textwrap.dedent("\n".join(line[1:] for line in lines if line[0] == sign))
        for lines in hunks_of("SpeechBrain")[1:3]
    )

    class Brain(speechbrain.Brain):
        def compute_forward(self, batch, stage):
            self.space = {"recipes": recipes, **names(self.modules, *batch), "self": self}
            exec(forward, self.space)
            return self.space["logits_transducer"]

        def compute_objectives(self, predictions, batch, stage):
            exec(training, {**self.space, "logits_transducer": predictions}, found := {})
            return found["loss_transducer"]

    torch.manual_seed(0)
    case = problem(LENGTHS, V=V)
    case.targets[case.targets == 0] = 1
    outputs = [torch.randn(5, length, H, dtype=torch.float64) for length in (9, 5)]
    joiner = speechbrain_joiner("sum", nonlinearity=nn.GELU).double()
    cost = speechbrain.nnet.losses.transducer_loss
    hparams = {"transducer_cost": lambda *given: cost(*given, 0), "blank_index": 0}
    brain = Brain(
        dict(joiner),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        hparams,
        {"device": "cpu", "max_grad_norm": 1e9},
    )
    brain.on_fit_start()
    before = [x.detach().clone() for x in joiner.parameters()]
    brain.fit_batch((*outputs, case))
    return [after.detach() - x for after, x in zip(joiner.parameters(), before)]


def parakeet(kind):
    """Return (a small model of transformers, features with their mask, labels, count of each row)."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
    sizes.update(num_mel_bins=16, subsampling_conv_channels=8)
    zeros = dict.fromkeys(("dropout", "activation_dropout", "attention_dropout", "layerdrop"), 0.0)
    sizes = {"encoder_config": {**sizes, **zeros}, "decoder_hidden_size": 24, "num_decoder_layers": 1}
    config = getattr(transformers, f"Parakeet{kind}Config")(**sizes, vocab_size=21, blank_token_id=20)
    model = getattr(transformers, f"ParakeetFor{kind}")(config)
    frames = torch.arange(200) < torch.tensor([200, 160, 120]).unsqueeze(1)
    features = {"input_features": torch.randn(3, 200, 16), "attention_mask": frames}
    return model, features, torch.randint(3, 20, (3, 5)), torch.tensor([5, 3, 1]).unsqueeze(1)


@pytest.mark.parametrize("kind", ["RNNT", "TDT"])
def test_transformers_whole_models(kind):
    model, features, labels, count = parakeet(kind)
    config = model.config
    own, other = config.blank_token_id, config.pad_token_id
    own, other = (own, other) if kind == "RNNT" else (other, own)  # the padding that the model's own loss knows
    results = []
    for padding, code in ((own, "-"), (own, "+"), (other, "+"), (own, "line")):
        given = torch.where(torch.arange(5) < count, labels, padding)
        ids = torch.cat([labels.new_full((3, 1), 20), given], 1)
        space = {"recipes": recipes, "model": model, "features": features, "decoder_input_ids": ids, "labels": given}
        if code == "line":
            exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], space)
            space["loss"] = model(**features, decoder_input_ids=ids, labels=given).loss
        else:
            exec(lines_of("transformers", code)[0], space)
        model.zero_grad()
        space["loss"].backward()
        results.append((space["loss"], [x.grad for x in model.parameters()]))
    largest = max(x.abs().max() for x in results[0][1])
    for loss, gradients in results[1:]:
        assert abs(loss.item() / results[0][0].item() - 1) < 2e-7
        assert max((a - b).abs().max() for a, b in zip(gradients, results[0][1])) < 8e-6 * largest


@pytest.mark.parametrize("model", ["parakeet", "nemotron"])
def test_the_example_trains_alike(model, monkeypatch, capsys):
    pytest.importorskip("transformers", minversion="5.23")
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import finetune_tdt

    def trained(command, text):
        return json.dumps(finetune_tdt.train(command[-1], model, 3, 2, 20, 32, "cpu"))

    monkeypatch.setattr(finetune_tdt.subprocess, "check_output", trained)  # a process takes longest to start
    monkeypatch.setattr(sys, "argv", ["finetune_tdt.py", "--steps", "3", "--model", model])
    finetune_tdt.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    curves = [(float(words[4]), float(words[6])) for words in lines if words[0] == "step"]
    assert len(curves) == 3 and len(lines) == 5
    assert all(own == pytest.approx(fused, rel=1e-5) for own, fused in curves) and curves[0] != curves[2]


def unsqueezed(joiner):
    return lambda x, h: joiner(x.unsqueeze(2), h.unsqueeze(1))


def aligned(toolkit):
    """Return (the toolkit's arguments before the outputs, its logits of the outputs, further arguments)."""
    if toolkit.startswith("nemo"):
        lattice = TDT if toolkit == "nemo of TDT" else {}
        joint = nemo("sigmoid", durations=lattice.get("durations", ()), temperature=2.0)
        return (joint,), joint, {"loss": RNNTLoss(**lattice, omega=1.0)}
    if toolkit == "speechbrain":
        layers = speechbrain_joiner("concat")
        return tuple(layers.values()), lambda *x: layers.transducer_lin(unsqueezed(layers.Tjoint)(*x)), {}
    joiner = {"icefall": icefall, "espnet": espnet, "wenet": wenet}[toolkit]()
    return (joiner,), joiner if toolkit == "wenet" else unsqueezed(joiner), {}


TOOLKITS = ("icefall", "espnet", "wenet", "speechbrain", "nemo", "nemo of TDT")


def batch_of(toolkit):
    """Return (case, outputs, lengths) of a small batch, outputs and lengths as the toolkit has them."""
    of_nemo = toolkit.startswith("nemo")
    case = problem([(5, 2), (4, 1)], V=V, dtype=torch.float32)
    case.targets = case.targets % (V - 2) + (not of_nemo)
    sizes = (H, H) if toolkit == "TransducerLoss" else (E, D)
    outputs = [torch.randn(2, *((size, T) if of_nemo else (T, size))) for T, size in zip((5, 3), sizes)]
    lengths = case.T_lengths, case.U_lengths
    return case, outputs, [x / max(x) for x in lengths] if toolkit == "speechbrain" else lengths


@pytest.mark.parametrize("toolkit", TOOLKITS)
def test_the_best_path_of_a_toolkits_joiner_is_that_of_its_logits(toolkit):
    torch.manual_seed(0)
    joiner, logits_of, options = aligned(toolkit)
    for layer in joiner:
        layer.float()
    recipe, blank = getattr(recipes, toolkit.partition(" ")[0]), V - 1 if toolkit.startswith("nemo") else 0
    case, outputs, lengths = batch_of(toolkit)
    frames, scores, confidences = recipe.align(*joiner, *outputs, case.targets, *lengths, confidence_span=5, **options)
    topology = topologies.TOPOLOGIES["tdt" if toolkit == "nemo of TDT" else "regular"]
    topology = replace(topology, **(TDT if topology.name == "tdt" else {}))
    parts = logits_of(*outputs).double()
    parts = topology.parts(parts, topologies.next_targets(case.targets, 5, 3), blank)
    for n, (T, U) in enumerate(case.lengths):
        best = max(paths_of(topology.arcs(parts[n, :T, : U + 1].detach()), T, U))
        assert scores[n].item() == pytest.approx(best[0].item(), rel=1e-5) and tuple(frames[n, :U].tolist()) == best[1]
    assert error(confidences.sum(1), case.U_lengths) < 1e-6 and not scores.requires_grad
    with pytest.raises(TypeError, match="confidence_spam"):
        recipe.align(*joiner, *outputs, case.targets, *lengths, confidence_spam=5, **options)


class Patched(nn.Module):
    """Returns the loss of a patched model of transformers."""

    def __init__(self, model):
        super().__init__()
        self.model = recipes.patch(model)

    def forward(self, features, mask, decoder_inputs, labels):
        inputs = {"input_features": features, "attention_mask": mask, "decoder_input_ids": decoder_inputs}
        return self.model(**inputs, labels=labels).loss


class Model(nn.Module):
    """Ends in the loss of a toolkit's joiner, or in TransducerLoss, as a model that someone watches."""

    def __init__(self, toolkit):
        super().__init__()
        if toolkit == "TransducerLoss":
            layers, self.loss, self.options = (TransducerLoss(H, V),), lambda module, *inputs: module(*inputs), {}
        else:
            layers, _, self.options = aligned(toolkit)
            self.loss = getattr(recipes, toolkit.partition(" ")[0])
        self.layers = nn.ModuleList(layers).float()

    def forward(self, *inputs):
        return self.loss(*self.layers, *inputs, **self.options)


WATCHERS = {
    "FlopCounterMode": "torch.utils.flop_counter", "ModuleTracker": "torch.utils.module_tracker",
    "MemTracker": "torch.distributed._tools.mem_tracker", "ModTracker": "torch.distributed._tools.mod_tracker",
    "CommDebugMode": "torch.distributed.tensor.debug",
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:fused_transducer")  # that hooks of the layer see no cells
@pytest.mark.filterwarnings("ignore:Full backward hook")  # of CommDebugMode, in torch
@pytest.mark.parametrize("watcher", [*WATCHERS, "torchinfo", "wandb"])
@pytest.mark.parametrize("toolkit", ["TransducerLoss", *TOOLKITS, "transformers"])
def test_what_watches_a_model_changes_nothing(toolkit, watcher, tmp_path, monkeypatch):
    module = pytest.importorskip(WATCHERS.get(watcher, watcher))
    if (toolkit, watcher) == ("transformers", "CommDebugMode"):
        pytest.skip("its hooks refuse the encoder's own operations in place, with any loss")
    torch.manual_seed(0)
    if toolkit == "transformers":
        model, features, labels, _ = parakeet("TDT")
        decoder_inputs = torch.nn.functional.pad(labels, (1, 0), value=model.config.blank_token_id)
        model, inputs = Patched(model), (*features.values(), decoder_inputs, labels)
    else:
        model, (case, outputs, lengths) = Model(toolkit), batch_of(toolkit)
        inputs = (*outputs, case.targets, *lengths)
    results = []

    def step():
        model.zero_grad()
        loss = model(*inputs)
        loss.backward()
        results.append([loss.detach(), *(x.grad for x in model.parameters())])

    step()
    if watcher == "torchinfo":
        shown = module.summary(model, input_data=list(inputs), verbose=0)
        assert shown.total_params >= sum(x.numel() for x in model.parameters())  # of a shared module more often
        step()
    elif watcher == "wandb":
        monkeypatch.setenv("WANDB_SILENT", "true")
        with module.init(mode="offline", dir=str(tmp_path), project="watched") as run:
            run.watch(model, log="all", log_freq=1, log_graph=True)
            step()
    else:
        with getattr(module, watcher)():
            step()
    allowed = 1e-5 if toolkit == "transformers" else 0.0  # under FlopCounterMode its attention is of another kernel
    for pair in zip(*results):
        torch.testing.assert_close(*pair, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("reduction", ["mean_batch", "mean", "mean_volume", "sum"])
def test_nemos_reductions_are_over_the_utterances_that_are_not_skipped(reduction):
    joint, case = nemo().double(), problem([(9, 4), (6, 2), (9, 4)], V=V)
    x, h = (torch.randn(3, size, length, dtype=torch.float64) for size, length in ((E, 9), (D, 5)))
    expected = recipes.nemo(
        joint, x[1:], h[1:], case.targets[1:], case.T_lengths[1:], case.U_lengths[1:], reduction=reduction
    )
    x[0, 0, 0] = float("nan")
    given, options = (joint, x, h, case.targets, case.T_lengths, case.U_lengths), {"reduction": reduction}
    loss, skipped = recipes.nemo(*given, nonfinite="skip", return_skipped=True, **options)
    assert error(loss, expected) < 1e-12 and skipped.tolist() == [True, False, False]
    assert torch.equal(loss, recipes.nemo(*given, nonfinite="skip", **options))


CHANGED = [
    (recipes.nemo, nemo(), {"num_extra_outputs": 5}, "durations"),
    (recipes.nemo, nemo(), {"is_adapter_available": lambda: True}, "adapters"),
    (recipes.nemo, nemo(), {"joint_net": nn.Sequential(nn.ELU(), nn.Linear(H, V))}, "ELU"),
    (recipes.espnet, espnet(), {"deepbiasing": True}, "biasing"),
    (recipes.espnet, espnet(), {"joint_activation": nn.GELU("tanh")}, "GELU"),
    (recipes.wenet, wenet(), {"hat_joint": True}, "hat_joint"),
    (recipes.nemo, nemo(), {"reduction": "batchmean"}, "mean_volume"),
    (recipes.nemo, nemo(), {"loss": SimpleNamespace(_loss=nn.CTCLoss(), reduction="mean")}, "CTCLoss"),
]


@pytest.mark.parametrize("recipe, joiner, change, word", CHANGED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_the_loss_would_leave_out_is_refused(recipe, joiner, change, word):
    options = {name: change.pop(name) for name in ("reduction", "loss") if name in change}
    for name, value in change.items():
        setattr(joiner, name, value)
    case = problem(LENGTHS, V=V)
    outputs = [torch.zeros(5, E, 9), torch.zeros(5, D, 5)]
    outputs = outputs if recipe is recipes.nemo else [x.transpose(1, 2) for x in outputs]
    with pytest.raises(ValueError, match=word):
        recipe(joiner, *outputs, case.targets, case.T_lengths, case.U_lengths, **options)
