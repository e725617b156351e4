# Everything a contributor runs. From a bare clone, `make demo` and `make test` need nothing but Python 3.10 and make.
#
# PYTHON=python3.12 make …        another interpreter for .venv
# ARGS="-k window -x" make test   arguments for pytest
# KVWATCH_REQUIRE_PARTS=1         a missing real component (Prometheus, vLLM, …) is a failure, as in CI

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export KVWATCH_VLLM_PYTHON ?= $(shell tools/install_vllm.sh --where)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.DEFAULT_GOAL := all
.DELETE_ON_ERROR:
.PHONY: all help demo test bench lint lint-python lint-text lint-generated lint-rules lint-deploy format generate \
        dashboards-shots golden oracle prove parts ci clean

all: lint test  ## Lint and test: what a change must pass (the default)

help:  ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- run it ---------------------------------------------------------------------------------------------------------

demo: $(VENV)/.runtime  ## Everything kvwatch does, on a recorded engine, on this machine
	@$(BIN)/kvwatch demo $(ARGS)

test: $(VENV)/.dev  ## All tests; those of real components are skipped where the component is missing
	$(BIN)/pytest $(ARGS)

bench: $(VENV)/.dev  ## What the hot paths cost
	$(BIN)/pytest benchmarks $(ARGS)

# --- keep it right --------------------------------------------------------------------------------------------------

lint: lint-python lint-text lint-generated lint-rules lint-deploy  ## Every static check

lint-python: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

lint-text: $(VENV)/.dev
	$(BIN)/codespell
	$(BIN)/yamllint --strict .

has_grafana_sdk = $(BIN)/python -c 'import grafana_foundation_sdk' 2>/dev/null

lint-generated: $(VENV)/.dev
	$(BIN)/kvwatch generate rules --check
	$(BIN)/kvwatch generate reference --check
	$(BIN)/python tools/readme_outputs.py --check
	@if $(has_grafana_sdk); then set -x; $(BIN)/kvwatch generate dashboards --check; \
	else echo 'not checked: dashboards; the SDK of Grafana needs Python 3.11'; fi

# $(call with,PROGRAM,COMMAND): COMMAND if PROGRAM is installed
with = @if command -v $(1) >/dev/null; then echo '$(2)'; $(2); \
       elif [ -n "$$KVWATCH_REQUIRE_PARTS" ]; then echo '$(1) is missing; make parts installs it' >&2; exit 1; \
       else echo 'not checked: $(1) is missing; make parts installs it'; fi

lint-rules:
	$(call with,promtool,promtool check rules alerts/*.rules.yaml)
	$(call with,promtool,promtool check config deploy/prometheus/scrape.yaml)
	$(call with,amtool,amtool check-config alerts/alertmanager.example.yaml)

lint-deploy: $(VENV)/.dev
	$(BIN)/hadolint deploy/Dockerfile
	$(BIN)/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml

format: $(VENV)/.dev  ## Let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

generate: $(VENV)/.dev  ## Write rules, reference pages, dashboards and the README's outputs anew
	$(BIN)/kvwatch generate rules
	$(BIN)/kvwatch generate reference
	$(BIN)/kvwatch generate dashboards
	$(BIN)/python tools/readme_outputs.py

dashboards-shots: $(VENV)/.dev  ## Pictures of the dashboards for docs/images (Prometheus, npm and Chromium)
	$(BIN)/python tools/render_dashboards/render.py $(ARGS)

golden: $(VENV)/.dev  ## Write the expected renderings anew; read the diff before committing it
	KVWATCH_UPDATE_GOLDEN=1 $(BIN)/pytest -q -m 'not real' $(ARGS)

oracle: $(VENV)/.dev  ## Compare budget and simulator with vLLM's own code; for a new vLLM release
	tools/install_vllm.sh
	$(KVWATCH_VLLM_PYTHON) tools/kv_oracle.py $(ARGS)
	KVWATCH_REQUIRE_PARTS=1 $(BIN)/pytest tests/test_simulator_oracle.py

prove: $(VENV)/.dev  ## Thrash a real vLLM, do what kvwatch says, measure: docs/proof.md
	tools/install_vllm.sh
	$(BIN)/python tools/prove.py $(ARGS)

# --- the machine ----------------------------------------------------------------------------------------------------

parts:  ## Install the real components for the tests (Debian, as root): Prometheus, Alertmanager, vLLM on the CPU, …
	tools/install_parts.sh

ci: parts  ## What CI runs: every check, no test skipped for a missing component
	KVWATCH_REQUIRE_PARTS=1 $(MAKE) --no-print-directory lint
	KVWATCH_REQUIRE_PARTS=1 $(MAKE) --no-print-directory bench ARGS="-m 'not slow'"
	KVWATCH_REQUIRE_PARTS=1 $(MAKE) --no-print-directory test

clean:  ## Remove what make and the tools left here; not what `make parts` installed
	rm -rf $(VENV) build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache

# --- the virtual environment: a stamp per set of packages -----------------------------------------------------------

define need_python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
  echo '$(PYTHON) is missing or older than Python 3.10. Name another one: make PYTHON=python3.12' >&2; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' || { \
  echo '$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv' >&2; exit 1; }
endef

# A copied or half-made environment is made anew; the one that is there is kept.
$(BIN)/pip:
	$(need_python)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)

$(VENV)/.runtime: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.runtime
