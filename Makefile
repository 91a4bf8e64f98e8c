# Needs Python 3.11 or newer with its headers and venv, and a C++17 compiler; the rest is installed into .venv.
# Another torch: make TORCH=torch==2.12.0 test.  Another Python: make PYTHON=python3.12 test.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= $(shell sed -n 's/^\(torch==.*\)/\1/p' constraints.txt)
EXTRAS ?= dev,train,bench
CONFIG ?= examples/pydoc.toml
TEST_ARGS ?=
# make test runs so many files of tests at a time; 0: one after the other, in pytest's own process.
WORKERS ?= 2

SHELL := /bin/bash
# Everything that builds the native core must agree on this, or each one builds it again.
export MOE_COMM_WERROR ?= on
BIN := $(CURDIR)/$(VENV)/bin
# The name holds the torch that was asked for, so that asking for another one installs again.
STAMP := $(VENV)/.installed-$(TORCH)
PINS := build/constraints.txt
BUILD_CORE = $(BIN)/python setup.py --quiet build_ext --inplace
# One thread a process (the tests start their own ranks), and no AMX: some virtual machines advertise it and then
# kill every bf16 matmul (see moe_comm/runtime/cpu_guard.py).
TEST_ENV := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} ONEDNN_MAX_CPU_ISA=$${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_BF16}
PARALLEL := --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder
CPP_FILES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.inc' -o -name '*.cu' -o -name '*.cuh')

.PHONY: help install build train test hosts hosts-install docs-install sglang vllm adapters wheels slow lint format docs notebooks gpu-script sanitize neon fuzz bench clean
help:
	@echo "make train     install, build, and train a small MoE model on real text (CONFIG=$(CONFIG))"
	@echo "make test      the tests of every change                     make slow     those that take minutes"
	@echo "make hosts     the adapters with the systems that they are for, in build/hosts"
	@echo "make adapters  the same, and axolotl, SGLang, vLLM and older transformers"
	@echo "make wheels    manylinux wheels for x86-64 and aarch64, each run without a compiler, in build/wheels"
	@echo "make lint      ruff, mypy, clang-format, import-linter        make format   fix what they can fix"
	@echo "make docs      the site in build/site, its links checked      make notebooks  execute the tutorials"
	@echo "make gpu-script  benchmarks/gpu.sh with emulated kernels and small sizes"
	@echo "make sanitize  the native core's tests under ASan, UBSan, TSan"
	@echo "make neon      the same tests for aarch64, under qemu (Debian: g++-aarch64-linux-gnu qemu-user)"
	@echo "make fuzz      parsers of files, coverage-guided (FUZZ_SECONDS=60 each, FUZZ=all of them)"
	@echo "make bench     dispatch and layer benchmarks                  make build    only the native core"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "moe_comm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Use make PYTHON=..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV) \
	  || { echo "could not make $(VENV); on Debian: apt-get install python3-venv python3-dev g++" >&2; exit 2; }

# Prints the requirements of extras, with those of extras that they name.
define REQUIRED
import sys, tomllib
project = tomllib.load(open('pyproject.toml', 'rb'))['project']
extras = sys.argv[1].split(',')
print(*project['dependencies'], sep='\n')
for extra in extras:
    for line in project['optional-dependencies'][extra]:
        if line.startswith('moe_comm['):
            extras += line.removeprefix('moe_comm[').removesuffix(']').split(',')
        else:
            print(line)
endef
export REQUIRED

