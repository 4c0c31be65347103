# Everything sets itself up: a virtual environment in the tree, with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PROCESSES ?= 2

.PHONY: demo test test-all bench lint format clean

demo: $(READY)  ## train on the embedded corpus, beside Hugging Face's collator and dense head
	$(BIN)/fastmlm pretrain --compare --output-dir demo --overwrite

test: $(READY)
	$(BIN)/python -m pytest -q -n $(PROCESSES) -m "not slow"

test-all: $(READY)  ## with the long sweeps
	$(BIN)/python -m pytest -q -n $(PROCESSES)

bench: $(READY)  ## measure against Hugging Face, write benchmarks/results/ and the table of the README
	$(BIN)/python -m pytest -q benchmarks --benchmark-json=build/benchmarks.json
	$(BIN)/python benchmarks/report.py build/benchmarks.json

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
