# Two commands are enough: `make run` and `make test`. Everything else is here for those who want it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup run check test test-all soak bench test-gpu clean

setup: $(STAMP)

# What the machine can use: its own CUDA build of PyTorch if it has one (then the venv sees it), PyTorch's default
# (CUDA) build if there is an NVIDIA driver, else the release whose CPU build and Triton were tested together.
$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Overnight needs Python 3.11 or newer; run: make setup PYTHON=/path/to/python3.11"; exit 2; }
	@if $(PYTHON) -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then \
	  echo "setup: using this machine's own CUDA build of PyTorch"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	elif command -v nvidia-smi >/dev/null 2>&1; then \
	  echo "setup: NVIDIA driver found, installing PyTorch's CUDA build"; \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet torch; \
	else \
	  echo "setup: no GPU found, installing PyTorch for the CPU"; \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet torch==2.13.0 triton==3.7.1; \
	fi
	$(BIN)/python -m pip install --quiet -e '.[dev,hf,dashboard,notify,ray]'
	@touch $@

# One command from a model to verified kernels: the LLaMA example, the built-in playbook, the GPU if there is one.
MODEL ?= models/llama.py:LLaMA
ARGS  ?= --experiments 40 --hours 0.13
run: $(STAMP)
	$(BIN)/overnight run $(MODEL) --proposer playbook $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_architecture.py

test: check
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: check
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(STAMP)
	$(BIN)/python -m pytest -m gpu

soak: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/test_kill.py tests/test_soak.py

bench: $(STAMP)
	@ls benchmarks/*.py | sed 's|^|$(BIN)/python |'

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist *.egg-info
