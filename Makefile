PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
LOWEST := 5.17.0
# tests of what transformers does; all else is the same with every release
OF_TRANSFORMERS := base causal classifier command_line configuration_elmo coreference_pipeline \
    coreference_resolver export exporting fine_tune_stock int8 integration model_outputs modeling_elmo push_to_hub \
    reader reader_pipeline remote_code role_labeler role_labeler_pipeline run_pretraining run_task scoring \
    sentence_transformers tagger task_heads tokenization_elmo torch_state trainer

# the public names, and the modules of functions that the documents call
DOCUMENTED := modeling_elmo $(addprefix modeling_elmo.,conversion.original conversion.manylangs \
    conversion.tensorflow conversion.archive run_scripts.vectors.word_changes run_scripts.explorer.readings)

BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
# Each process takes the tests that follow each other, so that few files have their fixtures made twice.
IN_PARALLEL := -n $(JOBS) --dist worksteal
# --no-compile: most modules of torch and transformers are never imported. --use-pep517: older pip cannot build seqeval.
PIP_INSTALL := python -m pip install --quiet --no-compile --use-pep517

# Tests start hundreds of processes. Where Python may not keep bytecode, each compiles torch and transformers again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help demo test test-long lint format bench bench-gpu docs tour checkpoints wheel release test-common test-browser test-lowest clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# OpenMP's default is active waiting, which takes ten times as long beside another busy process.
demo: $(VENV)/.demo  ## vectors, neighbors, further training and a tagger with the shipped English biLM (minutes)
	OMP_WAIT_POLICY=passive $(BIN)/python run_scripts/demo.py

test: $(VENV)/.dev  ## the test suite (minutes)
	$(PYTEST) $(IN_PARALLEL)

test-long: $(VENV)/.dev  ## tests of processes, kills, installations and whole plans
	$(PYTEST) $(IN_PARALLEL) -m slow --ignore tests/test_devices.py
	$(PYTEST) $(IN_PARALLEL) -m slow tests/test_devices.py  # autograd must not have started before its device is there

lint: $(VENV)/.dev  ## ruff (rules and format), English of documents and messages, and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python .ci/check_sentences
	.ci/link_as_installed build/typed
	$(BIN)/mypy

format: $(VENV)/.dev  ## let ruff repair what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.demo  ## published figures measured again, and speed beside torch.nn.LSTM and BertTokenizer (minutes)
	mkdir -p build
	$(BIN)/python -m modeling_elmo.run_scripts.benchmarks.published
	$(BIN)/elmo benchmark --output build/benchmark.json

bench-gpu: $(VENV)/.dev  ## on a CUDA device: its tests, and the speed of layers, pretraining and inference (4 minutes)
	mkdir -p build
	$(BIN)/python -m modeling_elmo.run_scripts.benchmarks.gpu_report --output build/gpu.json

docs: $(VENV)/.docs  ## the API reference, from the docstrings: build/docs/index.html
	$(BIN)/python .ci/write_reference --docformat google --output-directory build/docs $(DOCUMENTED)

tour: $(VENV)/.dev  ## run the notebooks of docs/ again and store their outputs (minutes)
	HF_HUB_OFFLINE=1 $(BIN)/python tests/test_tour.py

checkpoints: $(VENV)/.demo  ## write the table of docs/CHECKPOINTS.md from the catalog
	$(BIN)/python .ci/write_checkpoints

wheel: $(VENV)/.demo  ## dist/modeling_elmo-*.whl
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

# setuptools would add to the sdist what an old list of files in *.egg-info names.
release: $(VENV)/.dev  ## dist/: sdist and wheel, checked, and each installed in an empty environment (minutes)
	$(BIN)/$(PIP_INSTALL) -c constraints.txt build check-jsonschema twine
	$(BIN)/check-jsonschema --builtin-schema vendor.citation-file-format CITATION.cff
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	rm -rf dist *.egg-info
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*
	RELEASE=dist $(PYTEST) tests/test_release.py
	.ci/try_release $(BIN)/python dist/*

test-common: $(VENV)/.dev  ## transformers' ModelTesterMixin, from its source distribution
	@if tests=$$(.ci/fetch_transformers_tests $(BIN)/python build/transformers); \
	then TRANSFORMERS_TESTS=$$tests $(PYTEST) $(IN_PARALLEL) -r fE -o verbosity_subtests=0 tests/test_common_modeling.py; \
	else echo "skipped: pip has no source distribution of the installed transformers"; fi

test-browser: $(VENV)/.browser  ## the explorer in Chromium, a package of your distribution
	$(PYTEST) -p no:xdist tests/test_explore_browser.py

test-lowest: .venv-lowest/.dev  ## models, tokenizer, Trainer and pipelines with the oldest supported transformers
	OMP_NUM_THREADS=1 .venv-lowest/bin/python -m pytest -q $(IN_PARALLEL) $(OF_TRANSFORMERS:%=tests/test_%.py)

clean:  ## remove environments and built files
	rm -rf .venv .venv-lowest build demo_output dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

# pip comes last: without the package python3-venv, as on Debian, there is an environment without it.
$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing the packages into $(VENV), once: minutes and 1.5 GB, and gigabytes more where pip takes torch for CUDA."
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e ".[convert,train]"
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e ".[dev]"
	@touch $@

$(VENV)/.browser: $(VENV)/.dev
	$(BIN)/$(PIP_INSTALL) -c constraints.txt playwright
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/pip
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -e ".[convert,train,docs]"
	@touch $@

.venv-lowest/.dev: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-lowest
	grep -vE '^(transformers|huggingface-hub)==' constraints.txt > .venv-lowest/constraints.txt
	.venv-lowest/bin/$(PIP_INSTALL) -c .venv-lowest/constraints.txt -e ".[dev]" transformers==$(LOWEST)
	@touch $@
