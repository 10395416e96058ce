# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
KILL ?=
OPTIONS ?=
READY := $(VENV)/.ready

.PHONY: demo test lint types clean

demo: $(READY)  ## train the quick start; KILL=rollout (or another role, or coordinator) kills it midway
	$(BIN)/rondo train examples/quickstart.py $(if $(KILL),--kill $(KILL)@75) $(OPTIONS)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(OPTIONS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy -p rondo

# torch comes first and pinned, so that nothing replaces the build this machine's index offers.
$(READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
