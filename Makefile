# Everything a person or a CI job runs. `make` alone lists the targets.

PREFIX  ?= /usr/local
DESTDIR ?=
CARGO   ?= cargo

# A fresh rustup install is found even before the shell has been restarted.
export PATH := $(PATH):$(HOME)/.cargo/bin
export CARGO

.DEFAULT_GOAL := help
.PHONY: help setup build demo test bench lint install clean

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Install or name what this machine lacks for every other target.
	@scripts/setup.sh build demo test bench cuda

build: ## Build the libraries and the `ep` command (release).
	@scripts/setup.sh build
	$(CARGO) build --release --locked --workspace

demo: ## Run dispatch and combine among processes on this machine and check the result.
	@scripts/setup.sh demo
	$(CARGO) run --release --locked -p ep-cli -- demo

test: ## Run every check of scripts/test.sh, then list what ran, failed or was skipped.
	@scripts/setup.sh test cuda
	@scripts/test.sh

bench: ## Measure this machine; ARGS="..." goes to `ep bench`.
	@scripts/setup.sh bench
	$(CARGO) run --release --locked --quiet -p ep-cli -- bench $(ARGS)

lint: ## Check format, clippy and rustdoc only.
	@scripts/setup.sh build lint
	@scripts/test.sh fmt clippy doc

install: ## Install the library, header, packaging files and `ep` under PREFIX (DESTDIR is honoured).
	@scripts/setup.sh build
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' packaging/install.sh

clean: ## Remove everything that was built.
	$(CARGO) clean
