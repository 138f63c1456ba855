"""What a run prints reaches whatever is there: a pipe whose reader has left, an ASCII terminal, a log file on a full disk.

Takes: the process's standard streams. Gives: streams that never end a run. Does not know about: tables, experiments.
"""

import codecs
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import huggingface_hub.utils
import transformers.utils.logging

_PLAIN = {"Δ": "d", "±": "~", "×": "x", "·": "-", "…": "."}  # as wide as what they stand for, so that tables stay straight


class Lasting:
    """A text stream that outlives its reader: once nobody reads (`| head`), what is written is dropped and nothing is raised."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except BrokenPipeError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        """Lead the descriptor nowhere, so that what is buffered, and the flush at exit, find somebody who takes it."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def prepared() -> Iterator[None]:
    """Inside, sys.stdout takes every character and outlives its reader, and libraries draw no bars where nobody sees them."""
    before = sys.stdout, sys.stderr
    codecs.register_error("qkv.plain", _plainly)
    if hasattr(before[0], "reconfigure"):
        before[0].reconfigure(errors="qkv.plain")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
        huggingface_hub.utils.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()
    sys.stdout, sys.stderr = Lasting(before[0]), Lasting(before[1])
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def _plainly(error: UnicodeError) -> tuple[str, int]:
    """What stands for characters that the stream's encoding lacks: our own signs in ASCII, any other by its number."""
    assert isinstance(error, UnicodeEncodeError)
    wrong = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or ascii(c)[1:-1] for c in wrong), error.end


class Once(logging.Filter):
    """Lets each warning through once: every engine of a comparison repeats it."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        new = message not in self._seen
        self._seen.add(message)
        return new


class RunLog(logging.FileHandler):
    """run.log. Where it cannot be written (a full disk), that is said once and the run goes on without it."""

    _failed = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._failed:
            try:
                super().emit(record)
            except OSError as error:
                self._give_up(error)

    def handleError(self, record: logging.LogRecord) -> None:
        """Called by logging inside the handler of what went wrong."""
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._give_up(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what was buffered
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            print(
                f"WARNING: {self.baseFilename} cannot be written ({error.strerror}); the run goes on without it", file=sys.stderr
            )
