"""Pretrained models by the real packages, from folders of random weights: SpeechBrain, Hugging Face, torchaudio.

Each test runs where its package is installed; docs/inference.md says with which releases they were run.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import runpy
from types import SimpleNamespace

import pytest
from commands import ROOT

torch = pytest.importorskip("torch")

from common.core.errors import NotRunnable, UserError  # noqa: E402
from common.tools.inference import audio, recognisers  # noqa: E402
from common.tools.inference.measure import difference  # noqa: E402

SENTENCE = "a transducer listens to speech and writes it down one symbol after the other"


def made(kind, source, **arguments):
    return recognisers.load({"type": kind, "source": str(source), "arguments": arguments}, torch.device("cpu"))


def outputs(model, seconds=0.5, size=2):
    waves = audio.batch(None, seconds, size, model.sample_rate, 0)
    with torch.no_grad():
        return model(waves, torch.full((size,), waves.shape[1]))


# -- SpeechBrain -----------------------------------------------------------------------------------------------------

ESTIMATION = """
sample_rate: 16000
snrmin: 0
snrmax: 10
separation_norm_type: stnorm
encoder: !new:speechbrain.nnet.containers.Sequential
    cnn: !new:speechbrain.nnet.CNN.Conv1d
        in_channels: 2
        out_channels: 4
        kernel_size: 4
        stride: 2
        skip_transpose: True
        padding: valid
    relu: !new:torch.nn.ReLU
stat_pooling: !new:speechbrain.nnet.pooling.StatisticsPooling
encoder_out: !new:speechbrain.nnet.containers.Sequential
    linear: !new:speechbrain.nnet.linear.Linear
        input_size: 8
        n_neurons: 1
    sigmoid: !new:torch.nn.Sigmoid
model: !new:torch.nn.ModuleList
    - [!ref <encoder>, !ref <encoder_out>]
modules:
    encoder: !ref <encoder>
    encoder_out: !ref <encoder_out>
pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
    loadables:
        model: !ref <model>
"""


@pytest.mark.parametrize("name", recognisers.INTERFACES)
def test_each_interface_of_speechbrain_has_the_method_and_arguments(name):
    pytest.importorskip("speechbrain")
    module, method = recognisers.INTERFACES[name]
    interface = getattr(importlib.import_module(f"speechbrain.inference.{module}"), name)
    parameters = inspect.signature(getattr(interface, method)).parameters.values()
    waves, lengths = torch.zeros(2, 30), torch.full((2,), 30)
    needed = [part.name for part in parameters if part.default is part.empty and part.name != "self"]
    assert needed and all(recognisers._argument(each, waves, lengths) is not None for each in needed)


def test_a_model_of_speechbrain_is_that_of_its_folder(tmp_path, monkeypatch):
    """hyperparams.yaml, and the weights of each loadable; an estimate is of each of two speakers."""
    pytest.importorskip("speechbrain")
    from hyperpyyaml import load_hyperpyyaml

    source, elsewhere = tmp_path / "model", tmp_path / "elsewhere"
    for folder in (source, elsewhere):
        folder.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(NotRunnable, match="hyperparams.yaml"):
        made("SNREstimator", source)
    (source / "hyperparams.yaml").write_text(ESTIMATION)
    with pytest.raises(NotRunnable, match="model.ckpt"):
        made("SNREstimator", source)
    torch.save(load_hyperpyyaml(ESTIMATION)["model"].state_dict(), source / "model.ckpt")
    model = made("SNREstimator", source)
    answer = outputs(model, size=3)
    assert answer.shape == (6,) and answer.min() > 0 and answer.max() < 10
    assert difference(answer, outputs(made("SNREstimator", source), size=3)) < 1e-4
    assert not list(elsewhere.iterdir())
    with pytest.raises(NotRunnable, match="--compile"):
        model.parts()


# -- torchaudio ------------------------------------------------------------------------------------------------------


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Makes a bundle of torchaudio.pipelines, TINY, of another one, and puts its weights where torch looks for them."""
    pipelines = pytest.importorskip("torchaudio.pipelines")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def cache(bundle, below, weights, **changes):
        monkeypatch.setattr(pipelines, "TINY", dataclasses.replace(bundle, **changes), raising=False)
        (tmp_path / "hub" / below).parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, tmp_path / "hub" / below)
        return tmp_path / "hub" / below

    return cache


WAV2VEC2 = {
    "extractor_conv_layer_config": [(8, 10, 5), (8, 8, 8), (8, 8, 8)],
    "encoder_embed_dim": 16,
    "encoder_num_layers": 1,
    "encoder_num_heads": 2,
    "encoder_ff_interm_features": 16,
    "encoder_pos_conv_kernel": 8,
    "encoder_pos_conv_groups": 2,
}


