"""The keyword arguments of Engine.create are the settings of EngineConfig, by flat names, and are typed like them."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from qkv.config import EngineConfig, ModelConfig
from qkv.engine import Engine
from qkv.errors import ConfigError, ScaleError
from qkv.scales import ScaleFile
from qkv.settings import PLACES, POLICIES, EngineSettings, engine_config

CONFIG_HINTS = get_type_hints(EngineConfig)


def hint(place: tuple[str, ...]) -> Any:
    *part, name = place
    return get_type_hints(CONFIG_HINTS[part[0]] if part else EngineConfig)[name]


def test_the_types_for_editors_agree_with_the_dataclasses() -> None:
    hints = get_type_hints(EngineSettings)
    assert set(hints) == set(PLACES), "EngineSettings and the fields of config.py name different settings"
    for name, places in PLACES.items():
        if name not in POLICIES:  # flat, a policy may be just its name
            assert all(hint(place) == hints[name] for place in places), f"{name} has another type in config.py"


def test_every_setting_of_an_engine_has_a_flat_name() -> None:
    """All settings that Engine.create takes are checked; those of a simulation can only come from a configuration."""
    reached = {place for places in PLACES.values() for place in places}
    for part in ("cache", "scheduler", "attention", "runner"):
        left_out = {f.name for f in fields(CONFIG_HINTS[part])} - {p[1] for p in reached if p[0] == part}
        assert left_out == ({"name", "clock"} if part == "runner" else set())


@pytest.mark.parametrize("name", sorted(set(PLACES) - {"scales", *POLICIES}))
def test_a_flat_setting_arrives_where_its_dataclass_has_it(name: str) -> None:
    known: dict[str, Any] = {"dtype": "bfloat16", "reads": "raw", "prefix_hash": "sha256", "device": "cuda", "backend": "cpu"}
    *part, field = PLACES[name][0]
    before = getattr(getattr(EngineConfig(), part[0]) if part else EngineConfig(), field)
    default = before if before is not None else 0.25 if name == "memory_utilization" else 100
    value = known.get(name, not default if isinstance(default, bool) else default if isinstance(default, str) else default + 0.5)
    value = int(value) if isinstance(default, int) and not isinstance(default, bool) else value
    for *part, field in PLACES[name]:
        setting: dict[str, Any] = {name: value}
        config = engine_config("m", **setting)
        assert getattr(getattr(config, part[0]) if part else config, field) == value
    assert config.model.name == "m"


def test_without_settings_the_defaults_are_those_of_the_dataclasses() -> None:
    assert engine_config("smollm2") == EngineConfig(model=ModelConfig(name="smollm2"))
    assert engine_config("m", quantizer="int8_token", evictor={"name": "lfu"}).quantizer == {"name": "int8_token"}


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'num_block'; did you mean 'num_blocks'\?"):
        Engine.create("no-such-model", num_block=4)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"engine\.attention\.reads: 'cash' is not allowed; did you mean 'cache'"):
        Engine.create("no-such-model", reads="cash")  # type: ignore[arg-type]


@pytest.mark.parametrize("scales", [None, "no/such/file", Path("no/such/file"), {"layers.0.k_scale": 1}])
def test_scales_are_looked_at_before_a_model_is_loaded(scales: Any) -> None:
    with pytest.raises(ScaleError, match=r"needs a scale file|does not exist|must be the path of a scale file"):
        Engine.create("no-such-model", quantizer="int8", scales=scales)


def test_a_scale_file_and_its_path_are_the_same_setting(tmp_path: Path) -> None:
    import torch

    file = ScaleFile({"layers.0.k_scale": torch.ones(1)}, {"quantizer": "int8"})
    file.save(tmp_path / "s.safetensors")
    assert ScaleFile.of(file) is file
    for path in (tmp_path / "s.safetensors", str(tmp_path / "s.safetensors")):
        given = engine_config("m", scales=path).scales
        found = ScaleFile.of(given)
        assert found is not None
        assert found.fingerprint() == file.fingerprint()
