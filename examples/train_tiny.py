#!/usr/bin/env python3
"""Train one small transducer from the same seed with each loss, and compare the curves of the loss.

    .venv/main/bin/python examples/train_tiny.py

The losses are torchaudio's, optimized_transducer's and fused_transducer's.  The model has log-mel features of 80 ms, a
bidirectional LSTM as encoder, the last two letters as decoder, and the joiner Linear(tanh(encoder + decoder)).  The
data are the recordings of --audio of at most 10 s, all of them in each step, or tones that spell random letters.
Output is a table of nats per letter and a picture of the curves; it fails if two curves differ by more than --allowed
(relative).  It shows that the losses train alike; it does not make a model that recognises speech.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from common.cli.parser import Parser  # noqa: E402
from common.core import flag_types  # noqa: E402
from common.core.errors import EXIT_FAILED, EXIT_OK, NotRunnable, UserError  # noqa: E402
from common.core.guard import guarded  # noqa: E402
from common.plots.png import STYLE  # noqa: E402
from common.present.table import Cell, tabulated  # noqa: E402
from common.present.text import aligned  # noqa: E402

AUDIO = ROOT.parent / "shared" / "data" / "librispeech"
TONES = Path("tones")
RATE = 16_000
LETTERS = "-ABCDEFGHIJKLMNOPQRSTUVWXYZ' "  # the first is the blank
LONGEST = 10 * RATE  # samples; longer ones would take most of the time
STACKED = 8  # frames of 10 ms that the encoder reads as one


class Data(NamedTuple):
    """features (N, T, F) float32; targets (N, U), T_lengths, U_lengths (N,): int32."""

    features: Tensor
    targets: Tensor
    T_lengths: Tensor
    U_lengths: Tensor


def recordings(folder: Path) -> List[Tuple[Tensor, str]]:
    """Return (samples, text) of each line "NAME TEXT" of trans.txt and its NAME.flac, of 16 kHz."""
    import soundfile

    pairs = []
    for line in (folder / "trans.txt").read_text(encoding="utf-8").splitlines():
        name, _, text = line.partition(" ")
        samples, rate = soundfile.read(str(folder / f"{name}.flac"), dtype="float32", always_2d=True)
        if rate != RATE:
            raise UserError(f"{folder / name}.flac: has {rate} samples a second; make it {RATE}")
        if len(samples) <= LONGEST:
            pairs.append((torch.from_numpy(samples[:, 0].copy()), text))
    if not pairs:
        raise UserError(f"{folder / 'trans.txt'}: names no recording of at most {LONGEST // RATE} s; add some")
    return pairs


def tones(utterances: int = 3, letters: int = 40) -> List[Tuple[Tensor, str]]:
    """Return made utterances (samples, text): each letter is 0.1 s of a tone of its own, in noise."""
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for _ in range(utterances):
        codes = torch.randint(1, len(LETTERS), (letters,), generator=generator)
        at = torch.arange(RATE // 10) / RATE * 2 * torch.pi
        samples = torch.sin((200 + 100 * codes).unsqueeze(1) * at).flatten()
        samples += 0.1 * torch.randn(len(samples), generator=generator)
        pairs.append((samples, "".join(LETTERS[code] for code in codes)))
    return pairs


def prepared(utterances: List[Tuple[Tensor, str]]) -> Data:
    """Return log-mel features, STACKED frames side by side, of mean 0 and variance 1, and letters as numbers."""
    from torchaudio.transforms import MelSpectrogram

    mel = MelSpectrogram(RATE, n_fft=512, win_length=400, hop_length=160, n_mels=40)
    features, targets = [], []
    for samples, text in utterances:
        frames = mel(samples).clamp(min=1e-6).log().t()
        frames = (frames - frames.mean()) / frames.std()
        features.append(frames[: len(frames) // STACKED * STACKED].reshape(-1, STACKED * 40))
        targets.append(torch.tensor([LETTERS.index(letter) for letter in text.upper() if letter in LETTERS[1:]]))
    T_lengths = torch.tensor([len(frames) for frames in features], dtype=torch.int32)
    U_lengths = torch.tensor([len(letters) for letters in targets], dtype=torch.int32)
    pad = nn.utils.rnn.pad_sequence
    return Data(pad(features, batch_first=True), pad(targets, batch_first=True).int(), T_lengths, U_lengths)


class Model(nn.Module):
    """Gives encoder_out (N, T, H) and decoder_out (N, U+1, H); `output` is the joiner's layer."""

    def __init__(self, features: int, hidden: int = 64):
        super().__init__()
        self.encoder = nn.LSTM(features, hidden // 2, batch_first=True, bidirectional=True)
        self.embedding = nn.Embedding(len(LETTERS), hidden)
        self.decoder = nn.Linear(2 * hidden, hidden)
        self.output = nn.Linear(hidden, len(LETTERS))

    def forward(self, data: Data) -> Tuple[Tensor, Tensor]:
        before = self.embedding(nn.functional.pad(data.targets.long(), (2, 0)))
        return self.encoder(data.features)[0], self.decoder(torch.cat([before[:, :-1], before[:, 1:]], 2))


# Each: the sum over the utterances; the losses that take logits get them from the same joiner.
Loss = Callable[[Model, Tensor, Tensor, Data], Tensor]


def of_torchaudio() -> Loss:
    from torchaudio.functional import rnnt_loss

    def loss(model: Model, encoder_out: Tensor, decoder_out: Tensor, data: Data) -> Tensor:
        logits = model.output(torch.tanh(encoder_out.unsqueeze(2) + decoder_out.unsqueeze(1)))
        return rnnt_loss(logits, data.targets, data.T_lengths, data.U_lengths, blank=0, reduction="sum")

    return loss


def of_optimized_transducer() -> Loss:
    from common.setup import extensions

    transducer_loss = extensions.load("optimized_transducer", "cpu").transducer_loss

    def loss(model: Model, encoder_out: Tensor, decoder_out: Tensor, data: Data) -> Tensor:
        cells = [
            (encoder_out[n, :T].unsqueeze(1) + decoder_out[n, : U + 1]).flatten(0, 1)
            for n, (T, U) in enumerate(zip(data.T_lengths.tolist(), data.U_lengths.tolist()))
        ]
        logits = model.output(torch.tanh(torch.cat(cells)))
        lengths = {"logit_lengths": data.T_lengths, "target_lengths": data.U_lengths}
        return transducer_loss(logits, data.targets, **lengths, blank=0, reduction="sum", from_log_softmax=False)

    return loss


def of_fused() -> Loss:
    from fused_transducer import transducer_loss

    def loss(model: Model, encoder_out: Tensor, decoder_out: Tensor, data: Data) -> Tensor:
        joiner = model.output.weight, model.output.bias
        return transducer_loss(encoder_out, decoder_out, *joiner, *data[1:], blank=0, reduction="sum")

    return loss


LOSSES: Dict[str, Callable[[], Loss]] = {
    "torchaudio": of_torchaudio,
    "optimized_transducer": of_optimized_transducer,
    "fused": of_fused,
}


def train(loss_of: Loss, data: Data, steps: int, seed: int) -> List[float]:
    """Nats per letter before each step."""
    torch.manual_seed(seed)
    model = Model(data.features.shape[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    letters, curve = int(data.U_lengths.sum()), []
    for _ in range(steps):
        loss = loss_of(model, *model(data), data).sum() / letters  # one of them has the shape (1,)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        curve.append(loss.item())
    return curve


def differences(curve: List[float], first: List[float]) -> List[float]:
    """Relative, step by step."""
    return [abs(a - b) / abs(b) for a, b in zip(curve, first)]


def draw(curves: Dict[str, List[float]], allowed: float, path: Path) -> None:
    """The curves above, how far each is from the first below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({**STYLE, "svg.hashsalt": "train_tiny", "svg.fonttype": "none"}):
        figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 4.5), height_ratios=[3, 2])
        (first, *_), styles = curves, ("-", "--", ":")
        for index, (name, style) in enumerate(zip(curves, styles)):
            look = {"color": f"C{index}", "label": name}
            above.plot(curves[name], style, linewidth=3 if style == ":" else 1.5, **look)
            if name != first:
                below.plot([max(x, 1e-9) for x in differences(curves[name], curves[first])], **look)
        below.axhline(allowed, color="k", linestyle=":", linewidth=1)
        above.set_ylabel("nats per letter")
        below.set(yscale="log", ylabel=f"difference to {first}", xlabel="step")
        below.yaxis.set_major_formatter("{x:.0e}")  # not in powers: STYLE takes no formulas
        above.legend()
        below.legend()
        try:
            figure.savefig(str(path), metadata={"Date": None} if path.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: cannot be drawn: {error}; name another with --picture") from error
        finally:
            pyplot.close(figure)


def row(name: str, status: str, *numbers: str) -> Dict[str, Cell]:
    heads = "seconds", "first", "last", "largest difference"
    shown = dict(zip(heads, numbers or ("-",) * len(heads)))
    return {"loss": Cell(name), **{head: Cell(text, 0) for head, text in shown.items()}, "status": Cell(status)}


def main(arguments: argparse.Namespace) -> int:
    torch.set_num_threads(1)  # the tensors are too small for more
    folder = None if arguments.audio == TONES else arguments.audio or (AUDIO if AUDIO.is_dir() else None)
    try:
        data = prepared(recordings(folder) if folder else tones())
    except (OSError, RuntimeError) as error:  # soundfile's are RuntimeErrors
        raise UserError(f"{folder}: cannot be read: {error}; it needs trans.txt and its .flac files") from error
    curves: Dict[str, List[float]] = {}
    rows = []
    for name, make in LOSSES.items():
        try:
            loss = make()
        except (NotRunnable, ImportError) as error:
            rows.append(row(name, f"missing: {error}"))
            continue
        print(f"{name}: {arguments.steps} steps ...", file=sys.stderr)
        start = time.perf_counter()
        curves[name] = curve = train(loss, data, arguments.steps, arguments.seed)
        seconds = time.perf_counter() - start
        apart = max(differences(curve, next(iter(curves.values()))))
        status = "agrees" if apart <= arguments.allowed else "differs"
        rows.append(row(name, status, f"{seconds:.1f}", f"{curve[0]:.4f}", f"{curve[-1]:.4f}", f"{apart:.1e}"))
    of = folder.name if folder else "made tones"
    print(f"{len(data.features)} utterances of {of}, nats per letter; differences to {next(iter(curves), 'none')}")
    print(aligned(tabulated("train_tiny", "", rows)))
    if len(curves) < 2:
        raise UserError("there are no two losses to compare; `make setup` installs them")
    draw(curves, arguments.allowed, arguments.picture)
    return EXIT_FAILED if any(row["status"].shown == "differs" for row in rows) else EXIT_OK


def parser() -> Parser:
    result = Parser(prog=Path(sys.argv[0]).name, description=(__doc__ or "").partition("\n\n")[0])
    add = result.add_argument
    where = f"folder with trans.txt and .flac files, or {TONES}. Default: {AUDIO} where that is, else {TONES}"
    add("--audio", type=flag_types.path, metavar="DIR", help=where)
    add("--steps", type=flag_types.whole(1), default=300, metavar="N", help="of training. Default: 300")
    add("--seed", type=int, default=0, help="of the first weights. Default: 0")
    add("--allowed", type=flag_types.positive, default=1e-3, help="largest relative difference. Default: 1e-3")
    add(
        "--picture", type=flag_types.path, default=ROOT / "docs" / "train_tiny.svg", help="Default: docs/train_tiny.svg"
    )
    return result


if __name__ == "__main__":
    given = parser().parse_args()
    raise SystemExit(guarded("train_tiny.py", lambda: main(given)))
