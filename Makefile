# The targets create a virtual environment in the checkout, and update it when pyproject.toml changes.
# Needs Python >= 3.11 and make. TORCH_INDEX=https://download.pytorch.org/whl/cpu selects PyTorch's small CPU build.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH_INDEX ?=
LOUD_PIP := $(BIN)/python -m pip install --disable-pip-version-check
PIP := $(LOUD_PIP) --quiet
SITE = $(BIN)/sphinx-build -q -n -W --keep-going -j auto -c docs . build/site
CORES := $(shell getconf _NPROCESSORS_ONLN)

.PHONY: demo test unit contract e2e check check-types check-others check-docs docs specs golden cluster cluster-k8s nightly nightly-changed bench bench-train gpu gpu-wheels recording dist sbom lock help clean

help:  ## this list
	@grep -hE '^[a-z0-9-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 13

demo: $(VENV)/.train  ## train on handwritten digits with 2 nodes x 2 ranks on this machine
	$(BIN)/ddpctl launch -f examples/digits.yaml --device cpu
	@echo "this run's report:  $(BIN)/ddpctl report"
	@echo "your own script:    $(BIN)/ddpctl launch --gpus 2 -- train.py (docs/script.md)"
	@echo "other machines:     docs/ssh.md, docs/slurm.md, docs/kubernetes.md"

WORKERS := $(shell echo $$(($(CORES) * 3 / 2)))

test: unit contract  ## the quick tests: they need neither root nor a server

unit: $(VENV)/.dev  ## each module by itself
	$(BIN)/python -m pytest tests/unit -n $(WORKERS) --dist worksteal

contract: $(VENV)/.dev  ## ddpctl against a stand-in of a node, ddprun against a stand-in of a launcher, without torch
	$(BIN)/python -m pytest tests/contract -n $$(($(CORES) * 2)) --dist worksteal

e2e: $(VENV)/.dev  ## whole journeys: trainings, restarts, signals, notebooks
	$(BIN)/python -m pytest tests/e2e -n $(WORKERS) --dist worksteal

golden: $(VENV)/.dev  ## update the snapshots of whole screens in tests/golden, for TESTS="FILE ..." or for the quick tests
	$(BIN)/python -m pytest -p no:xdist --update-golden $(TESTS)

check: $(VENV)/.dev  ## style, types, import contracts, shell scripts, the checked-in specs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs=$(CORES) --output-sync check-types check-others check-docs

check-types:
	$(BIN)/mypy
	$(BIN)/mypy tests bench

check-others:
	$(BIN)/lint-imports
	git ls-files | grep -E '(\.(sh|sbatch)|^\.ci/run)$$' | xargs $(BIN)/shellcheck
	git ls-files | grep -E '(^|/)Dockerfile$$' | xargs $(BIN)/hadolint
	$(BIN)/zizmor --offline --quiet .github/workflows
	cd ansible && $(abspath $(BIN))/yamllint --strict .
	cd ansible && PATH="$(abspath $(BIN)):$$PATH" LC_ALL=C.UTF-8 ansible-lint -q
	$(BIN)/python -m pytest --quiet tests/unit/repository/test_specs.py

check-docs:
	$(SITE)

docs: $(VENV)/.dev  ## build all pages with search into build/site, and check their links
	$(SITE)
	@echo "open build/site/README.html"

specs: $(VENV)/.dev  ## update the checked-in specs from examples/
	PYTHONPATH=.:cli:trainer $(BIN)/python tests/unit/repository/test_specs.py

cluster: $(VENV)/.dev  ## the tests with real servers; a test whose server is missing is skipped
	$(BIN)/python -m pytest tests/cluster -n $$(($(CORES) * 2)) -o timeout=1800

nightly: $(VENV)/.dev  ## everything else: all parts of tests/nightly/parts.yaml, or PART="NAME or PATH ..."
	$(BIN)/python tests/nightly/run.py $(PART)

