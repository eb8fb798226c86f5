# The commands of this repository; `make` lists them.

CONFIG ?= lunar
TIME ?=
WORKERS ?= $(NWORKERS)
SEED ?=
ARGS ?=
JOBS ?= 5
MINUTES ?= 15
FAILOVERS ?= 50
COUNT ?= 100000
PIP_ARGS ?=
EXTRAS ?= box2d,atari,mujoco,video,tensorboard,flower,web,sweep,onnx,minari,pettingzoo,docs,dev

VENV = .venv
STAMP = $(VENV)/.set-up
DDRL = $(VENV)/bin/ddrl
PRESETS = $(basename $(notdir $(wildcard configs/*.yaml)))
NEW_ENOUGH = import sys; sys.exit(sys.version_info < (3, 11))

.DEFAULT_GOAL = help
.PHONY: help setup lunar run $(PRESETS:%=run_%) test faults soak ha mutants fuzz check size docs clean clean-runs

help:
	@echo 'make lunar       train a LunarLander; sets everything up first'
	@echo 'make run_lunar   the same; run_cartpole, run_acrobot, run_mountaincar, ...: any preset of `ddrl presets`'
	@echo 'make run         train a preset or a file of your own: CONFIG=my.yaml'
	@echo '                 all take TIME=15 (minutes), WORKERS=3 (or NWORKERS=3), SEED=1'
	@echo 'make test        set up and run the tests; ARGS="-k codec -x" goes to pytest'
	@echo 'make faults      only the tests that kill, freeze, cut and fill up, held to their exact time bounds'
	@echo 'make fuzz        bad settings, files, entries, messages and words; COUNT=100000, SEED=1'
	@echo 'make soak        random faults on a live fleet; MINUTES=15, SEED=1'
	@echo 'make ha          lose the primary of a live fleet again and again; FAILOVERS=50'
	@echo 'make mutants     does a test catch each planted bug of tests/mutants? ARGS="append trim" tries only these'
	@echo 'make check       format, lint, types and tests: what a change must pass'
	@echo 'make size        lines of code by folder; make docs: the site, strictly; writes the generated pages'
	@echo 'make setup       only set up $(VENV); EXTRAS=box2d,mujoco adds these to it,'
	@echo '                 PYTHON=python3.12 picks the interpreter, PIP_ARGS="..." goes to pip'
	@echo 'make clean       remove $(VENV), caches and builds (never runs/)'
	@echo 'make clean-runs  remove runs/, the results of all runs'

setup: $(STAMP)

ifneq ($(origin EXTRAS),file)  # named by the user: the last set-up may have had others
$(STAMP): FORCE
FORCE:
endif

# The stamp is written last: an interrupted set-up leaves none, and the next one starts afresh.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	  if "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "make: $(or $(PYTHON),python3) is missing or older than Python 3.11: install one, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "make: $$found cannot make virtual environments: install its venv package (Debian, Ubuntu: python3-venv), or name another: make PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	if [ ! -e $@ ]; then echo "Setting up $(VENV) with $$found"; "$$found" -m venv --clear $(VENV); fi; \
	rm -f $@; \
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) \
	  -c constraints.txt -e '.[$(EXTRAS)]'; \
	$(VENV)/bin/python -m compileall -q ddrl; \
	touch $@

lunar: run_lunar

run $(PRESETS:%=run_%): $(STAMP)
	@$(DDRL) submit $(if $(filter run,$@),$(CONFIG),$(@:run_%=%)) \
	  $(if $(TIME),--time $(if $(filter %s %m %h,$(TIME)),$(TIME),$(TIME)m)) \
	  $(if $(WORKERS),--workers $(WORKERS)) $(if $(SEED),--seed $(SEED)) $(ARGS)

# Tests mostly wait, so more of them than cores run side by side; JOBS=0 runs them one after another.
test: $(STAMP)
	@$(VENV)/bin/python -m pytest -m "not long" --numprocesses $(JOBS) --dist worksteal $(ARGS)

faults: $(STAMP)
	@DDRL_FAULT_BOUNDS=exact $(VENV)/bin/python -m pytest -m faults --numprocesses 2 --dist worksteal $(ARGS)

soak: $(STAMP)
	@PYTHONPATH=tests $(VENV)/bin/python benchmarks/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

ha: $(STAMP)
	@PYTHONPATH=tests $(VENV)/bin/python benchmarks/failover.py --failovers $(FAILOVERS) $(ARGS)

mutants: $(STAMP)
	@$(VENV)/bin/python benchmarks/mutants.py $(ARGS)

fuzz: $(STAMP)
	@$(VENV)/bin/python tests/fuzz.py $(COUNT) $(if $(SEED),--seed $(SEED)) $(ARGS)

check: $(STAMP)
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict
	$(VENV)/bin/python -m pytest --numprocesses $(JOBS) --dist worksteal $(ARGS)

size:
	@python3 benchmarks/size.py

docs: $(STAMP)
	@$(VENV)/bin/python docs/generate.py
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet --strict

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find ddrl workers tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-runs:
	rm -rf runs
