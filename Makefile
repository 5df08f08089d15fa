# Two commands: `make demo` trains the example, `make test` proves the project. Both are quick the second time.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo docs wheel test test-long screens first-hour fuzz audit lint types check install clean bench-trainers bench-parallel bench-faults bench-comm bench-pool bench-pool-live bench-tune bench-tune-live bench-published
.DEFAULT_GOAL := demo

demo: $(VENV)/.train
	$(BIN)/yunlu train examples/digits.yaml

# What pytest makes of assertions is kept, whatever the environment says: it is half of what collecting costs.
test test-long: export PYTHONDONTWRITEBYTECODE :=

# Checked meanwhile, and one thread a process, and more of them than a small machine has cores: half of the
# time tests wait. What the check found is said at the end, by a check that has the tree to itself.
test: $(VENV)/.dev
	@$(BIN)/python -m compileall -q src tests  # once, not in each of the processes that tests start
	@$(MAKE) --no-print-directory check >/dev/null 2>&1 & checking=$$!; \
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal; tested=$$?; \
	wait $$checking || $(MAKE) --no-print-directory check || exit; \
	exit $$tested

# Examples that train for a minute each.
test-long: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m long

# What every command shows at every width, stored anew: look at the difference before you commit it.
screens: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/screens --write-screens

# A newcomer's first hour, counted: commands, lines written, CPU seconds, lines of output beyond 80 columns.
first-hour: $(VENV)/.dev
	$(BIN)/python scripts/first_hour $(ARGS)

# Property tests with random examples, again and again with other seeds until the time is over, or until one
# fails: keep what it prints as an @example of that test. Narrow it with ARGS, e.g. ARGS=tests/unit/scheduler.
FUZZ_MINUTES ?= 10
fuzz: $(VENV)/.dev
	@end=$$(( $$(date +%s) + 60 * $(FUZZ_MINUTES) )); \
	while left=$$(( end - $$(date +%s) )); [ $$left -gt 0 ]; do \
		seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); \
		OMP_NUM_THREADS=1 timeout --signal=INT --kill-after=30 $$left $(BIN)/python -m pytest -x -q -n 2 \
			--timeout=0 -m 'hypothesis and not long' --hypothesis-profile=fuzz --hypothesis-seed=$$seed $(ARGS); \
		code=$$?; [ $$code -eq 124 ] && exit 0; [ $$code -eq 0 ] || exit $$code; \
	done

# The site of these pages, in both languages: site/index.html. Warnings are errors.
docs: $(VENV)/.docs
	$(BIN)/python scripts/make_site.py $(ARGS)

# What `pip install yunlu` gets: dist/*.whl, looked into; ARGS=--release: ready to be published, too.
wheel: $(VENV)/.dev
	rm -rf dist
	$(BIN)/python -m hatchling build -d dist
	$(BIN)/python scripts/check_wheel.py dist/*.whl $(ARGS)

# Its tools need other versions of what we use: they live in an environment of their own.
audit: .venv-audit/.tools
	.venv-audit/bin/python scripts/audit $(ARGS)

.venv-audit/.tools: pyproject.toml scripts/audit
	$(PYTHON) -m venv .venv-audit
	echo '*' > .venv-audit/.gitignore
	.venv-audit/bin/python -m pip --disable-pip-version-check install --quiet \
		$$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["audit"])')
	touch $@

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

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[docs]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt scripts/install-system | $(VENV)/bin/python
	# Both at once: one waits for the network while the other unpacks.
	scripts/install-system & $(PIP) --editable '.[all,dev,docs]' && wait
	touch $@ $(VENV)/.train $(VENV)/.docs

# The other trainers live in an environment of their own: nobody needs them to use Yunlu.
bench-trainers: .venv-bench/.trainers
	.venv-bench/bin/python benchmarks/trainers.py $(ARGS)

.venv-bench/.trainers: pyproject.toml constraints.txt benchmarks/requirements-trainers.txt
	$(PYTHON) -m venv .venv-bench
	echo '*' > .venv-bench/.gitignore
	.venv-bench/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		--requirement benchmarks/requirements-trainers.txt --editable '.[train,hf]'
	touch $@

# torchft comes as a wheel with a server in Rust; where there is none, the benchmark goes on without it.
bench-faults: .venv-bench/.faults
	.venv-bench/bin/python benchmarks/faults.py $(ARGS)

# Needs root: its hosts are network namespaces.
bench-comm: $(VENV)/.train
	$(BIN)/python benchmarks/comm.py $(ARGS)

bench-pool: $(VENV)/.train
	$(BIN)/python benchmarks/pool.py $(ARGS)

bench-pool-live: $(VENV)/.train
	$(BIN)/python benchmarks/pool_live.py $(ARGS)

# What others published, reproduced from their data, which lie beside this tree.
bench-published: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q benchmarks/published

bench-tune: .venv-bench/.tune
	.venv-bench/bin/python benchmarks/tune.py $(ARGS)

bench-tune-live: $(VENV)/.dev
	$(BIN)/python benchmarks/tune_live.py $(ARGS)

.venv-bench/.tune: pyproject.toml constraints.txt benchmarks/requirements-tune.txt
	$(PYTHON) -m venv .venv-bench
	echo '*' > .venv-bench/.gitignore
	.venv-bench/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		--requirement benchmarks/requirements-tune.txt --editable '.[tune]'
	touch $@

bench-parallel: .venv-bench/.faults
	.venv-bench/bin/python benchmarks/parallel.py $(ARGS)

.venv-bench/.faults: pyproject.toml constraints.txt benchmarks/requirements-faults.txt
	$(PYTHON) -m venv .venv-bench
	echo '*' > .venv-bench/.gitignore
	.venv-bench/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		--editable '.[train]'
	.venv-bench/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt \
		--requirement benchmarks/requirements-faults.txt || echo 'torchft cannot be installed here'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache
