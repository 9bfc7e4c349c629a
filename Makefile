# make demo: a trained drafter and its benchmark table. make test: every check that CI runs.

PYTHON ?= python3
BIN := .venv/bin

# Modules are compiled when they are first imported; without that cache every job would compile them again.
unexport PYTHONDONTWRITEBYTECODE
# The two environments of `make test` are installed side by side.
MAKEFLAGS += --jobs=2
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: demo test lint plan fixtures sglang sglang-cpu clean

demo: .venv/aerie
	$(BIN)/snakemake

plan: .venv/aerie
	$(BIN)/snakemake --dry-run --quiet rules host

# 1.1 million raw rows in the shapes of the ten datasets of configs/kimi-k2.5.yaml, for configs/kimi-k2.5-fixtures.yaml.
fixtures: .venv/aerie
	$(BIN)/python -m scripts.fixtures --rows 1100000 --folder fixtures

# SGLang in an environment of its own, so that neither it nor the workflow pins the other: 0.5.17 for a GPU, 0.5.23 for a CPU.
sglang: .venv-sglang/ready

sglang-cpu: .venv-sglang-cpu/ready

test: .venv/dev .venv-sglang-cpu/ready lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

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

# --no-deps: these lists are complete, and SGLang's own would bring the CUDA set to a CPU.
.venv-%/ready: envs/%.lock
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet --no-compile --no-deps --requirement $<
	touch $@

clean:
	rm -rf .venv .venv-sglang .venv-sglang-cpu results .snakemake
