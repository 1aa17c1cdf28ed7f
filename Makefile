# Three words do everything: check, test, bench; `demo` is the main job. Each sets up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.ready-dev
# Two locks, for all platforms, with a checksum of each file: what `demo` needs, then what `test` needs besides.
# Nothing is resolved, and nothing is built with tools that were not checked.
BY_HASH := tools/install --no-deps --no-build-isolation --require-hashes --requirement
# torch alone is pinned by its version only: it is another build on every kind of machine, a local one where there is.
TORCH := torch==2.13.0

# Python keeps what it has compiled, whatever the shell says: torch is imported in 2.7 s instead of 6.7.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo demo-ko test check coverage bench docs models heavy campaign lock clean

$(READY): pyproject.toml Makefile requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BY_HASH) requirements.lock
	tools/install $(TORCH)
	tools/install --no-deps --no-build-isolation --editable .
	@touch $(READY)

$(DEV): $(READY) requirements-dev.lock
	$(BY_HASH) requirements-dev.lock
	@touch $(DEV)

demo-ko: $(READY)
	$(BIN)/malmoi demo --language ko

demo: $(READY)
	$(BIN)/malmoi demo --language en  # the pages' lines use what it leaves

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/count.py --check

# Fails too if the tests leave more of the source out than pyproject.toml allows.
test: check
	$(BIN)/pytest --numprocesses 2 --dist worksteal --cov --cov-report=

# What the last tests left out, line by line.
coverage: $(DEV)
	$(BIN)/coverage report --show-missing

heavy: $(DEV)
	$(BIN)/pytest -m heavy

campaign: $(DEV)
	$(BIN)/pytest -m campaign

bench: $(DEV)
	$(BIN)/malmoi bench

# The two models that come with the package, made again from free text (models/README.md). Needs a GPU and a network.
models: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" models/make.sh runs/models

# The pages of docs/ and the API reference, in site/. Needs no network.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Writes the pinned versions and their checksums anew, without torch's (what the first has on some systems only is in both); a version that is pinned stays. Needs uv.
PIN := echo $(TORCH) | uv pip compile --quiet --universal --python-version 3.11 --no-annotate --generate-hashes \
  --custom-compile-command 'make lock' pyproject.toml -
lock:
	$(PIN) --group build --extra serve --output-file requirements.lock
	$(PIN) --extra dev --constraint requirements.lock --output-file requirements-dev.lock \
	  $$(sed -nE 's/^([a-z0-9.-]+)==[^ ;]+ .$$/--no-emit-package \1/p' requirements.lock)
	sed -i.old -E '/^(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==/,/[^\\]$$/d' requirements*.lock
	rm requirements*.lock.old

clean:
	rm -rf $(VENV) demo demo-ko site .pytest_cache .mypy_cache .ruff_cache
