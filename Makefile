# make demo: a trained drafter and its benchmark table. make test: every check that CI runs.

PYTHON ?= python3
BIN := .venv/bin

# Modules are compiled when they are first imported; without that cache every job would compile them again.
unexport PYTHONDONTWRITEBYTECODE
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: demo test lint plan clean

demo: .venv/aerie
	$(BIN)/snakemake

plan: .venv/aerie
	$(BIN)/snakemake --dry-run --quiet rules host

test: .venv/dev lint
	$(BIN)/python -m pytest

lint: .venv/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/mypy
	$(BIN)/snakemake --lint

# --no-compile: only what is imported gets compiled, which is quicker than all of it.
.venv/aerie: envs/aerie.lock
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --requirement envs/aerie.lock
	touch $@

.venv/dev: .venv/aerie envs/dev.lock
	$(BIN)/python -m pip install --quiet --no-compile --requirement envs/dev.lock
	touch $@

clean:
	rm -rf .venv results .snakemake
