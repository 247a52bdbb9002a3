PYTHON ?= python3
MODEL := examples/demo_model
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test lint clean

# The main job: prune the small model in this repository to 2:4 and compare its perplexity before and after.
demo: $(INSTALLED)
	$(BIN)/optimum-cli moonshot prune $(MODEL) --output outputs/demo-2of4 --overwrite \
		--solver sparsegpt --pattern 2:4 \
		--calibration $(MODEL)/calibration.txt --sequence-length 256 --eval $(MODEL)/heldout.txt

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(INSTALLED): pyproject.toml setup.cfg setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	touch $@

clean:
	rm -rf .venv build dist outputs *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
