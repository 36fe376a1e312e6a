"""Train checkpoints of examples/train.py on by minimum word error rate, and by the transducer loss
alone beside it."""

import argparse
import json
import random

import torch
from torch import nn
from torchaudio.functional import edit_distance
from train import Model, make_utterances  # examples/train.py

from fused_transducer import transducer_loss
from fused_transducer.sequence import mwer_loss


def search(model, frames, size):
    """Return the `size` most probable symbol sequences of frames (T, width), by a beam of at most a
    symbol a frame."""
    beams = {(): 0.0}
    for frame in frames:
        states = model.decoder(torch.tensor([path[-1] if path else 0 for path in beams]))
        scores = model.joiner.logits(frame, states).log_softmax(-1) + torch.tensor(
            [*beams.values()]
        ).unsqueeze(1)
        paths, vocab, ends = list(beams), scores.shape[1], {}
        best = scores.flatten().topk(min(2 * size, scores.numel()))
        for score, number in zip(*(x.tolist() for x in best)):
            path, symbol = paths[number // vocab], number % vocab
            path += (symbol,) if symbol else ()
            # another way to the same symbols
            other = torch.tensor([score, ends.get(path, -torch.inf)])
            ends[path] = other.logsumexp(0).item()
        beams = dict(sorted(ends.items(), key=lambda beam: -beam[1])[:size])
    return [torch.tensor(path, dtype=torch.int32) for path in beams]


def expected_errors(model, pairs, size):
    """Return the expected errors of the hypotheses of an utterance, and a tenth of the loss in nats
    a symbol."""
    encoder_out, T, targets, U = model.encode(pairs)
    with torch.no_grad():
        lists = [search(model, frames[:end], size) for frames, end in zip(encoder_out, T)]
    utterance_of = torch.tensor([n for n, paths in enumerate(lists) for _ in paths])
    hypotheses = [path for paths in lists for path in paths]
    right = [pairs[n][1].tolist() for n in utterance_of]
    errors = torch.tensor([edit_distance(x, path.tolist()) for x, path in zip(right, hypotheses)])
    rows, lengths = (
        nn.utils.rnn.pad_sequence(hypotheses, True),
        torch.tensor(list(map(len, hypotheses))),
    )
    decoder_out = model.decoder(nn.functional.pad(rows, (1, 0)))
    layer = model.joiner.output_linear
    inputs = encoder_out, decoder_out, layer.weight, layer.bias, rows, T, lengths
    losses = transducer_loss(*inputs, reduction="none", utterance_of=utterance_of)
    return mwer_loss(losses, errors, utterance_of) + 0.1 * model.loss(pairs, "fused")


def error_rate(saved, pairs, loss_of, steps, rate):
    """Return that of the utterances that are held out, after some steps of a loss from a checkpoint
    on."""
    # without dropout, since the search has none
    model = Model(len(saved["model"]["decoder.weight"])).eval()
    model.load_state_dict(saved["model"])
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    for step in range(steps):
        loss = loss_of(model, random.Random(step).sample(pairs, 12))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        return model.error_rate(saved["held_out"])


def main():
    """Print a line of JSON for each checkpoint: the error rates before, and after as many steps of
    both losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoints", nargs="+", help="files that examples/train.py --save wrote")
    for name, default in {"steps": 40, "beam": 4, "rate": 1e-4, "utterances": 700}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    given = parser.parse_args()
    losses = {
        "mwer": lambda model, batch: expected_errors(model, batch, given.beam),
        "transducer loss": lambda model, batch: model.loss(batch, "fused"),
    }
    for path in given.checkpoints:
        saved = torch.load(path, weights_only=True)
        pairs = make_utterances(given.utterances, len(saved["model"]["decoder.weight"]))[100:]
        result = {"checkpoint": path, "before": error_rate(saved, pairs, None, 0, given.rate)}
        result.update(
            {
                name: error_rate(saved, pairs, loss, given.steps, given.rate)
                for name, loss in losses.items()
            }
        )
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
