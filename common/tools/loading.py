"""A model by name: any importable class or function, one of a file, an upstream of s3prl, a model of Hugging Face."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, Dict, Mapping, NamedTuple, Tuple

import torch

from common.core import plain_yaml
from common.core.errors import NotRunnable, UserError
from common.core.files import read_text
from common.core.paths import not_a_file
from common.core.text import first_line

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
    source, attribute = _parts(name, "package.module:name, file.py:name, s3prl:upstream or hf:model")
    if source == S3PRL:
        return Loaded(_made(name, _upstream(attribute), arguments, device), listed=True)
    if source == HUGGING_FACE:
        return Loaded(_made(name, _pretrained(attribute), arguments, device))
    return Loaded(_made(name, imported(name), arguments, device))


def imported(name: str) -> Any:
    """Import "package.module:attribute" or "file.py:attribute".  Raises UserError."""
    source, attribute = _parts(name, "package.module:name or file.py:name")
    return _attribute(_module(source), attribute, name)


def made(name: str, arguments: Mapping[str, Any]) -> Any:
    """Call the class or function of this name with `arguments`.  Raises UserError."""
    return _result(name, imported(name), arguments, "cpu")


def _parts(name: str, forms: str) -> Tuple[str, str]:
    source, colon, attribute = name.rpartition(":")
    if not colon or not source or not attribute:
        raise UserError(f"{name}: give {forms}")
    return source, attribute


def read_arguments(path: Path) -> Dict[str, Any]:
    """Return the mapping in a YAML or JSON file.  Raises UserError."""
    values = parse_value(read_text(path, plain_yaml.LARGEST_FILE), str(path))
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise UserError(f"{path}: give a mapping of the constructor's arguments, such as `hidden_size: 256`")
    return values


def parse_value(text: str, where: str) -> Any:
    """Parse `text` as YAML (or, where PyYAML is not installed, as JSON).  Raises UserError."""
    try:
        return plain_yaml.parsed(text, where)
    except ImportError:
        pass
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:
        raise UserError(f"{where}: no JSON ({line(error)}); for YAML, pip install PyYAML") from error


def run_file(path: Path) -> None:
    """Import a file for its side effects.  Raises UserError."""
    _module(f"{path}" if path.suffix == ".py" else f"{path}.py")


def _module(source: str) -> ModuleType:
    try:
        return _file(Path(source)) if source.endswith(".py") else importlib.import_module(source)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{source} does not import in {sys.executable}: {line(error)}") from error


def _file(path: Path) -> ModuleType:
    problem = not_a_file(path)
    if problem:
        raise UserError(f"{path}: {problem}")
    sys.path.insert(0, str(path.parent.resolve()))  # what lies beside it can be imported
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _attribute(module: Any, attribute: str, name: str) -> Any:
    value = getattr(module, attribute, None)
    if value is None:
        near = difflib.get_close_matches(attribute, dir(module), n=3)
        hint = f"; it has {', '.join(near)}" if near else ""
        raise UserError(f"{name}: {module.__name__} has no {attribute}{hint}")
    return value


def _upstream(name: str) -> Callable[..., Any]:
    os.environ.update(OFFLINE)
    try:
        hub = importlib.import_module("s3prl.hub")
    except ImportError as error:
        raise UserError(f"s3prl:{name}: {line(error)}; pip install s3prl") from error
    return _attribute(hub, name, f"s3prl:{name}")


def _pretrained(name: str) -> Callable[..., Any]:
    os.environ.update(OFFLINE)
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"hf:{name}: {line(error)}; pip install transformers") from error

    def make(**arguments: Any) -> Any:
        return transformers.AutoModel.from_pretrained(name, local_files_only=True, **arguments)

    return make


def _made(name: str, maker: Any, arguments: Mapping[str, Any], device: str) -> torch.nn.Module:
    if isinstance(maker, torch.nn.Module):
        if arguments:
            raise UserError(f"{name} is a model already: it takes no arguments")
        return maker.to(device)
    model = _result(name, maker, arguments, device)
    if not isinstance(model, torch.nn.Module):
        raise UserError(f"{name} makes no torch.nn.Module, but {type(model).__name__}")
    return model.to(device)


def _result(name: str, maker: Any, arguments: Mapping[str, Any], device: str) -> Any:
    if not callable(maker):
        raise UserError(f"{name} is no class, function or model, but {type(maker).__name__}")
    _check_names(name, maker, arguments)
    try:
        return _call(maker, arguments, device)
    except (NotRunnable, UserError):
        raise
    except (Exception, SystemExit) as error:  # whatever a stranger's constructor raises
        raise UserError(f"{name} cannot be made: {line(error)}") from error


def _call(maker: Callable[..., Any], arguments: Mapping[str, Any], device: str) -> Any:
    """Make a model.  On the meta device it has no weights, if its initialisation allows that."""
    if device == "meta":
        try:
            with torch.device("meta"):
                return maker(**arguments)
        except (NotImplementedError, RuntimeError):
            pass
    return maker(**arguments)


def _check_names(name: str, maker: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    try:
        parameters = inspect.signature(maker).parameters
    except (TypeError, ValueError):
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = [key for key in arguments if key not in parameters]
    if unknown:
        raise UserError(f"{name} takes no {', '.join(unknown)}; it takes {', '.join(parameters) or 'no arguments'}")
    needed = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is not parameter.VAR_POSITIONAL
        and key not in arguments
    ]
    if needed:
        raise UserError(f"{name} needs {', '.join(needed)}: give --arg {needed[0]}=..., or --args with a file")


def line(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
