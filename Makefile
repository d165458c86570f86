# Thin wrappers: every target is `python tools/dev.py <target>`, which is the command on Windows.
# Extra arguments: make test ARGS="-k budget"
PYTHON ?= python3
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test lint docs test-versions test-native test-slow test-real clean

help:
	@$(PYTHON) tools/dev.py --help

demo test lint docs test-versions test-native test-slow test-real clean:
	@$(PYTHON) tools/dev.py $@ $(ARGS)
