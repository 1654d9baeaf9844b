# The verbs of this project. `make demo` and `make test` need nothing but Python 3.11 to 3.13 and make.

VENV := .venv
BIN := $(VENV)/bin
# The build of MLX: Metal comes plain on macOS; on Linux `make … MLX=cuda` takes the CUDA one.
MLX := $(if $(filter Darwin,$(shell uname -s)),metal,cpu)
WITH_MLX = $(if $(filter metal,$(MLX)),,$(MLX))

.PHONY: help demo cluster-demo serve test test-all test-matrix test-laws test-soak test-clients check format docs bench bench-device mutants matrix retrain release retrain-pictures clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.can-run ## a small model that remembers, forty turns of a chat, with reuse and without
	$(BIN)/reprise demo

cluster-demo: $(VENV)/.can-cluster ## two replicas behind a gateway, one cache directory, and one replica killed in the middle
	$(BIN)/python -m bench.cluster_demo

serve: $(VENV)/.can-run ## serve a model: make serve MODEL=path-or-hub-id
	@test -n "$(MODEL)" || { echo "Say which model: make serve MODEL=path-or-hub-id" >&2; exit 2; }
	$(BIN)/reprise serve "$(MODEL)"

# Three workers for two cores, since some tests wait. One that has nothing left takes tests from another's end: few files
# have half of all tests. Bytecode is kept whatever the shell says: each of twenty servers that the tests start would compile
# all of the source for itself.
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist worksteal

# On the CPU MLX compiles C++ for each function that mlx-lm fuses, a second each where none was compiled before.
test: $(VENV)/.can-test ## every layer kind and every API, in three minutes and without downloads
	MLX_DISABLE_COMPILE=1 $(PYTEST)

LATER := soak or matrix or agents or browser
test-all: test-matrix test-laws test-soak test-clients ## the rest, one after the other: what `make test` leaves out

test-matrix: $(VENV)/.can-test ## every model in every mode, every architecture of mlx-lm, every recorded client, server processes
	$(PYTEST) -m "matrix and not (soak or agents or browser)"

test-laws: $(VENV)/.can-test ## the laws with four times as many random examples
	$(PYTEST) -m "hypothesis and not ($(LATER))" --hypothesis-profile=thorough

test-soak: $(VENV)/.can-test ## long random runs; SOAK=10 makes them ten times as long
	$(PYTEST) -m "soak and not (agents or browser)"

test-clients: $(VENV)/.can-test ## real agents from npm in pinned versions, the page in a browser, the wheel installed
	$(PYTEST) -m "agents or browser"

check: $(VENV)/.can-test ## style, types, the direction of imports, house rules, and that each planted bug has a place
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/python -m tools.mutants --list > /dev/null
	$(BIN)/python -m tools.links
	$(BIN)/python -m pytest -m matrix tests/test_house.py

format: $(VENV)/.can-test ## let ruff write the format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.can-test ## the documentation with a search, in site/
	$(BIN)/python -m mkdocs build --quiet --strict

bench: $(VENV)/.can-test ## replay workloads, with exact counts and ratios of times
	$(BIN)/python -m bench

bench-device: $(VENV)/.can-test ## where a GPU or Apple silicon is at hand: speeds against mlx-lm on real dimensions, in 8 minutes
	$(BIN)/python -m bench.device

mutants: $(VENV)/.can-test ## plant bugs and see each one turn a test red
	$(BIN)/python -m tools.mutants

matrix: $(VENV)/.can-test ## every architecture of mlx-lm, warm against cold, into COMPATIBILITY.md
	$(BIN)/python -m tools.matrix

# A model that was trained for a few minutes (STEPS=150) has to get 60 % right, one of all the steps 95.
TRAIN := $(VENV)/train
STEPS := 1300
RIGHT := $(if $(filter 1300,$(STEPS)),95,60)
retrain: $(VENV)/.can-run $(TRAIN)/.made ## train the demo's model anew, evaluate it, and train its head: make retrain STEPS=150
	PYTHONPATH=src:. $(TRAIN)/bin/python -m tools.train_demo.train $(TRAIN)/run --steps $(STEPS)
	PYTHONPATH=src:. $(TRAIN)/bin/python -m tools.train_demo.export $(TRAIN)/run $(TRAIN)/model
	$(BIN)/python -m tools.train_demo.evaluate $(TRAIN)/model --chats 5 --at-least $(RIGHT)
	PYTHONPATH=src:. $(TRAIN)/bin/python -m tools.train_demo.train_head $(TRAIN)/head --model $(TRAIN)/model --steps $(STEPS)

retrain-pictures: $(VENV)/.can-test ## train the demo's model that sees anew, and evaluate it
	$(BIN)/python -m tools.train_demo.train_pictures $(TRAIN)/seeing

$(TRAIN)/.made: $(VENV)/.can-run
	$(BIN)/python -m venv $(TRAIN)
	$(TRAIN)/bin/python -m pip install -q "torch==2.13.0" numpy tokenizers safetensors
	@touch $@

release: $(VENV)/.can-release ## wheel, sdist and Homebrew formula, checked, in dist/: make release URL=where-the-sdist-will-be PUBLISH=yes
	$(BIN)/python -m tools.release $(if $(URL),--url "$(URL)") $(if $(PUBLISH),--publish)

clean: ## remove what `make` made
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis .import_linter_cache site dist

# The marks say which extras are installed, and are older than pyproject.toml when they have to be installed again.
$(VENV)/.made: tools/venv.sh
	tools/venv.sh make $(VENV)
	@touch $@

$(VENV)/.can-run: $(VENV)/.made pyproject.toml
	tools/venv.sh install $(VENV) "$(WITH_MLX)" plot
	@touch $@

$(VENV)/.can-cluster: $(VENV)/.can-run pyproject.toml
	tools/venv.sh install $(VENV) "$(WITH_MLX)" cluster
	@touch $@

$(VENV)/.can-release: $(VENV)/.can-run pyproject.toml
	tools/venv.sh install $(VENV) "$(WITH_MLX)" release
	@touch $@

$(VENV)/.can-test: $(VENV)/.can-run pyproject.toml
	tools/venv.sh install $(VENV) "$(WITH_MLX)" plot vision dev
	@touch $@
