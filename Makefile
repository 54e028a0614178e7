# Each target prepares what it needs: python3 >= 3.10 with pip and venv is enough to begin with.
#
#   make check     lint and quick: for every change     make fmt     format and fix imports
#   make quick     tests without ComfyUI and ranks      make type    types only
#   make test      all tests, on the CPU                make parity  numbers against independent references
#   make lint      style, types, spelling, dead code    make bench   measurements (SECTION=name: one)
#   make demo      a small video through ComfyUI        make clean   drop caches and out/
#   make coverage  all tests, and the lines they reach  make fullsize  a model of 10 GB on two CPU ranks
#   make hosts     what needs a ComfyUI, with each of HOSTS
#   make samplers  all of ComfyUI's samplers on our MODEL against its own: minutes
#
# TESTS="..."       what make test and make coverage run, instead of all
# PYTHON=...        the interpreter that .venv is made with
# COMFYUI_PATH=...  a ComfyUI to test against, instead of the one that set-up unpacks
# HOSTS="..."       folders of ComfyUI trees for make hosts; a venv or .venv in one is what it runs in

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := test

PYTHON ?= python3
SECTION ?=
TESTS ?=
HOSTS ?=
RUN := .venv/bin/python
SETUP := $(PYTHON) scripts/setup_env.py

# One thread for each process: the tests start many, and threads beyond the cores only slow them down.
export OMP_NUM_THREADS ?= 1
export PYTHONPATH := $(CURDIR)

.PHONY: check quick test hosts samplers coverage lint fmt type demo parity bench fullsize clean distclean

check: lint quick

quick:
	@$(SETUP) test
	$(RUN) -m pytest -m quick -n auto --maxprocesses 4 --dist loadfile

test:
	@$(SETUP) test comfyui
	$(RUN) -m pytest $(TESTS)

hosts:
	@$(SETUP) test
	@failed=; for host in $(or $(HOSTS),$(error HOSTS="FOLDER ..." names the ComfyUI trees)); do \
		echo "== $$host"; \
		COMFYUI_PATH="$$host" $(RUN) -m pytest -m comfyui $(TESTS) || failed="$$failed $$host"; \
	done; test -z "$$failed" || { echo "failed with:$$failed"; exit 1; }

samplers:
	@$(SETUP) test comfyui
	$(RUN) -m pytest tests/comfyui/test_model_samplers.py --every-combination -rP

# Lines that only ranks or ComfyUI run count too.
coverage:
	@$(SETUP) test comfyui
	@mkdir -p out
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest $(TESTS)
	-$(RUN) -m coverage combine --quiet # what the run has not combined itself; a killed rank leaves a broken file
	$(RUN) -m coverage report

lint:
	@$(SETUP) test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	.venv/bin/codespell
	$(RUN) -m vulture
	$(RUN) -m vulture comfy_wan_dist workers benchmarks devtools scripts tests
	.venv/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

fmt:
	@$(SETUP) test
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

type:
	@$(SETUP) test
	$(RUN) -m mypy

demo:
	@$(SETUP) demo comfyui
	@mkdir -p out
	$(RUN) scripts/demo.py

parity:
	@$(SETUP) test comfyui
	@mkdir -p out
	$(RUN) scripts/parity.py

bench:
	@$(SETUP) test comfyui bench
	@mkdir -p out
	$(RUN) -m benchmarks.bench $(if $(SECTION),--section $(SECTION))

fullsize:
	@$(SETUP) test
	@mkdir -p out
	$(RUN) scripts/fullsize.py

clean:
	rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . \( -path ./.venv -o -path ./.comfy -o -path ./.git \) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# The environment too: the next target sets it up anew.
distclean: clean
	rm -rf .venv .comfy
