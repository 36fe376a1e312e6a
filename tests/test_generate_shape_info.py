"""generate_shape_info.py, on real manifests and audio where the data folder is there, on made ones elsewhere.

Most runs are of ``main`` in this process (importing lhotse takes seconds); one of each source is of the real command.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import run as run_script

import generate_shape_info
from common.data import batching, shapes
from common.data.provenance import known_factor

torch = pytest.importorskip("torch")
REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "generate_shape_info.py"
DATA = REPOSITORY.parent / "shared" / "data" / "librispeech"
SECONDS_AND_TEXT = [
    (4.65, "A MAN SAID TO THE UNIVERSE"),
    (10.885, "SIR I EXIST"),
    (16.0, "HOWEVER REPLIED THE UNIVERSE"),
]

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no folder with LibriSpeech samples beside the checkout")


@pytest.fixture(scope="module")
def lhotse():
    try:
        import lhotse
        import sentencepiece  # noqa: F401
    except ImportError as error:
        pytest.skip(f"lhotse or sentencepiece is not here: {error}")
    return lhotse


@pytest.fixture(scope="module")
def model(lhotse, tmp_path_factory):
    """A BPE model of 40 tokens."""
    from common.data.sources import bpe

    path = tmp_path_factory.mktemp("model") / "bpe.model"
    path.write_bytes(bpe.train([text for _, text in SECONDS_AND_TEXT], 40))
    return path


@pytest.fixture
def run(tmp_path, capsys):
    """Runs ``main`` with `arguments` and --output tmp_path/out.pt; gives exit code, stdout, stderr."""

    def call(*arguments, output=tmp_path / "out.pt"):
        code = generate_shape_info.main([*map(str, arguments), "--output", str(output)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def command(*arguments, cwd, **environment):
    """The real command, as a user types it."""
    options = {"env": {**os.environ, **environment}} if environment else {}
    return run_script(SCRIPT, *arguments, cwd=cwd, timeout=120, **options)


def one_line_of_error(code, err, *words):
    assert code == 2
    assert err.startswith("generate_shape_info.py: error: ") and err.count("\n") == 1, err
    for word in words:
        assert word in err


def tokens(model, text):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor()
    processor.Load(str(model))
    return len(processor.encode(text))


def recording(name, seconds, source="missing.flac", kind="file"):
    return {
        "id": name,
        "sources": [{"type": kind, "channels": [0], "source": source}],
        "sampling_rate": 16000,
        "num_samples": round(seconds * 16000),
        "duration": seconds,
    }


def supervision(name, recording_id, start, seconds, text):
    return {"id": name, "recording_id": recording_id, "start": start, "duration": seconds, "channel": 0, "text": text}


def features_of(recording_id, frames, frame_shift, seconds):
    return {
        "type": "fbank",
        "num_frames": frames,
        "num_features": 80,
        "frame_shift": frame_shift,
        "sampling_rate": 16000,
        "start": 0.0,
        "duration": seconds,
        "storage_type": "lilcom_chunky",
        "storage_path": "none",
        "storage_key": "0",
        "recording_id": recording_id,
        "channels": 0,
    }


def cut(name, seconds, *supervisions, **fields):
    return {
        "id": name,
        "start": 0.0,
        "duration": seconds,
        "channel": 0,
        "supervisions": list(supervisions),
        "recording": recording(name, seconds),
        "type": "MonoCut",
        **fields,
    }


def simple_cuts():
    return [
        cut(f"c{i}", seconds, supervision(f"s{i}", f"c{i}", 0.0, seconds, text))
        for i, (seconds, text) in enumerate(SECONDS_AND_TEXT)
    ]


def jsonl(path, entries):
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w")).write(text)
    return path


def provenance(tmp_path, name="out"):
    return json.loads((tmp_path / f"{name}.json").read_text())


# ---- the figures


def test_the_committed_shape_file_is_regenerated_bit_for_bit(tmp_path):
    done = command("--from-figures", "--output", "shape_info.pt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    made, committed = tmp_path / "shape_info.pt", REPOSITORY / "shape_info.pt"
    assert torch.equal(torch.load(made, weights_only=True), torch.load(committed, weights_only=True))
    described = json.loads((REPOSITORY / "shape_info.json").read_text())
    assert described["shape_file"]["sha256"] == shapes.sha256(committed)
    if torch.__version__.split("+")[0] == described["versions"]["torch"]:
        assert made.read_bytes() == committed.read_bytes()
        assert made.with_suffix(".json").read_bytes() == committed.with_suffix(".json").read_bytes()


def test_the_committed_feature_frames_are_regenerated_and_make_the_published_batches(tmp_path):
    """icefall's sorted batches of 30,000 frames: 3,733 of 14, 15, 15 ... 150 utterances."""
    done = command("--from-figures", "--features", "--seed", "1097", "--output", "shape_info.pt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows, frames = shapes.load(tmp_path / "shape_info.pt"), shapes.load(REPOSITORY / "data" / "shape_info.features.pt")
    assert (shapes.load(tmp_path / "shape_info.features.pt") == frames).all()
    assert (shapes.subsampled(frames[:, 0]) == rows[:, 0]).all() and (frames[:, 1] == rows[:, 1]).all()
    batches = batching.max_frames(frames, 30000)
    sizes = [len(batches[index]) for index in (0, 1, 2, len(batches) - 1)]
    assert len(batches) == 3733 and sizes == [14, 15, 15, 150]


def test_a_seed_gives_another_draw(run, tmp_path):
    assert run("--from-figures", "--seed", 1)[0] == 0
    assert provenance(tmp_path)["options"] == {"seed": 1}
    assert (shapes.load(tmp_path / "out.pt") != shapes.load(REPOSITORY / "shape_info.pt")).any()


def test_help_needs_nothing_installed(tmp_path):
    done = subprocess.run([sys.executable, "-S", "-E", SCRIPT, "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert "--speed-perturbation" in done.stdout


def test_without_the_packages_it_says_what_to_do(tmp_path):
    (tmp_path / "lhotse.py").write_text("raise ImportError('no lhotse here')")
    done = command("--manifest", "cuts.jsonl", "--bpe-model", "x", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    one_line_of_error(done.returncode, done.stderr, "no lhotse here", "make setup", ".venv/main/bin/python")


# ---- manifests


@pytest.mark.parametrize("name", ["cuts.jsonl", "cuts.jsonl.gz", "cuts.json", "cuts.json.gz"])
def test_cuts_in_every_format(run, tmp_path, lhotse, model, name):
    lhotse.CutSet.from_dicts(simple_cuts()).to_file(tmp_path / name)
    code, out, err = run("--manifest", tmp_path / name, "--bpe-model", model)
    assert (code, err) == (0, "")
    # 74,400 samples of 16 kHz: 465 frames, 232, 115; 174,160: 1089, 544, 271; 256,000: 1600, 799, 399
    expected = [[frames, tokens(model, text)] for frames, (_, text) in zip((115, 271, 399), SECONDS_AND_TEXT)]
    assert shapes.load(tmp_path / "out.pt").tolist() == expected
    assert "3 utterances, T 115 to 399" in out
    record = provenance(tmp_path)
    assert record["source"] == {"kind": "manifest", "files": [{"name": name, "sha256": shapes.sha256(tmp_path / name)}]}
    assert record["bpe_model"]["sha256"] == shapes.sha256(model)
    assert record["counts"]["rows"] == 3


def test_feature_frames_are_written_too(run, tmp_path, model):
    cuts = [
        cut(name, frames / 100, supervision("s", name, 0, frames / 100, "SIR"), recording=recording(name, frames / 100))
        for name, frames in (("a", 2725), ("b", 6), ("c", 1411))
    ]
    path = jsonl(tmp_path / "cuts.jsonl", cuts)
    assert run("--manifest", path, "--bpe-model", model, "--features")[0] == 0
    rows, of_features = (shapes.load(tmp_path / name) for name in ("out.pt", "out.features.pt"))
    assert rows[:, 0].tolist() == [680, 352] and of_features[:, 0].tolist() == [2725, 1411]
    assert rows[:, 1].tolist() == of_features[:, 1].tolist()
    assert known_factor(tmp_path / "out.features.pt") == 1
    assert run("--from-figures", "--features")[0] == 0
    rows, of_features = (shapes.load(tmp_path / name) for name in ("out.pt", "out.features.pt"))
    assert (shapes.subsampled(of_features[:, 0]) == rows[:, 0]).all()


def test_frames_of_features_come_first(run, tmp_path, model):
    features = features_of("c", 2725, 0.01, 27.25)
    path = jsonl(tmp_path / "cuts.jsonl", [cut("c", 27.25, supervision("s", "c", 0, 27.25, "SIR"), features=features)])
    assert run("--manifest", path, "--bpe-model", model, "--frame-shift", 0.02)[0] == 0
    assert shapes.load(tmp_path / "out.pt")[0, 0] == 680
    assert provenance(tmp_path)["counts"]["frames_from_features"] == 1


def test_frame_shift_and_subsampling_factor(run, tmp_path, model):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts()[2:])  # 16 s: 800 frames of 20 ms
    assert run("--manifest", path, "--bpe-model", model, "--frame-shift", 0.02, "--subsampling-factor", 2)[0] == 0
    assert shapes.load(tmp_path / "out.pt")[0, 0] == 399
    assert provenance(tmp_path)["options"]["subsampling_factor"] == 2


def test_texts_of_several_supervisions_are_joined_in_time_order(run, tmp_path, model):
    second, first = supervision("b", "c", 2.0, 1.0, " SIR I EXIST"), supervision("a", "c", 0.5, 1.0, "A MAN SAID ")
    path = jsonl(tmp_path / "cuts.jsonl", [cut("c", 4.65, second, first)])
    assert run("--manifest", path, "--bpe-model", model)[0] == 0
    assert shapes.load(tmp_path / "out.pt").tolist() == [[115, tokens(model, "A MAN SAID SIR I EXIST")]]
    assert provenance(tmp_path)["counts"]["with_several_supervisions"] == 1


def test_cuts_without_text_or_too_short_are_counted(run, tmp_path, model):
    entries = [
        *simple_cuts()[:1],
        cut("none", 4.65),
        cut("blank", 4.65, supervision("a", "blank", 0, 1, "  ")),
        cut("null", 4.65, {key: value for key, value in supervision("a", "null", 0, 1, "").items() if key != "text"}),
        cut("short", 0.06, supervision("a", "short", 0, 0.06, "A")),  # 6 frames: none after subsampling
    ]
    path = jsonl(tmp_path / "cuts.jsonl", entries)
    code, out, _ = run("--manifest", path, "--bpe-model", model)
    assert code == 0
    assert len(shapes.load(tmp_path / "out.pt")) == 1
    counts = provenance(tmp_path)["counts"]
    assert counts == {
        "utterances_read": 5,
        "without_supervision": 1,
        "with_empty_text": 2,
        "left_out_without_text": 3,
        "rows_left_out_as_too_short": 1,
        "rows": 1,
    }
    assert "left out without text: 3" in out

    assert run("--manifest", path, "--bpe-model", model, "--keep-empty")[0] == 0
    assert shapes.load(tmp_path / "out.pt")[1:].tolist() == [[115, 0]] * 3
    assert provenance(tmp_path)["counts"]["kept_without_text"] == 3


def test_a_manifest_with_nothing_to_keep_is_an_error(run, tmp_path, model):
    path = jsonl(tmp_path / "cuts.jsonl", [cut("none", 4.65)])
    code, _, err = run("--manifest", path, "--bpe-model", model)
    one_line_of_error(code, err, "no utterance is left", "1 have no text")
    assert not (tmp_path / "out.pt").exists()


def test_speed_perturbation_is_lhotse_s(run, tmp_path, lhotse, model):
    cuts = lhotse.CutSet.from_dicts(simple_cuts())
    mixed = cuts["c0"].append(cuts["c1"])
    everything = lhotse.CutSet.from_cuts([*cuts, mixed, cuts["c1"].truncate(offset=1.23, duration=3.21)])
    everything.to_file(tmp_path / "cuts.jsonl")
    assert run("--manifest", tmp_path / "cuts.jsonl", "--bpe-model", model, "--speed-perturbation", 0.9, 1, 1.1)[0] == 0
    rows = shapes.load(tmp_path / "out.pt")
    expected = []
    for speed in (0.9, 1.0, 1.1):
        for number in everything:
            seconds = number.duration if speed == 1.0 else number.perturb_speed(speed).duration
            expected.append(shapes.subsampled(lhotse.utils.compute_num_frames(seconds, 0.01, 16000)))
    assert rows[:, 0].tolist() == expected
    assert rows[[0, 5, 10], 0].tolist() == [128, 115, 105]  # 74,400 samples are 82,667 at 0.9 and 67,636 at 1.1
    assert rows[:5, 1].tolist() == rows[5:10, 1].tolist() == rows[10:, 1].tolist()


def test_speeds_detach_features_and_keep_their_frame_shift(run, tmp_path, model):
    features = features_of("c", 800, 0.02, 16.0)
    path = jsonl(tmp_path / "cuts.jsonl", [cut("c", 16.0, supervision("s", "c", 0, 16.0, "SIR"), features=features)])
    run("--manifest", path, "--bpe-model", model, "--speed-perturbation", 1, 0.5, "--subsampling-factor", 1)
    assert shapes.load(tmp_path / "out.pt")[:, 0].tolist() == [800, 1600]


def test_supervisions_are_utterances_and_end_with_their_recording(run, tmp_path, model):
    supervisions = [
        supervision("a", "r", 0.0, 4.65, "A MAN"),
        supervision("b", "r", 4.65, 10.885, "SIR"),
        supervision("c", "r", 16.0, 9.0, "I EXIST"),  # the recording ends after 4.65 of these
    ]
    path = jsonl(tmp_path / "x_supervisions.jsonl.gz", supervisions)
    jsonl(tmp_path / "x_recordings.jsonl.gz", [recording("r", 20.65), recording("unused", 1.0)])
    assert run("--manifest", path, "--bpe-model", model)[0] == 0
    assert shapes.load(tmp_path / "out.pt")[:, 0].tolist() == [115, 271, 115]
    record = provenance(tmp_path)
    assert record["counts"]["cut_at_end_of_recording"] == record["counts"]["recordings_without_supervision"] == 1
    assert [file["name"] for file in record["source"]["files"]] == ["x_supervisions.jsonl.gz", "x_recordings.jsonl.gz"]

    code, _, err = run("--manifest", shutil.copy(path, tmp_path / "alone.jsonl.gz"), "--bpe-model", model)
    one_line_of_error(code, err, "alone.jsonl.gz", "--recordings")
    others = jsonl(tmp_path / "others.jsonl", [recording("other", 3.0)])
    code, _, err = run("--manifest", path, "--recordings", others, "--bpe-model", model)
    one_line_of_error(code, err, "entry 1 (a)", "recording r ")


def test_a_manifest_is_read_no_further_than_the_limit(run, tmp_path, model):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    path.write_text(path.read_text() + "this is no JSON\n")
    assert run("--manifest", path, "--bpe-model", model, "--limit", 2)[0] == 0
    assert len(shapes.load(tmp_path / "out.pt")) == 2
    one_line_of_error(*run("--manifest", path, "--bpe-model", model)[::2], "entry 4", "JSONDecodeError")


@pytest.mark.parametrize("flag", ["--manifest", "--recordings", "--features", "--bpe-model"])
def test_a_named_pipe_is_refused(run, tmp_path, model, flag):
    """Nobody writes to it: opening it would wait for ever."""
    os.mkfifo(tmp_path / "pipe")
    given = {"--manifest": jsonl(tmp_path / "cuts.jsonl", simple_cuts()), "--bpe-model": model, flag: tmp_path / "pipe"}
    code, _, err = run(*(word for pair in given.items() for word in pair))
    one_line_of_error(code, err, str(tmp_path / "pipe"), "not a file")


def test_a_kaldi_folder_of_named_pipes_is_refused(run, tmp_path, model):
    os.mkfifo(tmp_path / "wav.scp")
    one_line_of_error(*run("--kaldi-dir", tmp_path, "--bpe-model", model)[::2], "wav.scp", "not a file")


def test_a_command_that_a_manifest_names_is_not_run(run, tmp_path, model):
    entry = simple_cuts()[0]
    entry["recording"] = recording("c0", 4.65, source=f"touch {tmp_path}/ran", kind="command")
    assert run("--manifest", jsonl(tmp_path / "cuts.jsonl", [entry]), "--bpe-model", model)[0] == 0
    assert not (tmp_path / "ran").exists()


# ---- the model


def test_a_model_is_trained_where_none_is_given(run, tmp_path, lhotse):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    assert run("--manifest", path, "--bpe-vocab-size", 40)[0] == 0
    trained = tmp_path / "out.bpe.model"
    assert shapes.load(tmp_path / "out.pt")[:, 1].tolist() == [tokens(trained, text) for _, text in SECONDS_AND_TEXT]
    record = provenance(tmp_path)["bpe_model"]
    assert record == {
        "name": "out.bpe.model",
        "sha256": shapes.sha256(trained),
        "vocab_size": 40,
        "trained_here": "bpe",
    }

    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    assert [processor.id_to_piece(i) for i in range(3)] == ["<blk>", "<sos/eos>", "<unk>"]
    before = [file.read_bytes() for file in sorted(tmp_path.iterdir())]
    assert run("--manifest", path, "--bpe-vocab-size", 40)[0] == 0
    assert [file.read_bytes() for file in sorted(tmp_path.iterdir())] == before


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_text_too_small_for_the_vocabulary_says_the_largest_possible_size(run, tmp_path, lhotse, model_type):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    flags = ("--manifest", path, "--bpe-model-type", model_type, "--bpe-vocab-size")
    code, _, err = run(*flags, 5000)
    one_line_of_error(code, err, "--bpe-vocab-size 5000", "at most")
    largest = int(err.split()[-1])
    assert run(*flags, largest)[0] == 0
    assert run(*flags, largest + 1)[0] == 2
    one_line_of_error(*run(*flags, 4)[::2], "--bpe-vocab-size 4", "at least")


# ---- corpora


@pytest.fixture
def corpus(tmp_path):
    """LibriSpeech's layout around three real utterances."""
    for line in (DATA / "trans.txt").read_text().splitlines():
        speaker, chapter, _ = line.split()[0].split("-")
        folder = tmp_path / "LibriSpeech" / "test-clean" / speaker / chapter
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{speaker}-{chapter}.trans.txt", "a") as stream:
            stream.write(line + "\n")
        shutil.copy(DATA / f"{line.split()[0]}.flac", folder)
    return tmp_path / "LibriSpeech"


def expected_of_the_three():
    """T, text of each: 6.625, 16.715 and 4.825 s."""
    texts = [line.split(maxsplit=1)[1] for line in (DATA / "trans.txt").read_text().splitlines()]
    return [(shapes.subsampled(frames), text) for frames, text in zip((663, 1672, 483), texts)]


@needs_data
def test_straight_from_librispeech(tmp_path, corpus, model):
    flags = ("--corpus-dir", corpus, "--part", "test-clean", "--bpe-model", model)
    done = command(*flags, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = shapes.load(tmp_path / "shape_info.pt").tolist()
    assert rows == [[frames, tokens(model, text)] for frames, text in expected_of_the_three()]
    record = provenance(tmp_path, "shape_info")
    assert record["source"]["kind"] == "librispeech" and record["source"]["parts"] == ["test-clean"]


@needs_data
def test_what_is_missing_of_a_corpus_is_counted_or_named(run, tmp_path, corpus, model):
    flags = ("--corpus-dir", corpus, "--bpe-model", model)
    one_line_of_error(*run(*flags)[::2], "--part train-clean-100")
    one_line_of_error(*run(*flags, "--part", "dev-clean")[::2], "--part dev-clean", "test-clean")
    one_line_of_error(*run("--corpus-dir", tmp_path / "no", "--part", "x", "--bpe-model", model)[::2], "no such folder")
    next(corpus.rglob("1089*.flac")).unlink()
    assert run(*flags, "--part", "test-clean")[0] == 0
    assert len(shapes.load(tmp_path / "out.pt")) == 2
    assert provenance(tmp_path)["counts"]["warnings_of_lhotse"] == 1


@pytest.fixture
def kaldi(tmp_path):
    """A Kaldi data folder of the three utterances, whole recordings, no reco2dur."""
    folder = tmp_path / "kaldi"
    folder.mkdir()
    shutil.copy(DATA / "trans.txt", folder / "text")
    names = [line.split()[0] for line in (DATA / "trans.txt").read_text().splitlines()]
    (folder / "wav.scp").write_text("".join(f"{name} {DATA / name}.flac\n" for name in names))
    (folder / "utt2spk").write_text("".join(f"{name} {name.split('-')[0]}\n" for name in names))
    return folder


@needs_data
def test_straight_from_kaldi(tmp_path, kaldi, model):
    done = command("--kaldi-dir", kaldi, "--bpe-model", model, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows = shapes.load(tmp_path / "shape_info.pt").tolist()
    assert rows == [[frames, tokens(model, text)] for frames, text in expected_of_the_three()]
    files = provenance(tmp_path, "shape_info")["source"]["files"]
    assert [file["name"] for file in files] == ["wav.scp", "text", "utt2spk"]


@needs_data
def test_kaldi_segments_are_the_utterances(run, tmp_path, kaldi, model):
    first = (kaldi / "wav.scp").read_text().split()[0]
    (kaldi / "segments").write_text(f"a {first} 0.0 4.65\nb {first} 5.0 -1\n")
    (kaldi / "text").write_text("a A MAN\nb SIR\n")
    (kaldi / "utt2spk").write_text("a x\nb x\n")
    assert run("--kaldi-dir", kaldi, "--bpe-model", model)[0] == 0
    assert shapes.load(tmp_path / "out.pt")[:, 0].tolist() == [115, shapes.subsampled(163)]  # 6.625 - 5 s


@needs_data
def test_a_command_in_wav_scp_is_not_run(run, tmp_path, kaldi, model):
    name = (kaldi / "text").read_text().split()[0]
    (kaldi / "text").write_text(f"{name} SIR I EXIST\n")
    (kaldi / "utt2spk").write_text(f"{name} x\n")
    for source in (f"touch {tmp_path}/ran |", f"{tmp_path}/x;touch${{IFS}}{tmp_path}/ran;.sph"):
        (kaldi / "wav.scp").write_text(f"{name} {source}\n")
        one_line_of_error(*run("--kaldi-dir", kaldi, "--bpe-model", model)[::2], "wav.scp, line 1", "reco2dur")
    (kaldi / "reco2dur").write_text(f"{name} 4.65\n")
    assert run("--kaldi-dir", kaldi, "--bpe-model", model)[0] == 0
    assert shapes.load(tmp_path / "out.pt")[:, 0].tolist() == [115]
    assert not (tmp_path / "ran").exists()


@needs_data
def test_real_manifests(run, tmp_path, lhotse):
    manifest = DATA / "mini_supervisions.jsonl.gz"
    assert run("--manifest", manifest, "--bpe-vocab-size", 200, "--speed-perturbation", 0.9, 1.0, 1.1)[0] == 0
    rows = shapes.load(tmp_path / "out.pt")
    assert len(rows) == 3 * 38
    # utterances 1 to 3 of the file: 10.885, 4.65 and 4.715 s
    assert rows[38:41, 0].tolist() == [271, 115, 117]
    features = ("--features", DATA / "mini2_features.jsonl.gz", "--bpe-model", tmp_path / "out.bpe.model")
    assert run("--manifest", DATA / "mini2_supervisions.jsonl.gz", *features)[0] == 0
    assert shapes.load(tmp_path / "out.pt")[:, 0].tolist() == [496, 172, 241]  # of 1987, 693 and 969 frames


# ---- bad input, none of which may touch an output that is there


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["empty manifest"]),
        (b"not a manifest\n", ["entry 1", "JSONDecodeError"]),
        (b'{"about": "figures"}\n', ["entry 1"]),
        (b"5\n", ["entry 1"]),
        (b"[1, 2]", ["entry 1"]),
        (b"\x80\x02binary", ["damaged, or not a lhotse manifest"]),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03cut", ["bad.jsonl"]),
        (b"[" * 100000, ["bad.jsonl"]),
        (json.dumps(recording("r", 1.0)).encode(), ["a manifest of Recording entries", "--recordings"]),
        (json.dumps({**cut("c", 1.0), "duration": "long"}).encode(), ["entry 1 (c)"]),
        (json.dumps({**cut("c", 1.0), "duration": float("nan")}).encode(), ["entry 1 (c)", "a duration of nan s"]),
        (json.dumps({**cut("c", 1.0), "recording": None}).encode(), ["entry 1"]),
        (json.dumps(cut("c", 1.0, supervision("s", "c", 0, 1, "\ud800"))).encode(), ["entry 1 (c)", "surrogates"]),
        (
            json.dumps({key: value for key, value in cut("c", 1.0).items() if key != "recording"}).encode(),
            ["entry 1 (c)", "neither features nor a recording"],
        ),
    ],
)
def test_a_manifest_that_is_none(run, tmp_path, model, content, words):
    shapes.save(tmp_path / "out.pt", torch.tensor([[5, 1]]).numpy(), {})
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    (tmp_path / "bad.jsonl").write_bytes(content)
    one_line_of_error(*run("--manifest", tmp_path / "bad.jsonl", "--bpe-model", model)[::2], "bad.jsonl", *words)
    (tmp_path / "bad.jsonl").unlink()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_truncated_manifest(run, tmp_path, model):
    path = jsonl(tmp_path / "cuts.jsonl.gz", simple_cuts())
    path.write_bytes(path.read_bytes()[:-20])
    one_line_of_error(*run("--manifest", path, "--bpe-model", model)[::2], "cuts.jsonl.gz", "EOFError")


def test_bad_input_of_the_real_command(tmp_path, lhotse):
    (tmp_path / "text").write_text("hello\n")
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    done = command("--manifest", path, "--bpe-model", "text", cwd=tmp_path)
    one_line_of_error(done.returncode, done.stderr, "--bpe-model text", "not a SentencePiece model")
    done = command("--manifest", "text", "--bpe-vocab-size", 40, cwd=tmp_path)
    one_line_of_error(done.returncode, done.stderr, "text: entry 1")
    assert sorted(os.listdir(tmp_path)) == ["cuts.jsonl", "text"]


@pytest.mark.parametrize("content", [b"", b"hello", b"\x0a\x00", bytes(range(256)) * 20])
def test_a_model_that_is_none(run, tmp_path, lhotse, content):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    (tmp_path / "bpe.model").write_bytes(content)
    one_line_of_error(*run("--manifest", path, "--bpe-model", tmp_path / "bpe.model")[::2], "not a SentencePiece model")
    one_line_of_error(*run("--manifest", path, "--bpe-model", tmp_path / "no")[::2], "No such file")


def test_an_output_that_cannot_be_written(run, tmp_path, model):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    flags = ("--manifest", path, "--bpe-model", model)
    for output in (tmp_path / "no" / "out.pt", tmp_path, tmp_path / "out.json"):
        one_line_of_error(*run(*flags, output=output)[::2], f"--output {output}")


def test_an_input_is_never_replaced(run, tmp_path, lhotse, model):
    path = tmp_path / "cuts.json"
    lhotse.CutSet.from_dicts(simple_cuts()).to_file(path)
    before = path.read_bytes()
    for output in (tmp_path / "cuts.pt", path):
        one_line_of_error(*run("--manifest", path, "--bpe-model", model, output=output)[::2], "cuts.json")
    lines = jsonl(tmp_path / "lines.jsonl", simple_cuts())
    one_line_of_error(*run("--manifest", lines, "--bpe-model", model, output=lines)[::2], "would be replaced")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--manifest", "x"], ["--bpe-model", "--bpe-vocab-size"]),
        (["--manifest", "x", "--bpe-model", "m", "--bpe-vocab-size", "500"], ["either"]),
        (["--manifest", "x", "--bpe-model", "m", "--seed", "1"], ["--seed does not go with --manifest"]),
        (["--from-figures", "--bpe-model", "m"], ["--bpe-model does not go with --from-figures"]),
        (["--kaldi-dir", "x", "--bpe-model", "m", "--part", "p"], ["--part does not go with --kaldi-dir"]),
    ],
)
def test_flags_that_do_not_go_together(run, flags, words):
    one_line_of_error(*run(*flags)[::2], *words)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--from-figures", "--manifest", "x"],
        ["--manifest", "x", "--bpe-model", "m", "--subsampling-factor", "3"],
        ["--manifest", "x", "--bpe-model", "m", "--speed-perturbation", "0"],
        ["--manifest", "x", "--bpe-model", "m", "--frame-shift", "nan"],
        ["--manifest", "x", "--bpe-model", "m", "--limit", "0"],
    ],
)
def test_bad_flags(run, capsys, flags):
    with pytest.raises(SystemExit) as stopped:
        run(*flags)
    one_line_of_error(stopped.value.code, capsys.readouterr().err)


