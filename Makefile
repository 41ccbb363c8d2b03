# Everything from a fresh clone: `make demo` packs real documents and trains on them, `make test` runs the tests.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint bench clean

demo: $(INSTALLED)
	$(VENV)/bin/python recipes/quickstart.py

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(INSTALLED)
	$(VENV)/bin/python benchmarks/plan.py
	$(VENV)/bin/python benchmarks/strategies.py
	$(VENV)/bin/python benchmarks/pack.py
	$(VENV)/bin/python benchmarks/collate.py
	$(VENV)/bin/python benchmarks/samplers.py
	$(VENV)/bin/python benchmarks/attention.py
	$(VENV)/bin/python benchmarks/by_segment.py
	$(VENV)/bin/python benchmarks/training.py
	$(VENV)/bin/python benchmarks/startup.py

clean:
	rm -rf $(VENV) outputs

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[dev]"
	touch $@
