# Everything runs in .venv, made from pyproject.toml with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: install demo test test-all test-flags test-lowest bench accelerator bench-peers bench-cold hardware audit-deps docs dist lint types check format clean

# Sizes on Linux with CPUs alone.
install: .venv/installed
.venv/installed: EXTRAS := dev
.venv/installed: SIZE := 120 packages, 1.6 GB in all
.venv/demo: EXTRAS := train,plots
.venv/demo: SIZE := 56 packages, 0.8 GB in all
.venv/installed .venv/demo: pyproject.toml constraints.txt
	@echo 'Installing bam and its $(SIZE), in .venv …'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
# By all processors: pip compiles with one. Where PYTHONDONTWRITEBYTECODE is set, every command would
# otherwise compile what it imports. The demo runs once, so it does without.
	@if [ $@ = .venv/installed ]; then \
	  echo 'Compiling the packages …'; \
	  $(BIN)/python -m compileall -qq -j 0 .venv/lib/python*/site-packages || true; fi
	touch .venv/demo $@  # dev has all that the demo needs

demo: .venv/demo
	$(BIN)/python -m scripts.demo --workdir=runs/demo
	$(BIN)/bam report --workdir=runs/demo/DP-SGD_C=3/seed0

# Three for two cores: one of them often waits for processes that it has started.
# The type-checking hook compiles every module of bam, 8 s: kept as bytecode, also where that is off.
test: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal

# Everything, also what is thorough or slow (tests/conftest.py says which), but the tests of pages.
test-all: install
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal -m 'not pages'

# What the guarantee rests on, compiled as users compile it: the suite switches optimisations off.
PRIVACY_TESTS := call_contexts chacha engine exact_sums grid ledger one_run oracles places \
  private_training resumed_training resuming strategy transforms users
test-flags: install
	XLA_FLAGS= $(BIN)/python -m pytest -n 2 -m 'not slow' $(PRIVACY_TESTS:%=tests/test_%.py)

# The lower bounds of pyproject.toml hold: with them every module is imported, for its doctests, and
# runs are trained, saved and resumed.
LOWEST := .venv-lowest
test-lowest: $(LOWEST)/installed
	$(LOWEST)/bin/python -m pytest -m 'not slow' bam tests/test_accounting.py tests/test_datasets.py tests/test_engine.py \
	  tests/test_recorded_plan.py tests/test_transforms.py
$(LOWEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(LOWEST)
	grep -o '"[[:alpha:]][^"]*>=[^"]*"' pyproject.toml | sed 's/"//g; s/>=/==/' > $(LOWEST)/constraints.txt
	$(LOWEST)/bin/pip install --quiet --disable-pip-version-check -c $(LOWEST)/constraints.txt -e '.[dev]'
	touch $@

# DEVICE names the result files: make bench DEVICE=h100
DEVICE ?= cpu
bench: install
	$(BIN)/python -m scripts.benchmarks.step --out=benchmarks/step_$(DEVICE).json
	$(BIN)/python -m scripts.benchmarks.depth --out=benchmarks/depth_$(DEVICE)

# On an accelerator: everything that is to be measured there, in pieces of $(SECONDS) seconds. The same
# command goes on. DATA: a folder with CIFAR-10 in Parquet.
SECONDS ?= 540
accelerator: install
	$(BIN)/python -m scripts.benchmarks.accelerator --device=$(DEVICE) --workdir=runs/accelerator \
	  --seconds=$(SECONDS) --data=$(DATA)

# Opacus and jax-privacy beside ours, in an environment of their own. PyTorch's sympy needs an
# mpmath that is older than the one everything else here is tested with; setuptools is PyTorch's.
TORCH ?= torch==2.13.0
PEERS := .venv-peers
bench-peers: $(PEERS)/installed
	$(PEERS)/bin/python -m scripts.benchmarks.peers --out=benchmarks/peers_$(DEVICE).json
	$(PEERS)/bin/python -m scripts.benchmarks.peers --out=benchmarks/peers_512_$(DEVICE).json \
	  --batch=512 --trials=3 \
	  --only=ours_nonprivate,ours_dp_sgd,ours_bam_sam,torch_nonprivate,opacus_hooks,opacus_ghost

# Seconds to the first step, each in a fresh process. OLD: another checkout to measure ours in.
bench-cold: $(PEERS)/installed
	$(PEERS)/bin/python -m scripts.benchmarks.cold --out=benchmarks/cold.json $(OLD:%=--tree=old=%)

$(PEERS)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(PEERS)
	grep -v '^mpmath\|^setuptools' constraints.txt > $(PEERS)/constraints.txt
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check '$(TORCH)'
	$(PEERS)/bin/pip install --quiet --disable-pip-version-check -c $(PEERS)/constraints.txt \
	  -e '.[train]' jax-privacy 'opacus>=1.6'
	touch $@

# Whether a run compiles and fits on a TPU or GPU that is not here (docs/accelerators.md), by its
# compiler in an environment of its own: 2 GB, a GPU's 6 GB.
CONFIG ?= cifar10:dp_sgd
TARGET ?= v5e:2x2
COMPILER = .venv-$(if $(filter v%,$(TARGET)),tpu,cuda)
hardware: $(COMPILER)/installed
	$(COMPILER)/bin/python -m scripts.benchmarks.hardware --config=$(CONFIG) --target=$(TARGET)
.venv-tpu/installed .venv-cuda/installed: .venv-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,$*]'
	touch $@

# Known vulnerabilities of the pinned packages, from the network; without it, it says so.
AUDIT := .venv-audit
audit-deps: $(AUDIT)/installed
	@$(AUDIT)/bin/pip-audit --timeout 10 --no-deps --disable-pip --progress-spinner off \
	  -r constraints.txt > $(AUDIT)/report 2>&1; status=$$?; \
	skipped=$$(grep -c 'could not be audited' $(AUDIT)/report); \
	grep -v 'could not be audited\|^WARNING' $(AUDIT)/report | tail -n 30; \
	echo "packages the vulnerability service did not answer for, NOT checked: $$skipped"; \
	if [ $$status -ne 0 ] && grep -qiE 'connection|resolve|timed out' $(AUDIT)/report; then \
	  echo 'NOT checked: the vulnerability service cannot be reached'; exit 0; fi; exit $$status
$(AUDIT)/installed:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/pip install --quiet --disable-pip-version-check pip-audit
	touch $@

# The site, in site/, then the tests of what its pages say. Warnings and broken links are errors.
DOCS := .venv-docs
docs: install $(DOCS)/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo 'The site is in site/. The tests of its pages run now, for about two minutes.'
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist worksteal -m pages tests/pages
$(DOCS)/installed: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

# The wheel and the source archive, in dist/, built and checked with the newest tools.
DIST := .venv-dist
dist: $(DIST)/installed
	rm -rf dist
	$(DIST)/bin/python -m build --outdir dist
	$(DIST)/bin/twine check --strict dist/*
$(DIST)/installed:
	$(PYTHON) -m venv $(DIST)
	$(DIST)/bin/pip install --quiet --disable-pip-version-check build twine
	touch $@

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
	rm -rf .venv .venv-peers .venv-tpu .venv-cuda .venv-audit .venv-docs .venv-dist .venv-lowest site dist .mypy_cache .pytest_cache .ruff_cache
