# demo, test, check and docs each do all their own set-up on a fresh machine. Stamp files make a second call quick.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What `pip install torch` brings on Linux has two gigabytes of CUDA in it. Without an NVIDIA driver take the CPU build,
# wherever pip has been told of one (--extra-index-url, --find-links, pip.conf), else the ordinary one.
TORCH_CPU ?= torch==2.13.0+cpu

.PHONY: demo test check docs dashboards screenshots matrix wheel-matrix links clean
.DEFAULT_GOAL := help
.PHONY: help
help:
	@echo "make demo    train a model, watch a loss spike being caught, pulled out of a tracker and replayed bit for bit"
	@echo "make test    the test suite"
	@echo "make check   ruff, mypy --strict, import-linter"
	@echo "make docs    the documentation, into site/"
	@echo "make links   the documentation's links to elsewhere, asked for one by one"
	@echo "make matrix  the tests with the lowest and the newest version of torch and of each framework; an hour, 10 GB"
	@echo "make wheel-matrix   the wheel alone and with each extra alone, each in an empty environment; a quarter of an hour"
	@echo "make screenshots   the documentation's pictures, from a demo; needs Chromium"
	@echo "make dashboards   the checked-in W&B views, from trackbridge/panels.py"

demo: $(VENV)/.all
	$(BIN)/trackbridge demo

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "site/index.html"

links: $(VENV)/.dev
	$(BIN)/python -m tests.docs.elsewhere --fetch

matrix: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python tools/matrix.py

wheel-matrix: $(VENV)/.dev
	TORCH_CPU="$$(command -v nvidia-smi >/dev/null || echo '$(TORCH_CPU)')" $(BIN)/python -m tests.wheel_matrix

dashboards: $(VENV)/.dev
	$(BIN)/python -m tests.reports.specs

screenshots: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/trackbridge demo --dir demo-run
	$(BIN)/python -m tests.browser.screenshots demo-run --out docs/images

clean:
	rm -rf $(VENV) site build dist demo-run

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	@echo "Installing PyTorch into $(VENV) (a few minutes the first time) ..."
	@command -v nvidia-smi >/dev/null || $(PIP) "$(TORCH_CPU)" 2>/dev/null || true
	$(PIP) "torch>=2.6"
	@touch $@

$(VENV)/.all: pyproject.toml | $(VENV)/.torch
	@echo "Installing trackbridge and the trackers' clients (a few minutes the first time) ..."
	$(PIP) --editable ".[all]"
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch
	@echo "Installing trackbridge and what its tests need (a few minutes the first time) ..."
	$(PIP) --editable ".[dev]"
	@touch $@

$(VENV)/.docs: pyproject.toml | $(BIN)/python
	$(PIP) --editable ".[docs]"
	@touch $@
