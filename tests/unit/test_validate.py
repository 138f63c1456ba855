"""Settings: every wrong key, type or size ends in a ConfigError that names it and what is allowed."""

import dataclasses
import math
import string
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import ConfigError, QkvError
from qkv.validate import check_types, from_mapping, parse_bytes, require, suggest


@dataclass(frozen=True)
class Inner:
    depth: int = 1

    def __post_init__(self) -> None:
        require(self.depth >= 1, "depth", self.depth, "at least 1")


@dataclass(frozen=True)
class Settings:
    count: int
    rate: float = 0.5
    mode: Literal["fast", "slow"] = "fast"
    label: str | None = None
    flag: bool = False
    size: int | str | None = None
    names: list[str] = field(default_factory=list)
    inner: Inner = field(default_factory=Inner)
    extra: dict[str, Any] = field(default_factory=dict)


FIELDS = {f.name for f in dataclasses.fields(Settings)}
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "count": st.integers(),
    "rate": st.floats(allow_nan=False) | st.integers(-1000, 1000),
    "mode": st.sampled_from(["fast", "slow"]),
    "label": st.none() | st.text(),
    "flag": st.booleans(),
    "size": st.none() | st.integers() | st.text(),
    "names": st.lists(st.text(), max_size=3),
    "inner": st.builds(dict, depth=st.integers(1, 9)),
    "extra": st.dictionaries(st.text(), st.integers(), max_size=3),
}
BAD: dict[str, st.SearchStrategy[Any]] = {
    "count": st.booleans() | st.floats() | st.text() | st.none() | st.lists(st.integers()),
    "rate": st.booleans() | st.text() | st.none() | st.lists(st.floats()),
    "mode": st.text().filter(lambda s: s not in ("fast", "slow")) | st.integers() | st.none() | st.lists(st.text()),
    "label": st.integers() | st.booleans() | st.lists(st.text()),
    "flag": st.integers() | st.text() | st.none(),
    "size": st.booleans() | st.floats() | st.lists(st.integers()),
    "names": st.text() | st.integers() | st.lists(st.integers(), min_size=1),
    "inner": st.integers() | st.text() | st.none() | st.builds(dict, depth=st.integers(max_value=0)),
    "extra": st.integers() | st.text() | st.lists(st.text()),
}


@given(st.fixed_dictionaries({"count": GOOD["count"]}, optional={k: v for k, v in GOOD.items() if k != "count"}))
def test_good_values_arrive_unchanged(values: dict[str, Any]) -> None:
    settings = from_mapping(Settings, values, "thing")
    for key, value in values.items():
        got = getattr(settings, key)
        assert got == (Inner(**value) if key == "inner" else value)
    assert isinstance(settings.rate, float)


@given(st.data(), st.sampled_from(sorted(BAD)))
def test_bad_values_name_the_field(data: st.DataObject, key: str) -> None:
    values = {"count": 1, key: data.draw(BAD[key])}
    with pytest.raises(ConfigError, match=rf"^thing\.{key}") as caught:
        from_mapping(Settings, values, "thing")
    assert isinstance(caught.value, QkvError)
    assert isinstance(caught.value, ValueError)


@given(st.text(string.ascii_lowercase + "_", min_size=1).filter(lambda k: k not in FIELDS))
def test_unknown_keys_list_the_allowed_ones(key: str) -> None:
    with pytest.raises(ConfigError, match=f"thing: unknown key '{key}'") as caught:
        from_mapping(Settings, {"count": 1, key: 0}, "thing")
    assert all(name in str(caught.value) for name in FIELDS)


def test_a_misspelt_key_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'count'"):
        from_mapping(Settings, {"cuont": 1}, "thing")


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="thing: missing count"):
        from_mapping(Settings, {}, "thing")


def test_nested_errors_give_the_whole_path() -> None:
    with pytest.raises(ConfigError, match=r"thing\.inner: unknown key 'dpeth'; did you mean 'depth'"):
        from_mapping(Settings, {"count": 1, "inner": {"dpeth": 2}}, "thing")
    with pytest.raises(ConfigError, match=r"thing\.inner: depth=0 is not allowed; it must be at least 1"):
        from_mapping(Settings, {"count": 1, "inner": {"depth": 0}}, "thing")
    with pytest.raises(ConfigError, match=r"thing\.names\[1\]: expected str, got 3"):
        from_mapping(Settings, {"count": 1, "names": ["a", 3]}, "thing")


def test_check_types_covers_instances_made_by_hand() -> None:
    check_types(Settings(count=1))
    with pytest.raises(ConfigError, match="count: expected int, got 'three'"):
        check_types(Settings(count="three"))  # type: ignore[arg-type]


@given(st.integers(0, 10**15), st.sampled_from([("", 1), ("B", 1), ("kB", 10**3), ("MB", 10**6), ("GB", 10**9), ("TB", 10**12)]))
def test_decimal_sizes(number: int, unit: tuple[str, int]) -> None:
    assert parse_bytes(f"{number}{unit[0]}", "size") == pytest.approx(number * unit[1], rel=1e-12)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 * 1024**3),
        ("512MiB", 512 * 1024**2),
        ("1.5KiB", 1536),
        ("0", 0),
        (1073741824, 1024**3),
        ("1e3", 1000),
        (" 4 gb ", 4 * 10**9),
    ],
)
def test_sizes_as_people_write_them(text: str | int, size: int) -> None:
    assert parse_bytes(text, "size") == size


def test_no_size_stays_none() -> None:
    assert parse_bytes(None, "size") is None


@given(st.text())
def test_any_text_is_a_size_or_a_clear_error(text: str) -> None:
    try:
        size = parse_bytes(text, "cache.memory_bytes")
    except ConfigError as error:
        assert str(error).startswith("cache.memory_bytes: ")
        assert "2GiB" in str(error)
    else:
        assert isinstance(size, int)
        assert size >= 0


@pytest.mark.parametrize("bad", ["-1GiB", "2 gigs", "GiB", "1e999", "9" * 400, math.nan, math.inf, True, [1]])
def test_sizes_that_are_none(bad: Any) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_bytes(bad, "size")


def test_suggest_without_anything_close_still_lists() -> None:
    assert suggest("zzz", ["lru", "fifo"]) == "Allowed: fifo, lru"
    assert suggest("fifi", ["lru", "fifo"]) == "did you mean 'fifo'? Allowed: fifo, lru"
    assert suggest("x", []) == "Allowed: (none)"
