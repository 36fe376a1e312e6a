"""Train a small model of transformers on speech made on the spot, by the loss that it has and by
fused_transducer, and print both curves, times and peaks beside each other: of the same weights, on
the same batches.

--model parakeet: ParakeetForTDT and its own loss.  --model parakeet-rnnt or nemotron:
ParakeetForRNNT and NemotronAsrStreamingForRNNT, and torchaudio's on their logits."""

import argparse
import json
import random
import resource
import subprocess
import sys
import time

import torch
import torchaudio
import transformers
from train import SYLLABLES, make_utterances  # examples/train.py

from fused_transducer import recipes

LOSSES = ("own", "fused")
#: Model -> its class, and that of its configuration.
MODELS = {
    "parakeet": ("ParakeetForTDT", "ParakeetTDTConfig"),
    "parakeet-rnnt": ("ParakeetForRNNT", "ParakeetRNNTConfig"),
    "nemotron": ("NemotronAsrStreamingForRNNT", "NemotronAsrStreamingConfig"),
}
PAD = 0


def make_model(name, vocab, width):
    """Return a small model from its configuration, without dropout, so that both losses see the
    same."""
    encoder = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    encoder.update(num_mel_bins=40, subsampling_conv_channels=32)
    encoder.update(
        dict.fromkeys(("dropout", "activation_dropout", "attention_dropout", "layerdrop"), 0.0)
    )
    sizes = {
        "vocab_size": vocab + 1,
        "blank_token_id": vocab,
        "pad_token_id": PAD,
        "num_decoder_layers": 1,
    }
    model, config = (getattr(transformers, kind) for kind in MODELS[name])
    torch.manual_seed(0)
    return model(config(encoder_config=encoder, decoder_hidden_size=width, **sizes))


def loss_of(model, inputs):
    """Return the loss of the model; where its class has none torchaudio's of its logits, over the
    number of labels."""
    if isinstance(model, transformers.ParakeetForTDT) or hasattr(model, recipes.PATCHED):
        return model(**inputs).loss
    encoder_outputs = model.get_audio_features(inputs["input_features"], inputs["attention_mask"])
    logits = model(
        encoder_outputs=encoder_outputs, decoder_input_ids=inputs["decoder_input_ids"]
    ).logits
    labels, frames = inputs["labels"].int(), encoder_outputs.attention_mask.sum(1).int()
    count, blank = (labels != PAD).sum(1).int(), model.config.blank_token_id
    losses = torchaudio.functional.rnnt_loss(
        logits[:, : max(frames)], labels, frames, count, blank, reduction="sum"
    )
    return losses / count.sum()


def make_batch(pairs, vocab, device):
    """Return the arguments of the model for some utterances, as its processor makes them."""
    features = [rows.reshape(-1, 40) for rows, _ in pairs]  # of 10 ms
    lengths = torch.tensor([len(rows) for rows in features])
    labels = torch.nn.utils.rnn.pad_sequence([symbols.long() for _, symbols in pairs], True)
    batch = {
        "input_features": torch.nn.utils.rnn.pad_sequence(features, True),
        "attention_mask": torch.arange(max(lengths)) < lengths.unsqueeze(1),
        "labels": labels,
        "decoder_input_ids": torch.nn.functional.pad(labels, (1, 0), value=vocab),
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def peak_megabytes(device):
    """Return the most memory that torch has held on the GPU, or the process on the CPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(kind, name, steps, batch, vocab, width, device):
    """Return the loss of each step, the seconds of a step, and by how many MB training raised the
    peak."""
    model, pairs = (
        make_model(name, vocab, width).to(device),
        make_utterances(8 * batch, min(vocab, len(SYLLABLES))),
    )
    if kind == "fused":
        recipes.patch(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    curve, seconds, before = [], [], peak_megabytes(device)
    for step in range(steps):
        inputs = make_batch(random.Random(step).sample(pairs, batch), vocab, device)
        start = time.perf_counter()
        loss = loss_of(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())  # waits for a GPU
        seconds.append(time.perf_counter() - start)
    return {
        "curve": curve,
        "seconds": sorted(seconds)[steps // 2],
        "megabytes": peak_megabytes(device) - before,
    }


def main():
    """Train by each loss in a process of its own, since the peak of a process never falls."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", choices=LOSSES, help="train by this one alone, and print JSON")
    parser.add_argument("--model", choices=MODELS, default="parakeet")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    for name, default in {"steps": 40, "batch": 16, "vocab": 500, "width": 96}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    if given.loss:
        sizes = given.steps, given.batch, given.vocab, given.width
        return print(json.dumps(train(given.loss, given.model, *sizes, given.device)))
    command = [sys.executable, __file__, *sys.argv[1:], "--loss"]
    own, fused = (
        json.loads(subprocess.check_output([*command, kind], text=True)) for kind in LOSSES
    )
    for step in sorted({*range(0, given.steps, max(1, given.steps // 10)), given.steps - 1}):
        print(
            f"step {step + 1:4}   own loss {own['curve'][step]:10.6f}   fused {fused['curve'][step]:10.6f}"
        )
    for name in ("seconds", "megabytes"):
        print(f"{name:9}   own loss {own[name]:10.3f}   fused {fused[name]:10.3f}")


if __name__ == "__main__":
    main()
