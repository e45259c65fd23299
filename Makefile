# Everything a newcomer types. Each target sets up what it needs; one environment in .venv, re-used while up to date.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed

.PHONY: demo test browser check format speed backbone docs lock clean

demo: $(STAMP)     ## six methods on embedded images: who uses the background, and what is proved
	@$(BIN)/sightline demo

test: $(STAMP)     ## every test, the long ones too; without a browser its tests are skipped
	-@$(MAKE) --no-print-directory browser
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -q

# Debian's package as root; elsewhere, and where that package is only a pointer to a snap (Ubuntu), Playwright's download.
browser: $(STAMP)  ## Chromium for the tests of the app and of the report; nothing to do where there is one
	@$(BIN)/python -m tests.browser && exit; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; \
	fi; \
	$(BIN)/python -m tests.browser || $(BIN)/playwright install chromium

check: $(STAMP)    ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check src

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

speed: $(STAMP)    ## what hiding costs and saves, as ratios
	$(BIN)/python benchmarks/speed.py masking

docs: $(STAMP)     ## the pages, in site/; figures are taken from benchmarks/results
	$(BIN)/python docs/ledger.py
	$(BIN)/python docs/trust.py
	$(BIN)/python -m zensical build --clean --strict
	@echo "open site/index.html; to search, too: $(BIN)/python -m http.server -d site"

# Reproduces the embedded weights, from pictures drawn here; wants a GPU. A run that was interrupted goes on.
CORES := $(shell nproc 2>/dev/null || echo 4)

runs/toy-60k/rows.csv: | $(STAMP)
	$(BIN)/sightline toy runs/toy-60k --train 60000 --val 2048 --test 2048 --size 112 --correlation 0.5 --seed 1 --workers $(CORES)

backbone: $(STAMP) runs/toy-60k/rows.csv
	$(BIN)/sightline pretrain runs/toy-60k --arch nano --out runs/sightline-nano --epochs 18 --warmup 2 --prototypes 4096 \
	    --head-width 1024 --global-size 64 --local-size 32 --precision bf16 --compile --workers $(CORES) --resume

# Everything but torch is checked against the hashes of requirements.lock, also what builds the package itself. Which
# build of torch is right depends on the machine: its version is pinned, and without the pin pip may fetch gigabytes.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check --no-warn-script-location \
    --root-user-action=ignore

$(STAMP): pyproject.toml constraints.txt requirements.lock
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing into .venv (once, some minutes) ..."
	@$(PIP) --require-hashes --no-deps -r requirements.lock
	@$(PIP) -c constraints.txt torch
	@$(PIP) --no-deps --no-build-isolation -e .
	@$(BIN)/python -m pip check
	@touch $@

lock:              ## the hashes of the versions in constraints.txt, from PyPI
	$(PYTHON) .ci/lock.py

clean:
	rm -rf .venv runs build dist site .pytest_cache .ruff_cache .hypothesis
