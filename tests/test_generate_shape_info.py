"""generate_shape_info.py, on real manifests and audio where the data folder is there, on made ones elsewhere: ``main``
in this process (importing lhotse takes seconds), and one of each source by the real command."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import sys

import pytest
import rnnt_bench.cli.shapes
import rnnt_bench.command
from rnnt_bench.data import batching, generation, shapes

from commands import ROOT, SHARED
from commands import run as run_script

torch = pytest.importorskip("torch")
DATA = SHARED / "librispeech"
SECONDS_AND_TEXT = [
    (4.65, "A MAN SAID TO THE UNIVERSE"),
    (10.885, "SIR I EXIST"),
    (16.0, "HOWEVER REPLIED THE UNIVERSE"),
]


@pytest.fixture(scope="module")
def lhotse():
    pytest.importorskip("sentencepiece")
    return pytest.importorskip("lhotse")


@pytest.fixture(scope="module")
def model(lhotse, tmp_path_factory):
    """A BPE model of 40 tokens."""
    path = tmp_path_factory.mktemp("model") / "bpe.model"
    path.write_bytes(generation.train([text for _, text in SECONDS_AND_TEXT], 40))
    return path


@pytest.fixture
def run(tmp_path, capsys):
    """Runs ``main`` with `arguments` and --output tmp_path/out.pt; gives exit code, stdout, stderr."""

    def call(*arguments, output=tmp_path / "out.pt"):
        words = [*map(str, arguments), "--output", str(output)]
        code = rnnt_bench.command.run("generate_shape_info.py", words, lambda: rnnt_bench.cli.shapes)
        return (code, *capsys.readouterr())

    return call


def command(*arguments, cwd, **options):
    return run_script("generate_shape_info.py", *arguments, cwd=cwd, timeout=120, **options)


def one_line_of_error(code, err, *words):
    assert code == 2 and err.startswith("generate_shape_info.py: error: ") and err.count("\n") == 1, err
    assert all(word in err for word in words), err


def tokens(model, text):
    return len(pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=str(model)).encode(text))


def recording(name, seconds, source="missing.flac", kind="file"):
    samples = {"sampling_rate": 16000, "num_samples": round(seconds * 16000), "duration": seconds}
    return {"id": name, "sources": [{"type": kind, "channels": [0], "source": source}], **samples}


def supervision(name, recording_id, start, seconds, text):
    return {"id": name, "recording_id": recording_id, "start": start, "duration": seconds, "channel": 0, "text": text}


def cut(name, seconds, *supervisions, **fields):
    span = {"id": name, "start": 0.0, "duration": seconds, "channel": 0, "recording": recording(name, seconds)}
    return {**span, "supervisions": list(supervisions), "type": "MonoCut", **fields}


def simple_cuts():
    return [
        cut(f"c{i}", seconds, supervision(f"s{i}", f"c{i}", 0.0, seconds, text))
        for i, (seconds, text) in enumerate(SECONDS_AND_TEXT)
    ]


def jsonl(path, entries):
    text = "".join(json.dumps(entry) + "\n" for entry in entries)
    (gzip.open(path, "wt") if path.suffix == ".gz" else open(path, "w")).write(text)
    return path


def provenance(tmp_path):
    return json.loads((tmp_path / "out.json").read_text())


# ---- the figures


def test_the_committed_shape_file_is_regenerated_bit_for_bit(tmp_path):
    done = command("--from-figures", "--output", "shape_info.pt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "padding of batches of 30: 50% of the cells in file order, 26% sorted" in done.stdout
    made, committed = tmp_path / "shape_info.pt", ROOT / "shape_info.pt"
    assert torch.equal(torch.load(made, weights_only=True), torch.load(committed, weights_only=True))
    described = json.loads((ROOT / "shape_info.json").read_text())
    assert described["shape_file"]["sha256"] == shapes.sha256(committed)
    if torch.__version__.split("+")[0] == described["versions"]["torch"]:
        assert made.read_bytes() == committed.read_bytes()
        assert made.with_suffix(".json").read_bytes() == committed.with_suffix(".json").read_bytes()


def test_the_committed_feature_frames_are_regenerated_and_make_the_published_batches(tmp_path):
    """icefall's sorted batches of 30,000 frames: 3,733 of 14, 15, 15 ... 150 utterances."""
    done = command("--from-figures", "--features", "--seed", "1097", "--output", "shape_info.pt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    rows, frames = shapes.load(tmp_path / "shape_info.pt"), shapes.load(ROOT / "data" / "shape_info.features.pt")
    assert (shapes.load(tmp_path / "shape_info.features.pt") == frames).all()
    assert (shapes.subsampled(frames[:, 0]) == rows[:, 0]).all() and (frames[:, 1] == rows[:, 1]).all()
    batches = batching.max_frames(frames, 30000)
    sizes = [len(batches[index]) for index in (0, 1, 2, len(batches) - 1)]
    assert len(batches) == 3733 and sizes == [14, 15, 15, 150]


def test_without_the_packages_it_says_what_to_do(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "lhotse", None)
    code, _, err = run("--manifest", "cuts.jsonl", "--bpe-model", "x")
    one_line_of_error(code, err, "import of lhotse halted", "make setup", ".venv/main/bin/python")


# ---- manifests


@pytest.mark.parametrize("name", ["cuts.jsonl.gz", "cuts.json"])
def test_cuts_in_every_format(run, tmp_path, lhotse, model, name):
    lhotse.CutSet.from_dicts(simple_cuts()).to_file(tmp_path / name)
    code, out, err = run("--manifest", tmp_path / name, "--bpe-model", model)
    assert (code, err) == (0, "")
    # 74,400 samples of 16 kHz: 465 frames, 232, 115; 174,160: 1089, 544, 271; 256,000: 1600, 799, 399
    expected = [[frames, tokens(model, text)] for frames, (_, text) in zip((115, 271, 399), SECONDS_AND_TEXT)]
    assert shapes.load(tmp_path / "out.pt").tolist() == expected
    assert "3 utterances" in out and "T: 115 to 399" in out
    record = provenance(tmp_path)
    assert record["source"] == {"kind": "manifest", "files": [{"name": name, "sha256": shapes.sha256(tmp_path / name)}]}
    assert record["bpe_model"]["sha256"] == shapes.sha256(model)
    assert record["counts"]["rows"] == 3


def test_feature_frames_are_written_too(run, tmp_path, model):
    seconds = {"a": 27.25, "b": 0.06, "c": 14.11}
    cuts = [cut(name, duration, supervision("s", name, 0, duration, "SIR")) for name, duration in seconds.items()]
    path = jsonl(tmp_path / "cuts.jsonl", cuts)
    assert run("--manifest", path, "--bpe-model", model, "--features")[0] == 0
    rows, of_features = (shapes.load(tmp_path / name) for name in ("out.pt", "out.features.pt"))
    assert rows[:, 0].tolist() == [680, 352] and of_features[:, 0].tolist() == [2725, 1411]
    assert rows[:, 1].tolist() == of_features[:, 1].tolist()
    assert shapes.subsampling(tmp_path / "out.features.pt") == 1


def test_frames_of_features_come_first_and_other_speeds_keep_their_shift(run, tmp_path, model):
    features = {"type": "fbank", "num_frames": 800, "num_features": 80, "frame_shift": 0.02, "sampling_rate": 16000}
    features.update(start=0.0, duration=16.0, recording_id="c", channels=0)
    features.update(storage_type="lilcom_chunky", storage_path="none", storage_key="0")
    path = jsonl(tmp_path / "cuts.jsonl", [cut("c", 16.0, supervision("s", "c", 0, 16.0, "SIR"), features=features)])
    flags = ("--frame-shift", 0.5, "--subsampling-factor", 1, "--speed-perturbation", 1, 0.5)
    assert run("--manifest", path, "--bpe-model", model, *flags)[0] == 0
    assert shapes.load(tmp_path / "out.pt")[:, 0].tolist() == [800, 1600]  # of 20 ms
    record = provenance(tmp_path)
    assert record["counts"]["frames_from_features"] == 1 and record["options"]["subsampling_factor"] == 1


def test_cuts_without_text_or_too_short_are_counted(run, tmp_path, model):
    entries = [
        *simple_cuts()[:1],
        cut("none", 4.65, recording=recording("none", 4.65, source=f"touch {tmp_path}/ran", kind="command")),
        cut("two", 4.65, supervision("b", "two", 2, 1, " SIR I EXIST"), supervision("a", "two", 0.5, 1, "A MAN ")),
        cut("blank", 4.65, supervision("a", "blank", 0, 1, "  ")),
        cut("null", 4.65, {key: value for key, value in supervision("a", "null", 0, 1, "").items() if key != "text"}),
        cut("short", 0.06, supervision("a", "short", 0, 0.06, "A")),  # 6 frames: none after subsampling
    ]
    path = jsonl(tmp_path / "cuts.jsonl", entries)
    code, out, _ = run("--manifest", path, "--bpe-model", model)
    assert code == 0
    joined = [115, tokens(model, "A MAN SIR I EXIST")]  # in time order
    assert shapes.load(tmp_path / "out.pt")[1:].tolist() == [joined] and not (tmp_path / "ran").exists()
    counts = provenance(tmp_path)["counts"]
    assert (counts["utterances_read"], counts["without_supervision"], counts["with_empty_text"]) == (6, 1, 2)
    assert (counts["left_out_without_text"], counts["rows_left_out_as_too_short"], counts["rows"]) == (3, 1, 2)
    assert "left out without text: 3" in out
    assert run("--manifest", path, "--bpe-model", model, "--keep-empty")[0] == 0
    assert shapes.load(tmp_path / "out.pt")[1:].tolist() == [[115, 0], joined, [115, 0], [115, 0]]
    assert provenance(tmp_path)["counts"]["kept_without_text"] == 3


def test_a_model_that_does_not_know_the_letters_is_warned_of(run, tmp_path, lhotse, model):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    assert (
        run("--manifest", path, "--bpe-model", model)[2] == "" and provenance(tmp_path)["counts"]["unknown_tokens"] == 0
    )
    lower = [cut("a", 4.65, supervision("a", "a", 0, 4.65, "a man said to the universe"))]
    code, out, err = run("--manifest", jsonl(tmp_path / "lower.jsonl", lower), "--bpe-model", model)
    counts = provenance(tmp_path)["counts"]
    assert code == 0 and counts["unknown_tokens"] >= 6 and counts["tokens"] == shapes.load(tmp_path / "out.pt")[0, 1]
    assert err.startswith("warning: ") and "<unk>" in err and "letter case" in err and err.count("\n") == 1


def test_speed_perturbation_is_lhotse_s(run, tmp_path, lhotse, model):
    cuts = lhotse.CutSet.from_dicts(simple_cuts())
    mixed = cuts["c0"].append(cuts["c1"])
    everything = lhotse.CutSet.from_cuts([*cuts, mixed, cuts["c1"].truncate(offset=1.23, duration=3.21)])
    everything.to_file(tmp_path / "cuts.jsonl")
    assert run("--manifest", tmp_path / "cuts.jsonl", "--bpe-model", model, "--speed-perturbation", 0.9, 1, 1.1)[0] == 0
    rows = shapes.load(tmp_path / "out.pt")
    at_speeds = [each if speed == 1 else each.perturb_speed(speed) for speed in (0.9, 1, 1.1) for each in everything]
    frames = [lhotse.utils.compute_num_frames(each.duration, 0.01, 16000) for each in at_speeds]
    assert rows[:, 0].tolist() == list(map(shapes.subsampled, frames))
    assert rows[[0, 5, 10], 0].tolist() == [128, 115, 105]  # 74,400 samples are 82,667 at 0.9 and 67,636 at 1.1
    assert rows[:5, 1].tolist() == rows[5:10, 1].tolist() == rows[10:, 1].tolist()


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
    assert record["counts"]["cut_at_end_of_recording"] == 1
    assert [file["name"] for file in record["source"]["files"]] == ["x_supervisions.jsonl.gz", "x_recordings.jsonl.gz"]

    alone = shutil.copy(path, tmp_path / "alone.jsonl.gz")
    one_line_of_error(*run("--manifest", alone, "--bpe-model", model)[::2], "alone.jsonl.gz", "--recordings")
    others = jsonl(tmp_path / "others.jsonl", [recording("other", 3.0)])
    with_others = run("--manifest", path, "--recordings", others, "--bpe-model", model)
    one_line_of_error(*with_others[::2], "entry 1 (a)", "recording r ")


def test_a_manifest_is_read_no_further_than_the_limit(run, tmp_path, model):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    path.write_text(path.read_text() + "this is no JSON\n")
    assert run("--manifest", path, "--bpe-model", model, "--limit", 2)[0] == 0
    assert len(shapes.load(tmp_path / "out.pt")) == 2
    one_line_of_error(*run("--manifest", path, "--bpe-model", model)[::2], "entry 4", "JSONDecodeError")


# ---- the model


def test_a_model_is_trained_where_none_is_given(run, tmp_path, lhotse):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    assert run("--manifest", path, "--bpe-vocab-size", 40)[0] == 0
    trained = tmp_path / "out.bpe.model"
    assert shapes.load(tmp_path / "out.pt")[:, 1].tolist() == [tokens(trained, text) for _, text in SECONDS_AND_TEXT]
    known = {"name": "out.bpe.model", "sha256": shapes.sha256(trained), "vocab_size": 40}
    assert provenance(tmp_path)["bpe_model"] == {**known, "trained_here": "bpe"}
    sentencepiece = pytest.importorskip("sentencepiece")
    processor = sentencepiece.SentencePieceProcessor(model_file=str(trained))
    assert [processor.id_to_piece(i) for i in range(3)] == ["<blk>", "<sos/eos>", "<unk>"]
    one_line_of_error(*run("--manifest", path, "--bpe-vocab-size", 5000)[::2], "--bpe-vocab-size 5000", "too high")
    one_line_of_error(*run("--manifest", path, "--bpe-vocab-size", 4)[::2], "--bpe-vocab-size 4", "required_chars")
    before = [file.read_bytes() for file in sorted(tmp_path.iterdir())]
    assert run("--manifest", path, "--bpe-vocab-size", 40)[0] == 0
    assert [file.read_bytes() for file in sorted(tmp_path.iterdir())] == before


# ---- corpora


@pytest.mark.skipif(not DATA.is_dir(), reason="no folder with LibriSpeech samples beside the checkout")
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
        (b'{"about": "figures"}\n', ["entry 1"]),
        (b"[1, 2]", ["entry 1"]),
        (b"\x80\x02binary", ["damaged, or not a lhotse manifest"]),
        (gzip.compress(json.dumps(cut("c", 1.0)).encode() * 99)[:-20], ["bad.jsonl", "EOFError"]),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03cut", ["bad.jsonl"]),
        (b"[" * 100000, ["bad.jsonl"]),
        (json.dumps(recording("r", 1.0)).encode(), ["a manifest of Recording entries", "--recordings"]),
        (json.dumps({**cut("c", 1.0), "duration": "long"}).encode(), ["entry 1 (c)"]),
        (json.dumps({**cut("c", 1.0), "duration": float("nan")}).encode(), ["entry 1 (c)", "a duration of nan s"]),
        (json.dumps(cut("c", 1.0, supervision("s", "c", 0, 1, "\ud800"))).encode(), ["entry 1 (c)", "surrogates"]),
        (
            json.dumps({key: value for key, value in cut("c", 1.0).items() if key != "recording"}).encode(),
            ["entry 1 (c)", "neither features nor a recording"],
        ),
    ],
)
def test_a_manifest_that_is_none(run, tmp_path, model, content, words):
    (tmp_path / "bad.jsonl").write_bytes(content)
    (tmp_path / "out.pt").write_bytes(b"as before")
    one_line_of_error(*run("--manifest", tmp_path / "bad.jsonl", "--bpe-model", model)[::2], "bad.jsonl", *words)
    assert (
        sorted(os.listdir(tmp_path)) == ["bad.jsonl", "out.pt"] and (tmp_path / "out.pt").read_bytes() == b"as before"
    )


