# Everything runs in .venv, made from pyproject.toml with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-slow lint types check format clean

install: .venv/installed
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: install
	$(BIN)/python -m scripts.compare --config=configs/digits.py --workdir=runs/demo --overwrite \
	  --num_seeds=3 --config.diagnostics.every=20 --config.diagnostics.num_examples=256

test: install
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: install
	$(BIN)/python -m pytest -m slow

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

check: lint types test

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .jax_cache .mypy_cache .pytest_cache .ruff_cache
