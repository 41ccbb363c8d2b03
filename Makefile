# From a fresh clone: `make demo` packs real documents and trains on them. `make test` checks every law and every public
# path in minutes, `make test-all` runs every test, `make docs` builds the site, `make survey` writes
# docs/SUPPORTED_MODELS.md.

PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/.installed

.PHONY: demo test test-all survey lint bench docs clean

demo: $(INSTALLED)
	$(VENV)/bin/python recipes/quickstart.py

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -m "not slow and not survey"

test-all: $(INSTALLED)
	$(VENV)/bin/python -m pytest -m "not survey" --hypothesis-profile=thorough

survey: $(INSTALLED)
	$(VENV)/bin/python -m tools.survey

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

BENCHMARKS := plan strategies pack trees tree_training tree_pairs score_trees lazy collate loader samplers attention block_mask by_segment shapes patching first_batch head training padded_batches score masking streams mixtures lockstep fleet_pack fleet_scale fleet_trees startup

bench: $(INSTALLED)
	for name in $(BENCHMARKS); do $(VENV)/bin/python benchmarks/$$name.py --save || exit 1; done
	$(VENV)/bin/python benchmarks/write_readme.py

docs: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) outputs site

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[dev]"
	touch $@
