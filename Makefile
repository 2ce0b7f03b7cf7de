# Every way to build, check and try the project; `make help` lists them. CI runs the same commands (.ci/run).
#
# CLUSTER=existing uses the cluster of KUBECONFIG instead of making one on this machine.
# SPECCACHE_CACHE=DIR keeps built programs, images and the cluster's state there (default ~/.cache/speccache).

SHELL := /bin/bash
CACHE := $(or $(SPECCACHE_CACHE),$(HOME)/.cache/speccache)

# uv comes from the machine or, when it has none, from the cache (tools/prepare.sh). Go's usual place is added.
export PATH := $(PATH):$(CACHE)/uv/bin:/usr/local/go/bin
export UV_PYTHON_DOWNLOADS := never
# Python keeps what it has compiled, whatever the caller's shell says: the tests start a hundred processes.
unexport PYTHONDONTWRITEBYTECODE
# The machine says whom to trust: a proxy that signs anew is in its store, and not in the one that uv brings.
export UV_SYSTEM_CERTS := true

RUN := uv run --no-sync
CLUSTER_TOOL := $(RUN) python -m speccache_tools.cluster
WITHOUT_CLUSTER := --ignore=tests/e2e --ignore=tests/gpu
# Three on two cores: much of what is tested waits for leases, resyncs and processes. In the order of the files: those
# that take long are not the last.
IN_PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
OWN_CLUSTER := $(if $(filter existing,$(CLUSTER)),,build cluster)

# $(call phase,NAME,COMMAND): says what begins, and how long it took.
define phase
@printf '\n=== %s\n' '$(1)'; begun=$$SECONDS; $(2) || { printf '=== %s: FAILED\n' '$(1)'; exit 1; }; \
printf '=== %s: %d s\n' '$(1)' $$((SECONDS - begun))
endef

.DEFAULT_GOAL := help
.PHONY: help setup programs bucket-server images build cluster cluster-down lint check gpu soak test demo demo-down clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | expand -t 16

# Compiled here as in the images: where Python may not write its own (PYTHONDONTWRITEBYTECODE), every process that imports
# torch would compile thousands of files again, 6 of 12 seconds.
setup: ## install what is missing: Debian packages (as root), uv, the locked Python environment
	@tools/prepare.sh
	@uv sync --frozen --all-extras --compile-bytecode --quiet

programs: setup ## build etcd, the Kubernetes programs and helm from Go modules, each once (minutes)
	@$(CLUSTER_TOOL) programs

bucket-server: setup ## build an S3 server, for tests and for trying buckets; `make cluster` then gives it to the node
	@$(CLUSTER_TOOL) programs --s3

images: setup ## build the operator's and the runtime's image; load them when the cluster is up
	@$(CLUSTER_TOOL) images

build: setup ## programs and images at the same time: one waits for the processor, the other for the disk
	@$(MAKE) --no-print-directory --jobs=2 programs images

cluster: setup ## start a real one-node cluster; prints how to reach it
	@$(CLUSTER_TOOL) up

cluster-down: ## stop the cluster and leave nothing of it behind
	@cd tools && python3 -m speccache_tools.cluster down

lint: setup ## formatting, ruff, strict types, import contracts
	$(call phase,format,$(RUN) ruff format --check .)
	$(call phase,ruff,$(RUN) ruff check .)
	$(call phase,types,$(RUN) mypy)
	$(call phase,import contracts,$(RUN) lint-imports --no-logo)

check: lint ## lint and every test that starts neither a node nor the whole program
	@$(CLUSTER_TOOL) programs --api --helm --s3
	$(call phase,tests without a cluster,$(RUN) pytest $(IN_PARALLEL) $(WITHOUT_CLUSTER) -m 'not program')

# SOAK_SECONDS=60 shortens it; SPECCACHE_TEST_KILLS is how many writers are killed on a volume, and as many on a bucket.
soak: export SPECCACHE_TEST_KILLS := $(or $(SPECCACHE_TEST_KILLS),250)
soak: setup ## ten minutes of requests over tiers too small and storage in trouble, and hundreds of killed writers
	$(call phase,requests,OMP_WAIT_POLICY=PASSIVE $(RUN) python tests/soak/soak.py)
	$(call phase,killed writers,$(RUN) pytest tests/runtime/storage/test_kills.py)

gpu: setup ## the tests that need an NVIDIA GPU
	$(RUN) pytest tests/gpu

test: ## everything: setup, check, the whole program, images, cluster, end to end
	@$(MAKE) --no-print-directory check
	$(call phase,tests of the whole program,$(RUN) pytest $(IN_PARALLEL) $(WITHOUT_CLUSTER) -m program)
	$(foreach target,$(OWN_CLUSTER),$(call phase,$(target),$(MAKE) --no-print-directory $(target))$(newline))
	@printf '\n=== end to end\n'; $(RUN) pytest tests/e2e

demo: setup ## build everything, serve samples/tiny.yaml, lose its pod, show what that costs
	$(foreach target,$(OWN_CLUSTER),$(call phase,$(target),$(MAKE) --no-print-directory $(target))$(newline))
	@$(RUN) python -m speccache_tools.demo up

demo-down: ## take the demo off again, and the cluster too unless it is yours
	@$(RUN) python -m speccache_tools.demo down

clean: cluster-down ## remove every build product: environment, programs, images, caches
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
	@rm -rf '$(CACHE)'

# A line end, so that foreach makes one command line each.
define newline


endef
