#!/usr/bin/env python3
"""Check a transducer loss against the vectors beside this file.

README.md says how the function is called: with numpy arrays, and it returns losses (N,) and their
gradient.
"""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import numpy as np

TOLERANCE = {"float32": 1e-5, "float64": 1e-9}


def cases(topology=None):
    """Yield the cases, of one topology if it is named, with their arrays in place of offsets."""
    folder = Path(__file__).resolve().parent
    numbers = np.load(folder / "values.npy", allow_pickle=False)
    for case in json.loads((folder / "index.json").read_text())["cases"]:
        if topology in (None, case["topology"]):
            for key in ("logits", "losses", "gradient", "upstream"):
                begin, shape = case[key]["offset"], case[key]["shape"]
                case[key] = numbers[begin : begin + int(np.prod(shape))].reshape(shape)
            case["targets"] = np.array(case["targets"], np.int64).reshape(len(case["logits"]), -1)
            yield case


def error(actual, expected):
    """Return the largest difference over the largest right magnitude; infinite ones must be at the
    same places."""
    actual, finite = np.asarray(actual, np.float64), np.isfinite(expected)
    if actual.shape != expected.shape or not np.array_equal(np.isfinite(actual), finite):
        return np.inf
    largest = np.abs(expected[finite]).max(initial=1e-30)
    return np.abs(actual[finite] - expected[finite]).max(initial=0) / largest


def check(function, topology=None):
    """Return what is wrong, a line for each case and answer; [] for a right loss."""
    wrong = []
    for case in cases(topology):
        given = [
            np.array(case[key]) for key in ("logits", "targets", "logit_lengths", "target_lengths")
        ]
        before, named = (
            [array.copy() for array in given],
            {key: case[key] for key in ("blank", "topology", "upstream")},
        )
        losses, gradient = function(*given, **named, **case["options"])
        dtype = str(np.asarray(losses).dtype)
        large = np.max(case["losses"], where=np.isfinite(case["losses"]), initial=0)
        allowed = TOLERANCE.get(dtype, 1e-2)
        errors = {"loss": (error(losses, case["losses"]), allowed)}
        errors["gradient"] = (
            error(gradient, case["gradient"]),
            allowed + np.finfo(dtype).eps * large,
        )
        errors["inputs"] = (0.0 if all(map(np.array_equal, before, given)) else np.inf, 0.0)
        off = [
            f"{name} off by {size:.1e}" for name, (size, most) in errors.items() if not size <= most
        ]
        wrong += [f"{case['topology']} {case['name']}: {words}" for words in off]
    return wrong


def main():
    """Print what is wrong with the function that the command line names; exit with 1 then, with 2
    if there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function", metavar="package.module:function")
    names = sorted({case["topology"] for case in cases()})
    parser.add_argument(
        "topology", nargs="?", choices=names, help="check the vectors of this lattice alone"
    )
    given = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    module, _, attribute = given.function.partition(":")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        parser.error(f"{given.function}: {error}")
    sys.exit("\n".join(check(function, given.topology)) or print("every vector is right"))


if __name__ == "__main__":
    main()