def test_a_model_that_is_none(tmp_path, lhotse):
    """sentencepiece takes some such files for a model without pieces, and ends the process at others."""
    (tmp_path / "text").write_text("hello\n")
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    done = command("--manifest", path, "--bpe-model", "text", cwd=tmp_path)
    one_line_of_error(done.returncode, done.stderr, "--bpe-model text", "not a SentencePiece model")
    assert sorted(os.listdir(tmp_path)) == ["cuts.jsonl", "text"]


@pytest.mark.parametrize("flags", [[], ["--features"]], ids=str)
@pytest.mark.parametrize("folder", [".", "/"])
def test_an_output_that_is_a_folder(folder, flags, run):
    one_line_of_error(*run("--from-figures", *flags, output=folder)[::2], "a folder")


def test_an_output_that_would_replace_an_input(run, tmp_path, model):
    path = jsonl(tmp_path / "cuts.jsonl", simple_cuts())
    before = path.read_bytes()
    one_line_of_error(*run("--manifest", path, "--bpe-model", model, output=path)[::2], "would be replaced")
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["out.bpe.model", "out.features.pt"])
def test_a_file_of_the_user_s_beside_the_output_is_kept(name, run, tmp_path):
    """A model and feature frames of an earlier run are made anew; those that it did not make stay as they are."""
    flags = ("--manifest", jsonl(tmp_path / "cuts.jsonl", simple_cuts()), "--bpe-vocab-size", 40, "--features")
    assert run(*flags)[0] == 0 == run(*flags)[0]
    made = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(b"mine")
    one_line_of_error(*run(*flags)[::2], name, "would be replaced")
    assert (tmp_path / name).read_bytes() == b"mine"
    (tmp_path / name).unlink()
    assert run(*flags)[0] == 0 and (tmp_path / name).read_bytes() == made


