# A thin face over CMake presets. `make demo` and `make test` are all that a user needs.
PRESET ?= $(if $(CI),ci,release)
JOBS ?= $(shell nproc)
GOLDEN = $(wildcard tests/golden/*_bf16 tests/golden/*_bf16_shards tests/golden/*_f32)
FUSEDMOE = build/bin/fusedmoe

PYTHON = build/python-venv/bin/python

.PHONY: build build-asan build-tsan demo test test-long test-python bench-python sanitize sanitize-python \
  fuzz check clean

build:
	@scripts/install_dependencies.sh build
	@cmake --preset $(PRESET) >build.log 2>&1 || { cat build.log; exit 1; }
	@cmake --build build -j $(JOBS)

# The main job: real checkpoints' layers against their reference models, then what it costs to own
# scratch in three ways.
demo: build
	$(FUSEDMOE) verify $(GOLDEN)
	$(FUSEDMOE) bench --model qwen3.6-35b-a3b --layers 4 --tokens 1,8,64 --workspace-modes

test: build
	@ctest --test-dir build -j $(JOBS) --output-on-failure

# The Python package, installed into an environment of its own from PyPI: the binding, PyTorch's
# operators, transformers, vLLM's XPUExperts, and the code blocks of the docs.
test-python: build
	@scripts/install_dependencies.sh python
	@scripts/python_environment.sh build/python-venv
	@cd build && FUSEDMOE_COMMAND=$(CURDIR)/$(FUSEDMOE) FUSEDMOE_REQUIRE_VLLM=1 \
	  ../$(PYTHON) -m pytest -q -rs --durations=8 -p no:cacheprovider ../tests/python

# What a call costs from Python besides the work.
bench-python:
	@scripts/install_dependencies.sh python
	@scripts/python_environment.sh build/python-venv
	$(PYTHON) bench/python/overhead.py

# Minutes and gigabytes: indices beyond 2^31 for real, and a full random sweep.
test-long: build
	build/tests/long_tests
	$(FUSEDMOE) verify --random 5000

# The suite under sanitizers; asan is address + undefined, tsan leaves out the command.
sanitize: sanitize-asan sanitize-tsan sanitize-python
sanitize-python:
	@scripts/install_dependencies.sh python
	@scripts/python_environment.sh build/python-venv
	@scripts/sanitize_python.sh build/python-venv
build-asan build-tsan: build-%:
	@scripts/install_dependencies.sh check
	@cmake --preset $* >build.log 2>&1 || { cat build.log; exit 1; }
	@cmake --build $@ -j $(JOBS)
# allocator_may_return_null: tests ask for more memory than there is.
sanitize-%: build-%
	@ASAN_OPTIONS=allocator_may_return_null=1 TSAN_OPTIONS=allocator_may_return_null=1 \
	  ctest --test-dir $< -j $(JOBS) --output-on-failure -LE install

FUZZ_SECONDS ?= 60
fuzz: build-asan
	scripts/fuzz.sh $(FUZZ_SECONDS)

# What a change must pass besides the tests.
check: build
	@scripts/install_dependencies.sh check
	scripts/check_format.sh
	scripts/check_tidy.sh build

clean:
	rm -rf build build-asan build-tsan build.log
