# Everything a newcomer types. Each target sets up what it needs; one environment in .venv, re-used while up to date.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.installed

.PHONY: demo test check format speed clean

demo: $(STAMP)     ## the proof on the embedded pictures
	$(BIN)/sightline demo

test: $(STAMP)     ## every test, the long ones too
	$(BIN)/python -m pytest -n auto --dist loadgroup -q

check: $(STAMP)    ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check src

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

speed: $(STAMP)    ## what hiding costs and saves, as ratios
	$(BIN)/python benchmarks/speed.py

# The constraints hold torch at one build; without them pip may fetch gigabytes of CUDA packages.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv runs build dist .pytest_cache .ruff_cache .hypothesis
