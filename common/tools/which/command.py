"""Say which loss to take, from the results that come with the suite: at once, and without measuring.

The measurement nearest to the question is shown with its machine and date: the same device, then the nearest
vocabulary.  Other machines differ: `rnnt-bench run` measures yours.
"""

from __future__ import annotations

import argparse
from typing import List, Optional

from common.cli.parser import Parser
from common.core import flag_types, units
from common.core.errors import EXIT_OK
from common.core.guard import guarded
from common.core.settings import SETTINGS
from common.system import machine, memory
from common.tools.which import answer


def parser() -> argparse.ArgumentParser:
    result = Parser(prog="rnnt-bench which", description=__doc__)
    default = answer.Question()
    result.add_argument(
        "--vocab-size",
        type=flag_types.whole(2),
        metavar="V",
        default=default.vocab_size,
        help=f"Number of symbols, blank included. Default: {default.vocab_size}",
    )
    result.add_argument(
        "--need",
        choices=tuple(answer.NEEDS),
        default=default.need,
        help="Input of the loss: outputs of encoder and decoder, or logits if your joiner must stay as it is. "
        f"Default: {default.need}",
    )
    result.add_argument(
        "--device",
        type=flag_types.device,
        default="auto",
        help="Device: cpu or cuda. Default: cuda where there is a GPU",
    )
    result.add_argument(
        "--dtype",
        type=flag_types.dtype,
        choices=SETTINGS["dtype"].choices,
        default=default.dtype,
        help=f"Data type. Default: {default.dtype}",
    )
    result.add_argument(
        "--memory",
        type=flag_types.memory_size,
        metavar="SIZE",
        help="Memory that a step may take, such as 16GB: estimate how many utterances fit, from the measured peak "
        "of a few.",
    )
    return result


def main(arguments: Optional[List[str]] = None) -> int:
    options = parser().parse_args(arguments)

    def show() -> int:
        limit = None if options.memory is None else units.bytes_of(options.memory, memory.total_memory() or 0)
        device = options.device.partition(":")[0]
        if device == "auto":
            device = "cuda" if machine.gpu_may_be_here() else "cpu"
        question = answer.Question(options.vocab_size, options.need, device, options.dtype, limit)
        entry = answer.nearest(question, answer.measurements())
        print("\n".join(answer.lines(question, entry)))
        return EXIT_OK

    return guarded("rnnt-bench which", show)
