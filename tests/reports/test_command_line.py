"""Situations of the command line from public reports on other systems: what is right in each."""

import copy
import errno
import io
import json
import logging
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from experiments import run
from experiments.harness import cli, folders, screen
from experiments.harness.base import EXPERIMENTS, build
from experiments.harness.record import Record, plain
from experiments.harness.workload import Traffic, Workload
from experiments.measuring import duration
from experiments.studies.workload_stats import repeated_share, stats
from qkv.errors import ConfigError
from qkv.models import load_model
from tests.experiments.toy import CONF, composed

ROOT = CONF.parent
TINY = ["model=llama3-8b-tiny", "data=pydoc", "logger=none"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def python(*arguments: str, cwd: Path, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own. environment: None takes a variable away."""
    given = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"} | environment
    values = {key: value for key, value in given.items() if value is not None}
    command = [sys.executable, "-m", "experiments.run", *arguments]
    return subprocess.run(command, cwd=cwd, env=values, capture_output=True, text=True, check=False)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a command ends that is wrong; nothing is left of it."""
    before = sorted(Path.cwd().iterdir())
    assert run.main(arguments) == 2
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if not line.startswith("WARNING")]
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert sorted(Path.cwd().iterdir()) == before
    return lines[0]


# -- sweeps -----------------------------------------------------------------------------------------------------------------


def test_a_sweep_runs_in_a_folder_that_its_command_names(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without hydra.sweep.dir: the default folder, which a test that gives one never sees."""
    command = ["experiment=plan", "quantizer=none,int8", "--multirun", "allocator.block_size=16,32"]  # a flag between settings
    assert run.main(command) == 0
    (sweep,) = (place / "outputs" / "plan").glob("sweep_*")
    records = [json.loads((sweep / str(job) / "record.json").read_text(encoding="utf-8")) for job in range(4)]
    chosen = [(r["config"]["quantizer"]["name"], r["config"]["allocator"]["block_size"]) for r in records]
    assert chosen == [("none", 16), ("none", 32), ("int8", 16), ("int8", 32)]
    assert (sweep / "report.html").is_file()
    assert run.main(command) == 0
    assert capsys.readouterr().out.count("finished before, skipped") == 4


def test_a_sweep_over_experiments_runs(place: Path) -> None:
    assert run.main(["-m", "experiment=plan,workload_stats", "workload.num_requests=20"]) == 0
    (sweep,) = (place / "outputs" / "several").glob("sweep_*")
    assert [json.loads((sweep / str(job) / "record.json").read_text())["experiment"] for job in range(2)] == [
        "plan",
        "workload_stats",
    ]


def test_the_same_sweep_twice_at_once_is_refused_the_second_time(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = place / "sweep"
    sweep.mkdir()
    with FileLock(sweep / ".lock"):  # as another process would hold it
        assert run.main(["-m", "experiment=plan", "seed=1,2", f"hydra.sweep.dir={sweep}"]) == 2
    assert capsys.readouterr().err.count("another process is running this very sweep") == 1
    assert not list(sweep.glob("*/record.json"))


# -- settings that are wrong --------------------------------------------------------------------------------------------------

WRONG: list[Any] = [None, "", "abc", [], [1], [None], [[]], [{}], {}, {"a": 1}, {"name": None}, {"name": ["x"]}, -1, 0, 1.5, True]
WRONG += [10**30, -(10**30), math.inf, math.nan, "~nobody/x", "a\0b", [""], ["a b"], [".x"], "mps", [{"name": "int8", "a": {}}]]
GIVEN = {"model=hub": ["model.id=a/b"], "model=path": ["model.path={0}"], "model=gguf": ["model.path={0}/lines.jsonl"]}
GIVEN |= {"workload=trace": ["workload.file={0}/lines.jsonl"]}
GIVEN |= {"model=shape": ["model.layers=2", "model.kv_heads=2", "model.head_dim=16"], "data=hub": ["data.path=wikitext"]}
GIVEN |= {f"data={kind}": ["data.path={0}/lines.jsonl"] for kind in ("csv", "json", "jsonl", "parquet", "text")}


def keys(values: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in values.items():
        yield (*before, key)
        if isinstance(value, dict):
            yield from keys(value, (*before, key))


def spoiled(place: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Every key of every experiment and of every option of every group, with every wrong value: settings, and what was done."""
    (place / "lines.jsonl").write_text('{"prompt_tokens": 4, "output_tokens": 4}\n', encoding="utf-8")
    (place / "config.json").write_text("{}", encoding="utf-8")
    groups, seen = cli.groups(CONF), set[tuple[str, ...]]()
    choices = [("experiment", name) for name in groups["experiment"]]
    choices += [(group, option) for group in groups if group != "experiment" for option in groups[group]]
    for group, option in choices:
        choice, served = f"{group}={option}", "throughput" if group == "workload" or option == "simulated" else "compare"
        given = [text.format(place) for text in GIVEN.get(choice, [])]
        experiment = [] if group == "experiment" else [f"experiment={served}"]
        values = composed([choice, *experiment, *given], resolve=True)
        for key in keys(values):
            if key in seen if group == "experiment" and key[0] in groups else group not in ("experiment", key[0]):
                continue
            seen.add(key)
            for value in WRONG:
                changed = copy.deepcopy(values)
                inner = changed
                for part in key[:-1]:
                    inner = inner[part]
                inner[key[-1]] = copy.deepcopy(value)
                yield changed, f"{choice} {'.'.join(key)}={value!r}"


def check_refused_in_one_line(cases: Iterator[tuple[dict[str, Any], str]], place: Path) -> int:
    count = 0
    for values, what in cases:
        count += 1
        try:
            build(values, place / "run")
        except ConfigError as error:
            assert "\n" not in str(error).strip(), what
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    return count


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Record, "save", lambda self: None)
    monkeypatch.setattr("experiments.harness.record.git_state", lambda: None)


@pytest.mark.usefixtures("unwritten")
def test_no_value_of_any_setting_gives_a_traceback(place: Path) -> None:
    """One of seventeen; the slow tier tries all. Either it is allowed, or it is one line."""
    assert check_refused_in_one_line(islice(spoiled(place), 0, None, 17), place) > 1000


@pytest.mark.slow
@pytest.mark.usefixtures("unwritten")
def test_no_value_of_any_setting_gives_a_traceback_at_all(place: Path) -> None:
    assert check_refused_in_one_line(spoiled(place), place) > 20_000


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["experiment=plan", "quantizer=null"],
            "quantizer=null: 'null' is no option of quantizer; Allowed: fp8, fp8_token",
        ),
        (["experiment=plan", "quantizer=3"], "quantizer=3: '3' is no option of quantizer"),
        (["experiment=null"], "experiment=null: 'null' is no option of experiment"),
        (["-m", "experiment=plan", "quantizer=none,null"], "quantizer=none,null"),
        (["-m", "experiment=plan", "quantizer=none,int9"], "unknown quantizer 'int9'; did you mean 'int8'"),
        (["experiment=plan", "quantizer=none,int8"], "a sweep over them takes -m"),
        (["experiment=plan", "--nope"], "unrecognized arguments: --nope"),
        (["experiment=plan", "--cfg=nope"], "invalid choice: 'nope'"),
        (["experiment=plan", "model.device=mps"], "'mps' is not a device that an engine runs on; use cpu, cuda or cuda:N"),
        (["experiment=plan", "seed=-1"], "seed=-1 is not allowed"),
        (["experiment=plan", "workload=null"], "workload=null"),
        (["experiment=plan", "policy_modules=['']"], "policy_modules: cannot import ''"),
        (
            ["experiment=throughput", "model=llama3-8b-tiny", "workload=system_prompt"],
            "workload.max_tokens=4096 is above the 2048",
        ),
        (["experiment=compare", *TINY, "tokens_per_document=9000"], "tokens_per_document=9000 is above the 2048 positions of"),
        (["experiment=calibrate", *TINY, "sample.tokens=9000"], "sample.tokens=9000 is above the 2048 positions of"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_typed_and_leaves_nothing(
    arguments: list[str], expected: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert expected in refusal(capsys, *arguments)


def test_a_sweep_whose_every_job_is_refused_leaves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["-m", "experiment=plan", "allocator.block_size=17,19"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
    assert list(place.iterdir()) == []


def test_a_setting_found_wrong_after_something_was_measured_ends_with_code_1_and_its_record(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(self: Any, run: Any) -> None:
        run.add_row({"label": "measured"})
        raise ConfigError("the second policy does not fit")

    monkeypatch.setattr(EXPERIMENTS.get("plan"), "run", measure)
    assert run.main(["experiment=plan", "hydra.run.dir=here"]) == 1
    record = json.loads((place / "here" / "record.json").read_text(encoding="utf-8"))
    assert (record["error"], len(record["rows"])) == ("the second policy does not fit", 1)


def test_a_model_of_a_hub_that_cannot_be_reached_is_refused_without_retries(
    monkeypatch: pytest.MonkeyPatch, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub's own library tries five times, 25 seconds in all."""
    asked: list[dict[str, Any]] = []

    def load(*_: Any, **settings: Any) -> None:
        asked.append(settings)
        raise OSError("not in the cache")

    monkeypatch.setattr("qkv.models.loader.unreachable", lambda: "the hub does not answer")
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", load)
    assert run.main(["experiment=generate", "quantizer=none", "model=hub", "model.id=a/b", "prompts=[x]"]) == 1
    assert [settings["local_files_only"] for settings in asked] == [True]
    assert capsys.readouterr().err.count("error: ") == 1


# -- workloads ----------------------------------------------------------------------------------------------------------------


def test_a_shared_prefix_shorter_than_a_block_is_advised_a_smaller_block(place: Path) -> None:
    work = Workload(num_requests=200, prompt_tokens=100, output_tokens=10, prefix_groups=1, prefix_tokens=58)
    requests = list(Traffic(work, 0, 32_000))
    found = stats(requests, 64)
    assert found["prefix_duplication"] == 0.0
    assert "allocator.block_size=16" in found["advice"]
    assert "leave prefix caching off" not in found["advice"]
    assert repeated_share(requests, 16) == pytest.approx(199 * 48 / (200 * 158))  # three whole blocks of 16 are in 58 tokens
    assert stats(requests, 16)["advice"] == "Prefix caching pays."
    unlike = list(Traffic(Workload(num_requests=50, prompt_tokens=100, output_tokens=10), 0, 32_000))
    assert "leave prefix caching off" in stats(unlike, 64)["advice"]


def test_a_trace_with_quiet_hours_is_simulated_with_room_for_its_requests(place: Path) -> None:
    lines = [{"arrival": 3600 * i, "prompt_tokens": 100, "output_tokens": 10} for i in range(2)]
    Path("sparse.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    given = ["runner=simulated", "workload=trace", "workload.file=sparse.jsonl", "surface_pools=[]", "surface_lengths=[]"]
    assert run.main(["experiment=throughput", *given, "hydra.run.dir=here"]) == 0
    record = json.loads((place / "here" / "record.json").read_text(encoding="utf-8"))
    assert record["pool"]["tokens"] >= 4096  # the longest request that the model allows
    for row in record["rows"]:
        assert row["requests"]["served"] == 2
        assert 3600 < row["requests"]["seconds"] < 3601
        assert row["speed"]["ttft_s"]["p95"] < 0.1
        assert row["speed"]["output_tokens_per_s"] == pytest.approx(20 / row["requests"]["seconds"])


# -- where things are written -------------------------------------------------------------------------------------------------


def test_runs_of_the_same_second_get_folders_of_their_own(place: Path) -> None:
    """Eight at once, and two one after the other through the command line."""
    claimed: list[str] = []

    def claim() -> None:
        claims = folders.Claims()
        claimed.append(claims.folder("outputs/plan/then"))
        assert claims.folder("outputs/plan/then") == claimed[-1] or len(claimed) > 1

    threads = [threading.Thread(target=claim) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == ["outputs/plan/then", *(f"outputs/plan/then_{i}" for i in range(2, 9))]
    for _ in range(2):
        assert run.main(["experiment=plan", "hydra.run.dir=${qkv.claim:outputs/now}"]) == 0
    assert [(place / "outputs" / name / "record.json").is_file() for name in ("now", "now_2")] == [True, True]


def test_a_full_disk_is_one_line_with_the_last_whole_record(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No byte is left when the first row is written: the log and the lines for followers say so once, the record ends the run."""
    folder = place / "here"
    folder.mkdir()
    for name in ("run.log", "metrics.jsonl"):
        (folder / name).symlink_to("/dev/full")
    logger = logging.getLogger("qkv")

    def measure(self: Any, run: Any) -> None:
        (folder / "metrics.jsonl").symlink_to("/dev/full")
        logger.info("one")
        logger.info("two")
        run.add_row({"label": "first"})
        (folder / "record.json.tmp").symlink_to("/dev/full")
        run.add_row({"label": "second"})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EXPERIMENTS.get("plan"), "run", measure)
        assert run.main(["experiment=plan", f"hydra.run.dir={folder}"]) == 1
    err = capsys.readouterr().err
    assert err.count("error: cannot write") == 1
    assert "No space left on device; free some space" in err
    assert err.count("run.log cannot be written") == 1
    assert err.count("metrics.jsonl cannot be written") == 1
    assert "Traceback" not in err
    assert json.loads((folder / "record.json").read_text(encoding="utf-8"))["rows"][0]["label"] == "first"


def test_a_full_disk_at_the_start_leaves_nothing(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = place / "here"
    folder.mkdir()
    (folder / "notes.txt").touch()  # somebody's own
    (folder / "record.json.tmp").symlink_to("/dev/full")
    assert "No space left on device" in refusal(capsys, "experiment=plan", f"hydra.run.dir={folder}")
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(("sweep", "setting"), [([], "hydra.run.dir"), (["-m"], "hydra.sweep.dir")])
def test_a_place_that_cannot_be_written_is_named_with_the_setting_to_change(
    sweep: list[str], setting: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A read-only checkout: in /sys nobody can make a folder, root included."""
    monkeypatch.chdir("/sys")
    assert run.main([*sweep, "experiment=plan"]) == 2
    err = capsys.readouterr().err
    assert re.match(rf"error: cannot write '\S+': .*; choose another place with {setting}=\.\.\.\n$", err), err


def test_no_place_knows_errors_of_places_only() -> None:
    assert folders.no_place(OSError(errno.EROFS, "Read-only file system", "a"), "x") is not None
    assert folders.no_place(OSError(errno.ECONNRESET, "reset"), "x") is None


# -- the screen ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["experiment=plan"], ["--help"]])
def test_a_reader_that_leaves_does_not_end_a_run(arguments: list[str], place: Path) -> None:
    """`| head`: quiet, exit code 0, and the record is whole."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "experiments.run", *arguments, *([] if "--help" in arguments else ["hydra.run.dir=here"])]
    process = subprocess.Popen(command, cwd=place, env=environment, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    _, err = process.communicate(timeout=280)
    assert (process.returncode, err) == (0, "")
    if "--help" not in arguments:
        assert json.loads((place / "here" / "record.json").read_text(encoding="utf-8"))["finished"]


def test_an_ascii_screen_gets_every_table_and_every_text(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    with screen.prepared():
        print("ΔPPL ± 0.1, 你好")
    stream.flush()
    assert stream.buffer.getvalue() == b"dPPL ~ 0.1, \\u4f60\\u597d\n"


def test_a_process_with_no_home_no_terminal_and_ascii_only_runs(place: Path) -> None:
    given = {"HOME": None, "LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii", "TERM": "dumb"}
    prompts = ["quantizer=none", 'prompts=["Grüße, 你好"]', "sampling.max_tokens=4"]
    done = python("experiment=generate", *TINY, *prompts, cwd=place, **given)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "Gr\\xfc" in done.stdout


def test_a_user_without_a_home_folder_is_told_where_the_cache_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from qkv_kernels.folders import cache_root

    for name in ("QKV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert str(cache_root()) == "/nonexistent/.cache/qkv"


# -- how long it takes --------------------------------------------------------------------------------------------------------


def test_compare_says_beforehand_how_long_it_takes_and_draws_no_bars(place: Path) -> None:
    """First by an estimate; then by what the same run took."""
    small = ["workload.num_requests=2", "workload.prompt_tokens=20", "workload.output_tokens=4", "documents=2"]
    small += ["tokens_per_document=48", "calibration_documents=2", "quantizers=[none]", "cache.memory_bytes=4MiB"]
    command = ["experiment=demo", "model=llama3-8b-tiny", "model.dtype=bfloat16", *small]  # with the demo's own text
    done = python(*command, cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    first = done.stdout.splitlines()[0]
    assert re.fullmatch(
        r"This takes about \d+ (seconds|minutes) on this machine, by an estimate from a few short forwards\.", first
    )
    (path,) = place.glob("outputs/demo/*/record.json")
    record = json.loads(path.read_text(encoding="utf-8"))
    _, again = build(record["config"], place / "outputs" / "demo" / "again", "demo")
    assert duration.remembered(again) == record["wall_s"]
    assert "as long as the last time" in duration.line(again, load_model("llama3-8b-tiny"), duration.Work(1, 1, 1, 1))
    path.write_text(json.dumps(record | {"config": plain(record["config"] | {"documents": 3})}), encoding="utf-8")
    assert duration.remembered(again) is None
    path.write_text("{", encoding="utf-8")
    assert duration.remembered(again) is None


def test_a_duration_has_no_more_digits_than_an_estimate() -> None:
    said = [duration.rounded(seconds) for seconds in (0.2, 44.0, 89.0, 100.0, 1000.0)]
    assert said == ["about 10 seconds", "about 40 seconds", "about 90 seconds", "about 2 minutes", "about 17 minutes"]


# -- after the run ------------------------------------------------------------------------------------------------------------


def test_a_run_leaves_the_process_s_logging_as_it_was(place: Path) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    assert run.main(["experiment=plan", "model=llama2-7b", "device=a100-80g", "logger=none"]) == 0
    assert (list(root.handlers), root.level) == before
