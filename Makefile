PYTHON ?= python3
BIN := .venv/bin
CORPUS := data/stdlib
export RAY_USAGE_STATS_ENABLED = 0

.PHONY: demo test bench-engine bench-model clean

demo: .venv/ready
	$(BIN)/rayzero3 tokenize "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" --pattern "*.py" --exclude "site-packages/*" --exclude "test/*" --vocab-size 1024 --out $(CORPUS)
	$(BIN)/rayzero3 submit jobs/quickstart.yaml

test: .venv/ready
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

bench-engine: .venv/ready
	$(BIN)/python -m bench.engine

bench-model: .venv/ready
	$(BIN)/python -m bench.model

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@

clean:
	rm -rf .venv data runs
