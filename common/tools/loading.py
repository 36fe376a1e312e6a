"""A model by name: any importable class or function, one of a file, an upstream of s3prl, a model
of Hugging Face."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from rnnt_bench.core import files, implementations, text
from rnnt_bench.core.errors import NotRunnable, UserError

#: Packages that models come from, which are named where they are missing.
PACKAGES = ("s3prl", "soundfile", "speechbrain", "torchaudio", "transformers")
#: A model of s3prl takes a list of waveforms in place of a batch.
S3PRL, HUGGING_FACE = "s3prl:", "hf:"
#: Weights have to be here already: whoever tries to fetch some is refused at once.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    **dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    ),
}


def load(name: str, arguments: Mapping[str, Any], device: str) -> torch.nn.Module:
    """Return the model `name` ("package.module:attribute", "file.py:Class", "s3prl:upstream",
    "hf:model"), made with `arguments`, on `device`.  Raises UserError for what cannot be imported
    or made."""
    if name.startswith((S3PRL, HUGGING_FACE)):
        os.environ.update(OFFLINE)
    model_name, absent = name.partition(":")[2], ""
    if name.startswith(HUGGING_FACE):
        maker: Any = partial(
            module("transformers").AutoModel.from_pretrained, model_name, local_files_only=True
        )
        absent = absent_from(
            model_name,
            f"from transformers import AutoModel; AutoModel.from_pretrained('{model_name}')",
        )
    elif name.startswith(S3PRL):
        maker = imported(f"s3prl.hub:{model_name}")
        absent = not_here(f"from s3prl import hub; hub.{model_name}()")
    else:
        maker = imported(name)
    if isinstance(maker, torch.nn.Module) and arguments:
        raise UserError(f"{name} is a model already: it takes no arguments")
    model = (
        maker
        if isinstance(maker, torch.nn.Module)
        else made(name, maker, arguments, device, absent)
    )
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{name} makes no torch.nn.Module, but {type(model).__name__}")
    return model.to(device)


def on_device(values: Any, device: torch.device) -> Any:
    """Return `values` with the tensors in its lists, tuples and dicts moved to a device."""
    return tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, values)


def imported(name: str) -> Any:
    """Import "package.module:attribute" or "file.py:attribute".  Raises UserError."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise UserError(f"{name}: give package.module:name or file.py:name")
    loaded = module(source)
    value = getattr(loaded, attribute, None)
    if value is None:
        raise UserError(
            f"{name}: {loaded.__name__} has no {attribute}{text.closest(attribute, dir(loaded))}"
        )
    return value


def module(source: str) -> ModuleType:
    """Import a module by its name, or a file, whose neighbours it may import.  Raises UserError."""
    path = Path(source)
    problem = files.not_a_file(path) if path.suffix == ".py" else ""
    if problem:
        raise UserError(f"{path}: {problem}")
    try:
        return (
            implementations.imported(path.resolve())
            if path.suffix == ".py"
            else importlib.import_module(source)
        )
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None)
        lacks = f"; pip install {missing}" if missing in PACKAGES else ""
        raise UserError(
            f"{source} does not import in {sys.executable}: {text.reason_of(error)}{lacks}"
        ) from error


def not_here(code: str, where: str = "the caches of its package") -> str:
    """Return why a model that would have to be fetched cannot be made, and the command that fetches
    it."""
    return f'it is not in {where}, and rnnt-bench forbids the network to models; fetch it with: python -c "{code}"'


def absent_from(name: str, code: str) -> str:
    """Return `not_here` for a name on a hub, "" for a folder that is there.  Raises UserError for
    one that is not."""
    if Path(name).exists():
        return ""
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise UserError(
            f"{name}: no such folder, and no name on a hub, such as facebook/wav2vec2-base-960h"
        )
    return not_here(code)


def made(
    name: str, maker: Any, arguments: Mapping[str, Any], device: str = "cpu", absent: str = ""
) -> Any:
    """Call what makes a model, on the meta device without weights where its initialisation allows
    that.  Raises UserError, also for a wrong or missing argument.  absent: why a file that it needs
    is not there, see `not_here`."""
    if not callable(maker):
        raise UserError(f"{name} is no class, function or model, but {type(maker).__name__}")
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # of a builtin
        signature = inspect.Signature.from_callable(lambda *_, **__: None)
    try:
        signature.bind_partial(**arguments)  # first, since a wrong name makes another one missing
        signature.bind(**arguments)
    except TypeError as error:
        raise UserError(
            f"{name}: {error}; it takes {signature}: --arg NAME=VALUE, or arguments in a file"
        ) from None
    try:
        try:
            with torch.device("meta") if device == "meta" else nullcontext():
                return maker(**arguments)
        except (NotImplementedError, RuntimeError):
            if device != "meta":
                raise
            return maker(**arguments)
    except (NotRunnable, UserError):
        raise
    except (Exception, SystemExit) as error:  # whatever a stranger's constructor raises
        reason = absent if absent and isinstance(error, OSError) else text.reason_of(error)
        raise UserError(f"{name} cannot be made: {reason}") from error
