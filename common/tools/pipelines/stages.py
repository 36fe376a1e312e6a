"""The stages of a pipeline: their configuration, and what is measured of one on an example.  No torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Dict, List, Literal, Mapping, Optional

from common.tools import configuration  # first: it goes on in another Python where this one lacks msgspec

# isort: split
from msgspec import Meta, Struct, field

from common.core.errors import UserError
from common.core.text import closest, shown
from common.tools.configuration import Count, Positive, Seconds, Text

#: How many stages each of the classic types has.
MODEL_TYPES = {
    "S2S": (1,),
    "S2T": (1,),
    "TTS": (1,),
    "MT": (1,),
    "S2UT": (1, 2),
    "2StageS2ST": (2,),
    "3StageS2ST": (3,),
}


class General(Struct, forbid_unknown_fields=True, kw_only=True):
    """Keys of the whole pipeline, which `general` and the command line give.

    Attributes:
        dataset_type: "made" (noise), "raw" (a manifest of audio) or "npy" (arrays)
        dataset_path: the manifest or the arrays
        dataset_size: the first of its examples; None: all
        target_sr: samples of audio in a second
        made_seconds: of each made example
    """

    model_type: Optional[Literal[tuple(MODEL_TYPES)]] = None  # type: ignore[valid-type]
    dataset_type: Literal["made", "raw", "npy"] = "made"
    dataset_path: Optional[Text] = None
    dataset_size: Optional[Positive] = None
    target_sr: Positive = 16000
    made_seconds: Annotated[List[Seconds], Meta(min_length=1)] = field(default_factory=lambda: [2, 4, 8])

    def __post_init__(self) -> None:
        configuration.check_list(self.made_seconds, "made_seconds")


class Stage(Struct, forbid_unknown_fields=True, kw_only=True):
    """Keys of a stage; `general` may give all but its name, the command line the numbers.

    Attributes:
        factory: "module:name" or "file.py:name" of what makes the model
        arguments: of the factory
        builder: makes the inputs of the example, or of what the stage before gave
        converter: makes of the outputs what the stage after gets
        python: the interpreter of its process; None for the command's
        warmup, repeats: calls that are not timed, and that are
    """

    name: Text
    factory: Text
    arguments: Dict[str, Any] = {}
    builder: Optional[Text] = None
    converter: Optional[Text] = None
    python: Optional[Text] = None
    warmup: Count = 2
    repeats: Positive = 5


class Pipeline(Struct, kw_only=True):
    """A configuration.  examples: the names of those of the data set; trust_pickle: whether that may be pickled."""

    general: General
    stages: List[Stage]
    examples: List[str] = []
    trust_pickle: bool = False

    def job(self, example: str, stage: Stage) -> str:
        """Return the name of the job that measures a stage on an example."""
        return f"{example} {stage.name}"


class Costs(Struct, kw_only=True):
    """What a stage costs on an example.

    Attributes:
        wall_ns: time of each timed call
        busy: calls that ran beside other load
        memory_bytes: peak of a call above the level before it: resident on a CPU, of torch's allocator on CUDA
        process_bytes: resident peak of the whole process
        macs, flops: operations of a call, forward
        not_counted: operators without a rule
        seconds: of audio in the example; None where it is none
    """

    wall_ns: Annotated[List[int], Meta(min_length=1)]
    busy: int
    memory_bytes: Optional[int]
    process_bytes: Optional[int]
    macs: int
    flops: int
    not_counted: List[str]
    seconds: Optional[float] = None


def configured(path: Path, flags: Mapping[str, Any], quick: Mapping[str, Any]) -> Pipeline:
    """Return the configuration in a YAML file: a stage over `general` over `flags` over the defaults; `quick` is over
    all.  Raises UserError."""
    values = configuration.read(path)
    numbered = [key for key in values if re.fullmatch(r"stage\d+", key)]
    names = [f"stage{number}" for number in range(1, 1 + len(numbered))]
    for key in values:
        if key not in ("general", *names):
            gap = "; stages are numbered from 1, without a gap" if key.startswith("stage") else ""
            raise UserError(f"{path}: unknown key {shown(key)}{gap or closest(key, ['general', *names])}")
    if not names:
        raise UserError(f"{path}: has no stage1; a system that is end to end has one stage")
    given = values.get("general") or {}
    if not isinstance(given, dict):
        raise UserError(f"{path}: general: give keys and values, not {shown(given)}")
    of_stages = {*Stage.__struct_fields__} - {"name"}
    shared = {**flags, **given, **quick}
    whole = {key: value for key, value in shared.items() if key not in of_stages}
    general = configuration.converted(whole, General, f"{path}: general")
    accepted = MODEL_TYPES.get(general.model_type or "", (len(names),))
    if len(names) not in accepted:
        wanted = " or ".join(map(str, accepted))
        raise UserError(f"{path}: general.model_type: {general.model_type} has {wanted} stages, not {len(names)}")
    if general.dataset_path is not None:
        general.dataset_path = str(configuration.located(general.dataset_path, path))
    shared = {key: value for key, value in shared.items() if key in of_stages}
    stages: List[Stage] = []
    for key in names:
        where = f"{path}: {key}"
        if not isinstance(values[key], dict):
            raise UserError(f"{where}: give keys and values, not {shown(values[key])}")
        over = {name: value for name, value in quick.items() if name in of_stages}
        stage = configuration.converted({"name": key, **shared, **values[key], **over}, Stage, where)
        if stage.name in [other.name for other in stages]:
            raise UserError(f"{path}: two stages are called {shown(stage.name)}; give each a name of its own")
        for name in ("factory", "builder", "converter"):
            value = getattr(stage, name)
            setattr(stage, name, value and configuration.python_name(value, path))
        stage.python = stage.python and configuration.interpreter(stage.python, path, f"{where}.python")
        stages.append(stage)
    return Pipeline(general=general, stages=stages)
