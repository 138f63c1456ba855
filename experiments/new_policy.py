"""Starts a new policy, or checks one; `make policy` and `make check-policy` run it.

    python -m experiments.new_policy create evictor gdsf     writes qkv/policies/evictor/gdsf.py and conf/evictor/gdsf.yaml
    python -m experiments.new_policy check gdsf              its contract tests, then a short experiment on a tiny model

New policies start from the _template.py files beside the others, which are real code, linted and tested like the rest.
Does not know about: what the policies do.
"""

import argparse
import dataclasses
import importlib
import json
import keyword
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from qkv.errors import ConfigError
from qkv.policies.allocator.base import ALLOCATORS
from qkv.policies.evictor.base import EVICTORS
from qkv.policies.preemptor.base import PREEMPTORS
from qkv.policies.quantizer.base import QUANTIZERS
from qkv.registry import Registry
from qkv.validate import suggest

ROOT = Path(__file__).resolve().parent.parent
REGISTRIES: dict[str, Registry[Any]] = {r.kind: r for r in (ALLOCATORS, EVICTORS, PREEMPTORS, QUANTIZERS)}

# A tiny model and a pool so small that requests compete for it: evictors evict and preemptors preempt.
EXPERIMENT = [
    "experiment=compare",
    "model=llama3-8b-tiny",
    "data=pydoc",
    "logger=none",
    "workload.num_requests=12",
    "workload.prompt_tokens=64",
    "workload.output_tokens=32",
    "cache.memory_bytes=null",
    "cache.num_blocks=40",
    "scheduler.max_model_len=256",
    "documents=2",
    "tokens_per_document=128",
]


def create(kind: str, name: str) -> list[Path]:
    """Write the policy's file and its YAML; returns both. Raises ConfigError for a bad kind or a bad or taken name."""
    if kind not in REGISTRIES:
        raise ConfigError(f"KIND='{kind}' is not a kind of policy; {suggest(kind, REGISTRIES)}")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"NAME='{name}' cannot name a file; use lower-case letters, digits and _, starting with a letter, like gdsf"
        )
    source = ROOT / "qkv" / "policies" / kind / f"{name}.py"
    settings = ROOT / "conf" / kind / f"{name}.yaml"
    if name in REGISTRIES[kind].names() or source.exists() or settings.exists():
        raise ConfigError(f"NAME='{name}' is taken: there is a {kind} or a file of that name. Choose another")
    template = source.with_name("_template.py").read_text(encoding="utf-8")
    camel = "".join(part.capitalize() for part in name.split("_"))
    source.write_text(template.replace('"template"', f'"{name}"').replace("class Template(", f"class {camel}("), encoding="utf-8")
    importlib.invalidate_caches()
    cls = getattr(importlib.import_module(f"qkv.policies.{kind}.{name}"), camel)
    settings.write_text(_yaml(kind, name, cls, template), encoding="utf-8")
    return [source, settings]


def _yaml(kind: str, name: str, cls: type, template: str) -> str:
    """The text of the settings file: two comment lines, as in all of conf/, then the name and every field with its default."""
    choice = f"quantizers='[none,{name}]'" if kind == "quantizer" else f"{kind}={name}"
    first_line = template.splitlines()[0].strip('"')
    fields = [f"{f.name}: {json.dumps(f.default)}" for f in dataclasses.fields(cls) if f.init]
    return "\n".join(
        [f"# python -m experiments.run experiment=compare {choice}", f"# {first_line}", f"name: {name}", *fields, ""]
    )


def check(name: str, kind: str | None = None) -> int:
    """Run the contract tests and the short experiment, and print a verdict. Returns 0 if both are well. Raises ConfigError."""
    kinds = [k for k, registry in REGISTRIES.items() if name in registry.names() and kind in (None, k)]
    if not kinds:
        known = {n for k, registry in REGISTRIES.items() if kind in (None, k) for n in registry.names()}
        raise ConfigError(f"NAME='{name}' is no {kind or 'policy'}; {suggest(name, known)}")
    if len(kinds) > 1:
        raise ConfigError(f"NAME='{name}' is {' and '.join(kinds)}: say which with KIND={kinds[0]}")
    (kind,) = kinds
    print(f"{kind} '{name}': contracts", flush=True)
    selected = f"{name} and not new_policy"
    contracts = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/contracts", "-k", selected], cwd=ROOT, check=False)
    if contracts.returncode:
        print(
            f"FAIL: {kind} '{name}' breaks its contracts; the first failure above says which"
            + " (none ran)" * (contracts.returncode == 5)
        )
        return 1
    print(f"{kind} '{name}': experiment", flush=True)
    row = _experiment(kind, name)
    if row is None:
        print(f"FAIL: {kind} '{name}' keeps its contracts, but the experiment ended with the error above")
        return 1
    print(f"OK: {kind} '{name}' keeps its contracts and ran: {_verdict(row)}")
    return 0


def _experiment(kind: str, name: str) -> dict[str, Any] | None:
    """The record's last row, or None if the experiment failed."""
    chosen = [f"quantizers=[none,{name}]"] if kind == "quantizer" else [f"{kind}={name}", "quantizers=[none]"]
    command = [sys.executable, "-m", "experiments.run", *EXPERIMENT, *chosen]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="", flush=True)
    if done.returncode:
        return None
    path = done.stdout.strip().splitlines()[-1].removeprefix("record: ")
    rows: list[dict[str, Any]] = json.loads((ROOT / path).read_text(encoding="utf-8"))["rows"]
    return rows[-1]


def _verdict(row: dict[str, Any]) -> str:
    shown = {
        "bits of K": row.get("memory", {}).get("effective_bits_k"),
        "bits of V": row.get("memory", {}).get("effective_bits_v"),
        "perplexity change": row.get("accuracy", {}).get("perplexity_delta_pct"),
        "evictions": row.get("cache", {}).get("evictions"),
        "preemptions": row.get("cache", {}).get("preemptions"),
    }
    return ", ".join(f"{key} {value:.4g}" for key, value in shown.items() if value is not None)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    new = actions.add_parser("create", help="write the files of a new policy")
    new.add_argument("kind", help=" | ".join(REGISTRIES))
    new.add_argument("name")
    old = actions.add_parser("check", help="run a policy's contracts and a short experiment")
    old.add_argument("name")
    old.add_argument("kind", nargs="?")
    options = parser.parse_args()
    try:
        if options.action == "check":
            return check(options.name, options.kind or None)
        source, settings = create(options.kind, options.name)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {source.relative_to(ROOT)}: a working starting point, change it into your policy")
    print(f"wrote {settings.relative_to(ROOT)}: one line per field of its class")
    print(f"then: make check-policy NAME={options.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
