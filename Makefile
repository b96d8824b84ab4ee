# Every target makes a virtual environment first; nothing else needs to be set up.
#   make demo                  train and evaluate FashionMNIST, native PyTorch and poptorch side by side
#   make demo-processes        the same training in two processes that work together
#   make test                  the tests: the first case of each
#   make test-full             lint, types, make test, then all further cases, and larger tests
#   make test-capabilities     the tests of numbers, with each set of instructions of this processor
#   make test-long             what takes long: sweeps, hard use, kills, jobs, sites; before a release
#   make test-torch VERSION=2.14.1   all tests on another release of torch, or on its nightly build
#   make examples              eleven programs, most of them on real data, compared with eager PyTorch, a few steps each
#   make docs                  the site in build/site, and the tests of its pages
#   make check                 lint, types and a quick part of the tests, in half a minute
#   make PYTHON=python3.12 ... choose the interpreter (3.11 or newer)
#   make VENV=build/venv ...   choose the environment; a torch that .venv already has is kept
#   make test JOBS=8           run the tests in that many processes

PYTHON ?= python3
JOBS ?= 2
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints.txt)
FASHION := /usr/share/datasets/fashion-mnist

# The tests start many processes. Without byte code on disk, each of them compiles all modules again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: demo demo-processes examples test test-full test-capabilities test-long test-torch check lint docs site bench bench-quick soak dataset clean
.DEFAULT_GOAL := test

# torch goes first and by its exact version, so that nothing later can pull another build of it. One
# that make has not installed, as after the README's commands, stays.
HELD = $(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("this needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "Making $(VENV) with $$($(PYTHON) --version) (once; torch is a large download)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@held=torch==$$($(HELD)); chosen=$(TORCH); \
	case "$$held" in \
		torch==|$(TORCH)|$(TORCH)+*) touch $(VENV)/.has-tested-torch;; \
		*) if [ ! -e $(VENV)/.has-tested-torch ]; then chosen=$$held; \
			echo "Keeping $$held, which $(VENV) has. With $(TORCH), which is tested: make VENV=build/venv"; fi;; \
	esac; \
	sed "s/^torch==.*/$$chosen/" constraints.txt >$(VENV)/constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt torch
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -q src  # as pip does for what it copies
	@touch $@

demo: $(STAMP) dataset
	$(BIN)/python examples/fashion_mnist/demo.py

# Real data, beside eager PyTorch. Without --small they train longer, with --plot FILE they draw.
EXAMPLES := series/train single_cell/train text/train images/train pipeline/train bert/train \
	sentences/train reinforcement/train graphs/nodes graphs/molecules graphs/temporal
examples: $(STAMP)
	for name in $(EXAMPLES); do $(BIN)/python examples/$$name.py --small || exit 1; done

demo-processes: $(STAMP) dataset
	$(BIN)/poprun --num-instances 2 --oversubscribe --only-output-from-instance 0 $(BIN)/python examples/fashion_mnist/processes.py

test: $(STAMP)
	$(BIN)/python -m pytest --cases short -n $(JOBS) --dist worksteal

# The types and the site are checked at the same time: each takes one core.
test-full: $(STAMP)
	$(MAKE) --no-print-directory -j2 lint site
	$(MAKE) --no-print-directory test
	$(BIN)/python -m pytest --cases rest -n $(JOBS) --dist worksteal

# What ATen and Inductor choose at run time; the processor's best one is what make test has.
CAPABILITIES = $(shell $(BIN)/python -c 'import torch; sets = ["default", "avx2", "avx512"]; \
	best = torch.backends.cpu.get_cpu_capability().lower(); print(*sets[:sets.index(best) + 1])')
test-capabilities: $(STAMP)
	for set in $(CAPABILITIES); do \
		echo "ATEN_CPU_CAPABILITY=$$set"; \
		ATEN_CPU_CAPABILITY=$$set $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "numeric and not long" || exit 1; \
	done

# What is marked long, with nothing that an earlier run has compiled: before a release.
test-long: site
	rm -rf build/compiled
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m long

