# Three words do everything: check, test, bench; `demo` is the main job. Each sets up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench heavy clean

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $(READY)

demo: $(READY)
	$(BIN)/malmoi demo

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/pytest --numprocesses 2 --dist worksteal -m "not heavy and not campaign"

heavy: $(READY)
	$(BIN)/pytest -m heavy

bench: $(READY)
	$(BIN)/malmoi bench

clean:
	rm -rf $(VENV) demo .pytest_cache .mypy_cache .ruff_cache
