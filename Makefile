# Every target sets up .venv from the lock file first; a fresh machine needs only Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
FRAMEWORKS := langchain==1.5.2 langchain-openai==1.7.4 langchain-anthropic==1.7.10 openai-agents==0.24.0 "pydantic-ai-slim[openai,anthropic]==2.68.0"
LIMIT ?= 2000
STEP ?= 1
AGENTS := tests/clients/node_modules/.installed
# Recorded traffic and cases for tests and benchmarks; `make run` must not see it, it is no setting.
test bench crash torture clients: export TURNGATE_SHARED ?= $(abspath ../shared)

.PHONY: help setup demo run test lint bench crash torture clients sdks build lock clean

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 10

setup: $(STAMP) ## virtual environment with all that the lock file names

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Turngate needs Python 3.11 or newer; say make PYTHON=python3.12 (found: $$($(PYTHON) -V))"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "Could not make $(VENV): on Debian and Ubuntu install the package python3-venv"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## simulator, sidecar and mixed traffic; no key, no network
	$(BIN)/turngate demo

run: setup ## the sidecar with built-in defaults, in front of the real providers
	$(BIN)/turngate serve

test: setup ## all tests
	$(BIN)/python -m pytest

lint: setup ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup ## side by side with other proxies (reads ../shared/bench)
	$(BIN)/python tests/bench/bench.py

crash: setup ## 100 kill -9 of proxy and observer under load; 1,000 races for one turn
	CRASHES=100 CRASH_SEED=$${CRASH_SEED:-$$(date +%s)} RACES=1000 $(BIN)/python -m pytest tests/test_crash.py tests/test_conversations.py --timeout 3600

torture: setup ## recorded answers broken in every way, LIMIT variants of each (reads ../shared/traffic); SDKs on cut streams
	$(BIN)/turngate torture $(TURNGATE_SHARED)/traffic/dev.jsonl.gz --limit $(LIMIT)
	CUT_STEP=$(STEP) $(BIN)/python -m pytest tests/test_sdk.py -k cut_at_any_byte

clients: setup $(AGENTS) ## coding agents from npm through the sidecar (needs Node.js; 1.2 GB)
	CLIENTS=1 $(BIN)/python -m pytest tests/clients

# Not `npm ci`: it refuses a lock file without the packages of every platform, and ours was made where a registry has
# OpenCode's for Linux only. What the file names is checked against it; --no-save keeps the file as it is.
$(AGENTS): tests/clients/package.json tests/clients/package-lock.json
	@command -v npm > /dev/null || { echo "make clients needs Node.js 20 or newer, with npm"; exit 1; }
	npm install --prefix tests/clients --no-save
	@touch $@

sdks: setup ## older Python SDKs, agent frameworks and Node SDKs that some tests ask for (needs npm)
	for sdk in openai==1.109.1 openai==2.54.0 anthropic==0.125.0; do \
	  test -d tests/.sdks/$$sdk || $(BIN)/python -m pip install --quiet --target tests/.sdks/$$sdk $$sdk || exit 1; done
	test -d tests/.sdks/frameworks || $(BIN)/python -m pip install --quiet --target tests/.sdks/frameworks $(FRAMEWORKS)
	npm ci --ignore-scripts --no-audit --no-fund --prefix tests/node

build: setup ## wheel and sdist in dist/
	$(BIN)/python -m build --no-isolation --outdir dist

lock: setup ## resolve requirements.lock again
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --universal --generate-hashes --no-emit-index-url --no-annotate --no-header \
	  --python-version 3.11 --all-extras --upgrade --quiet pyproject.toml -o requirements.lock

clean: ## remove what the targets made
	rm -rf $(VENV) tests/clients/node_modules tests/node/node_modules tests/.sdks build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
