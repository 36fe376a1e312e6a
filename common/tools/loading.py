"""A model by name: any importable class or function, one of a file, an upstream of s3prl, a model of Hugging Face."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Mapping, NamedTuple

import torch

from common.core import implementations
from common.core.errors import NotRunnable, UserError
from common.core.files import not_a_file
from common.core.text import closest, first_line

S3PRL, HUGGING_FACE = "s3prl", "hf"
#: Weights have to be here already: whoever tries to fetch some is refused at once.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9"),
}


class Loaded(NamedTuple):
    """A loaded model.  listed: whether it takes a list of waveforms in place of a batch."""

    model: torch.nn.Module
    listed: bool = False


def load(name: str, arguments: Mapping[str, Any], device: str) -> Loaded:
    """Return the model `name` ("package.module:attribute", "file.py:Class", "s3prl:upstream", "hf:model"), made with
    `arguments`, on `device`.  Raises UserError for what cannot be imported or made."""
    source, _, attribute = name.rpartition(":")
    if source in (S3PRL, HUGGING_FACE):
        os.environ.update(OFFLINE)
        maker = _from_package(source, attribute)
    else:
        maker = imported(name)
    if isinstance(maker, torch.nn.Module) and arguments:
        raise UserError(f"{name} is a model already: it takes no arguments")
    model = maker if isinstance(maker, torch.nn.Module) else _made(name, maker, arguments, device)
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{name} makes no torch.nn.Module, but {type(model).__name__}")
    return Loaded(model.to(device), listed=source == S3PRL)


def imported(name: str) -> Any:
    """Import "package.module:attribute" or "file.py:attribute".  Raises UserError."""
    source, _, attribute = name.rpartition(":")
    if not source or not attribute:
        raise UserError(f"{name}: give package.module:name or file.py:name")
    return _attribute(module(source), attribute, name)


def made(name: str, arguments: Mapping[str, Any]) -> Any:
    """Call the class or function of this name with `arguments`.  Raises UserError."""
    return _made(name, imported(name), arguments, "cpu")


def module(source: str) -> ModuleType:
    """Import a module by its name, or a file, whose neighbours it may import.  Raises UserError."""
    path = Path(source)
    try:
        if path.suffix != ".py":
            return importlib.import_module(source)
        problem = not_a_file(path)
        if problem:
            raise UserError(f"{path}: {problem}")
        return implementations.imported(path.resolve())
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{source} does not import in {sys.executable}: {line(error)}") from error


def _attribute(of: Any, attribute: str, name: str) -> Any:
    value = getattr(of, attribute, None)
    if value is None:
        raise UserError(f"{name}: {of.__name__} has no {attribute}{closest(attribute, dir(of))}")
    return value


def _from_package(source: str, name: str) -> Callable[..., Any]:
    """Return what makes an upstream of s3prl, or a model of transformers.  Raises UserError."""
    package = "s3prl.hub" if source == S3PRL else "transformers"
    try:
        found = importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{source}:{name}: {line(error)}; pip install {package.partition('.')[0]}") from error
    if source == S3PRL:
        upstream: Callable[..., Any] = _attribute(found, name, f"s3prl:{name}")
        return upstream
    return lambda **arguments: found.AutoModel.from_pretrained(name, local_files_only=True, **arguments)


def _made(name: str, maker: Any, arguments: Mapping[str, Any], device: str) -> Any:
    """Call what makes a model.  On the meta device it has no weights, if its initialisation allows that."""
    if not callable(maker):
        raise UserError(f"{name} is no class, function or model, but {type(maker).__name__}")
    _check_names(name, maker, arguments)
    try:
        try:
            with torch.device(device if device == "meta" else "cpu"):
                return maker(**arguments)
        except (NotImplementedError, RuntimeError):
            if device != "meta":
                raise
            return maker(**arguments)
    except (NotRunnable, UserError):
        raise
    except (Exception, SystemExit) as error:  # whatever a stranger's constructor raises
        raise UserError(f"{name} cannot be made: {line(error)}") from error


def _check_names(name: str, maker: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Raise UserError for an argument that is not known, or missing."""
    try:
        signature = inspect.signature(maker)
    except (TypeError, ValueError):
        return
    parameters = {key: part for key, part in signature.parameters.items() if part.kind is not part.VAR_POSITIONAL}
    keywords = any(part.kind is part.VAR_KEYWORD for part in parameters.values())
    unknown = [key for key in arguments if key not in parameters]
    if unknown and not keywords:
        raise UserError(f"{name} takes no {', '.join(unknown)}; it takes {', '.join(parameters) or 'no arguments'}")
    needed = [key for key, part in parameters.items() if part.default is part.empty and key not in arguments]
    if needed and not keywords:
        raise UserError(f"{name} needs {', '.join(needed)}: give --arg {needed[0]}=..., or --args with a file")


def line(error: BaseException) -> str:
    """Return an error with its type in a line."""
    return f"{type(error).__name__}: {first_line(error)}"
