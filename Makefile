# Every command sets up what it needs in .venv; nothing is installed outside this checkout.
PYTHON ?= python3
PORT ?= 8000
VENV := .venv
STAMP := $(VENV)/.installed

.PHONY: serve test lint clean

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[test]'
	touch $@

serve: $(STAMP)
	exec $(VENV)/bin/hallmark serve --port $(PORT)

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: lint
	$(VENV)/bin/pytest -m 'not gpu'

clean:
	rm -rf $(VENV)
