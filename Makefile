# Every target sets up what it needs in .venv; a second run installs nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DISTRIBUTIONS := core $(sort $(wildcard plugins/*))
WORKERS ?= auto
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := help
# Many tests start Python anew. Without bytecode each start compiles the libraries again, which takes longer than the
# tests that follow.
unexport PYTHONDONTWRITEBYTECODE

# The oldest and the newest that the packages admit; the newest is the installed one, which `make test` covers.
TRANSFORMERS ?= 5.2.0

.PHONY: help demo test test-all test-docs test-versions check check-form check-types check-wheels format docs wheels bench coverage generate release clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(INSTALLED)  ## train a small Qwen3-MoE on real text, and compare it with everything eager
	$(BIN)/veomni train examples/demo.yaml --compare eager --overwrite

test: $(INSTALLED)  ## run the tests of every change: each kind of question once, in ten minutes on two cores
	$(PYTEST) --suite test

test-all: $(INSTALLED)  ## run all tests, or a part of them that takes twenty minutes: PART=3/8
	$(PYTEST) --suite all $(if $(PART),--part $(PART))

test-docs: $(INSTALLED)  ## run the tests of pages, examples, pictures and generated tables
	$(PYTEST) --suite docs

test-versions: $(INSTALLED)  ## run the binding tests against other versions: TRANSFORMERS="5.2.0 5.17.0 5.24.0"
	for version in $(TRANSFORMERS); do $(BIN)/python scripts/test_with_transformers.py $$version || exit 1; done

check: $(INSTALLED)  ## format, lint, types, import layers, links of pages, and each wheel alone beside the core
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target check-types check-wheels check-form

check-form: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_links.py
	$(BIN)/python scripts/check_size.py

check-types: $(INSTALLED)
	$(BIN)/mypy

check-wheels: $(INSTALLED)
	$(BIN)/python scripts/check_wheels.py

format: $(INSTALLED)  ## rewrite the sources as check wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED)  ## build the documentation site into docs/_build, with its generated pages, and check every link
	$(BIN)/python scripts/check_links.py
	$(BIN)/python scripts/build_site.py $(if $(COVERAGE),--coverage)

wheels: $(INSTALLED)  ## build every distribution's wheel into dist/
	rm -rf dist
	for distribution in $(DISTRIBUTIONS); do \
	  $(BIN)/python -m build --wheel --no-isolation --outdir dist $$distribution || exit 1; \
	done

bench: $(INSTALLED)  ## measure what needs no GPU, and rewrite its pages; with BASE=HEAD~1, fail on a loss since then instead
ifdef BASE
	$(BIN)/python benchmarks/revisions/compare_revisions.py $(BASE) $(if $(ONLY),--only $(ONLY)) $(if $(PAIRS),--pairs $(PAIRS))
else
	$(BIN)/python benchmarks/core/core.py
	$(BIN)/python benchmarks/core/host_cost.py
	$(BIN)/python benchmarks/causal_conv1d/causal_conv1d.py
	$(BIN)/python benchmarks/plugins/cpu_kernels.py
	$(BIN)/python benchmarks/chunk_gated_delta_rule/chunk_gated_delta_rule.py
	$(BIN)/python benchmarks/cross_entropy_loss/chunk_sizes.py
	$(BIN)/python benchmarks/kda/kda.py
	$(BIN)/python benchmarks/mamba2_scan/mamba2_scan.py
	$(BIN)/python benchmarks/moe_experts/lora.py
	$(BIN)/python benchmarks/token_dispatch/traffic.py
	$(BIN)/python benchmarks/token_logprobs/token_logprobs.py
endif

coverage: $(INSTALLED)  ## which lines the tests reach
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine
	$(BIN)/coverage report

generate: $(INSTALLED)  ## write what docs have from the code and the figures; with COVERAGE=1 the coverage page too, for minutes
	$(BIN)/python scripts/generate.py $(if $(COVERAGE),--coverage)

release: $(INSTALLED)  ## bump all distributions to VERSION=x.y.z, check, build, commit and tag; nothing is pushed
	$(BIN)/python scripts/release.py $(VERSION)

clean:  ## remove everything that make has made
	rm -rf $(VENV) dist docs/_build runs .coverage* .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# hatchling and editables come first: with them here, the editable installs need no build environments of their own.
# Most modules of the libraries are never imported; Python compiles the others when they are.
$(INSTALLED): constraints.txt pyproject.toml $(DISTRIBUTIONS:=/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt "pip>=25.1"
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --group dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation $(DISTRIBUTIONS:%=--editable %)
	touch $@
