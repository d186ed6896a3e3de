# Every target sets up what it needs: a virtual environment in .venv with this package and the pinned tools.
# Set-up runs once, and again only when setup.py or constraints.txt changes.
#
#   make demo                      what is lost without this package, and what is kept with it
#   make test                      the whole test suite, in parallel
#   make test ARGS="-k metrics"    part of it
#   make PYTHON=python3.12 test    with another Python (3.10 or newer)

PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := setup.py src tests examples benchmarks tools

STREAMING := .venv-streaming

.PHONY: help demo test test-long test-streaming test-cuda bench docs quality style upstream-pr test-upstream clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train on two ranks with plain accelerate and with this package, and compare"
	@echo "make test      run the test suite in parallel (ARGS=\"-k name\" for part of it)"
	@echo "make test-long run the property tests on 10,000 random examples"
	@echo "make test-streaming  the tests with MosaicML Streaming and LitData, in an environment of their own"
	@echo "make test-cuda       the checks on GPUs, with the torch and accelerate that PYTHON has (ARGS=\"--only WORD\")"
	@echo "make bench     measure against plain accelerate (ARGS=\"--quick\", ARGS=\"--only NAME\")"
	@echo "make docs      build the documentation into build/docs; any warning fails it"
	@echo "make quality   check format and lint"
	@echo "make style     fix format and lint"
	@echo "make upstream-pr CHECKOUT=path   write the feature into a git checkout of Accelerate, as one commit"
	@echo "make test-upstream               do that to released sources, and run Accelerate's tests and ours on them"
	@echo "make clean     remove .venv and everything that was built"

demo: $(READY)
	@$(BIN)/python examples/compare.py

test: $(READY)
	$(BIN)/python -m pytest -n logical --maxprocesses 4 $(ARGS)

# Ten thousand random examples of the promises in the README; test takes some hundreds of them.
test-long: $(READY)
	PRESHARDED_EXAMPLES=10000 $(BIN)/python -m pytest tests/test_properties.py $(ARGS)

test-streaming: $(STREAMING)/.ready
	$(STREAMING)/bin/python -m pytest tests/libraries/streaming_env $(ARGS)

# As it is, without .venv: torch for a GPU is installed where the GPU is.
test-cuda:
	@$(PYTHON) tests/cuda/run.py $(ARGS)

# The full run, which rewrites benchmarks/RESULTS.md, takes minutes and wants a quiet machine.
bench: $(READY)
	@$(BIN)/python -m benchmarks $(ARGS)

docs: $(READY)
	@$(BIN)/python -m mkdocs build --strict
	@echo "The documentation is in build/docs; begin with build/docs/index.html."

quality: $(READY)
	$(BIN)/ruff format --check $(wildcard $(SOURCES))
	$(BIN)/ruff check $(wildcard $(SOURCES))

style: $(READY)
	$(BIN)/ruff check --fix $(wildcard $(SOURCES))
	$(BIN)/ruff format $(wildcard $(SOURCES))

# ARGS=--check says what would be done, and does nothing.
upstream-pr: $(READY)
	@test -n "$(CHECKOUT)" || { echo "Say where: make upstream-pr CHECKOUT=path/to/accelerate" >&2; exit 1; }
	@$(BIN)/python tools/upstream_pr.py "$(CHECKOUT)" $(ARGS)

# Long: half an hour on two cores. CHECKOUT=path takes that commit instead of the released sources.
test-upstream: $(READY)
	@$(BIN)/python tools/test_upstream.py $(CHECKOUT) $(ARGS)

clean:
	rm -rf $(VENV) $(STREAMING) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis

# A .venv made by hand is used as it is; what it lacks is installed into it.
$(READY): setup.py constraints.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	    command -v $(PYTHON) >/dev/null || { echo "No '$(PYTHON)' here. Name a Python 3.10 or newer: make PYTHON=/path/to/python ..." >&2; exit 1; }; \
	    $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	        echo "Python 3.10 or newer is needed; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 ..." >&2; exit 1; }; \
	    echo "Making $(VENV) with $$($(PYTHON) --version) ..."; \
	    $(PYTHON) -m venv $(VENV) || exit 1; \
	fi
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "$(VENV) holds $$($(BIN)/python --version 2>&1), and Python 3.10 or newer is needed. Remove it with 'make clean'." >&2; exit 1; }
	@echo "Installing into $(VENV) (the first time this takes a few minutes) ..."
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt setuptools
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

$(STREAMING)/.ready: setup.py constraints-streaming.txt | $(READY)
	@test -x $(STREAMING)/bin/python || $(BIN)/python -m venv $(STREAMING)
	@echo "Installing into $(STREAMING) (the first time this takes a few minutes) ..."
	@$(STREAMING)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-streaming.txt setuptools
	@$(STREAMING)/bin/python -m pip install -qq --disable-pip-version-check -c constraints-streaming.txt --no-build-isolation -e '.[streaming]'
	@touch $@
