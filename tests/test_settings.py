"""A setting is declared in one place, from which its flag, default, record, comparison and heading follow."""

from __future__ import annotations

import argparse
import ast
from dataclasses import fields, make_dataclass
from typing import Optional

import msgspec
import pytest
from commands import ROOT

from common.cli import flags
from common.core import flag_types, grid, presets, settings
from common.core.errors import UserError
from common.core.setting import declared, setting
from common.records import schema

GRAIN = setting(
    3,
    settings.BATCHES,
    "grains of each batch",
    short="grains",
    type=flag_types.whole(1),
    metavar="G",
    presets={"quick": 1, "chars": 2},
    label="grain",
    heading="{} grains",
    heading_of_default=False,
)


@pytest.fixture
def with_grain(monkeypatch):
    """The settings with one more, declared as any other."""
    extended = make_dataclass("More", [("grain", Optional[int], GRAIN)], bases=(settings.Settings,), frozen=True)
    known = declared(fields(extended))
    monkeypatch.setattr(settings, "Settings", extended)
    monkeypatch.setitem(settings.SETTINGS, "grain", known["grain"])
    monkeypatch.setitem(settings.SWEEPABLE, "grain", known["grain"])


def test_one_field_makes_a_setting(with_grain):
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    assert parser.parse_args([]).grain is None and parser.parse_args(["--grain", "7"]).grain == 7
    assert "grains of each batch. Default: 3 (1 with quick; 2 with chars)" in " ".join(parser.format_help().split())
    assert settings.resolve({}, "cpu").to_json()["grain"] == 3
    assert settings.resolve({"preset": "quick"}, "cpu").grain == 1
    assert settings.resolve({"preset": "quick,chars"}, "cpu").grain == 2
    assert settings.resolve({"preset": "quick", "grain": 9}, "cpu").grain == 9
    assert grid.axis("grain=1,2") == ("grain", (1, 2))
    known = settings.in_rows({"grain": 5}, "cpu", "exact")
    assert known["grain"] == 5 and "5 grains" in settings.heading(known)
    assert "3 grains" not in settings.heading({"grain": 3}) and settings.described({"grain": 5}, (settings.BATCHES,))


@pytest.mark.parametrize("value, fits", [(3, True), (None, True), (0, False), ("many", False)])
def test_records_are_checked_by_the_declaration(value, fits):
    kind = schema._type_of(declared(fields(make_dataclass("Few", [("grain", int, GRAIN)])))["grain"], Optional[int])
    if fits:
        assert msgspec.convert(value, kind) == value
    else:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(value, kind)


def test_no_other_list_names_the_settings():
    """Lists of other modules name the few that they use."""
    for path in sorted((ROOT / "common").rglob("*.py")):
        if path.name == "settings.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Tuple, ast.List, ast.Set, ast.Dict)):
                parts = [key for key in node.keys if key] if isinstance(node, ast.Dict) else node.elts
                words = {leaf.value for part in parts for leaf in ast.walk(part) if isinstance(leaf, ast.Constant)}
                named = {word for word in words if isinstance(word, str) and word in settings.SETTINGS}
                assert len(named) < 12, f"{path.name}:{node.lineno} lists settings: {sorted(named)}"


def test_every_setting_has_a_flag_and_a_help_with_its_default():
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    actions = {action.dest: action for action in parser._actions}
    for key, declaration in settings.SETTINGS.items():
        assert actions[key].option_strings == [declaration.flag]
        assert actions[key].help == declaration.help_text() and "Default: " in actions[key].help


def test_the_full_size_has_an_older_name():
    assert presets.parts("seed") == presets.parts("full") == ("full", "bpe500")
    assert settings.resolve({"preset": "seed,chars"}, "cpu") == settings.resolve({"preset": "full,chars"}, "cpu")


@pytest.mark.parametrize(
    "given, words",
    [
        ({"tf32": True}, ["--tf32", "CUDA"]),
        ({"l2": "warm"}, ["--l2", "CUDA"]),
        ({"memory_snapshot": True}, ["--memory-snapshot", "CUDA"]),
        ({"memory_limit": "1GB"}, ["--memory-limit", "--find-largest batch-size or max-frames"]),
        ({"find_largest": "batch-size", "passes": ("timing",)}, ["--passes", "--find-largest"]),
        ({"find_largest": "batch-size", "sort_utterance": True}, ["--sort-utterance false"]),
    ],
)
def test_a_setting_without_effect_is_refused(given, words):
    with pytest.raises(UserError) as refused:
        settings.resolve(given, "cpu")
    assert all(word in str(refused.value) for word in words) and "remove" in str(refused.value)


def test_a_setting_of_cuda_is_taken_there():
    resolved = settings.resolve({"tf32": True, "l2": "warm", "memory_snapshot": True}, "cuda:1")
    assert resolved.tf32 and resolved.l2 == "warm" and resolved.memory_snapshot
    assert settings.resolve({"tf32": False, "memory_snapshot": False}, "cpu").tf32 is False
