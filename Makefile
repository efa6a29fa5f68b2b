# make demo       install, then the whole way on the digital phantom: data, language model, scores, training, evaluation
# make test       install the test tools, then ruff and mypy (make lint) and the tests (make fast)
# make package    the source archive and the wheel of the last commit in dist, checked; with links, if
#                 REPOSITORY_URL=https://github.com/OWNER/NAME is given
# make nih        classifiers and an image-text model on real radiographs: NIH=FOLDER of the release, or of a part of it
# make study      objectives on phantoms (docs/experiments.md): hours; what is finished is kept
# make replicates the study of false negatives (tests/benchmarks/false_negatives_study): a quarter of an hour
#                 of a core for each of its replicates; what is finished is kept
# make numbers    measured numbers of README and docs, from the tables in docs/results
# make docs       these pages and the reference as a site that loads nothing from another host
# make test-slow  kills, browsers, two processes, whole releases, fuzzing, further cases
# make test-gpu   a GPU against the CPU; skipped without one

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.demo_installed
TESTED := $(VENV)/.test_installed

DEMO := runs/demo

.PHONY: install demo nih study replicates numbers docs test lint fast test-slow test-gpu package clean
.DELETE_ON_ERROR:

# Without bytecode files each of the many processes compiles the program again.
unexport PYTHONDONTWRITEBYTECODE

install: $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --editable .
	touch $@

$(TESTED): setup.cfg pyproject.toml | $(INSTALLED)
	$(RUN) -m pip install --editable ".[test]"
	touch $@

# One thread is as fast as two for networks so small, and more than twice as fast while another program uses a core.
nih study: export OMP_NUM_THREADS ?= 1

# The C library keeps the memory that a step frees for the next one: to get it anew takes 4% of a step.
nih study: export MALLOC_MMAP_THRESHOLD_ ?= 33554432
nih study: export MALLOC_TRIM_THRESHOLD_ ?= 1073741824

# The study's phantoms two by two.
MAKEFLAGS += --jobs=2

demo: $(INSTALLED)
	$(RUN) -m medclip_dcl demo

$(DEMO)/fit.json: | $(INSTALLED)
	$(RUN) -m medclip_dcl demo

# Each release has a set and runs of its own: the page of one must not be shown for another.
NIH ?= data/nih_release
NIH_FOLDER := '$(subst ','\'',$(NIH))'
NIH_NAME := $(shell folder=$$(cd $(NIH_FOLDER) 2>/dev/null && pwd -P || echo $(NIH_FOLDER)); \
    if [ "$$folder" = data/nih_release ] || [ "$$folder" -ef data/nih_release ]; then echo nih; \
    else echo nih_$$(echo "$$folder" | cksum | cut -d ' ' -f 1); fi)
NIH_SET := data/$(NIH_NAME)
NIH_RUNS := runs/$(NIH_NAME)
NIH_MODELS := random demo_encoder image_text
# The official test patients are drawn anew: all boxes, and in a part of the release perhaps all findings, are theirs.
NIH_OPTIONS := --source $(NIH_FOLDER) --size 256 --redraw_test --split_shares 0.5,0.1,0.4
NIH_CLASSIFIER := --config finetune --config nih/classifier

nih: $(NIH_RUNS)/benchmark/benchmark.html
	@echo "open $<"

$(NIH_SET)/dataset.json: | $(INSTALLED)
	$(RUN) -m medclip_dcl prepare public nih $(NIH_OPTIONS) --output $(@D)

$(NIH_SET)_templated/dataset.json: $(NIH_SET)/dataset.json
	$(RUN) -m medclip_dcl prepare public nih $(NIH_OPTIONS) --output $(@D) --templates public

$(NIH_RUNS)/random/fit.json: $(NIH_SET)/dataset.json
	$(RUN) -m medclip_dcl fit $(NIH_CLASSIFIER) --config nih/random --data.init_args.folder $(NIH_SET) \
	    --run_folder $(@D)

$(NIH_RUNS)/demo_encoder/fit.json: $(NIH_SET)/dataset.json $(DEMO)/fit.json
	$(RUN) -m medclip_dcl fit $(NIH_CLASSIFIER) --model.init_args.init_from $(DEMO)/checkpoints/best.ckpt \
	    --data.init_args.folder $(NIH_SET) --run_folder $(@D)

$(NIH_RUNS)/image_text/fit.json: $(NIH_SET)_templated/dataset.json $(DEMO)/fit.json
	$(RUN) -m medclip_dcl fit --config demo --config nih/image_text \
	    --data.init_args.folder $(NIH_SET)_templated --run_folder $(@D)

