# The one set-up: a virtual environment with the project, its extras for development and a pinned torch.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test test-slow test-flower-versions bench fuzz check format clean

demo: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/fedmtl run

# Python may write its bytecode, also where the environment forbids it: every process would compile all tests and sources.
test: $(STAMP)
	PYTHONDONTWRITEBYTECODE= HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(STAMP)
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m slow

# Not part of the others: it installs Flower's lowest and newest version that the project takes.
test-flower-versions: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/flower_versions.py

# About an hour: BENCH="--quick --systems fedmtl naive" and other options in docs/benchmarks.md.
bench: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python -m simulator $(BENCH)

# About two minutes: FUZZ="--seconds 600 --targets wire,sums" and other options in docs/results/robustness.md.
# REPRO=fuzz-found/NAME tries one saved input again.
fuzz: $(STAMP)
	PYTHONPATH=benchmarks $(BIN)/python -m fuzz $(if $(REPRO),--repro $(REPRO)) $(FUZZ)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	# A maintainer who follows one round reads no more files than this.
	HF_HUB_OFFLINE=1 $(BIN)/python scripts/round_files.py --at-most 40

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
