"""YAML of configurations and arguments: plain data, or one clear line within a moment."""

from __future__ import annotations

import pytest
from commands import assert_user_error, run

from common.core import plain_yaml
from common.core.errors import UserError
from common.tools import configuration
from common.tools.inference import command as inference
from common.tools.inference import pipeline_command as pipeline

pytest.importorskip("yaml")


def pipeline_of(path):
    return pipeline.configured(path, {})


def inference_of(path):
    return inference.configured(path, [])


def unfolding(levels, fan, of="[{}]"):
    """Return a document of a few hundred bytes whose aliases stand for fan ** levels values."""
    lines = ["a0: &a0 {x: 1}"]
    for level in range(1, levels + 1):
        lines.append(f"a{level}: &a{level} " + of.format(", ".join([f"*a{level - 1}"] * fan)))
    return "\n".join(lines) + "\n"


WRONG = {
    "a: 1\ngeneral: !!bool maybe\n": ["line 2", "maybe", "bool"],
    'general: !!int ""\n': ["line 1", "int"],
    'general: !!float ""\n': ["float"],
    "general: !!timestamp x\n": ["timestamp"],
    "a:\n  - !!int abc\n": ["line 2", "abc"],
    'general: {a: 1, "\\ud800": 2}\n': ["line 1", "half of a character"],
    "a: 2026-13-41\n": ["line 1", "timestamp"],
    "a: 0x" + "f" * 10**4 + "\n": ["too large"],
    "a: &x [*x]\n": ["part of itself"],
    "a: &x {b: {c: *x}}\n": ["part of itself"],
    unfolding(10, 9): ["more than", "aliases"],
    unfolding(10, 9, "{{<<: [{}]}}"): ["more than", "aliases"],
    unfolding(25, 2): ["more than", "aliases"],
    "? [a, b]\n: 1\n": ["unhashable"],
    "a: !!python/object/apply:os.system ['true']\n": ["plain data"],
}


@pytest.mark.parametrize("text", WRONG, ids=range(len(WRONG)))
def test_it_is_refused_in_a_line(text):
    with pytest.raises(UserError) as raised:
        plain_yaml.parsed(text, "x.yaml")
    message = str(raised.value)
    assert message.startswith("x.yaml") and "\n" not in message and len(message) < 1000
    assert all(word in message for word in WRONG[text])


def test_aliases_that_unfold_to_little_are_taken():
    assert plain_yaml.parsed("a: &x [1, 2]\nb: *x\nc: {<<: {d: *x}}\n", "x") == {
        "a": [1, 2],
        "b": [1, 2],
        "c": {"d": [1, 2]},
    }
    assert plain_yaml.parsed("", "x") is None


@pytest.mark.parametrize("value", [[list(range(1000))] * 1000, {"x" * 10**6: 1}])
def test_a_message_does_not_hold_a_long_value(value):
    for kind in (pipeline.Whole, pipeline.Stage):
        for key in configuration.keys_of(kind):
            with pytest.raises(UserError) as raised:
                configuration.converted({"name": 1, key: value}, kind, "x")
            assert len(str(raised.value)) < 700


def test_a_key_or_choice_like_a_known_one_is_named():
    for values, words in (
        ({"dataset_typ": "made"}, ["'dataset_typ'", "did you mean 'dataset_type'?", "made_seconds"]),
        ({"x" * 10**6: 1}, ["unknown key", "xxx"]),
        ({"dataset_type": "x" * 10**6}, ["dataset_type", "made, raw, npy"]),
        ({"dataset_type": "rav"}, ["dataset_type", "'rav'", "did you mean 'raw'?"]),
        ({"made_seconds": [1, "many"]}, ["made_seconds[1]", "a whole number or a number", "'many'"]),
        ({"target_sr": 0}, ["target_sr", "at least 1", "0"]),
        ({"repeats": True}, ["repeats", "a whole number", "True"]),
    ):
        with pytest.raises(UserError) as raised:
            configuration.converted(values, pipeline.General, "x.yaml")
        assert str(raised.value).startswith("x.yaml: ") and all(word in str(raised.value) for word in words)
        assert len(str(raised.value)) < 700


COMMANDS = {
    "profile_inference.py": [],
    "pipeline_metrics.py": ["--config"],
    "count_flops.py": ["torch.nn:Linear", "--input-shape", "1x2", "--args"],
    "profile_model.py": ["--config"],
}


@pytest.mark.parametrize("script", COMMANDS)
@pytest.mark.parametrize("text", ["general: !!bool maybe\n", unfolding(10, 9)], ids=["tag", "aliases"])
def test_a_command_ends_in_a_line(script, text, tmp_path):
    (tmp_path / "x.yaml").write_text(text)
    assert_user_error(run(script, *COMMANDS[script], tmp_path / "x.yaml", timeout=60), "x.yaml")


#: What stands where something of another type is wanted.
VALUES = ["[a]", "{1: 1}", "2026-01-01", "-5", "!!binary aGk=", ".nan"]
WHOLE, STAGE = configuration.keys_of(pipeline.Whole), configuration.keys_of(pipeline.Stage)
PIPELINES = [
    *("general: {KEY: VALUE}\nstage1: {factory: 'x:y'}\n".replace("KEY", key) for key in WHOLE),
    *(f"stage1: {{factory: 'x:y', {key}: VALUE}}\n" for key in STAGE if key != "factory"),
    *("stage1: {factory: VALUE}\n", "stage1: VALUE\n", "general: VALUE\nstage1: {factory: 'x:y'}\n"),
    *("stage999999999999: {}\n", "stage" + "9" * 5000 + ": VALUE\n", "stage1000: {}\n"),
]
MODELS = [
    *(f"pretrained_model: {{{key}: VALUE}}\n" for key in configuration.keys_of(inference.Model)),
    *(f"profiling_dimensions: {{{key}: VALUE}}\n" for key in configuration.keys_of(inference.Dimensions)),
    *("pretrained_model: VALUE\n", "VALUE\n"),
]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("read, texts", [(pipeline_of, PIPELINES), (inference_of, MODELS)])
def test_a_value_of_another_type_is_one_line(read, texts, value, tmp_path):
    path = tmp_path / "x.yaml"
    for text in texts:
        path.write_text(text.replace("VALUE", value))
        try:
            read(path)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 2000
