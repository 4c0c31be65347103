# Everything sets itself up: a virtual environment in the tree, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PROCESSES ?= 2

INPUTS ?= 200000
comma := ,

.PHONY: demo test test-slow test-all test-clang sanitize bench lint format clean

demo: $(READY)  ## train on the embedded corpus, beside Hugging Face's collator and dense head
	$(BIN)/fastmlm pretrain --compare --output-dir demo --overwrite

test: $(READY)
	$(BIN)/python -m pytest -q -n $(PROCESSES) -m "not slow"

test-slow: $(READY)  ## the long sweeps, and the packaging
	$(BIN)/python -m pytest -q -m slow

test-all: $(READY)  ## with the long sweeps
	$(BIN)/python -m pytest -q -n $(PROCESSES)

# A copy of the package with the native module from another compiler or with other options (folder, compiler, options).
define copy_with_native
	rm -rf $(1) && mkdir -p $(1)
	cp -R src/fastmlm $(1)/
	cp -R kernels/gpu kernels/cpu $(1)/fastmlm/kernels/
	rm -f $(1)/fastmlm/kernels/cpu/_native.*
	$(2) -shared -fPIC -std=c++17 -fvisibility=hidden -Wall -Wextra $(3) kernels/cpu/*.cpp \
		-I"$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("include"))')" \
		-o $(1)/fastmlm/kernels/cpu/_native$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
endef

# The sanitizers' libraries must be loaded before Python, and that of C++ with them, since they wrap its exceptions, which
# torch throws. No search for leaks: Python and torch keep much until they exit, and test_native_fuzz.py counts what our
# calls leave.
SANITIZED = PYTHONPATH=$(CURDIR)/build/sanitize UBSAN_OPTIONS=print_stacktrace=1 \
	ASAN_OPTIONS=detect_leaks=0:detect_stack_use_after_return=1 \
	LD_PRELOAD="$$(for name in asan ubsan stdc++; do g++ -print-file-name=lib$$name.so; done | xargs)" $(BIN)/python

sanitize: $(READY)  ## the native module under AddressSanitizer and UBSan: its tests, and INPUTS inputs by hypothesis
	$(call copy_with_native,build/sanitize,g++,-O1 -g -fno-omit-frame-pointer -fsanitize=address$(comma)undefined \
		-fno-sanitize-recover=all -Wno-uninitialized -Wno-maybe-uninitialized)
	$(SANITIZED) tests/native_fuzz.py --sanitized --inputs $(INPUTS) --processes $(PROCESSES) --record build/sanitize/input
	PYTHONMALLOC=malloc $(SANITIZED) -m pytest -q -n $(PROCESSES) -m "not slow" tests/test_native.py tests/test_native_loss.py

test-clang: $(READY)  ## the native module as clang builds it
	$(call copy_with_native,build/clang,clang++,-O3 -Werror)
	PYTHONPATH=$(CURDIR)/build/clang $(BIN)/python -m pytest -q -m "not slow" tests/test_native.py tests/test_native_loss.py tests/test_native_fuzz.py

bench: $(READY)  ## measure against Hugging Face, write benchmarks/results/ and the table of the README
	$(BIN)/python -m pytest -q benchmarks --benchmark-json=build/benchmarks.json
	$(BIN)/python benchmarks/report.py build/benchmarks.json
	$(BIN)/python benchmarks/scaling.py
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/head.py
	$(BIN)/python benchmarks/roofline.py
	$(BIN)/python benchmarks/reproducibility.py
	$(BIN)/python benchmarks/objectives.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@# mypy reads the package as it is installed: kernels inside fastmlm
	rm -rf build/lint && mkdir -p build/lint && cp -R src/fastmlm build/lint/
	cp -R kernels/gpu kernels/cpu build/lint/fastmlm/kernels/
	MYPYPATH=build/lint $(BIN)/mypy -p fastmlm

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(READY): constraints.txt pyproject.toml setup.py $(wildcard kernels/cpu/*.cpp kernels/cpu/*.h kernels/cpu/*.inc)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build demo src/*.egg-info .mypy_cache .ruff_cache .hypothesis
