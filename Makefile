# Everything is installed into .venv, from the pins in constraints.txt. `make help` lists the targets.

PYTHON ?= $(or $(shell command -v python3.11),python3)
# Arguments of the demo, for instance `make demo DEMO_ARGS=--short`, of the benchmark and the hunt.
DEMO_ARGS ?=
SPEED_ARGS ?=
HUNT_ARGS ?=
EXAMPLE_ARGS ?=
RELEASE_ARGS ?=
# Processes that share the unit tests; each computes on one thread.
JOBS ?= 2
# How many random networks, and series of steps, `make fuzz` tries: others each time.
EXAMPLES ?= 10000
# More arguments of pytest, for instance `make unit PYTEST_ARGS="-k linear"`.
PYTEST_ARGS ?=

VENV := .venv
OLDEST := .venv-oldest
NEWEST := .venv-newest
# The lower bound of torch in pyproject.toml, which is the only place that has it.
OLDEST_TORCH = $(shell sed -n 's/.*"torch>=\([0-9.]*\).*/\1/p' pyproject.toml)
BIN := $(VENV)/bin
# Without the constraints, pip would take the newest torch, whose CUDA build has several gigabytes.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := src tests demo examples docs

.DEFAULT_GOAL := help
.PHONY: help demo test lint types unit slow nightly kernels pretended programs unordered graph compiled test-oldest test-newest coverage fuzz hunt batching speed docs models examples release format clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.demo  ## Draw six pictures of what is won, and of what is not
	$(BIN)/python -m demo $(DEMO_ARGS)

test: lint types unit  ## Run lint, types and the unit tests, without those that are slow

lint: $(VENV)/.test  ## Check style and formatting
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.test  ## Check types
	$(BIN)/mypy

unit: $(VENV)/.test  ## Run the unit tests
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal -m "not slow" $(PYTEST_ARGS)

slow: $(VENV)/.test  ## Run the unit tests that are slow: models compiled by inductor, processes
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal -m "slow and not nightly" \
		$(PYTEST_ARGS)

nightly: $(VENV)/.test  ## Run slow tests that show everywhere what others show at some places
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(JOBS) --dist worksteal -m nightly $(PYTEST_ARGS)

# The plain kernels of PyTorch, and last bits that depend on how operands are arranged in memory.
KERNELS := precision rules losses _capture/forward _blocks/programs
kernels: $(VENV)/.test  ## Run the tests that compare bits, with kernels as on other processors
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.arranged \
		--numprocesses $(JOBS) --dist worksteal -m "not slow" --ignore tests/unit/rules/_nodes \
		$(PYTEST_ARGS) $(addprefix tests/unit/,$(KERNELS))

pretended: build/pretended.so  ## Run the unit tests on a CUDA device that is pretended, without a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.pretended --numprocesses $(JOBS) \
		--dist worksteal -m "not slow and not gpu" -k "not sparse and not compressed" \
		--ignore tests/unit/integrations --ignore tests/unit/project/test_docs.py \
		--ignore tests/unit/project/test_docstrings.py $(PYTEST_ARGS)