# ---- for one's own data


def perturbed_cuts(lhotse):
    cuts = lhotse.CutSet.from_dicts(simple_cuts())
    return lhotse.CutSet.from_cuts([*cuts, *cuts.perturb_speed(0.9), *cuts.perturb_speed(1.1)])


def test_what_is_perturbed_is_not_perturbed_again_unless_told(run, tmp_path, lhotse, model):
    """Make cuts as icefall makes its training cuts."""
    perturbed_cuts(lhotse).to_file(tmp_path / "cuts.jsonl")
    flags = ("--manifest", tmp_path / "cuts.jsonl", "--bpe-model", model)
    speeds = ("--speed-perturbation", 0.9, 1.0, 1.1)
    code, _, err = run(*flags, *speeds)
    one_line_of_error(code, err, "entry 4", "_sp0.9", "icefall", "--perturb-again")
    assert not (tmp_path / "out.pt").exists()
    assert run(*flags)[0] == 0 and len(shapes.load(tmp_path / "out.pt")) == 9
    assert shapes.load(tmp_path / "out.pt")[[0, 3, 6], 0].tolist() == [115, 128, 105]
    assert run(*flags, *speeds, "--perturb-again")[0] == 0 and len(shapes.load(tmp_path / "out.pt")) == 27


def test_the_speed_is_in_the_recording_where_ids_do_not_say(run, tmp_path, lhotse, model):
    entries = perturbed_cuts(lhotse).to_dicts()
    path = jsonl(tmp_path / "cuts.jsonl", [{**entry, "id": f"cut{at}"} for at, entry in enumerate(entries)])
    code, _, err = run("--manifest", path, "--bpe-model", model, "--speed-perturbation", 0.9, 1.0)
    one_line_of_error(code, err, "entry 4", "0.9")