@pytest.mark.parametrize(
    "flags, words",
    {
        "--manifest x": "give either --bpe-model",
        "--manifest x --bpe-model m --bpe-vocab-size 500": "give either --bpe-model",
        "--manifest x --bpe-model m --seed 1": "--seed does not go with --manifest",
        "--from-figures --bpe-model m": "--bpe-model does not go with --from-figures",
    }.items(),
)
def test_flags_that_do_not_go_together(run, flags, words):
    one_line_of_error(*run(*flags.split())[::2], words)


# ---- for one's own data


def test_what_is_perturbed_is_not_perturbed_again_unless_told(run, tmp_path, lhotse, model):
    """Make cuts as icefall makes its training cuts."""
    cuts = lhotse.CutSet.from_dicts(simple_cuts())
    every = [*cuts, *cuts.perturb_speed(0.9), *cuts.perturb_speed(1.1)]
    lhotse.CutSet.from_cuts(every).to_file(tmp_path / "cuts.jsonl")
    flags = ("--manifest", tmp_path / "cuts.jsonl", "--bpe-model", model)
    speeds = ("--speed-perturbation", 0.9, 1.0, 1.1)
    one_line_of_error(*run(*flags, *speeds)[::2], "entry 4", "_sp0.9", "icefall", "--perturb-again")
    assert not (tmp_path / "out.pt").exists()
    assert run(*flags)[0] == 0 and len(shapes.load(tmp_path / "out.pt")) == 9
    assert shapes.load(tmp_path / "out.pt")[[0, 3, 6], 0].tolist() == [115, 128, 105]
    assert run(*flags, *speeds, "--perturb-again")[0] == 0 and len(shapes.load(tmp_path / "out.pt")) == 27


