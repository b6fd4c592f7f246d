# Every command sets up what it needs in .venv; nothing is installed outside this checkout.
#   make serve          the server with the demo model on http://127.0.0.1:8000   (PORT=8123 make serve)
#   make test           lint, types and the tests that need no GPU                (PYTEST_FLAGS='-k sampling' make test)
#   make test-sm90      the machine code of the kernels, compiled for sm_90 without a GPU
#   make test-e2e       whole servers driven by real clients, browsers, Prometheus and Alertmanager
#   make test-portable  the tests of numbers and proofs again, with PyTorch's code for processors without AVX
#   make test-starts    small models of all families, each started with an empty cache and held against transformers
#   make test-configs   each key of each family's config.json changed, held against transformers' logits; ten minutes   (CONFIG_FLAGS)
#   make test-planted   faults switched on in an engine that serves, and which check sees each; fifteen minutes   (PLANTED_FLAGS)
#   make test-clients   clients of others, each in an environment of its own; those of npm need node and npm
#   make test-tokenizers  encode, decode and streams beside transformers, for tokenizers that packages ship (TOKENIZER_FLAGS)
#   make test-templates  chat templates that packages ship, rendered beside transformers; three minutes  (TEMPLATE_FLAGS)
#   make test-deploy    Kubernetes manifests and the dashboard, checked; installs kubectl, checkov and types into .cache/deploy
#   make test-image     the container image built by buildah and run by runc, as root; ten minutes the first time
#   make test-ray       replicas on Ray Serve: killed, updated and measured; an environment of its own   (RAY_FLAGS)
#   make test-routers   routers of others in front of two servers, and whether they choose by their load
#   make test-schema    20,000 requests or more that schemathesis makes of /openapi.json; an hour of a core   (SCHEMA_FLAGS)
#   make test-schemas-suite  JSON Schema's own suite and a million numbers against answers bound by schemas  (SUITE_FLAGS)
#   make test-gpu       the tests that need a CUDA GPU of sm_80 or newer
#   make drill          a model upgrade gone wrong for 10% of traffic, and who notices; a report in drill/
#   make drill-upgrade  candidates of a changed machine, slower and wrong, each before the gate; a report in drill-upgrade/
# Another interpreter: make PYTHON=python3.12 serve
PYTHON ?= python3
PORT ?= 8000
PYTEST_FLAGS ?=
CLIENTS ?=
ROUTERS ?=
SCHEMA_FLAGS ?= --out docs/benchmarks/schema-cases.json
CONFIG_FLAGS ?= --out docs/benchmarks/configs.json
PLANTED_FLAGS ?= --out docs/benchmarks/planted.json
SUITE_FLAGS ?= --out docs/benchmarks/schema-suite.json
TOKENIZER_FLAGS ?= --out docs/benchmarks/tokenizers.json
RAY_FLAGS ?= --out docs/benchmarks/ray-cpu.json
VENV := .venv
# Empty where the environment says not to write bytecode: each program that a test starts would compile PyTorch's again,
# 2 s of 4, and each run of the tests their own, 16 s of a core.
export PYTHONDONTWRITEBYTECODE :=
STAMP := $(VENV)/.installed
SERVING := $(VENV)/.installed-serving

.PHONY: serve test test-sm90 test-e2e test-portable test-starts test-configs test-planted test-images test-clients test-tokenizers test-templates test-routers test-deploy test-schema \
  test-schemas-suite test-image test-ray test-gpu drill drill-upgrade lint format clean

define CHECK_PYTHON
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "hallmark needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>/dev/null || echo missing)." >&2; \
	  echo "Name another one: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments (on Debian and Ubuntu: apt-get install python3-venv)." >&2; exit 1; }
endef

# In a .venv of another Python, venv would keep that one and say nothing.
MINOR := 'import sys; print(sys.version_info[:2])'
define CHECK_VENV
	@test ! -x $(VENV)/bin/python || test "$$($(VENV)/bin/python -c $(MINOR))" = "$$($(PYTHON) -c $(MINOR))" || { \
	  echo "$(VENV) has $$($(VENV)/bin/python --version), '$(PYTHON)' is $$($(PYTHON) --version)." >&2; \
	  echo "Name the one that it has, or set it up anew: make clean, then this command again." >&2; exit 1; }
endef

