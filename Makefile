# Everything here works from a bare python3 >= 3.11: the environment is made on the first call and stamped by the locks'
# hash, so that later calls are quick and need no network. Another interpreter: `make PYTHON=python3.12 ...`.
PYTHON ?= python3
BIN := .venv/bin
# Tests and Spark start Python processes by the hundred: without bytecode each would compile everything again.
unexport PYTHONDONTWRITEBYTECODE
# Test modules run in so many processes, each with services and a Spark of its own; most of them wait for something half of the time.
WORKERS ?= 2
SIDE_BY_SIDE = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder
# `required` makes a missing service a failure instead of a skipped test.
export HEADWATER_SERVICES ?= optional

.DEFAULT_GOAL := help
.PHONY: help demo test check lint bench lock floors clean environment archive preflight

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: environment ## make the environment and run the best example so far
	@$(BIN)/headwater demo

test: environment ## everything: style, types, layers, and all tests with the services they need
	@$(MAKE) --no-print-directory --jobs 2 lint archive
	$(BIN)/pytest -m "not bench" $(SIDE_BY_SIDE) --durations 40

check: WORKERS = 4
check: environment lint ## what to run before a commit: style, types, layers and the fast tests
	$(BIN)/pytest -m "not slow and not service and not bench" --timeout 60 $(SIDE_BY_SIDE)

lint: environment
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: environment ## the long test tier (bench/storms.py) and every figure: writes bench/results/*.json
	@for script in $$(grep -l '^if __name__ == "__main__"' bench/*.py bench/*/__main__.py); do \
		name=$${script%.py}; name=$$(echo $${name%/__main__} | tr / .); echo "$$name"; $(BIN)/python -m $$name || exit 1; \
	done

environment: preflight ## .venv, made from the locks
	@$(PYTHON) tools/environment.py

test bench: NEEDS = --services $(if $(filter required,$(HEADWATER_SERVICES)),--strict)
bench: NEEDS += --bench
archive: environment
	@$(BIN)/python tools/archive.py

preflight:
	@$(PYTHON) tools/preflight.py $(NEEDS)

# uv does not read pip's configuration, so it is handed the index; the locks themselves name none.
# `make lock UPGRADE=` keeps the versions that fit.
UPGRADE ?= --upgrade
lock: environment ## resolve pyproject.toml anew: versions and hashes for every platform, no index addresses
	@index="$${PIP_INDEX_URL:-$$($(BIN)/pip config get global.index-url 2>/dev/null)}"; \
	if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
	compile="$(BIN)/uv pip compile --quiet --universal $(UPGRADE) --generate-hashes --no-emit-index-url --no-emit-find-links"; \
	$$compile pyproject.toml --extra all --group test --group lint --group types --group bench \
		--custom-compile-command "make lock" --output-file requirements.lock && \
	$$compile --group build --constraints requirements.lock \
		--custom-compile-command "make lock" --output-file requirements-build.lock
	@$(PYTHON) tools/environment.py

floors: environment ## install the lowest versions that pyproject.toml allows, and test them
	@$(BIN)/python tools/floors.py

clean: ## remove what was made, the environment too
	rm -rf .venv .venv.lock .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find src tests bench tools examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
