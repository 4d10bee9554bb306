# `make demo` and `make test` do all their own set-up in a virtual environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# Smaller than the demo model, so that experts are read from disk while it writes.
DEMO_MEMORY ?= 9MiB

.PHONY: demo test check bench gpu

demo: $(VENV)/.lowtide
	$(BIN)/lowtide generate demo:diffusion -p 'def fibonacci(n):' --max-tokens 128 --context 512 --host-memory $(DEMO_MEMORY)

test: $(VENV)/.lowtide-dev
	$(BIN)/python -m pytest -q -m 'not slow and not gpu'

check: $(VENV)/.lowtide-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# All but full_size.py, which writes 30 GiB: start that one by hand.
bench: $(VENV)/.lowtide-dev
	for name in decode offload batching; do $(BIN)/python benchmarks/$$name.py || exit 1; done

gpu: $(VENV)/.lowtide-dev
	$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("There is no GPU here: nothing was tested.")'
	$(BIN)/python -m pytest -q -m gpu

# What running needs; what developing needs is put on top of it.
$(VENV)/.lowtide: pyproject.toml constraints.txt
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

$(VENV)/.lowtide-dev: $(VENV)/.lowtide
	$(PIP) -e '.[dev]'
	touch $@
