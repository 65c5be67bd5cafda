# `make run` and `make test` set up everything they need on a fresh machine.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

export OMP_NUM_THREADS ?= 1

.PHONY: targets start-embedded test-targets bench-endpoint
.PHONY: run test test-slow bench long oldest benign benign-kinds benign-runs selftest families upstream lint clean
run: $(STAMP)            ## the main job: the embedded reference beside the embedded accelerated path
	$(BIN)/day0check run

test: $(STAMP)           ## the tests that CI runs
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 2 --dist worksteal

test-slow: $(STAMP)      ## the proofs that take minutes
	$(BIN)/python -m pytest -m "slow and not gpu and not targets"

benign: $(STAMP)         ## how often healthy operators raise an alarm: 1,000 runs of each, goes on where it was stopped
	PYTHONPATH=tests $(BIN)/python tests/compare/benign_sweep.py --runs $(or $(RUNS),1000) --jobs 2 \
		--profile $(or $(PROFILE),bf16) --state reports/benign-$(or $(PROFILE),bf16).jsonl

benign-kinds: $(STAMP)   ## legal variants x small presets x ten seeds through the main job; goes on where it was stopped
	PYTHONPATH=tests $(BIN)/python tests/benign/kinds_sweep.py --seeds $(or $(SEEDS),10) --jobs 2

benign-runs: $(STAMP)    ## 200 whole runs over presets, cases and profiles: how often not ready; goes on likewise
	PYTHONPATH=tests $(BIN)/python tests/benign/whole_runs.py --runs $(or $(RUNS),200) --jobs 2

schedules: $(STAMP)      ## random schedules of the engine against the reference: 1,000 of them, goes on where it was stopped
	PYTHONPATH=tests $(BIN)/python tests/schedules/random_schedules.py --runs $(or $(RUNS),1000) --jobs 2

selftest: $(STAMP)       ## every known fault and legal variant through the main job
	$(BIN)/day0check selftest --jobs 2

bench: $(STAMP)          ## speed beside the float32 reference and of comparisons beside reading; memory over layers
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[fast]" || true
	$(BIN)/python -m venv .targets/msprobe && .targets/msprobe/bin/python -m pip install --quiet mindstudio-probe || true
	$(BIN)/python -m bench.engine; speed=$$?; \
	$(BIN)/python -m bench.compare --msprobe .targets/msprobe/bin/python; pairs=$$?; \
	$(BIN)/python -m bench.memory && exit $$((speed | pairs))

long: $(STAMP)           ## 128k tokens with all choices judged, and a decode step behind a million: a quarter of an hour
	$(BIN)/python -m bench.long

families: $(STAMP)       ## stage t0 of every model family
	$(BIN)/python -m pytest tests/faults/test_families.py -m slow

upstream: $(STAMP)       ## the table of reference errors against transformers, as Markdown
	$(BIN)/python tests/reference/upstream

oldest:                  ## the probe under the oldest Python and torch it promises (downloads 2.5 GB): PYTHON39=python3.9
	$(or $(PYTHON39),python3.9) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet "torch==2.1.2" "numpy<2" pytest hypothesis safetensors
	PYTHONPATH=. .venv-oldest/bin/python -m pytest -q --noconftest -c /dev/null --rootdir . tests/probe

targets:                 ## install the real servers, one environment each under .targets (gigabytes, most of an hour)
	$(PYTHON) servers/targets.py install vllm transformers llama

start-%:                 ## start one: make start-vllm MODEL=qwen3 PORT=8101 (vllm, transformers, llama, embedded)
	$(PYTHON) servers/targets.py start $* $(or $(MODEL),qwen3) --port $(or $(PORT),8101)

start-embedded: $(STAMP)
	$(BIN)/day0check serve --model $(or $(MODEL),tiny) --port $(or $(PORT),8000)

test-targets: $(STAMP)   ## what is known of the real servers is found on them, and nothing else
	$(BIN)/python -m pytest tests/targets -m targets

bench-endpoint: $(STAMP) ## our load beside vllm bench serve and GuideLLM on one vLLM, and 256 streams at a fixed pace
	$(PYTHON) servers/targets.py install vllm guidellm
	$(BIN)/python -m bench.streams
	$(BIN)/python -m bench.endpoint --start --guidellm

lint: $(STAMP)
	$(BIN)/ruff format --check . && $(BIN)/ruff check .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==$$(sed -n 's/^torch==//p' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test,dev]"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info reports/*/