nightly-changed: $(VENV)/.dev  ## the parts of nightly whose paths have changed since they passed, within WITHIN seconds
	$(BIN)/python tests/nightly/run.py --changed --within $(or $(WITHIN),3600)

cluster-k8s: $(VENV)/.dev  ## the tests on the Kubernetes cluster that KUBECONFIG names, with the image DDPCTL_TEST_IMAGE
	$(BIN)/python -m pytest tests/nightly/kubernetes/test_kubernetes.py

BENCHES := startup signals binding checkpoint restore kills exact deterministic metrics input stragglers random_kills \
  explain explain_cost sync kubernetes

bench: $(VENV)/.dev  ## benchmarks, each with its baseline
	@set -ex; for name in $(BENCHES); do $(BIN)/python bench/$$name.py; done
	@if [ "$$(id -u)" != 0 ]; then echo "misconfigured, doctor and faults need root (network namespaces): skipped"; exit; fi; \
	set -ex; $(BIN)/python bench/misconfigured.py --torchrun; $(BIN)/python bench/doctor.py; \
	$(BIN)/python bench/faults.py --torchrun

bench-train: $(VENV)/.bench  ## compare ddptrain with tutorials' loops and frameworks, on one process and two ranks
	$(BIN)/python bench/train.py
	$(BIN)/python bench/train.py --ranks 2
	$(BIN)/python bench/scaling.py
	$(BIN)/python bench/notebook.py --plot docs/pictures/notebook-epoch.svg

recording: $(VENV)/.dev  ## record the README's terminal session again
	$(BIN)/python bench/recording.py

gpu:  ## show on a machine with a GPU what holds, in nine minutes, without a network: PART=2 or 3 for the rest, OUT=DIR
	$(PYTHON) bench/gpu.py --part $(or $(PART),1) --out $(or $(OUT),build/gpu) $(GPU_OPTIONS)

gpu-wheels: $(VENV)/.dev  ## collect in build/gpu-wheels what make gpu installs there
	$(BIN)/python bench/gpu.py --download build/gpu-wheels

dist: $(VENV)/.dev  ## build wheel and sdist into dist/, and test the wheel without torch
	rm -rf dist
	$(BIN)/python -m hatchling build
	$(BIN)/twine check --strict dist/*
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT \
	&& $(BIN)/python -m venv "$$fresh" \
	&& "$$fresh/bin/pip" install --quiet --disable-pip-version-check dist/*.whl \
	&& cd "$$fresh" && bin/ddpctl --version \
	&& bin/ddpctl launch --dry-run 2>&1 | grep 'no torch in it: install it with'

sbom: $(VENV)/.dev  ## write an SBOM (CycloneDX) of the wheel and the image into dist/
	mkdir -p dist
	$(BIN)/uvx --quiet --from cyclonedx-bom==7.5.0 cyclonedx-py requirements docker/requirements/ddpctl.txt \
	  --pyproject pyproject.toml --output-file dist/ddpctl.cdx.json

lock: $(VENV)/.dev  ## update the locked requirements of the image
	PATH="$(abspath $(BIN)):$$PATH" docker/requirements/lock.sh

clean:  ## remove the virtual environment
	rm -rf $(VENV)

$(VENV)/.train: pyproject.toml
	@echo "setting up $(VENV): torch alone may be 5 GB (see TORCH_INDEX in the README); this happens once"
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(f"ddpctl needs Python 3.11 or newer; $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=python3.12 ..." if v < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) --upgrade 'pip>=25.1'
	@$(if $(TORCH_INDEX),$(LOUD_PIP) torch torchvision --index-url $(TORCH_INDEX))
	@$(LOUD_PIP) --editable '.[train,digits]'
	@touch $@

$(VENV)/.dev: $(VENV)/.train
	@$(PIP) --group dev
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@$(PIP) --group bench
	@touch $@
