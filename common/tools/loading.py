"""Make a model by its name: any class or function that can be imported, one of a file, an upstream
of s3prl, or a model of Hugging Face."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from rnnt_bench.core import files, implementations, text
from rnnt_bench.core.errors import NotRunnable, UserError

#: Packages that models come from; where one is missing, the message says how to install it.
PACKAGES = ("s3prl", "soundfile", "speechbrain", "torchaudio", "transformers")
#: How the names of models of these hubs begin.
S3PRL, HUGGING_FACE = "s3prl:", "hf:"
#: Environment variables that keep a model from downloading weights: its attempt fails at once.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    **dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"
    ),
}


def load(name: str, arguments: Mapping[str, Any], device: str) -> torch.nn.Module:
    """Return a model on a device.  Raises UserError for one that cannot be imported or made.

    For a model of a hub, `load` forbids downloads to this process (OFFLINE): its files must be here
    already.

    name: "package.module:attribute", "file.py:Class", "s3prl:upstream" or "hf:model"; arguments:
    {name: value} for its constructor."""
    if name.startswith((S3PRL, HUGGING_FACE)):
        os.environ.update(OFFLINE)
    _, _, model_name = name.partition(":")
    absent = ""  # the reason that `made` gives if a file is not there
    if name.startswith(HUGGING_FACE):
        from_pretrained = module("transformers").AutoModel.from_pretrained
        maker: Any = partial(from_pretrained, model_name, local_files_only=True)
        code = f"from transformers import AutoModel; AutoModel.from_pretrained('{model_name}')"
        absent = absent_from(model_name, code)
    elif name.startswith(S3PRL):
        maker = imported(f"s3prl.hub:{model_name}")
        absent = not_here(f"from s3prl import hub; hub.{model_name}()")
    else:
        maker = imported(name)
    if not isinstance(maker, torch.nn.Module):
        model = made(name, maker, arguments, device, absent)
    elif arguments:
        raise UserError(f"{name} is a model already: it takes no arguments")
    else:
        model = maker
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{name} makes no torch.nn.Module, but {type(model).__name__}")
    return model.to(device)


def on_device(values: Any, device: torch.device) -> Any:
    """Return `values` with all tensors, and all other objects with a method `to`, on a device.

    Looks into lists, tuples and dicts."""
    return tree_map(lambda value: value.to(device) if hasattr(value, "to") else value, values)


def imported(name: str) -> Any:
    """Import a module or file, and return the attribute of it that `name` names.

    Raises UserError.

    name: "package.module:attribute" or "file.py:attribute"."""
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
    """Import and return a module; raise UserError if that fails.

    source: the name of a module, or a file "*.py", which may import the files beside it."""
    path = Path(source)
    try:
        if path.suffix != ".py":
            return importlib.import_module(source)
        problem = files.not_a_file(path)
        if problem:
            raise UserError(f"{path}: {problem}")
        return implementations.imported(path.resolve())
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        missing = getattr(error, "name", None)
        lacks = f"; pip install {missing}" if missing in PACKAGES else ""
        raise UserError(
            f"{source} does not import in {sys.executable}: {text.reason_of(error)}{lacks}"
        ) from error


def not_here(code: str, where: str = "the caches of its package") -> str:
    """Return why a model cannot be made: its weights are not in `where`, and must be fetched first.

    code: the Python code that fetches them, which the text quotes."""
    return f'it is not in {where}, and rnnt-bench forbids the network to models; fetch it with: python -c "{code}"'


def absent_from(name: str, code: str) -> str:
    """Return why the weights of a model on a hub may be absent; "" for a path that exists.

    Raises UserError for a name that is neither such a path nor a possible name on a hub.

    code: the Python code that fetches the weights."""
    if Path(name).exists():
        return ""
    # "facebook/wav2vec2-base-960h", "gpt2"
    if not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name):
        raise UserError(
            f"{name}: no such folder, and no name on a hub, such as facebook/wav2vec2-base-960h"
        )
    return not_here(code)


def made(
    name: str, maker: Any, arguments: Mapping[str, Any], device: str = "cpu", absent: str = ""
) -> Any:
    """Return what a class or function `maker` makes.  Raises UserError if `maker` fails, and for a
    wrong or missing argument.

    name: of the maker, in messages; device: "meta" makes a model without memory, if the
    initialisation of its weights allows that, and any other device has no effect; absent: the
    reason that a message gives for a missing file, see `not_here`; "" for that of the error."""
    if not callable(maker):
        raise UserError(f"{name} is no class, function or model, but {type(maker).__name__}")
    _check_arguments(name, maker, arguments)
    try:
        if device == "meta":
            with suppress(NotImplementedError, RuntimeError), torch.device("meta"):
                return maker(**arguments)
        return maker(**arguments)  # with memory: another device, or "meta" has just failed
    except (NotRunnable, UserError):
        raise
    except (Exception, SystemExit) as error:  # a constructor may raise anything
        reason = absent if absent and isinstance(error, OSError) else text.reason_of(error)
        raise UserError(f"{name} cannot be made: {reason}") from error


def _check_arguments(name: str, maker: Any, arguments: Mapping[str, Any]) -> None:
    """Raise UserError if a class or function does not take one of `arguments`, or needs another.

    name: of the class or function `maker`, for the message."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind_partial(**arguments)  # first, to name a misspelt argument
        signature.bind(**arguments)  # names a missing argument
    except TypeError as error:
        raise UserError(
            f"{name}: {error}; it takes {signature}: --arg NAME=VALUE, or arguments in a file"
        ) from None
