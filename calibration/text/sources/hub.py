"""Data sets of the Hugging Face hub, as a stream: nothing but the rows read is downloaded or held in memory."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from calibration.text.data import DATA, DataSource
from calibration.text.rows import Bad
from qkv.errors import ConfigError
from qkv.validate import require

_SECONDS = 5.0  # that the hub may take to answer


@DATA.register("hub")
@dataclass
class Hub(DataSource):
    """A data set of the hub, e.g. path=wikitext config=wikitext-2-raw-v1. limit: rows read at most.

    field: the column (or columns, the answer last) with the text or the messages; null: by the names that data sets use.
    """

    path: str
    config: str | None = None
    split: str = "test"
    field: str | list[str] | None = None
    limit: int = 5000

    def __post_init__(self) -> None:
        require(bool(self.path), "path", self.path, "a data set's hub id, e.g. data.path=wikitext")
        require(self.limit >= 1, "limit", self.limit, "at least 1")
        if importlib.util.find_spec("datasets") is None:
            raise ConfigError("data: the package 'datasets' is not installed. Run: pip install datasets")
        self._must_answer()  # as a file must exist: before a model is loaded

    def rows(self) -> Iterator[Any]:
        """An error at the first row raises ConfigError; a later one ends the stream with a Bad row: datasets cannot continue."""
        from datasets import load_dataset
        from datasets.utils.logging import set_verbosity_error

        set_verbosity_error()  # its errors arrive here as exceptions
        read = 0
        try:
            # decode: images and sounds stay bytes, which nobody here looks at
            for row in islice(load_dataset(self.path, self.config, split=self.split, streaming=True).decode(False), self.limit):
                read += 1
                yield row
        except Exception as error:  # datasets raises many kinds: unknown name, gated, bad split, broken file
            if not read:
                raise ConfigError(f"data.path: cannot load {self._named()}: {_first_line(error)}") from error
            yield Bad("unreadable rest of the data")

    def _named(self) -> str:
        settings = {"config": self.config, "split": self.split}
        shown = ", ".join(f"{key} {value}" for key, value in settings.items() if value is not None)
        return f"'{self.path}' ({shown})"

    def _must_answer(self) -> None:
        """One request with a short time limit: datasets tries for half a minute. Raises ConfigError: no network, no such name."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

        if Path(os.path.expanduser(self.path)).exists():
            return
        instead = "or read files: data=jsonl data.path=FILE"
        try:
            HfApi().dataset_info(self.path, timeout=_SECONDS)
        except OfflineModeIsEnabled:
            return  # datasets looks into its cache, and fails at once
        except RepositoryNotFoundError:
            raise ConfigError(f"data.path: the hub has no data set '{self.path}', or it is private (hf auth login)") from None
        except HfHubHTTPError:
            return  # gated or in trouble: datasets says which
        except Exception as error:  # of the network, by whichever library the hub's client uses
            raise ConfigError(
                f"data.path: the hub cannot be reached for '{self.path}' ({_first_line(error)}); look at the network, {instead}"
            ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
