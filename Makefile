# make demo: trains on digits with few labels, compares idmm train with training from scratch and the baseline
# make test: the whole test suite; make test-fast: without whole runs and clusters
# make fuzz: thousands of malformed inputs, half an hour on one core
# make test-lowest: exports and what they rely on, with the lowest versions that setup.cfg allows, in .venv-lowest
# make bench: measures the speed of this machine; make bench-quick: checks that all benchmarks run
# make docs: builds docs/ as a site, docs/_build/index.html. It needs no network after the installation
# Each target creates .venv and installs what it needs (about 6 GB, mostly PyTorch).
PYTHON ?= python3
BIN := .venv/bin
# With this line in site-packages a script in the folder above imports the package, not this folder as an empty one.
PATH_FILE := import os, sysconfig; open(sysconfig.get_path("purelib") + "/idmm.pth", "w").write(os.getcwd() + "\n")
SAY := @echo 'installing into .venv. The first time this downloads about 6 GB and takes some minutes. pip prints nothing meanwhile'

# exports, the example that reads them, preprocessing by timm alone, and tests/contract.py
LOWEST := tests/test_export.py tests/test_use_of_deep.py tests/test_preprocessing.py tests/test_t2t.py

.PHONY: demo test test-fast test-lowest fuzz bench bench-quick docs lint format clean

demo: .venv/installed
	$(BIN)/idmm demo --out runs/demo
	@echo 'before you use idmm in this shell: . .venv/bin/activate'

test: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -rs

test-fast: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m 'not slow'

test-lowest: .venv-lowest/installed
	OMP_NUM_THREADS=1 timeout 600 .venv-lowest/bin/python -m pytest -n 2 --dist loadfile $(LOWEST)

fuzz: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py

bench: .venv/installed
	$(BIN)/python benchmarks/run_all.py

bench-quick: .venv/installed
	$(BIN)/python benchmarks/run_all.py --quick

docs: .venv/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build
	@echo 'open docs/_build/index.html'

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python .ci/lint_docs.py
	$(BIN)/python -m mypy
	$(BIN)/python .ci/lint_contributing.py

format: .venv/installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-lowest build docs/_build *.egg-info

.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("idmm needs Python 3.11 or newer, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip

.venv/installed: setup.cfg | .venv/bin/python
	$(SAY)
	$(BIN)/python -m pip install --quiet --editable .
	@$(BIN)/python -c '$(PATH_FILE)'
	touch $@

.venv/installed-test: setup.cfg | .venv/bin/python
	$(SAY)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@$(BIN)/python -c '$(PATH_FILE)'
	touch .venv/installed $@

# each line of setup.cfg with a lower bound is a constraint to exactly this version
.venv-lowest/installed: setup.cfg
	$(PYTHON) -m venv .venv-lowest
	sed -n 's/^ \+\([^ ]\+\) >= \([^ ]\+\)$$/\1==\2/p' setup.cfg | sort -u > .venv-lowest/constraints.txt
	$(SAY)
	.venv-lowest/bin/python -m pip install --quiet --constraint .venv-lowest/constraints.txt --editable '.[export]' \
		pytest pytest-xdist scikit-image
	touch $@

.venv/installed-docs: setup.cfg | .venv/bin/python
	$(SAY)
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@$(BIN)/python -c '$(PATH_FILE)'
	touch .venv/installed $@