# Whoever names an interpreter gets that one, also where nothing is to be installed.
ifneq ($(origin PYTHON),file)
$(STAMP) $(SERVING): | same-python
endif
.PHONY: same-python
same-python:
	$(CHECK_PYTHON)
	$(CHECK_VENV)

# What serving needs; pip's lines and bars show how far the download is, and a line every 8 s how much is copied since.
$(SERVING): pyproject.toml
	$(CHECK_PYTHON)
	$(CHECK_VENV)
	@echo "Setting up $(VENV) to serve (once; PyTorch is most of the download) ..."
	@$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	@while sleep 8; do echo "$(VENV) holds $$(du -sm $(VENV) | cut -f1) MB of some 1,700, or 7,000 with CUDA"; done & \
	  said=$$!; trap "kill $$said" EXIT; $(VENV)/bin/python -m pip install --editable .
	@touch $@

# uv reads none of pip's settings: where these variables name an index or a folder of wheels for pip, they do for uv.
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
export UV_HTTP_TIMEOUT ?= 180

# The tests' packages too, by uv: 20 s on two cores where pip takes 95 s.
$(STAMP): pyproject.toml
	$(CHECK_PYTHON)
	$(CHECK_VENV)
	@echo "Setting up $(VENV) to serve and to test (once; PyTorch is most of the download) ..."
	@$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet $$(grep -o 'uv==[0-9.]*' pyproject.toml)
	$(VENV)/bin/uv pip install --python $(VENV) --editable '.[test]'
	@touch $@

# Whoever can test can serve.
serve: $(if $(wildcard $(STAMP)),$(STAMP),$(SERVING))
	@exec $(VENV)/bin/hallmark serve --port $(PORT)

lint: $(STAMP)
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

format: $(STAMP)
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

# 5 is pytest's word for no test at all: no mistake where `-k` has chosen none of them.
NONE_CHOSEN := $(if $(findstring -k,$(PYTEST_FLAGS)),|| test $$? -eq 5)

# The test files that name a mark: to collect all others takes 20 s of each core.
files_of = $(shell grep -rlE 'mark\.$(1)\b' tests --include='test_*.py')

# Files with a test that is marked `first` begin first: one of 20 s must not be a worker's last, when the other has ended.
test: lint
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -m 'not gpu and not sanitizer and not timed and not starts and not e2e and not sm90' \
	  -n auto --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS) $(NONE_CHOSEN)

test-sm90: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -m 'sm90 and not gpu' -n auto --dist loadfile $(call files_of,sm90) $(PYTEST_FLAGS)

test-e2e: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -m 'e2e and not gpu and not sanitizer and not timed and not starts' -n auto --dist loadfile $(call files_of,e2e) $(PYTEST_FLAGS)

# Tests whose numbers or proofs depend on PyTorch's code for the processor: right results within their limits, tokens
# equal to transformers', proofs that must not fail. Decisions, files, refusals and processes do not, nor what Triton's
# interpreter computes by numpy.
PORTABLE := $(addprefix tests/kernels/,reference sdpa sampling/test_sampling.py experts/test_eager.py)
PORTABLE += $(addprefix tests/qualification/measure/,checks faults test_error_rates.py test_experts_qualified.py)
PORTABLE += $(foreach name,decoder_parity family_parity ranks,tests/server/model/test_$(name).py)
PORTABLE += $(foreach name,engine pooling,tests/server/engine/test_$(name).py)
PORTABLE += tests/server/engine/execution/test_scores.py
PORTABLE += $(foreach name,attestation shadow shadow_products,tests/server/engine/proof/test_$(name).py)

test-portable: $(STAMP)
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=1 $(VENV)/bin/pytest \
	  -m 'not gpu and not sanitizer and not timed and not e2e' -n auto --dist loadfile $(PORTABLE) $(PYTEST_FLAGS) $(NONE_CHOSEN)

test-starts: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -m starts -n auto --dist load $(call files_of,starts) $(PYTEST_FLAGS)

# CONFIG_FLAGS='--first 7 --time-limit 60' runs a sample of a minute, another one for each number.
test-configs: $(STAMP)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(VENV)/bin/python trials/config_keys.py $(CONFIG_FLAGS)

# PLANTED_FLAGS='--only norm --reproducible' switches on some, in an engine of ordered paths, and writes nothing.
test-planted: $(STAMP)
	PYTHONPATH=.:tests OMP_NUM_THREADS=1 $(VENV)/bin/python trials/planted_in_service.py $(PLANTED_FLAGS)