def test_durations_are_of_each_speed(run, tmp_path, model):
    """4.65, 10.885 and 16 s; at 0.5 twice as long."""
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    flags = ("--manifest", path, "--bpe-model", model)
    assert run(*flags, "--min-duration", 4.65, "--max-duration", 10.885)[0] == 0
    assert shapes.load(tmp_path / "out.pt")[:, 0].tolist() == [115, 271]
    assert provenance(tmp_path)["counts"]["rows_above_max_duration"] == 1
    assert run(*flags, "--max-duration", 16, "--speed-perturbation", 1, 0.5)[0] == 0
    assert len(shapes.load(tmp_path / "out.pt")) == 4
    assert provenance(tmp_path)["options"]["max_duration"] == 16
    one_line_of_error(*run(*flags, "--min-duration", 100)[::2], "no utterance is left", "--min-duration")
    one_line_of_error(*run(*flags, "--min-duration", 9, "--max-duration", 3)[::2], "--min-duration")


def test_it_ends_with_what_the_shapes_are_like_and_what_to_type_next(run, tmp_path):
    code, out, _ = run("--from-figures")
    rows = shapes.load(tmp_path / "out.pt")
    median = int(sorted(rows[:, 0])[len(rows) // 2])
    assert code == 0 and f"T: median {median}" in out
    assert out.splitlines()[-1] == f"next: ./benchmark_all.py --shape-file {tmp_path / 'out.pt'}"
    padded = out.partition("padding of batches of 30: ")[2].partition("%")[0]
    batches = rows[: len(rows) // 30 * 30].reshape(-1, 30, 2).astype("int64")
    useful = (batches[:, :, 0] * (batches[:, :, 1] + 1)).sum()
    cells = 30 * (batches[:, :, 0].max(1) * (batches[:, :, 1].max(1) + 1)).sum()
    assert abs(int(padded) - 100 * (1 - useful / cells)) < 1
