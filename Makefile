# From a fresh clone: `make demo` packs real documents and trains on them. `make test` checks every law and every public
# path in minutes, `make test-all` runs every test, `make docs` builds the site, `make survey` writes
# docs/SUPPORTED_MODELS.md. `make test-oldest` and `make test-newest` build the wheel and run the fast tests on it in new
# environments: with the oldest version of each package that pyproject.toml allows, and with the newest releases.
# `make test-with PINS=tests/pins/axolotl-0.19.0.txt` does so with the versions of a file.

PYTHON ?= python3
VENV := .venv
# The torch of test-oldest, test-newest and test-with. It is the one of constraints.txt, not the oldest or the newest,
# since few versions have a build without CUDA on PyPI. `make test-oldest TORCH=2.9.0` takes another one.
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
INSTALLED := $(VENV)/.installed
INSTALLED_FOR_DEMO := $(VENV)/.installed-for-demo

.PHONY: demo doors test test-all test-deepspeed test-oldest test-newest test-with survey lint bench docs clean

demo: $(INSTALLED_FOR_DEMO)
	$(VENV)/bin/python -u recipes/quickstart.py
	@echo "To run these commands, activate the virtual environment: source $(VENV)/bin/activate"

# Python keeps what it has compiled, also where the machine says otherwise: tests start many processes. The environment
# for the tests is installed uncompiled, since most of it is never imported.
export PYTHONDONTWRITEBYTECODE =

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -m "not slow and not survey"

# What other versions of a library in .venv have changed, and what of ours needs it, in a minute. In an environment of
# your own: python -m pytest -c /dev/null --noconftest tests/upstream/test_doors.py
doors: $(INSTALLED)
	$(VENV)/bin/python -m pytest tests/upstream

test-all: $(INSTALLED)
	$(VENV)/bin/python -m pytest -m "not survey"

# DeepSpeed is installed only here: accelerate imports it in every process that trains, once it is there.
test-deepspeed: $(INSTALLED)
	$(VENV)/bin/python -m pip install --no-compile --quiet --constraint constraints.txt --editable ".[deepspeed]"
	$(VENV)/bin/python -m pytest -n 1 tests/training/test_deepspeed.py

# What prints the pins of each, beside torch, and the name that the environment's folder ends in.
test-oldest: pins = grep -oE '"[a-z0-9-]+(\[[a-z0-9,]+\])?>=[0-9.]+[",]' pyproject.toml | grep -v '"torch>=' \
    | sed -E 's/"([a-z0-9-]+).*>=(.*)[",]/\1==\2/'
test-newest: pins = true
test-with: pins = cat "$(or $(PINS),$(error test-with needs a file of pins: make test-with PINS=tests/pins/NAME.txt))"
test-oldest test-newest: name = $(@:test-%=%)
test-with: name = $(basename $(notdir $(PINS)))

# The wheel is tested, not the checkout: the tests run in a copy of it without the package.
test-oldest test-newest test-with:
	rm -rf .venv-$(name) && mkdir .venv-$(name)
	echo "torch==$(TORCH)" > .venv-$(name)/constraints.txt
	$(pins) >> .venv-$(name)/constraints.txt
	$(PYTHON) -m venv .venv-$(name)
	.venv-$(name)/bin/python -m pip wheel --no-deps --wheel-dir .venv-$(name)/wheel .
	.venv-$(name)/bin/python -m pip install --no-compile --constraint .venv-$(name)/constraints.txt \
	    "$$(echo .venv-$(name)/wheel/*.whl)[dev]"
	mkdir .venv-$(name)/checkout
	git ls-files -z ':!hf_packing' | tar --null -T - -cf - | tar -xf - -C .venv-$(name)/checkout
	cd .venv-$(name)/checkout && ../bin/python -c "import hf_packing; print(hf_packing.__file__)" | grep site-packages
	cd .venv-$(name)/checkout && ../bin/python -m pytest -m "not slow and not survey"

survey: $(INSTALLED)
	$(VENV)/bin/python -m tools.survey

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m tools.size --check

BENCHMARKS := plan strategies pack alignment trees tree_training tree_pairs score_trees lazy collate loader samplers long_documents two_ranks rollouts attention block_mask by_segment shapes patching first_batch head training padded_batches score masking streams mixtures lockstep fleet_pack startup

bench: $(INSTALLED)
	for name in $(BENCHMARKS); do $(VENV)/bin/python benchmarks/$$name.py --save || exit 1; done
	$(VENV)/bin/python benchmarks/write_readme.py

docs: $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) .venv-* outputs site

$(INSTALLED_FOR_DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --constraint constraints.txt --editable ".[trl,plots]"
	touch $@

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --no-compile --constraint constraints.txt --editable ".[dev]"
	touch $@ $(INSTALLED_FOR_DEMO)