# Needs a C++ compiler.
build/pretended.so: TORCH = $(firstword $(wildcard $(VENV)/lib/python*/site-packages/torch))
build/pretended.so: $(wildcard tests/pretended/*.cpp tests/pretended/*.h) $(VENV)/.test
	mkdir -p $(@D)
	$(CXX) -std=c++20 -O1 -fPIC -shared -I$(TORCH)/include $(filter %.cpp,$^) -o $@ \
		-L$(TORCH)/lib -Wl,-rpath,$(abspath $(TORCH)/lib) -ltorch_cpu -lc10

programs: $(VENV)/.test  ## Run the unit tests with programs from the first step on, where others need many
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.programs --numprocesses $(JOBS) \
		--dist worksteal -m "not slow" $(PYTEST_ARGS)

unordered: $(VENV)/.test  ## Run the unit tests with kernels that add up in any order, as on a GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.unordered --numprocesses $(JOBS) \
		--dist worksteal -m "not slow" $(PYTEST_ARGS)

graph: $(VENV)/.test  ## Run the unit tests with uses that are read from autograd's graph
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.graph --numprocesses $(JOBS) \
		--dist worksteal -m "not slow" $(PYTEST_ARGS)

compiled: $(VENV)/.test  ## Run the tests of compiled models, with inductor for those of the zoo
	AUTOGRAM_TEST_INNER=inductor OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses $(JOBS) \
		--dist worksteal tests/unit/_compiled $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.test  ## Run the unit tests with the oldest PyTorch that is supported
	OMP_NUM_THREADS=1 $(OLDEST)/bin/pytest --numprocesses $(JOBS) --dist worksteal $(PYTEST_ARGS)

test-newest: $(NEWEST)/.test  ## Run the unit tests with the newest PyTorch that pip finds
	OMP_NUM_THREADS=1 $(NEWEST)/bin/pytest --numprocesses $(JOBS) --dist worksteal $(PYTEST_ARGS)

# Apart from the tests that decide: to see each line takes as long as half of them.
coverage: $(VENV)/.test  ## Run the unit tests, and list the lines that they do not reach
	$(MAKE) unit PYTEST_ARGS="-m '' --cov --cov-report term $(PYTEST_ARGS)"

fuzz: $(VENV)/.test  ## Compare EXAMPLES random networks and series of steps with plain autograd
	AUTOGRAM_FUZZ_EXAMPLES=$(EXAMPLES) OMP_NUM_THREADS=1 $(BIN)/pytest \
		tests/unit/losses/test_properties.py tests/unit/errors/test_verification.py -k "plain_autograd or many_draws"

hunt: $(VENV)/.test  ## Look for silent errors in series of steps whose arguments change
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hunt $(HUNT_ARGS)

batching: $(VENV)/.test  ## Compare PyTorch's batched backward passes with a loop, for every operator
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hunt.batching

speed: $(VENV)/.test  ## Measure a training step, beside torchjd's engine; on a GPU if there is one
	$(BIN)/python -m tests.speed $(SPEED_ARGS)

docs: $(VENV)/.docs  ## Build the documentation into build/docs
	$(BIN)/sphinx-build -W -n --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "The documentation is in build/docs/index.html."

models: $(VENV)/.test  ## Write the table of docs/models.md anew
	$(BIN)/python -m docs.generate_models

examples: $(VENV)/.test  ## Run the examples to the end; their pictures are in build/examples
	OMP_NUM_THREADS=1 $(BIN)/python -m examples $(EXAMPLE_ARGS)

release: $(VENV)/.test $(VENV)/.release  ## Build wheel and sdist into dist, and try them elsewhere
	$(BIN)/python -m tests.release $(RELEASE_ARGS)

format: $(VENV)/.test  ## Format the code and mend what can be mended
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

clean:  ## Remove the environment and everything that was built
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build dist .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp per set of requirements: a second call installs nothing, an edited requirement does.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: EXTRAS := demo
$(VENV)/.test: EXTRAS := test,lint,demo
$(VENV)/.docs: EXTRAS := docs
$(VENV)/.release: EXTRAS := release

$(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(VENV)/.release: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing autogram[$(EXTRAS)] into $(VENV) ..."
	@$(INSTALL) --editable ".[$(EXTRAS)]"
	@touch $@

# Environments of their own, with the same pins but for torch, and for what it has bounds of.
# PyPI has builds for CUDA only, of several gigabytes; a CPU build is taken where pip finds one, as
# with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu.
$(OLDEST)/.test: OTHER := torch==$(OLDEST_TORCH).*
$(NEWEST)/.test: OTHER := torch
$(OLDEST)/.test $(NEWEST)/.test: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -v -e '^torch==' -e '^setuptools==' constraints.txt > $(@D)/constraints.txt
	echo "$(OTHER)" >> $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c $(@D)/constraints.txt --editable ".[test,demo]"
	@touch $@
