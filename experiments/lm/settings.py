"""Turns lm-eval's --model_args into settings of the engine, which have the names and the defaults that experiments use.

Takes: e.g. {"model": "smollm2", "quantizer": "kivi", "quantizer.bits": 2}. Gives: an Engine. Does not know about: lm-eval.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from calibration.text.data import DATA, DataSource
from experiments.harness import cli
from experiments.lm.text import with_tokenizer
from experiments.measuring import scales
from qkv.assemble import build_policies
from qkv.config import EngineConfig
from qkv.engine import Engine
from qkv.errors import ConfigError
from qkv.models import load_model
from qkv.validate import from_mapping, suggest

log = logging.getLogger(__name__)

CONF = Path(__file__).resolve().parents[2] / "conf"
CALIBRATION_DOCUMENTS, CALIBRATION_TOKENS = 16, 1024  # as in conf/experiment/compare.yaml


def engine(arguments: Mapping[str, Any]) -> Engine:
    """Load the model and build an engine. Where the quantizer needs scales and no file is given, they are calibrated on `data`.

    Raises ConfigError, ModelError or ScaleError.
    """
    config, data = read(arguments)
    quantizer = build_policies(config).quantizer  # so that a mistake in a policy's settings shows before a model is loaded
    loaded = with_tokenizer(load_model(config.model))
    if not quantizer.needs_scales or config.scales is not None:
        return Engine(loaded, config)
    file, origin = scales.in_memory(config, loaded, quantizer, data, CALIBRATION_DOCUMENTS, CALIBRATION_TOKENS)
    log.warning("%s: no scale file given for it, %s", quantizer.name, origin)
    return Engine(loaded, replace(config, scales=file))


def read(arguments: Mapping[str, Any]) -> tuple[EngineConfig, DataSource]:
    """The settings of conf/config.yaml, as `arguments` change them. Raises ConfigError."""
    groups = cli.groups(CONF)
    overrides = [_override(key, value, groups) for key, value in arguments.items()]
    cli.register_resolvers(CONF)
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides)
        values: dict[str, Any] = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"model_args: {cli.explain(error, CONF, overrides)}") from None
    known = {f.name for f in fields(EngineConfig)}
    config = from_mapping(EngineConfig, {key: value for key, value in values.items() if key in known}, "model_args")
    return config, DATA.build(values["data"])


def _override(key: str, value: Any, groups: Mapping[str, list[str]]) -> str:
    """The Hydra override for one setting. lm-eval has already turned its text into a bool, a number or, for "none", None."""
    name = key.partition(".")[0]
    known = [*groups, "scales", "seed", "policy_modules"]
    if name not in known or name in ("experiment", "workload", "logger"):
        raise ConfigError(f"model_args: unknown setting '{key}'; {suggest(name, known)}")
    if key in groups:
        return f"{key}={'none' if value is None else value}"
    return f"{key}={json.dumps(value)}"
