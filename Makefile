# make demo   follow the KV cache of a real language model, write demo/index.html   (installs the extra `kernels`)
# make test   linters, types, import rules, tests, doctests, notebooks              (installs the extra `dev`;
#             everything but what test-slow has)
# make lab    JupyterLab on notebooks/; cells that need more name its extra         (installs the extra `notebooks`)
# make site   pages of the course, the documents and the reference, site/index.html (installs `dev` and `site`)
# make clean  remove what these have made
#
# make test-slow                  the longest tests, and those that look at pictures, pages and notebooks in Chromium
# make test-triton TRITON=3.9.0   interpreter and compile tests with another release of Triton
# make test-transformers          models of transformers with its oldest release that is supported
#
# PYTHON=python3.12 names another interpreter; ARGS="..." goes to the demo, to JupyterLab or to pytest.

# For GNU make 3.81, which macOS has: no name here is newer.
SHELL := bash
.DELETE_ON_ERROR:
.SUFFIXES:

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
ENVS := .ci-envs
TRITON ?= 3.7.1
TRANSFORMERS ?= 4.57.6
NEEDS := pyproject.toml constraints.txt

# $(call install,EXTRA): pip's own report, less the lines that say nothing happened.
install = set -o pipefail; $(BIN)/python -m pip install --disable-pip-version-check --no-input --progress-bar off -c constraints.txt -e '.[$(1)]' \
	| sed -E '/^ *(Requirement already|Looking in|Obtaining|Using cached|Preparing|Installing b|Checking if|Getting req|Building|Created wheel|Stored in|Successfully (built|uninst)|Attempting|Found exist|Uninstalling)|\.metadata/d; s/ \(from .*\)$$//'

# $(call beside,REQUIREMENT,OPTIONS): an environment of its own for what differs; the rest is found where it is already.
define beside
	@echo "kvlab: installing $(1) beside $(VENV)"
	@rm -rf $(@D)
	@$(BIN)/python -m venv --without-pip $(@D)
	@$(@D)/bin/python -c 'import site, sys; packages = site.getsitepackages()[0]; \
	  open(packages + "/beside.pth", "w").write(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
	  "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')"
	@$(BIN)/python -m pip --python $(@D)/bin/python install --disable-pip-version-check --quiet $(2) $(1)
	@touch $@
endef

.PHONY: demo test test-slow test-triton test-transformers lab site clean lint pytest
.NOTPARALLEL:

demo: $(VENV)/.kernels
	@$(BIN)/python -m kvlab.demo $(ARGS)

test: lint pytest
	@echo "kvlab: make test passed"

lint: $(VENV)/.dev
	@echo "kvlab: [1/4] ruff"
	@$(BIN)/python -m ruff check .
	@echo "kvlab: [2/4] mypy"
	@$(BIN)/python -m mypy
	@echo "kvlab: [3/4] import rules"
	@$(BIN)/lint-imports

pytest: $(VENV)/.dev
	@echo "kvlab: [4/4] pytest: tests, doctests, notebooks; then the tests that compare times"
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "not gpu and not timing and not slow and not browser" $(ARGS)
	@$(BIN)/python -m pytest -m timing

test-slow: $(VENV)/.dev
	@echo "kvlab: the longest tests, and those in a browser"
	@$(BIN)/python -m pytest -n auto --dist worksteal -m "(slow or browser) and not gpu and not timing" $(ARGS)
	@$(BIN)/python -c 'from kvlab.viz.pen.files import browser; \
	  browser() or print("kvlab: the browser tests were left out: no Chromium or Chrome is installed (Debian: apt-get install chromium)")'

test-triton: $(ENVS)/triton-$(TRITON)/.ready
	@echo "kvlab: interpreter and compile tests with Triton $(TRITON)"
	@$(<D)/bin/python -c 'import triton; assert triton.__version__ == "$(TRITON)", triton.__version__'
	@$(<D)/bin/python -m pytest -n auto --dist worksteal -m "(interpreter or compile or oracle) and not slow and not gpu" $(ARGS)

test-transformers: $(ENVS)/transformers-$(TRANSFORMERS)/.ready
	@echo "kvlab: models of transformers $(TRANSFORMERS)"
	@$(<D)/bin/python -c 'import transformers as t; assert t.__version__ == "$(TRANSFORMERS)", t.__version__'
	@$(<D)/bin/python -m pytest tests/integrations/test_transformers.py $(ARGS)

# Root, as in a container, has to say so: JupyterLab listens on loopback, with a token, either way.
lab: $(VENV)/.notebooks
	@$(BIN)/python -m jupyterlab notebooks $(if $(filter 0,$(shell id -u)),--allow-root) $(ARGS)

site: $(VENV)/.site
	@$(BIN)/python -m tools.website.build $(ARGS)
	@$(BIN)/python -m pytest -q tests/browser/test_site.py

clean:
	rm -rf $(VENV) $(ENVS) build dist demo site

$(VENV)/.kernels: $(NEEDS) | $(BIN)/python
	@echo "kvlab: installing what the kernels need (torch, triton); this takes some minutes the first time"
	@$(call install,kernels)
	@touch $@

$(VENV)/.notebooks: $(NEEDS) | $(BIN)/python
	@echo "kvlab: installing what notebooks need (jupyterlab, matplotlib)"
	@$(call install,notebooks)
	@touch $@

# `dev` contains `kernels` and `notebooks`.
$(VENV)/.dev: $(NEEDS) | $(BIN)/python
	@echo "kvlab: installing what development needs (torch, triton, transformers, jupyterlab, ...); this takes some minutes the first time"
	@$(call install,dev)
	@touch $(VENV)/.kernels $(VENV)/.notebooks $@

$(VENV)/.site: $(NEEDS) $(VENV)/.dev
	@echo "kvlab: installing what the site needs (sphinx, myst-nb, furo)"
	@$(call install,site)
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	  (3, 11) <= v < (3, 14) or sys.exit(f"kvlab needs Python 3.11, 3.12 or 3.13; $(PYTHON) is {v.major}.{v.minor}.{v.micro} ({sys.executable}). Name another one: make PYTHON=python3.12 ...")'
	@echo "kvlab: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "kvlab: $(PYTHON) has no working venv module (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(ENVS)/triton-%/.ready: $(VENV)/.dev
	$(call beside,triton==$*,--no-deps)

$(ENVS)/transformers-%/.ready: $(VENV)/.dev
	$(call beside,transformers==$*)
