# PYTHON=/path/to/python make ... runs that interpreter with what is installed there and installs nothing.
# Without it .venv is made from requirements.txt, by whichever target needs it first.
VENV := .venv
ifdef PYTHON
PY := $(PYTHON)
READY :=
else
PY := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

.DEFAULT_GOAL := help
.PHONY: help setup build test test-machines test-long test-gpu test-versions test-histories demo doctor bench beside-eager tune publish verify hub lint docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo "PYTHON=/path/to/python make ... uses that interpreter instead of $(VENV)"

setup: $(READY) ## make .venv from requirements.txt

$(VENV)/.installed: requirements.txt
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "requirements.txt needs Python 3.11 or newer")'
	python3 -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --no-input --disable-pip-version-check -r requirements.txt
	@touch $@

build: $(READY) ## build/torch-{cuda,rocm,cpu}, what the Hub ships
	$(PY) scripts/build_kernel.py

test: lint build ## everything that needs no GPU
	$(PY) -m pytest -n 2 --dist worksteal -m "not gpu and not gpu2 and not long"

test-machines: build ## what every kernel compiles to, for seven NVIDIA and five AMD generations
	LOSSLESS_MACHINES=all $(PY) -m pytest -n 2 tests/test_machine.py tests/test_rocm.py

test-long: build ## the tests that take too long for `make test`, without a GPU
	$(PY) -m pytest -n 2 --dist worksteal -m "long and not gpu and not gpu2"

test-gpu: build ## everything that needs a GPU, and the sweep over transformers on it
	$(PY) -m pytest -n 6 --dist worksteal -m "(gpu or either) and not alone"
	$(PY) -m pytest -rP -m "alone or gpu2"

test-versions: build ## CPU tests with other versions of torch and the rest: make test-versions ARGS="--only 2.15.0"
	$(PY) scripts/versions.py $(ARGS)

test-histories: build ## 10,000 random histories of small models, two processes
	$(PY) -W ignore tests/histories.py --histories 9500 --processes 2
	$(PY) -W ignore tests/histories.py --histories 500 --processes 2 --arithmetic triton

demo: build ## kernelize a Llama and compare (ARGS="--help" lists its options), then the same from a local Hub
	$(PY) examples/kernelize_llama.py $(ARGS)
	$(PY) examples/hub_round_trip.py

doctor: build ## what keeps kernels from running here, and what of a model is replaced: make doctor ARGS="MODEL"
	$(PY) scripts/doctor.py $(ARGS)

publish: build ## send build/ and the card to the Hub: make publish ARGS="--dry-run"
	$(PY) scripts/publish.py $(ARGS)

verify: $(READY) ## check digests: make verify ARGS="ORG/NAME"; of build/ if nothing is named
	$(PY) scripts/verify.py $(ARGS)

hub: $(READY) ## serve a Hub on this machine for trying out a release: make hub ARGS="--root DIR --trust ORG"
	$(PY) scripts/local_hub.py $(ARGS)

bench: build ## time the kernels beside every installed peer, on a GPU: make bench ARGS="--help"
	$(PY) benchmarks/peers.py $(ARGS)

beside-eager: build ## time every function beside eager's in over 2,000 cases, on a GPU: make beside-eager ARGS="--help"
	$(PY) benchmarks/beside_eager.py $(ARGS)

tune: build ## measure launch configurations on this GPU and write the faster ones: make tune ARGS="--help"
	$(PY) scripts/tune.py $(ARGS)

lint: $(READY) ## ruff
	$(PY) -m ruff check .

DOCS := .venv-docs
docs: $(DOCS)/.installed ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

$(DOCS)/.installed: docs/requirements.txt
	python3 -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip install --quiet --no-input --disable-pip-version-check -r $< || { \
		echo "make docs: expected the packages of $<, found no way to install them: it needs the network or a package index" >&2; exit 1; }
	@touch $@

clean: ## remove what was built and cached, but not .venv
	rm -rf build .build-* site .hypothesis .pytest_cache .ruff_cache
	find . -path './.venv*' -prune -o -name __pycache__ -type d -exec rm -rf {} +
