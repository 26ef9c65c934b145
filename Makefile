# Two commands do everything, set-up included: make demo, make test.
# Each target may be repeated; what is done already is not done again.

# Another interpreter has an environment of its own: make demo PYTHON=python3.13
ifdef PYTHON
VENV ?= .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
endif
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := bash
comma := ,
.SHELLFLAGS := -o pipefail -c
JOBS ?= $(shell nproc 2>/dev/null || echo 1)
QUIET := TF_CPP_MIN_LOG_LEVEL=3 TF_ENABLE_ONEDNN_OPTS=0
# The tests compute with small arrays, on which torch's threads would only wait for each other.
TESTING := $(QUIET) OMP_NUM_THREADS=1

.PHONY: demo test test-all test-slow-part test-jax test-tensorflow \
  test-torch test-python test-versions bench docs lint format clean

demo: $(VENV)/base.done
	$(QUIET) KERAS_BACKEND=$${KERAS_BACKEND:-jax} $(BIN)/python examples/digits.py

# Every engine, one after the other, each with as many processes as there are processors; ARGS are
# pytest's: make test ARGS="tests/function/test_parity.py -x". The slow tests are left out.
TESTS = $(TESTING) $(BIN)/python -m tests.run --jobs $(JOBS)
test: $(VENV)/all.done
	@$(TESTS) $(ARGS)

test-all: $(VENV)/all.done
	@$(TESTS) --slow $(ARGS)

test-slow-part: $(VENV)/all.done
	@$(TESTS) --slow-part $(ARGS)

test-jax test-tensorflow test-torch: test-%: $(VENV)/all.done
	@$(TESTS) --engines $* $(ARGS)

# The tests on another interpreter, without torch: make test-python PYTHON=python3.13
ENGINES ?= jax,tensorflow
test-python: $(VENV)/test-$(ENGINES).done
	@$(TESTS) --engines $(ENGINES) $(ARGS)

# What depends on the engines, with the oldest versions that are supported and with the newest.
VERSIONS := build/versions$(patsubst .venv%,%,$(VENV))
test-versions: $(VERSIONS)/oldest/done $(VERSIONS)/newest/done
	@for which in oldest newest; do \
	  echo "== $$which: $$($(VERSIONS)/$$which/bin/python -m pip list 2>/dev/null \
	    | grep -E '^(jax|keras|numpy|optree|tensorflow_cpu) ' | tr -s ' \n' ' ')"; \
	  $(TESTING) $(VERSIONS)/$$which/bin/python -m tests.run --core --jobs $(JOBS) \
	    --engines $(ENGINES) || exit 1; \
	done

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
	rm -rf .venv .venv-* build dist src/*.egg-info

$(VENV)/bin/python:
	@echo "== creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/base.done: $(VENV)/bin/python pyproject.toml constraints.txt
	@echo "== installing trainstep with JAX"
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e . scikit-learn
	@touch $@

$(VENV)/test-%.done: $(VENV)/base.done
	@echo "== installing $* and the tools of the tests"
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt \
	  -e '.[test$(if $(findstring tensorflow,$*),$(comma)tensorflow)]'
	@touch $@

$(VERSIONS)/oldest/done $(VERSIONS)/newest/done: $(VERSIONS)/%/done: pyproject.toml tests/versions.py
	@echo "== installing the $* versions"
	$(PYTHON) -m venv $(VERSIONS)/$*
	$(PYTHON) -m tests.versions > $(VERSIONS)/$*/oldest.txt
	$(VERSIONS)/$*/bin/python -m pip install --progress-bar off \
	  $(if $(findstring oldest,$*),-c $(VERSIONS)/$*/oldest.txt) -e '.[tensorflow]' \
	  hypothesis pandas pytest pytest-timeout pytest-xdist scikit-learn
	@touch $@

$(VENV)/all.done: $(VENV)/base.done
	@echo "== installing all engines and the tools"
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt torch
	$(BIN)/python -m pip install --progress-bar off -c constraints.txt -e '.[tensorflow,torch,dev]'
	@touch $@
