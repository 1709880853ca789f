# Two commands do everything on a fresh machine with Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help setup demo test check docs smoke format clean

help:
	@echo "make demo    read faces out of the weights of a small network (sets up first)"
	@echo "make setup   create $(VENV) with pinned versions"
	@echo "make test    run the test suite (sets up first)"
	@echo "make check   lint, formatting, types, doctests (sets up first)"
	@echo "make docs    run the documents' examples and build the site into build/docs (sets up first)"
	@echo "make smoke   run a small version of every experiment (sets up first)"
	@echo "make format  rewrite the code in the house format"

setup: $(VENV)/.ready

$(VENV)/.ready: requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Palimpsest needs Python 3.11 or newer; set PYTHON=...")'
	@echo "Installing into $(VENV); this takes a minute or more."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: setup
	$(BIN)/palimpsest demo

test: setup
	$(BIN)/pytest tests --numprocesses auto

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest src experiments/reproduce experiments/published experiments/margin_problem

docs: setup
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-docs.txt
	$(BIN)/pytest tests/test_documents.py
	$(BIN)/mkdocs build --strict --quiet

smoke: setup
	$(BIN)/python experiments/reproduce all --small

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
