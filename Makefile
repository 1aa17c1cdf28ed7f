# Three words do everything: check, test, bench; `demo` is the main job. Each sets up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LOCKS := constraints.txt requirements-build.lock requirements.lock
# Nothing is resolved, and nothing is built with tools that were not checked. -qq: pip's remarks about itself.
BY_HASH := install -qq --no-deps --no-build-isolation --require-hashes

.PHONY: demo demo-ko test check bench docs heavy campaign lock clean

# torch alone is pinned by its version only: it is another build on every kind of machine, a local one where there is.
$(READY): pyproject.toml $(LOCKS)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(BY_HASH) --requirement requirements-build.lock
	$(BIN)/pip $(BY_HASH) --requirement requirements.lock
	$(BIN)/pip install -qq --constraint constraints.txt torch
	$(BIN)/pip install -qq --no-deps --no-build-isolation --editable .
	@touch $(READY)

demo-ko: $(READY)
	$(BIN)/malmoi demo --language ko

demo: $(READY)
	$(BIN)/malmoi demo --language en  # the pages' lines use what it leaves

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/count.py --check

test: check
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m "not heavy and not campaign"

heavy: $(READY)
	$(BIN)/pytest -m heavy

campaign: $(READY)
	$(BIN)/pytest -m campaign

bench: $(READY)
	$(BIN)/malmoi bench

# The pages of docs/ and the API reference, in site/. Needs no network.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Writes the pinned versions and their checksums anew, for all platforms; a version that is pinned stays. Needs uv.
PIN := uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command 'make lock'
lock:
	$(PIN) --extra dev pyproject.toml requirements-build.in --output-file constraints.txt
	$(PIN) --generate-hashes --constraint constraints.txt requirements-build.in --output-file requirements-build.lock
	$(PIN) --generate-hashes --constraint constraints.txt --extra dev pyproject.toml --output-file requirements.lock \
	  $$(grep -oE '^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)=' constraints.txt | sed 's/=//; s/^/--no-emit-package /')

clean:
	rm -rf $(VENV) demo demo-ko site .pytest_cache .mypy_cache .ruff_cache
