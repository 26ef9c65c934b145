# Two commands do everything, set-up included: make demo, make test.
# Each target may be repeated; what is done already is not done again.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := bash
.SHELLFLAGS := -o pipefail -c
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
QUIET := TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0
# The tests compute with small arrays, on which torch's threads would only wait for each other.
TESTING := $(QUIET) OMP_NUM_THREADS=1

.PHONY: demo test test-jax test-tensorflow test-torch bench docs lint format clean \
  steps-jax steps-tensorflow steps-torch doctor-jax doctor-tensorflow doctor-torch \
  devices-jax devices-tensorflow devices-torch

demo: $(VENV)/base.done
	$(QUIET) KERAS_BACKEND=$${KERAS_BACKEND:-jax} $(BIN)/python examples/digits.py

# One process per engine and part, as many at a time as there are processors, the longest first.
ENGINES := jax torch tensorflow
test: $(VENV)/all.done
	@$(MAKE) --no-print-directory -j$(JOBS) steps-torch steps-jax steps-tensorflow \
	  devices-jax doctor-tensorflow devices-torch doctor-torch doctor-jax devices-tensorflow

PYTEST = $(TESTING) KERAS_BACKEND=$* $(BIN)/python -m pytest $(ARGS)
test-jax: devices-jax
test-tensorflow: devices-tensorflow
test-torch: devices-torch
test-jax test-tensorflow test-torch: test-%: $(VENV)/all.done
	@$(PYTEST) 2>&1 | sed -u 's/^/$*: /'

$(ENGINES:%=steps-%): steps-%: $(VENV)/all.done
	@$(PYTEST) --ignore tests/doctor --ignore tests/distribution 2>&1 | sed -u 's/^/$*: /'

$(ENGINES:%=doctor-%): doctor-%: $(VENV)/all.done
	@$(PYTEST) tests/doctor 2>&1 | sed -u 's/^/$*, doctor: /'

# In a process of its own: how many devices there are is fixed when the engine starts.
$(ENGINES:%=devices-%): devices-%: $(VENV)/all.done
	@TRAINSTEP_DEVICES=4 $(PYTEST) tests/distribution 2>&1 | sed -u 's/^/$*, devices: /'

bench: $(VENV)/all.done
	$(QUIET) $(BIN)/python -m benchmarks.compare $(ARGS)
	$(QUIET) $(BIN)/python -m benchmarks.overhead $(ARGS)
	$(QUIET) $(BIN)/python -m benchmarks.fit $(ARGS)
	$(QUIET) $(BIN)/python -m benchmarks.sizes $(ARGS)
	$(QUIET) $(BIN)/python -m benchmarks.doctor $(ARGS)
	$(QUIET) $(BIN)/python -m benchmarks.session $(ARGS)
	$(QUIET) $(BIN)/python -m benchmarks.devices $(ARGS)

# Judges the whole zoo of steps whose sizes vary, which takes some twenty minutes an engine.
docs: $(VENV)/all.done
	@mkdir -p build
	@for engine in jax tensorflow torch; do \
	  echo "== $$engine"; \
	  $(TESTING) TRAINSTEP_CACHE=off KERAS_BACKEND=$$engine \
	    $(BIN)/python -m tests.function.sizes.table judge build/zoo-$$engine.json || exit 1; \
	done
	$(BIN)/python -m tests.function.sizes.table show build/zoo-*.json > docs/sizes-zoo.md

lint: $(VENV)/all.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/all.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist src/*.egg-info

$(VENV)/bin/python:
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/base.done: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "== installing trainstep with JAX"
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e . scikit-learn
	@touch $@

$(VENV)/all.done: $(VENV)/base.done
	@echo "== installing all engines and the tools"
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt torch
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[tensorflow,torch,dev]'
	@touch $@