$(NIH_RUNS)/benchmark/benchmark.html: $(NIH_MODELS:%=$(NIH_RUNS)/%/fit.json)
	$(RUN) -m medclip_dcl benchmark $(NIH_MODELS:%=$(NIH_RUNS)/%) $(DEMO) --sets $(NIH_SET) --output $(@D)

# A phantom for each mean share of false negatives, with findings that are rare in training, and encoders trained on it.
STUDY := data/phantoms
SHARES := 0.1 0.43 0.6

study: $(SHARES:%=$(STUDY)/%/set/features/warm/features.json)
	for name in table1_search table1 table1_settings table1_whole table1_whole_both; do \
	    $(RUN) -m medclip_dcl study $$name --workers 2 || exit; done

.SECONDARY:

$(STUDY)/%/raw/phantom_truth/phantom.json: | $(INSTALLED)
	$(RUN) -m medclip_dcl phantom --output $(STUDY)/$*/raw --studies 2600 --seed 0 --size 256 --false_negatives $* \
	    --rare_findings 0.005

$(STUDY)/%/set/dataset.json: $(STUDY)/%/raw/phantom_truth/phantom.json
	$(RUN) -m medclip_dcl prepare mimic-cxr --source $(STUDY)/$*/raw --output $(STUDY)/$*/set \
	    --ms_cxr $(STUDY)/$*/raw/MS_CXR_Local_Alignment_v1.0.0.json

$(STUDY)/%/language_model/fit.json: $(STUDY)/%/set/dataset.json
	$(RUN) -m medclip_dcl fit --config language_model_small --run_folder $(@D) \
	    --data.init_args.folder $(STUDY)/$*/set

# Means over tokens, as measured in docs/near_texts.md: reports that are near by the [CLS] of so small a model fit no more
# often than chance.
$(STUDY)/%/set/.texts: $(STUDY)/%/language_model/fit.json
	$(RUN) -m medclip_dcl score $(@D) --model $(<D)/language_model
	$(RUN) -m medclip_dcl embed $(@D) --model $(<D)/language_model --pooling mean
	touch $@

$(STUDY)/%/warm/fit.json: $(STUDY)/%/set/.texts
	$(RUN) -m medclip_dcl fit --config demo --config study \
	    --config objective/infonce --run_folder $(@D) --data.init_args.folder $(<D) \
	    --model.init_args.text_encoder.init_args.pretrained $(STUDY)/$*/language_model/language_model

$(STUDY)/%/set/features/warm/features.json: $(STUDY)/%/warm/fit.json
	$(RUN) -m medclip_dcl encode $(<D $(STUDY)/$*/set) --name warm

REPLICATES := tests/benchmarks/false_negatives_study

replicates: $(INSTALLED)
	$(RUN) $(REPLICATES)/replicates.py test --folder runs/false_negatives --workers 2
	$(RUN) $(REPLICATES)/reading.py $(REPLICATES)/rows/*.csv

docs: $(VENV)/.docs
	$(RUN) docs/site/build.py

$(VENV)/.docs: $(INSTALLED)
	$(RUN) -m pip install --editable ".[docs]"
	touch $@

numbers: $(INSTALLED)
	$(RUN) docs/site/measured_numbers.py

# They compare with the CPU's values bit for bit.
fast test-slow: export CUDA_VISIBLE_DEVICES :=

# A process that crashes or stands still ends the run with the test's name.
NAMED := --max-worker-restart 0 -o faulthandler_timeout=1200 -o faulthandler_exit_on_timeout=true

test: lint fast

lint: $(TESTED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

fast: $(TESTED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadscope --no-loadscope-reorder

test-slow: $(TESTED)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -m slow -n 2 $(NAMED)

test-gpu: $(TESTED)
	$(RUN) -m pytest tests/gpu -m gpu -rs

# The oldest versions that setup.cfg allows, docs/contributing.md.
build/oldest.txt: setup.cfg
	mkdir -p $(@D)
	sed -nE 's/^ +([A-Za-z0-9_-]+)(\[[a-z]+\])?>=([0-9.]+).*/\1==\3/p' $< | sort -u > $@

package: $(VENV)/.package
	rm -rf build/package && mkdir -p build/package
	git archive HEAD -- . ':!tests' | tar -x -C build/package
	$(RUN) .ci/links.py build/package $(REPOSITORY_URL)
	$(RUN) -m build --no-isolation --outdir dist build/package
	$(VENV)/bin/twine check --strict dist/medclip_dcl-*

$(VENV)/.package: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install build twine "setuptools>=77.0.3"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