# Another release of torch, in an environment of its own outside of this folder. What pyproject.toml
# allows is not asked: this is how a release gets there. "nightly" is torch's newest build.
TORCH_ENV ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/poptorch-torch-$(VERSION)
OTHER := $(TORCH_ENV)/bin/python -m pip install --quiet --disable-pip-version-check
NIGHTLY := --upgrade --pre torch --index-url https://download.pytorch.org/whl/nightly/cpu
test-torch:
	@test -n "$(VERSION)" || { echo "Say which: make test-torch VERSION=2.14.1"; exit 2; }
	@test -x $(TORCH_ENV)/bin/python || $(PYTHON) -m venv $(TORCH_ENV)
	@grep -v '^torch==' constraints.txt >$(TORCH_ENV)/constraints.txt
	@$(OTHER) --no-deps -r $(TORCH_ENV)/constraints.txt
	@$(OTHER) -c $(TORCH_ENV)/constraints.txt $(if $(filter nightly,$(VERSION)),$(NIGHTLY),torch==$(VERSION))
	@$(OTHER) --no-deps -e .
	NO_MKDOCS_2_WARNING=1 $(TORCH_ENV)/bin/mkdocs build --strict --quiet
	$(TORCH_ENV)/bin/python -m pytest -n $(JOBS) --dist worksteal

# Of each test function the first case, and none that is marked slow.
check: lint
	$(BIN)/python -m pytest --cases quick -n $(JOBS) --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell

docs: site
	$(BIN)/python -m pytest -m "" tests/test_docs.py tests/test_site_browser.py

# Strict: a broken link, a page that is not in the menu or an entry of nothing ends it.
site: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(STAMP)
	mkdir -p benchmarks/results
	$(BIN)/python benchmarks/speed.py --out benchmarks/results/$$(date +%F).json
	$(BIN)/python benchmarks/program_kinds.py --out benchmarks/results/$$(date +%F).md
	$(BIN)/python benchmarks/inference.py
	$(BIN)/python benchmarks/first_minute.py
	$(BIN)/python benchmarks/compile_cost.py
	$(BIN)/python benchmarks/compile_speedups.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/interference.py
	$(BIN)/python benchmarks/call_overhead.py
	$(BIN)/python benchmarks/fused_update.py
	$(BIN)/python benchmarks/data.py
	$(BIN)/python benchmarks/graphs.py
	$(BIN)/python benchmarks/graph_order.py
	$(BIN)/python benchmarks/trainer.py
	$(BIN)/python benchmarks/zoo.py
	$(BIN)/python benchmarks/processes.py
	$(BIN)/python benchmarks/waiting.py
	if [ "$$(id -u)" = 0 ]; then $(BIN)/python benchmarks/link.py; else echo "benchmarks/link.py needs root"; fi

bench-quick: $(STAMP)
	$(BIN)/python benchmarks/speed.py --quick
	$(BIN)/python benchmarks/data.py --quick

# Makes, uses and drops a thousand loaders, runs ten thousand calls, makes hundreds of executors,
# and fails if anything of them is left.
soak: $(STAMP)
	$(BIN)/python benchmarks/executor_soak.py
	$(BIN)/python benchmarks/data.py --cycles 1000

# The full FashionMNIST set is a Debian package. Where it can be had it is installed; where it
# cannot, the example says which data it uses instead.
dataset:
	@if [ ! -d $(FASHION) ] && [ -z "$$FASHION_MNIST_DIR" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing the Debian package dataset-fashion-mnist (31 MB)"; \
		timeout 180 sh -c 'apt-get install -y -qq dataset-fashion-mnist || \
			{ apt-get update -qq && apt-get install -y -qq dataset-fashion-mnist; }' >/dev/null 2>&1 || \
			echo "It could not be installed; going on without it"; \
	fi

# A test draws report.html in Chromium, a Debian package, and is skipped without it.
.PHONY: browser
browser:
	@if ! command -v chromium >/dev/null && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing the Debian package chromium"; \
		timeout 300 sh -c 'apt-get install -y -qq --no-install-recommends chromium || \
			{ apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; }' \
			>/dev/null 2>&1 || echo "It could not be installed; its test is skipped"; \
	fi

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache
