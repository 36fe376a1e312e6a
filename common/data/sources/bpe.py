"""Counting the tokens of a text with a SentencePiece model, and training one.

sentencepiece is imported only when it is used.  Its C++ log is not shown, and its errors become one line.
"""

from __future__ import annotations

import io
import re
from functools import lru_cache
from pathlib import Path
from typing import Any, Callable, List, Sequence

from common.core.errors import UserError
from common.core.files import open_file

_LOG_NOTHING_BELOW_FATAL = 3


def load(path: Path) -> bytes:
    """Return the SentencePiece model in `path`.  Raises UserError for a file that is missing or not a model."""
    try:
        with open_file(path) as stream:
            content = stream.read()
    except OSError as error:
        raise UserError(f"--bpe-model {path}: {error.strerror or error}; name a SentencePiece model") from error
    try:
        if not content:  # sentencepiece reads this as a model without pieces
            raise RuntimeError("empty")
        _processor(content)
    except RuntimeError as error:
        advice = "name one, or train one with --bpe-vocab-size"
        raise UserError(f"--bpe-model {path}: not a SentencePiece model; {advice}") from error
    return content


def train(texts: Sequence[str], vocab_size: int, model_type: str = "bpe") -> bytes:
    """Train a SentencePiece model of `texts`, one utterance each; ids: 0 <blk>, 1 <sos/eos>, 2 <unk>. icefall's own
    lang_bpe_500 has the type ``unigram``, in spite of its name.  The same texts give the same model.  Raises UserError
    where `texts` cannot give so many tokens, with the largest or smallest possible number."""
    import sentencepiece

    sentencepiece.set_min_log_level(_LOG_NOTHING_BELOW_FATAL)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(  # as icefall trains a model
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            user_defined_symbols=["<blk>", "<sos/eos>"],
            unk_id=2,
            bos_id=-1,
            eos_id=-1,
            character_coverage=1.0,
            input_sentence_size=100_000_000,
            minloglevel=_LOG_NOTHING_BELOW_FATAL,
        )
    except RuntimeError as error:
        raise UserError(f"--bpe-vocab-size {vocab_size}: {_advice(str(error), len(texts))}") from error
    return model.getvalue()


@lru_cache(maxsize=1)
def counter(model: bytes) -> Callable[[List[str]], List[int]]:
    """Return a function from texts to the number of tokens of each, in one thread."""
    processor = _processor(model)

    def count(texts: List[str]) -> List[int]:
        return [len(tokens) for tokens in processor.encode(texts, out_type=int, num_threads=1)]

    return count


def vocab_size(model: bytes) -> int:
    return _processor(model).vocab_size()


def _processor(model: bytes) -> Any:
    import sentencepiece

    sentencepiece.set_min_log_level(_LOG_NOTHING_BELOW_FATAL)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    return processor


def _advice(problem: str, texts: int) -> str:
    largest = re.search(r"value <= (\d+)", problem)
    if largest:
        return f"the text of {texts} utterances has no more than {largest[1]} tokens; ask for at most {largest[1]}"
    smallest = re.search(r"required_chars\. \d+ vs (\d+)", problem)
    if smallest:
        return f"the text has so many characters that it takes {smallest[1]} tokens; ask for at least {smallest[1]}"
    return f"no model could be trained on the text of {texts} utterances ({' '.join(problem.split())})"