def test_perturbed_audio_is_found_in_tracks_and_recordings_not_by_ids_alone(run, tmp_path, lhotse, model):
    cuts = lhotse.CutSet.from_dicts(simple_cuts())
    faster = cuts["c0"].perturb_speed(0.9)
    padded, appended = faster.pad(duration=8.0), cuts["c1"].append(faster)
    renamed = [{**each.to_dict(), "id": f"cut{at}"} for at, each in enumerate((faster, padded, appended))]
    flags = ("--bpe-model", model, "--speed-perturbation", 0.9, 1.0)
    for entry in renamed:
        path = jsonl(tmp_path / "cuts.jsonl", [entry])
        one_line_of_error(*run("--manifest", path, *flags)[::2], "entry 1", "speed 0.9")
    jsonl(tmp_path / "x_recordings.jsonl", [faster.recording.to_dict()])
    path = jsonl(tmp_path / "x_supervisions.jsonl", [supervision("s", faster.recording.id, 0.0, 4.0, "SIR")])
    one_line_of_error(*run("--manifest", path, *flags)[::2], "entry 1", "speed 0.9")
    path = jsonl(tmp_path / "cuts.jsonl", [{**simple_cuts()[0], "id": "talk_es_sp12"}])
    assert run("--manifest", path, *flags)[0] == 0


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
