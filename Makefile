# Two commands matter: `make bench` and `make test`.  Both create what they need first, and reuse it while it is current.

PYTHON ?= $(shell for python in python3.11 python3; do $$python -c "" 2>/dev/null && echo $$python && break; done)
MAIN := .venv/main/bin/python
DEV := .venv/dev/bin
PORT ?= 6006
LOGDIR ?= log
WINDOW ?= 1
ARGS ?=
ENVIRONMENTS ?=
NAME ?=
# One more than two cores can run: most tests wait for a process now and then.
TEST_PROCESSES ?= 3

# What a user or a stranger's folder is called is no text of make or of the shell: recipes read it from the environment.
$(foreach name,LOGDIR NAME,$(eval override $(name) := $$(value $(name))))
export ENVIRONMENTS LOGDIR NAME PORT WINDOW
# Python would not find common/ beside the scripts.
export PYTHONSAFEPATH :=
# The tests start some thousand processes: what these import is compiled once.
test coverage: export PYTHONDONTWRITEBYTECODE :=

# A flag that is given as a variable would be ignored, and all be measured.
KNOWN := PYTHON PORT LOGDIR WINDOW ARGS ENVIRONMENTS NAME TEST_PROCESSES
unknown := $(filter-out $(KNOWN) MAKE%,$(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name))))
ifneq ($(unknown),)
$(error no variable is named $(unknown): flags go into ARGS, as in make bench ARGS="--preset quick")
endif

.DEFAULT_GOAL := help
.PHONY: help setup try bench profile inference pipelines flops test products mutants faults sanitize wheels lint coverage docs summary conformance vectors report compare tensorboard trace-viewer lock results clean

help:
	@echo 'make setup        create or refresh the environments in .venv and the compiled losses in ~/.cache/rnnt-bench'
	@echo '                  ENVIRONMENTS=nemo: the optional one too, for the rows of NeMo;'
	@echo '                  ray: for --executor ray, docs/clusters.md'
	@echo 'make try          a quick answer within some five minutes, with the main environment alone; ARGS as below'
	@echo 'make bench        compare the losses, on a CPU in ten minutes; ARGS="--rounds 10" is the long run;'
	@echo '                  ARGS="--preset quick --only torchaudio" is passed to benchmark_all.py'
	@echo 'make test         run the tests; ARGS="-k summary" is passed to pytest;'
	@echo '                  ARGS=--thorough repeats what is simulated or garbled as often as a night allows'
	@echo 'make mutants      put one-line faults into the readers of records, and say which no test notices; ARGS="--only machines"'
	@echo 'make products     judge right and wrong losses under each library that can multiply matrices here; ARGS="--only intel"'
	@echo 'make faults       break things by seed for eight minutes, see docs/reliability.md; ARGS="--only logs"'
	@echo 'make sanitize     random problems through the C++ code under sanitizers; ARGS="--count 20"; needs GCC'
	@echo 'make wheels       packages of fused_transducer in dist/'
	@echo 'make lint         ruff, mypy, the import rule of common/, and how much there is to read'
	@echo 'make coverage     run the tests and say which lines of common/ they ran; ARGS as in make test'
	@echo 'make docs         the pages of docs/ and of the code as a site in site/'
	@echo 'make profile      where a training step goes; ARGS="--preset quick"'
	@echo 'make inference    is a speech model faster than real time? ARGS="examples/profile.yaml --preset quick"'
	@echo 'make pipelines    what an utterance costs in stages; ARGS="--preset quick"'
	@echo 'make flops ARGS="torchaudio.models:hubert_base --preset quick"  operations of a model'
	@echo 'make summary      the table of what is in log/; ARGS="--format json" is passed to summarize.py'
	@echo 'make conformance  which implementation is right in which corner, e.g. ARGS="--only k2"'
	@echo 'make vectors      inputs, losses and gradients that a loss in any language can be checked with; see data/vectors/README.md'
	@echo 'make compare      two measurements, ARGS="log results/2026-11-25-amd-epyc-2-cores"'
	@echo 'make report       the page of what is in log/; ARGS="..." is passed to it'
	@echo 'make tensorboard  TensorBoard on http://127.0.0.1:$(PORT); PORT=... and LOGDIR=... choose others'
	@echo 'make trace-viewer NAME=k2  one trace in Perfetto, offline; WINDOW=2, PORT=... and LOGDIR=... choose others'
	@echo 'make results      measure what docs/results.md shows, quietly; ARGS="largest v4096"; docs/_results.py has more'
	@echo 'make lock         resolve common/setup/requirements/*.in into the hash-locked *.txt anew'
	@echo 'make clean        remove what make made: environments, .build, caches and site; log/, ~/.cache/rnnt-bench'
	@echo '                  and what else lies in .venv stay'

