"""Train a small transducer on speech made on the spot, and recognise utterances that it has not
heard."""

import argparse
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torchaudio
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1]))  # for who has not installed the loss

from fused_transducer import TransducerLoss  # noqa: E402

#: Losses by name, and the package of each.
LOSSES = {
    "fused": "fused_transducer",
    "torchaudio": "torchaudio",
    "fast_rnnt-pruned": "fast_rnnt",
}
RATE, ONSETS = 22_050, "b d f g k l m n p r s t v z br dr fr kr pr tr".split()
SYLLABLES = [
    onset + vowel + coda
    for coda in ("", "n", "s", "l", "r")
    for vowel in "aeiou"
    for onset in ONSETS
]


def check_loss(name):
    """Raise ValueError for a name that is none of LOSSES, or whose package is not installed."""
    if name not in LOSSES:
        raise ValueError(f"there is no loss {name!r}; choose from {', '.join(LOSSES)}")
    if not find_spec(LOSSES[name]):
        compiled = "$(.venv/main/bin/python -m rnnt_bench.setup.extensions fast_rnnt)"
        raise ValueError(
            f"{LOSSES[name]} is not installed; in a checkout set PYTHONPATH={compiled}"
        )


def speak(text, speed, pitch):
    """Return samples (S,) of a text, by espeak-ng or as chords, at `speed` words a minute and a
    pitch of 0 to 99."""
    if shutil.which("espeak-ng"):
        sound = subprocess.check_output(
            [*f"espeak-ng -v it -s {speed} -p {pitch} --stdout".split(), text]
        )
        # after the head of a WAV file
        return torch.frombuffer(bytearray(sound[44:]), dtype=torch.int16) / 32768
    hertz = [
        [[25 * x - 2000], [60 * (7 * x % 26) + 1000], [80 * (11 * x % 26) + 2600]]
        for x in text.encode()
    ]
    angles = 2 * torch.pi * (1 + pitch / 500) * torch.arange(RATE * 18 // speed) / RATE
    return (
        torch.sin(torch.tensor(hertz) * angles).mean(1) * torch.hann_window(len(angles))
    ).flatten()


def make_utterances(count, vocab):
    """Return `count` pairs: log-mel features (T, 160) of 40 ms a row, and symbols (U,) from 1 on,
    rarer the larger."""
    draw, noise, symbols, pairs = (
        random.Random(0),
        torch.Generator().manual_seed(0),
        range(1, vocab),
        [],
    )
    mel = torchaudio.transforms.MelSpectrogram(RATE, n_fft=512, hop_length=RATE // 100, n_mels=40)
    for _ in range(count):
        spoken = draw.choices(
            symbols, [1 / (20 + symbol) for symbol in symbols], k=draw.randint(4, 12)
        )
        samples = speak(
            " ".join(SYLLABLES[k - 1] for k in spoken), draw.randint(180, 280), draw.randint(20, 80)
        )
        frames = (mel(samples + 0.003 * torch.randn(len(samples), generator=noise)) + 1e-5).log().T
        features = (frames - frames.mean(0))[: len(frames) // 4 * 4].reshape(-1, 160) / 3
        pairs.append((features, torch.tensor(spoken, dtype=torch.int32)))
    return pairs


class Model(nn.Module):
    """A Conformer, a decoder that knows the last symbol, and a joiner with its loss."""

    def __init__(self, vocab, width=128):
        super().__init__()
        self.stacked, self.decoder = nn.Linear(160, width), nn.Embedding(vocab, width)
        self.conformer = torchaudio.models.Conformer(
            width, 4, 2 * width, 2, 15, dropout=0.1, use_group_norm=True
        )
        self.joiner = TransducerLoss(
            width, vocab, reduction="sum", nonfinite="skip", return_skipped=True
        )
        # of the pruned loss alone
        self.am, self.lm = nn.Linear(width, vocab), nn.Linear(width, vocab)

    def encode(self, pairs):
        """Return encoder outputs (N, T, width), T of each utterance, symbols (N, U), and U of each
        utterance."""
        T, U = (torch.tensor([*map(len, rows)], dtype=torch.int32) for rows in zip(*pairs))
        features, symbols = (nn.utils.rnn.pad_sequence(rows, True) for rows in zip(*pairs))
        return *self.conformer(self.stacked(features), T), symbols, U

    def loss(self, pairs, kind):
        """Return the loss in nats a symbol."""
        encoder_out, T, targets, U = self.encode(pairs)
        decoder_out = self.decoder(nn.functional.pad(targets, (1, 0)))
        if kind == "fused":
            loss, skipped = self.joiner(encoder_out, decoder_out, targets, T, U)
            for n in skipped.nonzero().flatten().tolist():
                print(
                    f"skipped utterance {n} of the batch: {T[n]} frames, {pairs[n][1].tolist()}",
                    file=sys.stderr,
                )
            return loss / U[~skipped].sum().clamp(min=1)
        if kind == "torchaudio":
            logits = self.joiner.logits(encoder_out.unsqueeze(2), decoder_out.unsqueeze(1)).float()
            return (
                torchaudio.functional.rnnt_loss(logits, targets, T, U, 0, reduction="sum") / U.sum()
            )
        import fast_rnnt as rnnt  # as icefall trains, but without a warm-up

        bounds = torch.stack([0 * T, 0 * T, U, T], 1).long()
        given = {
            "symbols": targets.long(),
            "termination_symbol": 0,
            "boundary": bounds,
            "reduction": "sum",
        }
        scores = self.lm(decoder_out).float(), self.am(encoder_out).float()
        simple, gradients = rnnt.rnnt_loss_smoothed(
            *scores, lm_only_scale=0.25, return_grad=True, **given
        )
        ranges = rnnt.get_rnnt_prune_ranges(*gradients, bounds, 5)
        logits = self.joiner.logits(*rnnt.do_rnnt_pruning(encoder_out, decoder_out, ranges)).float()
        return (
            0.5 * simple + rnnt.rnnt_loss_pruned(logits=logits, ranges=ranges, **given)
        ) / U.sum()

    def error_rate(self, pairs):
        """Return the share of wrong symbols, decoding greedily with at most three symbols a
        frame."""
        (encoder_out, T, *_), heard = self.encode(pairs), [[0] for _ in pairs]
        for t in [t for t in range(max(T)) for _ in range(3)]:
            logits = self.joiner.logits(
                encoder_out[:, t], self.decoder(torch.tensor([x[-1] for x in heard]))
            )
            for n, symbol in enumerate(logits.argmax(-1).tolist()):
                heard[n] += [symbol] if symbol and t < T[n] else []
        errors = [
            torchaudio.functional.edit_distance(x[1:], right.tolist())
            for x, (_, right) in zip(heard, pairs)
        ]
        return sum(errors) / sum(len(right) for _, right in pairs)


def main():
    """Train, recognise the first 100 utterances, which are held out, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loss", choices=LOSSES, default="fused")
    for name, default in {
        "seed": 0,
        "steps": 400,
        "utterances": 700,
        "vocab": 41,
        "autocast": 0,
        "save": "",
    }.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given, curve, peak = (
        parser.parse_args(),
        [],
        lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    if given.steps <= 10:
        parser.error("--steps: give more than 10; in a tenth of them the learning rate rises")
    try:
        check_loss(given.loss)
    except ValueError as error:
        parser.error(f"--loss: {error}")
    if given.save:
        os.makedirs(given.save, exist_ok=True)
    torch.manual_seed(given.seed)
    pairs, model = make_utterances(given.utterances, given.vocab), Model(given.vocab)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, given.steps, pct_start=0.1)
    start, cpu, before = time.time(), time.process_time(), peak()
    for step in range(1, given.steps + 1):
        with torch.autocast("cpu", enabled=bool(given.autocast)):
            loss = model.loss(
                random.Random(f"{given.seed} {step}").sample(pairs[100:], 12), given.loss
            )
        optimizer.zero_grad()
        loss.backward()
        # of an encoder that makes a NaN it is not
        if nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite():
            optimizer.step()
        schedule.step()
        curve.append(loss.item())
        if given.save and step in (20, given.steps // 3, given.steps):
            torch.save(
                {"model": model.state_dict(), "held_out": pairs[:100]}, f"{given.save}/{step}.pt"
            )
    result = {
        "cpu_seconds": time.process_time() - cpu,
        "seconds": time.time() - start,
        "mb": peak() - before,
    }
    with torch.no_grad():
        error_rate, nats = (
            model.eval().error_rate(pairs[:100]),
            float(model.loss(pairs[:100], "fused")),
        )
    print(
        json.dumps(
            {**vars(given), **result, "error_rate": error_rate, "nats": nats, "curve": curve}
        )
    )


if __name__ == "__main__":
    main()
