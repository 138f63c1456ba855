"""Data sets of the Hugging Face hub, as a stream: nothing but the rows read is downloaded or held in memory."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from calibration.text.data import DATA, DataSource
from calibration.text.rows import Bad
from qkv.errors import ConfigError
from qkv.validate import require


@DATA.register("hub")
@dataclass
class Hub(DataSource):
    """A data set of the hub, e.g. path=wikitext config=wikitext-2-raw-v1. limit: rows read at most.

    field: the column (or columns, in order: prompt, answer) with the text or the chat messages; null: guess.
    """

    path: str
    config: str | None = None
    split: str = "test"
    field: str | list[str] | None = None
    limit: int = 5000

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "a data set's hub id, e.g. data.path=wikitext")
        require(self.limit >= 1, "limit", self.limit, "at least 1")

    def rows(self) -> Iterator[Any]:
        yield from islice(stream(self.path, self.config, split=self.split), self.limit)


def stream(path: str, config: str | None = None, **arguments: Any) -> Iterator[Any]:
    """Rows of datasets.load_dataset(path, config, **arguments, streaming=True). An error at the first row raises ConfigError;
    a later one ends the stream with a Bad row, for datasets cannot continue."""
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError("data: the package 'datasets' is not installed. Run: pip install datasets")
    from datasets import load_dataset
    from datasets.utils.logging import set_verbosity_error

    set_verbosity_error()  # its errors arrive here as exceptions
    read = 0
    try:
        for row in load_dataset(path, config, streaming=True, **arguments):
            read += 1
            yield row
    except Exception as error:  # datasets raises many kinds: offline, unknown name, gated, bad split, broken file
        if not read:
            shown = arguments.get("data_files", path)
            raise ConfigError(
                f"data.path: cannot load '{shown}': {(str(error) or type(error).__name__).splitlines()[0]}"
            ) from error
        yield Bad("unreadable rest of the data")
