"""A strategy whose worker prepares one job slowly: `LLAMAQ_BATCH_STRATEGY=slow_preparation:Slow`.

The worker tokenizes a text that contains `WAIT` only after its I/O thread has ended. If MAY_PREPARE is set, it also
waits for this file in the worker's folder. The worker prints when it begins to tokenize such a text, when it has done
so, and when it frees its model. PREPARATIONS_TIMEOUT_S is how long the worker waits for the text at its end.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import llama_cpp

from llamaq.common.vocab.llama_vocab import Vocab
from llamaq.worker import DecodeMaximal
from llamaq.worker.process import io_thread

GRACE_S = 0.5
"""A worker that does not wait for the text frees its model within this time after the end of its I/O thread."""
tokenize = Vocab._tokenize
free_model = llama_cpp.llama_model_free


def report(step: str) -> None:
    os.write(1, f"{step}\n".encode())


def has_io_thread() -> bool:
    return any(thread.name == "llamaq-io" for thread in threading.enumerate())


def tokenize_slowly(vocab: Vocab, text: str, **options: Any) -> list[int]:
    if "WAIT" not in text:
        return tokenize(vocab, text, **options)
    report("preparation.begun")
    while has_io_thread():
        time.sleep(0.01)
    if "MAY_PREPARE" in os.environ:
        while not Path(os.environ["MAY_PREPARE"]).exists():
            time.sleep(0.01)
    else:
        time.sleep(GRACE_S)
    tokens = tokenize(vocab, text, **options)
    report("preparation.ended")
    return tokens


def free_model_and_tell(model: Any) -> None:
    report("model.freed")
    free_model(model)


class Slow(DecodeMaximal):
    def __init__(self) -> None:
        super().__init__()
        changed: Any = Vocab, llama_cpp, io_thread
        changed[0]._tokenize = tokenize_slowly
        changed[1].llama_model_free = free_model_and_tell
        changed[2].PREPARATIONS_TIMEOUT_S = float(os.environ["PREPARATIONS_TIMEOUT_S"])
