# Trajlake for developers: `make` lists what there is. Every target does its own set-up, once.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# One test process per core: many tests wait for processes of their own.
PARALLEL ?= -n logical --dist worksteal
COVERAGE ?= --cov --cov-report=term:skip-covered

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start hundreds of processes: none of them compiles the sources again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow check docs golden bench

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## */  make \1	/p' Makefile | expand -t 20

setup: $(INSTALLED) ## Make .venv with every version pinned (the other targets do it by themselves)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit( \
	    "Trajlake needs Python 3.11 or newer; %s is %s. Name another: make PYTHON=/path/to/python3.12 setup" \
	    % (sys.executable, sys.version.split()[0]))'
	@test -x $(BIN)/pip || { echo "Making a virtual environment in .venv"; $(PYTHON) -m venv .venv; }
	@echo "Installing the pinned packages into .venv (minutes the first time)"
	@$(BIN)/python -m pip install --quiet -c constraints.txt hatchling editables
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	@touch $@

demo: $(INSTALLED) ## Train a tiny agent from imperfect traces to a good one, in minutes
	@$(BIN)/trajlake demo

test: $(INSTALLED) ## Run the tests, with the coverage of lake and pipelines
	@$(BIN)/python -m pytest -q $(PARALLEL) $(COVERAGE)

test-slow: $(INSTALLED) ## Run the long repetitions: kills, races, seeds (an hour)
	@$(BIN)/python -m pytest -q $(PARALLEL) -m slow

check: $(INSTALLED) ## Lint, format, types, import rules, generated docs in step with the code
	@echo "== ruff check";  $(BIN)/ruff check .
	@echo "== ruff format"; $(BIN)/ruff format --check .
	@echo "== mypy";        $(BIN)/mypy && $(BIN)/mypy docs/generate .ci/check_wheel.py
	@echo "== imports";     $(BIN)/lint-imports
	@echo "== docs";        $(BIN)/python docs/generate --check

docs: $(INSTALLED) ## Write the generated pages of docs/reference again
	@$(BIN)/python docs/generate

golden: $(INSTALLED) ## Write the golden files again; read the diff before you commit it
	@for script in tests/golden/regenerate_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done

bench: $(INSTALLED) ## Run the benchmarks, each as a ratio to the bare engine
	@for script in benchmarks/bench_*.py; do echo "== $$script"; $(BIN)/python $$script || exit 1; done
