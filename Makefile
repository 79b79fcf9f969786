# Everything sets itself up: `make demo` and `make test` need Python 3.10 or later (3.11 is what is tested) and nothing else.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

export OMP_NUM_THREADS ?= 1

.PHONY: demo test lint bench clean

demo: $(READY)  ## train a small GPT-NeoX under DDP and ZeRO 0 to 3, and show what each communicated
	$(BIN)/python -m commtrace.workloads.demo demo-logs

test: lint  ## everything that must hold
	$(BIN)/pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(READY): setup.cfg setup.py constraints.txt requirements-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement requirements-dev.txt
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[parquet,workloads]'
	touch $(READY)

clean:
	rm -rf $(VENV) build dist *.egg-info demo-logs