# IMAGE_FLAGS='--cases 5000 --out docs/benchmarks/hostile-images.json' writes down what came back.
test-images: $(STAMP)
	PYTHONPATH=.:tests:trials $(VENV)/bin/python trials/hostile_images.py $(IMAGE_FLAGS)

# CLIENTS='openai anthropic' chooses some, by their folders in trials/clients/clients.toml.
test-clients: $(STAMP)
	PYTHONPATH=trials $(VENV)/bin/python trials/clients/run_clients.py $(CLIENTS)

# TOKENIZER_FLAGS='--num 2 --first 5' takes two of the packages, and writes nothing.
test-tokenizers: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python trials/tokens/compare_tokenizers.py $(TOKENIZER_FLAGS)

# TEMPLATE_FLAGS='--sample 20 --first 5' takes some templates of one or two packages, and writes nothing.
TEMPLATE_FLAGS ?= --out docs/benchmarks/templates.json
test-templates: $(STAMP)
	OMP_NUM_THREADS=1 $(VENV)/bin/python trials/templates/run_templates.py $(TEMPLATE_FLAGS)

# RAY_FLAGS='--quick --out FILE' kills one of each kind and measures no speed.
RAY := .cache/ray
$(RAY)/.installed: pyproject.toml deploy/ray/requirements.txt
	$(CHECK_PYTHON)
	@$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/python -m pip install --quiet --editable . -r deploy/ray/requirements.txt 'psutil>=7'
	@touch $@

test-ray: $(RAY)/.installed
	$(RAY)/bin/python deploy/ray/trial.py $(RAY_FLAGS)

SCHEMA := .cache/schema
$(SCHEMA)/.installed:
	@$(PYTHON) -m venv $(SCHEMA)
	$(SCHEMA)/bin/python -m pip install --quiet schemathesis==4.32.5
	@touch $@

test-schema: $(STAMP) $(SCHEMA)/.installed
	$(VENV)/bin/python trials/schema_cases.py $(SCHEMA)/bin/schemathesis $(SCHEMA_FLAGS)

# The source archive of jsonschema holds the suite: its wheel, which the tests use, does not.
SUITE := .cache/schema-suite/jsonschema-4.26.0.tar.gz
$(SUITE): | $(STAMP)
	$(VENV)/bin/python -m pip download --quiet --no-deps --no-binary jsonschema --dest $(@D) jsonschema==4.26.0

# SUITE_FLAGS='--numbers 20000 --seed 7 --out FILE' compares fewer numbers.
test-schemas-suite: $(STAMP) $(SUITE)
	PYTHONPATH=trials $(VENV)/bin/python trials/schema_suite.py $(SUITE) $(SUITE_FLAGS)

test-deploy: $(STAMP)
	$(VENV)/bin/pytest trials/kubernetes/check_manifests.py trials/kubernetes/check_dashboard.py $(PYTEST_FLAGS)

# ROUTERS='smg rolter' runs some, and writes no page.
test-routers: $(STAMP)
	PYTHONPATH=trials $(VENV)/bin/python trials/routers/run_routers.py $(ROUTERS)

test-image: $(STAMP)
	$(VENV)/bin/pytest -s trials/image/check_image.py $(PYTEST_FLAGS)

# Kernels of attention are compiled first, each once. Then a worker a core, dealt over the GPUs; tests beside each other
# share what they compile, so they go to workers in blocks.
GPU_TESTS := $(shell grep -rl 'mark\.gpu' tests --include='test_*.py' | sort)
test-gpu: $(STAMP)
	PYTHONPATH=.:tests:tests/kernels OMP_NUM_THREADS=1 $(VENV)/bin/python -m support.compiled.compile_gpu_tests
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -m 'gpu and not timed and not sanitizer' -n auto --dist worksteal $(GPU_TESTS) \
	  $(PYTEST_FLAGS) $(NONE_CHOSEN)
	$(VENV)/bin/pytest -m 'gpu and timed' $(GPU_TESTS) $(PYTEST_FLAGS) $(NONE_CHOSEN)

drill: $(STAMP)
	$(VENV)/bin/python deploy/drill/drill.py --out drill

drill-upgrade: $(STAMP)
	$(VENV)/bin/python deploy/drill/upgrade.py --out drill-upgrade

clean:
	rm -rf $(VENV)
