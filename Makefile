# Two commands: `make demo` trains the example, `make test` proves the project. Both are quick the second time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test lint types check install clean
.DEFAULT_GOAL := demo

demo: $(VENV)/.train
	$(BIN)/yunlu train examples/digits.yaml

test: check
	# One thread a process: two test processes share the cores of a small machine.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

install: $(VENV)/.dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.train: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[train]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt scripts/install-system | $(VENV)/bin/python
	scripts/install-system
	$(PIP) --editable '.[all,dev]'
	touch $@ $(VENV)/.train

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache
