# `make help` lists the targets.  Variables: PYTHON=python3.12, PIP_ARGS="--extra-index-url ...", PYTEST_ARGS="-k mesh -x".

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CONSTRAINTS := requirements/constraints.txt
TORCH := $(shell grep '^torch==' $(CONSTRAINTS))
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -c $(CONSTRAINTS) $(PIP_ARGS)

.DEFAULT_GOAL := help
.PHONY: help setup demo test matrix kernels versions check format clean

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(STAMP)  ## make .venv with everything in it; instant when up to date

demo: setup  ## run the demonstration
	@$(BIN)/python -m examples.demo

test: setup  ## run the tests but the slow ones, four files at a time; PYTEST_ARGS are passed on
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 4 --dist loadfile --no-loadscope-reorder -m "not slow" $(PYTEST_ARGS)

matrix: setup  ## run every test with all of its cases, then the full matrix; hours
	@MESHWRIGHT_ALL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --timeout 7200
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.matrix

versions: setup  ## run the core tests with the oldest and the newest torch and transformers; minutes and gigabytes
	@$(BIN)/python -m tests.versions

kernels: setup  ## run the tests of our Triton kernels in its interpreter, and compile them for three GPUs
	@$(PIP_INSTALL) -e '.[kernels]'
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -p no:cacheprovider -m "not gpu" $(wildcard tests/test_*kernel*.py)

check: setup  ## formatting, lint, types, storeys
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: setup  ## format and repair what can be repaired
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# torch goes first and alone: PIP_ARGS may choose its build, and the constraints keep pip from fetching another. pip would
# compile to bytecode on one core; compileall takes all, and fails on templates that are not Python, as pip would too.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; install Python 3.11, 3.12 or 3.13, or name one: make setup PYTHON=/path/to/python" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v[:2] < (3, 14) else f"$(PYTHON) is Python {v[0]}.{v[1]}, meshwright needs 3.11, 3.12 or 3.13; name one: make setup PYTHON=python3.11")'
	@echo "setup: making $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup: installing $(TORCH)"
	@$(PIP_INSTALL) $(TORCH)
	@echo "setup: installing meshwright[dev], editable"
	@$(PIP_INSTALL) -e '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null || true
	@touch $@
	@echo "setup: done"
