"""Calibration from Python: texts in, a scale file out.

    from calibration import calibrate
    from qkv import Engine

    scales = calibrate("smollm2", texts, quantizer="int8")
    engine = Engine.create(model="smollm2", quantizer="int8", scales=scales)

Takes: a model, texts. Gives: a ScaleFile. Writes nothing. `python -m calibration.run` does the same from files, with checkpoints,
a check on documents held back, and a report.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from calibration.fitting.fit import fit, static_quantizer
from calibration.fitting.gather import observed
from calibration.fitting.search import Method
from calibration.text.data import DataSource
from calibration.text.sample import Sampling, draw
from qkv.config import Dtype
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.scales import ScaleFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from qkv.models import LoadedModel


@dataclass
class Texts(DataSource):
    """Rows that are in memory already: texts, or mappings with messages or columns as in files of rows."""

    name = "texts"

    texts: Sequence[Any] = field(default_factory=list)

    def rows(self) -> Iterator[Any]:
        return iter(self.texts)


def calibrate(
    model: "str | Path | PreTrainedModel | LoadedModel",
    texts: Sequence[Any],
    quantizer: str | dict[str, Any] = "int8",
    *,
    tokenizer: Any = None,
    method: Method = "absmax",
    percentile: float = 99.9,
    documents: int = 256,
    tokens: int = 512,
    sink_tokens: int = 4,
    search_documents: int = 16,
    dtype: Dtype = "float32",
    device: str = "cpu",
    seed: int = 0,
    progress: bool = False,
) -> ScaleFile:
    """The scale file of `quantizer` for `model`, from `texts`: what `Engine.create(scales=...)` takes.

    model, tokenizer, dtype, device: as Engine.create takes them. quantizer: a name, or {"name": ..., field: value}.
    texts: documents; a mapping with chat messages or text columns is read as a row of a file would be.
    method, percentile, sink_tokens, search_documents: as in conf/experiment/calibrate.yaml. documents, tokens: how many documents
    are drawn, and how many tokens of each at most. progress: a bar, if stderr is a terminal.
    Raises ConfigError (a quantizer without static scales, no usable text), ModelError, ScaleError.
    """
    if isinstance(texts, str):
        raise ConfigError("texts is one string; give a list of documents, e.g. [text]")
    chosen = static_quantizer(quantizer)
    sampling = Sampling(documents=documents, tokens=tokens, held_back=0)
    engine = Engine.create(
        model,
        tokenizer,
        dtype=dtype,
        device=device,
        quantizer="none",
        num_blocks=-(-(tokens + 1) // 16) + 2,
        host_memory_bytes=0,
        max_num_seqs=1,
        max_model_len=tokens + 1,  # one new token is asked of every document
        max_num_batched_tokens=tokens + 1,
        enable_prefix_caching=False,
        seed=seed,
    )
    with engine:
        sample = draw(Texts(texts), engine.tokenizer, sampling, seed)
        total = sum(map(len, sample.calibration))
        with tqdm(total=total, disable=None if progress else True, unit=" tokens", leave=False) as bar:
            statistics = observed(engine, sample.calibration, sink_tokens, bar.update)
        statistics.metadata |= {"data": Texts.name, "sampling": sample.how}
        return fit(engine, statistics, chosen, method, percentile, sample.calibration[:search_documents])
