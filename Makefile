# Targets set up .venv themselves: `make demo` and `make test` need only Python 3.10 to 3.13.
PYTHON ?= $(shell command -v python3.11 || echo python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Three processes for two cores: tests also wait. The tests of a file share logs, so they stay in one process.
PARALLEL ?= --numprocesses 3 --dist loadfile

export OMP_NUM_THREADS ?= 1

# Otherwise each of the hundreds of processes that tests start would compile commtrace again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo quick test test-long test-all before-tests lint docs native bench clean

demo: $(READY)  ## train a small GPT-NeoX under DDP and ZeRO 0 to 3; report what each communicated, and write two pages
	rm -rf demo-logs
	-$(BIN)/commtrace build
	$(BIN)/python -m examples.demo demo-logs

quick: native  ## tests that start no ranks: less than a minute
	$(BIN)/pytest $(PARALLEL) tests/unit -m "not long and not exhaustive and not external"

test: before-tests  ## lint, types, documentation, and all tests that do not take long: seven minutes on two cores
	$(BIN)/pytest $(PARALLEL) -m "not long and not exhaustive and not external"

test-long: native  ## the tests that take long: must pass before a merge, too
	$(BIN)/pytest $(PARALLEL) -m "long and not exhaustive and not external"

test-all: before-tests  ## also the exhaustive tests, about two hours; THEORY_SEED=N repeats the random models of a run
	THEORY_SEED=$${THEORY_SEED:-$$(date +%s)} $(BIN)/pytest $(PARALLEL) -m ""

# In parallel: each uses one core.
before-tests: $(READY)
	$(MAKE) --jobs 2 --output-sync=target lint docs native

# The native recorder needs a compiler; without one, its tests are skipped, with the reason.
native: $(READY)
	-$(BIN)/commtrace build

lint: $(READY)  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## build the documentation in build/site; any broken link or reference is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build  # not --quiet, which hides warnings from `strict`

$(READY): setup.cfg setup.py constraints.txt requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement requirements-dev.txt
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[html,import,parquet,perfetto,examples]'
	touch $(READY)

bench: $(READY)  ## measure the cost of tracing against a control and other tools: about four hours; writes the README's tables
	-$(BIN)/commtrace build
	test -x build/plain/bin/python || $(PYTHON) -m venv build/plain
	build/plain/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	$(BIN)/python benchmarks/startup.py --python build/plain/bin/python
	$(BIN)/python benchmarks/log_size.py
	$(BIN)/python benchmarks/own_cost.py
	$(BIN)/python benchmarks/call_cost.py
	$(BIN)/python benchmarks/call_parts.py
	$(BIN)/python benchmarks/mpi_cost.py
	$(BIN)/python benchmarks/step_cost.py
	$(BIN)/python benchmarks/step_instructions.py
	$(BIN)/python benchmarks/bench_loop.py
	$(BIN)/python -m pip install --quiet --disable-pip-version-check duckdb
	$(BIN)/python benchmarks/report.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/across_ranks.py
	$(BIN)/python benchmarks/table.py

clean:
	rm -rf $(VENV) build dist *.egg-info demo-logs
