# Every goal makes its own set-up: Python >= 3.11, pip, make and git are all that a machine needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Python >= 3.12, which one of those clients wants; without it that client's tests are skipped.
PYTHON_312 ?= python3.12

.PHONY: demo test test-unit test-clients test-system test-engines check bench-codec bench-publish bench-swap bench-engine format lock clean help

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

$(READY): requirements.lock requirements-no-deps.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-no-deps.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(READY)

demo: $(READY) ## train a real small model against a real fleet on this machine (ARGS="--steps 6" and others)
	$(BIN)/slackwater demo $(ARGS)

# Compiled tests and modules are kept: pytest rewrites each assertion of 6,000 tests, which takes ten seconds a process.
unexport PYTHONDONTWRITEBYTECODE

test: test-unit ## all tests that need only pip
	$(BIN)/pytest tests/conformance tests/integration $(ARGS)

# SLACKWATER_TEST_DEPTH=thorough tries eight times as many examples. Torch has one thread: there are two processes.
test-unit: $(READY) ## unit, hostile, frozen and stateful tests: about a minute
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 tests/unit tests/hostile tests/frozen tests/stateful $(ARGS)

test-clients: $(READY) .clients/fireworks/.ready .clients/cwtrain/.ready ## other services' published clients against the hot-load fronts
	$(BIN)/pytest tests/integration/test_fireworks_client.py tests/integration/test_coreweave_client.py $(ARGS)

# Each in an environment of its own: they pin what this project doesn't want pinned.
.clients/fireworks/.ready:
	$(PYTHON) -m venv .clients/fireworks
	.clients/fireworks/bin/python -m pip install --quiet --disable-pip-version-check 'fireworks-ai[training-sdk]==1.2.30'
	touch $@

.clients/cwtrain/.ready:
	if $(PYTHON_312) --version; then $(PYTHON_312) -m venv .clients/cwtrain && \
	  .clients/cwtrain/bin/python -m pip install --quiet --disable-pip-version-check cwtrain==1.0.2 && \
	  touch $@; fi

test-system: $(READY) .azurite/node_modules/.bin/azurite ## tests with what pip can't install: Azurite, which npm does
	$(BIN)/pytest -m system $(ARGS)

.azurite/node_modules/.bin/azurite:
	npm install --no-audit --no-fund --silent --prefix .azurite azurite@3.37.0

test-engines: $(READY) ## tests with vLLM, Ray and TRL (none yet in this version)
	@echo "test-engines: this version has the embedded engine alone; make test proves it"

check: $(READY) ## format, lint, strict types, docs, layers
	$(BIN)/ruff format --check src tests scripts benchmarks
	$(BIN)/ruff check src tests scripts benchmarks
	$(BIN)/pyright
	$(BIN)/pytest -q tests/unit/test_layers.py tests/unit/test_public_api.py tests/unit/test_import_cost.py tests/unit/test_docs.py

bench-demo: $(READY) ## the demo as a benchmark: last line is one JSON object
	$(BIN)/slackwater demo $(ARGS)

bench-codec: $(READY) ## the codec on real deltas, beside what others ship: last line is one JSON object
	$(BIN)/python benchmarks/codec.py $(ARGS)

bench-publish: $(READY) ## publishing to an S3 server over loopback, crashes and races: last line is one JSON object
	PYTHONPATH=tests:tests/unit:tests/integration $(BIN)/python benchmarks/publishing.py $(ARGS)

bench-swap: $(READY) ## the pause of a swap under load, beside other ways to write weights: last line is one JSON object
	$(BIN)/python benchmarks/swap.py $(ARGS)

bench-engine: $(READY) ## the embedded engine under load, beside other engines: last line is one JSON object
	$(BIN)/python benchmarks/engine.py $(ARGS)

format: $(READY) ## rewrite to the house format
	$(BIN)/ruff format src tests scripts benchmarks
	$(BIN)/ruff check --fix src tests scripts benchmarks

lock: ## write requirements.lock anew from requirements.in (needs pip-tools)
	$(PYTHON) scripts/lock.py

clean: ## remove what the goals made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis out
