# The one task runner. Everything works on a machine that has only make and Python 3.10 or newer.
PYTHON ?= python3
VENV := .venv
SERVER := .venv-server
BIN := $(VENV)/bin
READY := $(VENV)/.ready
SOURCES := pipeline stages tests recipes benchmarks

.PHONY: setup demo test test-fast check lint types imports generated gen format clean

setup: $(READY) ## .venv with everything that the tests and the recipes need, at pinned versions

$(READY): pyproject.toml requirements/cpu.txt requirements/recipes.txt requirements/recipes-no-deps.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq --constraint requirements/cpu.txt --editable '.[build,dev,rtx]' --requirement requirements/recipes.txt
	$(BIN)/python -m pip install -qq --no-deps --requirement requirements/recipes-no-deps.txt
	$(BIN)/python -m compileall -q pipeline stages
	@touch $@

demo: setup ## build recipes/minilm.yaml for this CPU, then run its bundle; exit code 1 is expected: gates refuse two variants
	@$(BIN)/vbpipe build recipes/minilm.yaml; code=$$?; \
	if [ $$code -eq 1 ]; then echo "exit code 1: gates refused a variant, as the table says; what passed is packaged."; \
	elif [ $$code -ne 0 ]; then exit $$code; fi
	@echo "Now as a server would, from an environment without torch:"
	@test -x $(SERVER)/bin/vbpipe || { $(PYTHON) -m venv $(SERVER) && $(SERVER)/bin/python -m pip install -qq --constraint requirements/cpu.txt '.[runtime]'; }
	@! $(SERVER)/bin/python -c 'import torch' 2>/dev/null
	$(SERVER)/bin/vbpipe run artifacts/minilm/cpu/bundle

test: setup ## every test
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-fast: setup ## without the tests that take more than ten seconds
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

check: setup lint types imports generated ## everything that needs no running code

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: setup
	$(BIN)/mypy

imports: setup
	$(BIN)/lint-imports

generated: setup ## fails when a committed generated file is not what the code generates
	$(BIN)/python -m tools.generate --check

gen: setup ## write the generated files
	$(BIN)/python -m tools.generate

format: setup
	$(BIN)/ruff check --fix --quiet $(SOURCES)
	$(BIN)/ruff format --quiet $(SOURCES)

clean:
	rm -rf $(VENV) $(SERVER) .mypy_cache .ruff_cache .pytest_cache .hypothesis