# torch comes before what needs it, so that nothing installed later brings another one. The native core needs neither, so
# it is compiled meanwhile.
$(STAMP): constraints.txt pyproject.toml | $(BIN)/python
	@mkdir -p build
	@{ grep -v -e '^torch==' -e '^triton==' -e '^nvidia-' constraints.txt; echo '$(TORCH)'; } > $(PINS)
	$(BIN)/python -m pip install --quiet -c $(PINS) setuptools pybind11 cmake ninja
	@# torch for GPUs brings the Triton and NVRTC that it was made for; torch for CPUs brings none.
	@set -e; $(BUILD_CORE) & core=$$!; \
	  { $(BIN)/python -m pip install --quiet -c $(PINS) '$(TORCH)' \
	    && { $(BIN)/python -m pip show torch | grep -q '^Requires:.*triton' \
	      || grep -e '^triton==' -e '^nvidia-' constraints.txt >> $(PINS); } \
	    && $(BIN)/python -c "$$REQUIRED" '$(EXTRAS)' > build/requirements.txt \
	    && $(BIN)/python -m pip install --quiet -c $(PINS) -r build/requirements.txt; } || { kill $$core; exit 1; }; wait $$core
	$(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e '.[$(EXTRAS)]'
	@rm -f $(VENV)/.installed-*
	@touch '$@'

install: $(STAMP)

build: $(STAMP)
	$(BUILD_CORE)

train: build
	$(BIN)/moe-comm train $(CONFIG)

test: build
	$(TEST_ENV) $(BIN)/python -m pytest $(PARALLEL) --durations=15 -m "not slow" $(TEST_ARGS)

# Other systems are installed beside the environment and without dependencies, so that none of them replaces torch or
# another package there. OLDER: versions of transformers whose tests run in processes of their own.
# axolotl, SGLang and vLLM have their own folders, with the versions that they require of what other systems import too.
# axolotl and DeepSpeed's AutoEP run with transformers 5.16.1.
HOSTS := build/hosts
AXOLOTL := build/axolotl
OLDER := 5.16.1 5.19.0
REQUIREMENTS := tests/integrations/hosts/requirements
$(HOSTS)/.installed: $(REQUIREMENTS).txt Makefile $(STAMP)
	rm -rf $(HOSTS)
	@# Only DeepSpeed is built from source; its setup.py imports torch, and compiles nothing.
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target $(HOSTS) -r $<
	@touch '$@'
$(AXOLOTL)/.installed: $(REQUIREMENTS)-axolotl.txt Makefile $(STAMP)
	rm -rf $(AXOLOTL) $(OLDER:%=build/transformers-%)
	$(BIN)/python -m pip install --quiet --no-deps --target $(AXOLOTL) -r $<
	@set -e; for version in $(OLDER); do \
	  $(BIN)/python -m pip install --quiet --no-deps --target build/transformers-$$version transformers==$$version; \
	done
	@# 5.16.1 needs an older huggingface_hub than the environment has.
	$(BIN)/python -m pip install --quiet --no-deps --target build/transformers-5.16.1 \
	  huggingface_hub==1.17.0 httpx==0.28.1 httpcore
	@touch '$@'
build/sglang/.installed build/vllm/.installed: build/%/.installed: $(REQUIREMENTS)-%.txt Makefile $(STAMP)
	rm -rf build/$*
	$(BIN)/python -m pip install --quiet --no-deps --target build/$* -r $<
	@touch '$@'

hosts-install: $(HOSTS)/.installed

# A system that is absent, or is found in another version, ends this with an error; its tests alone would be skipped.
hosts: build $(HOSTS)/.installed
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/$(HOSTS) $(BIN)/python -m tests.integrations.hosts.installed requirements.txt
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/$(HOSTS) $(BIN)/python -m pytest $(PARALLEL) --durations=5 tests/integrations/hosts \
	  $(patsubst %,--ignore=tests/integrations/hosts/test_%.py,axolotl autoep sglang vllm) $(TEST_ARGS)

# axolotl, SGLang, vLLM and older transformers take as long again; CI runs only the systems above.
adapters: hosts sglang vllm $(AXOLOTL)/.installed
	@set -e; export $(TEST_ENV) PYTHONPATH=$(CURDIR)/$(AXOLOTL):$(CURDIR)/build/transformers-5.16.1:$(CURDIR)/$(HOSTS); \
	  $(BIN)/python -m tests.integrations.hosts.installed requirements-axolotl.txt; \
	  $(BIN)/python -m pytest tests/integrations/hosts/test_axolotl.py tests/integrations/hosts/test_autoep.py $(TEST_ARGS)
	@set -e; for version in $(OLDER); do \
	  export $(TEST_ENV) PYTHONPATH=$(CURDIR)/build/transformers-$$version; \
	  $(BIN)/python -c "import transformers as t; assert t.__version__ == '$$version', t.__version__"; \
	  $(BIN)/python -m pytest tests/integrations/test_swap.py tests/integrations/test_experts_interface.py $(TEST_ARGS); \
	done

sglang: build build/sglang/.installed
vllm: build build/vllm/.installed
sglang vllm:
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/build/$@ $(BIN)/python -m tests.integrations.hosts.installed requirements-$@.txt
	$(TEST_ENV) PYTHONPATH=$(CURDIR)/build/$@ $(BIN)/python -m pytest tests/integrations/hosts/test_$@.py $(TEST_ARGS)

# Other interpreters than those that are found: make wheels PYTHONS="python3.12 /opt/python/bin/python3.13".
# Wheels for another machine than this one are run under qemu: Debian's qemu-user.
PYTHONS ?=
MACHINES ?=
TORCH_INDEX ?=
wheels: $(STAMP)
	$(TEST_ENV) MOE_COMM_WERROR=off $(BIN)/python -m benchmarks.wheels build/wheels \
	  $(addprefix --python=,$(PYTHONS)) $(addprefix --machine=,$(MACHINES)) $(addprefix --torch-index=,$(TORCH_INDEX))

slow: build
	$(TEST_ENV) $(BIN)/python -m pytest --durations=15 -m slow $(TEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

# The pages' generated parts are checked by make test. make notebooks stores the outputs of tutorials whose code has changed.
DOCS_READY = $(BIN)/python -c 'import ipykernel, matplotlib, mkdocs, mkdocstrings, nbclient' 2> /dev/null \
  || $(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e '.[$(EXTRAS),docs]'
docs-install: build
	@$(DOCS_READY)
docs: docs-install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m benchmarks.check_site build/site

notebooks: docs-install
	$(TEST_ENV) $(BIN)/python -m benchmarks.run_notebooks docs/tutorials build/tutorials

gpu-script: build
	$(TEST_ENV) PYTHON=$(BIN)/python bash benchmarks/gpu.sh --emulated --again --deadline 1500 --out build/gpu-emulated

# ThreadSanitizer needs the old layout of addresses; setarch asks for it where the machine allows that.
sanitize: $(STAMP)
	@set -e; for kind in address undefined thread; do \
	  echo "== $$kind"; \
	  $(BIN)/cmake -G Ninja -S . -B build/sanitize-$$kind -DCMAKE_MAKE_PROGRAM=$(BIN)/ninja -DMOE_COMM_SANITIZE=$$kind \
	    -DMOE_COMM_WERROR=ON > build/sanitize-$$kind.log \
	    || { cat build/sanitize-$$kind.log; exit 1; }; \
	  $(BIN)/cmake --build build/sanitize-$$kind; \
	  fixed=; if setarch -R true 2> /dev/null; then fixed="setarch -R"; fi; \
	  ASAN_OPTIONS=detect_leaks=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
	    $$fixed build/sanitize-$$kind/moe_comm_tests; \
	done; \
	echo "== thread, GEMMs in the model of Hopper's instructions"; \
	for seed in 1 2 3; do \
	  TSAN_OPTIONS=halt_on_error=1 $$fixed build/sanitize-thread/moe_comm_gemm_model $$seed; \
	done

ARM_CXX ?= aarch64-linux-gnu-g++
ARM_SOURCES = $(filter-out %isa_avx2.cpp %isa_avx512.cpp %isa_avx512_bf16.cpp %isa_amx.cpp,\
  $(wildcard csrc/cpu/*.cpp csrc/cpu/gemm/*.cpp)) \
  $(wildcard csrc/cuda/*.cpp csrc/cuda/gemm/*.cpp) $(wildcard csrc/tests/*.cpp)
neon:
	@mkdir -p build
	$(ARM_CXX) -std=c++17 -O2 -Wall -Wextra -Werror -ffp-contract=off -Icsrc -static $(ARM_SOURCES) -o build/neon-tests -lpthread -lrt
	qemu-aarch64 build/neon-tests

# What is found is kept in tests/fuzz/corpus, and replayed by make test.
FUZZ_SECONDS ?= 60
FUZZ ?= $(shell $(BIN)/python -m tests.fuzz list)
fuzz: build
	@$(BIN)/python -c 'import atheris' 2> /dev/null \
	  || $(BIN)/python -m pip install --quiet -c $(PINS) --no-build-isolation -e '.[$(EXTRAS),fuzz]'
	@set -e; for name in $(FUZZ); do \
	  echo "== $$name"; \
	  $(TEST_ENV) $(BIN)/python -m tests.fuzz $$name $(FUZZ_SECONDS) > build/fuzz-$$name.log 2>&1 \
	    || { tail -n 40 build/fuzz-$$name.log; exit 1; }; \
	  sed -n 's/^Done /  /p' build/fuzz-$$name.log; \
	done

bench: build
	$(BIN)/moe-comm bench dispatch
	$(BIN)/moe-comm bench layer

clean:
	rm -rf build moe_comm/_C*.so *.egg-info
