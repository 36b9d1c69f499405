# Everything here works on a machine with only python3 (3.11+), pip, venv and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-full lint types env clean

demo: .venv/ready
	$(BIN)/coterie run quickstart

test: .venv/ready
	$(BIN)/python -m pytest -n auto -m "not full"

test-full: .venv/ready
	$(BIN)/python -m pytest -n 2 -m full

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/ready
	$(BIN)/mypy

env: .venv/ready

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev,data,text,track,onnx,flower]"
	touch $@

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
