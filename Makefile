# Two commands matter: `make bench` and `make test`.  Both create what they need first, and reuse it while it is current.

PYTHON ?= $(shell for python in python3.11 python3; do $$python -c "" 2>/dev/null && echo $$python && break; done)
MAIN := .venv/main/bin/python
PORT ?= 6006
LOGDIR ?= log
WINDOW ?= 1
ARGS ?=
ENVIRONMENTS ?=

.DEFAULT_GOAL := help
.PHONY: help setup bench test summary conformance report tensorboard trace-viewer lock clean

help:
	@echo 'make setup        create or refresh the environments in .venv and what is compiled into .build'
	@echo '                  ENVIRONMENTS=nemo: the optional one too, for the rows of NeMo'
	@echo 'make bench        compare the losses; ARGS="--preset quick --only torchaudio" is passed to benchmark_all.py'
	@echo 'make test         run the tests; ARGS="-k summary" is passed to pytest'
	@echo 'make summary      the table of what is in log/; ARGS="--format json" is passed to summarize.py'
	@echo 'make conformance  which implementation is right in which corner; ARGS="--only k2" is passed to conformance.py'
	@echo 'make report       the page of what is in log/; ARGS="--png pictures" is passed to report.py'
	@echo 'make tensorboard  TensorBoard on http://127.0.0.1:$(PORT); PORT=... and LOGDIR=... choose others'
	@echo 'make trace-viewer NAME=k2  one trace in Perfetto, offline; WINDOW=2, PORT=... and LOGDIR=... choose others'
	@echo 'make lock         resolve requirements/*.in into the hash-locked *.txt anew (needs uv)'
	@echo 'make clean        remove .venv, .build and caches; log/ stays'

setup: needs-python
	@$(PYTHON) -m common.setup.environments setup $(if $(ENVIRONMENTS),main $(ENVIRONMENTS))
	@$(MAIN) -m common.setup.extensions build || echo 'set-up goes on without it' >&2

bench: setup
	@$(MAIN) benchmark_all.py $(ARGS)

# The environment_contract tests run in k2's environment too, whose torch is the oldest one supported, and in NeMo's;
# exit code 5 is pytest's for ARGS that choose none of them.
test: setup
	@$(MAIN) -m pytest $(ARGS)
	@for name in k2 nemo; do \
	if python="$$($(PYTHON) -m common.setup.environments path $$name)"; then \
	"$$python" -m pytest -m environment_contract $(ARGS) || $(if $(ARGS),test $$? -eq 5 ||) exit 1; \
	else echo "the environment_contract tests did not run in the $$name environment"; fi; done

summary: setup
	@$(MAIN) summarize.py $(ARGS)

conformance: setup
	@$(MAIN) conformance.py $(ARGS)

report: setup
	@$(MAIN) report.py $(ARGS)

# The report's pictures come from the main environment, where that is there.
tensorboard: needs-python
	@$(PYTHON) -m common.setup.environments setup viewer
	@viewer="$$($(PYTHON) -m common.setup.environments path viewer)" && \
	"$$viewer" -m common.results.tensorboard_scalars "$(LOGDIR)" && \
	exec "$$viewer" -m tensorboard.main --logdir "$(LOGDIR)" --host 127.0.0.1 --port $(PORT)

trace-viewer: PORT = 9001
trace-viewer: needs-python
	@$(PYTHON) -m common.setup.environments setup viewer
	@viewer="$$($(PYTHON) -m common.setup.environments path viewer)" && \
	exec "$$viewer" -m common.results.trace_viewer "$(NAME)" --log-dir "$(LOGDIR)" --window $(WINDOW) --port $(PORT)

lock: needs-python
	@$(PYTHON) requirements/lock.py

clean: needs-python
	@$(PYTHON) -m common.setup.environments clean
	@rm -rf .build .pytest_cache .ruff_cache

.PHONY: needs-python
needs-python:
	@$(if $(PYTHON),:,$(error no Python on PATH: install Python 3.11, or name one with PYTHON=...))