setup: needs-python
	@$(PYTHON) -m rnnt_bench.setup.environments build $$ENVIRONMENTS

# The main environment alone, and no round begins after five minutes.
try: needs-python
	@$(PYTHON) -m rnnt_bench.setup.environments build main
	@$(MAIN) benchmark_all.py --budget 5m $(ARGS)

bench: setup
	@$(MAIN) benchmark_all.py $(ARGS)

profile: setup
	@$(MAIN) rnnt-bench profile $(ARGS)

inference: setup
	@$(MAIN) rnnt-bench inference $(ARGS)

pipelines: setup
	@$(MAIN) rnnt-bench pipelines $(ARGS)

flops: setup
	@$(MAIN) rnnt-bench flops $(ARGS)

# The environment_contract tests run in k2's environment too, whose torch is the oldest one supported, and in NeMo's,
# for what is measured there; exit code 5 is pytest's for ARGS that choose none of them.
test: setup
	@$(MAIN) -m pytest -n $(TEST_PROCESSES) --dist worksteal $(ARGS)
	@for name in k2 nemo; do \
	if python="$$($(PYTHON) -m rnnt_bench.setup.environments path $$name)"; then \
	"$$python" -m pytest -m environment_contract $(ARGS) || $(if $(ARGS),test $$? -eq 5 ||) exit 1; \
	else echo "the environment_contract tests did not run in the $$name environment"; fi; done

products: setup
	@PYTHONPATH=tests:. $(MAIN) -m products $(ARGS)

mutants: setup
	@$(MAIN) tests/mutants.py $(ARGS)

faults: setup
	@PYTHONPATH=tests $(MAIN) -m faults $(ARGS)

sanitize: setup
	@PYTHONPATH=tests:. $(MAIN) -m fused_helpers $(ARGS)

wheels: setup
	@PYTHON=$(MAIN) fused_transducer/wheels.sh

# What only developers need: made on demand.
.PHONY: dev
dev: setup
	@$(PYTHON) -m rnnt_bench.setup.environments setup dev
	@$(PYTHON) -m rnnt_bench.setup.environments path dev >/dev/null

lint: dev
	@$(DEV)/ruff check
	@$(DEV)/ruff format --check
	@$(DEV)/mypy --python-executable $(MAIN)
	@$(DEV)/lint-imports --no-cache --no-logo
	@$(DEV)/shellcheck .ci/run .ci/pythons examples/gpu_node.sh fused_transducer/wheels.sh
	@$(MAIN) tests/size.py

coverage: setup
	@$(MAIN) -m coverage erase
	@ended=0; $(MAIN) -m coverage run -m pytest -q -n $(TEST_PROCESSES) --dist worksteal $(ARGS) || ended=$$?; \
	$(MAIN) -m coverage combine -q; \
	$(MAIN) -m coverage report --skip-covered --sort=cover && exit $$ended

docs: dev
	@NO_MKDOCS_2_WARNING=1 $(DEV)/mkdocs build --config-file .ci/mkdocs.yml --strict --quiet && echo site/index.html

summary: setup
	@$(MAIN) summarize.py $(ARGS)

conformance: setup
	@$(MAIN) rnnt-bench check $(ARGS)

vectors: setup
	@$(MAIN) data/vectors/make.py

compare: setup
	@$(MAIN) rnnt-bench compare $(ARGS)

report: setup
	@$(MAIN) rnnt-bench report $(ARGS)

tensorboard: needs-python
	@$(PYTHON) -m rnnt_bench.setup.environments setup viewer
	@viewer="$$($(PYTHON) -m rnnt_bench.setup.environments path viewer)" && \
	"$$viewer" rnnt-bench tensorboard "$$LOGDIR" && \
	exec "$$viewer" -m tensorboard.main --logdir "$$LOGDIR" --host 127.0.0.1 --port "$$PORT"

trace-viewer: PORT = 9001
trace-viewer: needs-python
	@$(PYTHON) -m rnnt_bench.setup.environments setup viewer
	@viewer="$$($(PYTHON) -m rnnt_bench.setup.environments path viewer)" && \
	exec "$$viewer" rnnt-bench trace-viewer "$$NAME" --log-dir "$$LOGDIR" --window "$$WINDOW" --port "$$PORT"

results: setup
	@$(MAIN) docs/_results.py $(ARGS)

lock: needs-python
	@$(PYTHON) -m rnnt_bench.setup.environments lock $$ENVIRONMENTS

clean: needs-python
	@$(PYTHON) -m rnnt_bench.setup.environments clean
	@rm -rf .build .pytest_cache .ruff_cache .mypy_cache .coverage .coverage.* site

.PHONY: needs-python
needs-python:
	@$(if $(PYTHON),:,$(error no Python on PATH: install Python 3.10 to 3.13, or name one with PYTHON=...))