def test_a_bundle_of_wav2vec2(cached):
    torchaudio = pytest.importorskip("torchaudio")
    bundle = torchaudio.pipelines.WAV2VEC2_ASR_BASE_960H
    sizes = {**bundle._params, **WAV2VEC2}
    torch.manual_seed(1)
    weights = torchaudio.models.wav2vec2_model(**sizes).state_dict()
    changes = {"_params": sizes, "_remove_aux_axis": (), "_labels": ("a",)}
    path = cached(bundle, f"checkpoints/{bundle._path}", weights, **changes)
    emissions, lengths = outputs(made("torchaudio", "TINY"))
    assert emissions.shape == (2, 24, 29) and lengths is None
    expected = torchaudio.models.wav2vec2_model(**sizes).eval()
    expected.load_state_dict(weights)
    assert torch.equal(emissions, outputs(recognisers.plain(expected))[0])
    with pytest.raises(UserError, match="beam_width"):
        made("torchaudio", "TINY", beam_width=3)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="TINY: cannot be made"):
        made("torchaudio", "TINY")
    path.unlink()
    with pytest.raises(NotRunnable, match=str(path.parents[1])):
        made("torchaudio", "TINY")


def test_a_bundle_of_a_transducer(cached, tmp_path):
    torchaudio = pytest.importorskip("torchaudio")
    bundle = torchaudio.pipelines.EMFORMER_RNNT_BASE_LIBRISPEECH
    shipped = SimpleNamespace(**runpy.run_path(str(ROOT / "examples" / "recognisers.py")))

    def small():
        return shipped.EmformerRNNT(vocab_size=12, layers=1, dim=64, blank_bias=3).search.model

    torch.manual_seed(1)
    cached(bundle, f"torchaudio/{bundle._rnnt_path}", small().state_dict(), _rnnt_factory_func=small, _blank=11)
    stats = tmp_path / "hub" / "torchaudio" / bundle._global_stats_path
    stats.parent.mkdir(parents=True, exist_ok=True)
    stats.write_text(json.dumps({"mean": [0.0] * 80, "invstddev": [1.0] * 80}))
    model = made("torchaudio", "TINY", beam_width=2)
    answer = outputs(model)
    assert len(answer) == 2 and answer[0] == answer[1]  # equal rows
    assert all(0 <= symbol < 11 for symbol in answer[0]) and len(model.parts()) == 1


def test_a_bundle_that_separates(cached):
    torchaudio = pytest.importorskip("torchaudio")
    bundle = torchaudio.pipelines.CONVTASNET_BASE_LIBRI2MIX
    filters = dict.fromkeys(("enc_num_feats", "msk_num_feats", "msk_num_hidden_feats"), 8)

    def small():
        return torchaudio.models.ConvTasNet(num_sources=2, msk_num_layers=1, msk_num_stacks=1, **filters)

    cached(bundle, f"torchaudio/{bundle._model_path}", small().state_dict(), _model_factory_func=small)
    model = made("torchaudio", "TINY")
    assert model.sample_rate == 8000 and outputs(model).shape == (2, 2, 4000)


def test_what_is_no_model():
    pytest.importorskip("torchaudio")
    for source in ("TACOTRON2_GRIFFINLIM_CHAR_LJSPEECH", "RNNTBundle", "__file__"):
        with pytest.raises(UserError, match="WAV2VEC2_ASR_BASE_960H"):
            made("torchaudio", source)
    with pytest.raises(UserError, match="EncoderDecoderASR"):
        made("EncoderDecoder", "x")
    with pytest.raises(NotRunnable, match="transformers"):
        made("transformers", "facebook/wav2vec2-base-960h")


# -- Hugging Face ----------------------------------------------------------------------------------------------------


def wav2vec2_folder(folder):
    """Write a CTC model of random weights with its processor."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    words = ["<pad>", "<s>", "</s>", "<unk>", "|", *sorted(set(SENTENCE) - {" "})]
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    features = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    transformers.Wav2Vec2Processor(feature_extractor=features, tokenizer=tokenizer).save_pretrained(folder)
    config = transformers.Wav2Vec2Config(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=[8, 8, 8],
        conv_kernel=[10, 8, 8],
        conv_stride=[5, 8, 8],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    torch.manual_seed(1)
    transformers.Wav2Vec2ForCTC(config).save_pretrained(folder)
    return folder


def test_a_pipeline_of_hugging_face(tmp_path):
    source = wav2vec2_folder(tmp_path / "model")
    model = made("transformers", source)
    answer = outputs(model)
    assert model.sample_rate == 16000 and len(answer) == 2 and answer[0] == answer[1] and "text" in answer[0]
    assert answer == outputs(made("transformers", source))  # the weights are those of the folder
