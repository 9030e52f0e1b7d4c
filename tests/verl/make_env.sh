#!/usr/bin/env bash
# Make an environment with verl 0.9.1 and this checkout, and run the contract tests in it: tests/verl/make_env.sh DIRECTORY
# verl wants transformers below 5.11, and Meshwright 5.23 or later: so Meshwright is installed without its dependencies.
# Its backend of verl uses neither tokenizers nor templates, the parts for which the version matters.
# PYTHON=python3.12, PIP_ARGS="--extra-index-url URL" for another build of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

at=${1:?give a directory for the environment}
torch=$(grep '^torch==' requirements/constraints.txt)
"${PYTHON:-python3}" -m venv "$at"
pip() { "$at/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} "$@"; }
pip "$torch" "verl==0.9.1" uvicorn fastapi cachetools pyzmq msgspec
pip safetensors fsspec huggingface_hub xxhash pyarrow filelock pydantic numpy packaging rich pytest pytest-timeout
pip --no-deps --editable .

export VERL_USE_EXTERNAL_MODULES=tests.verl.cpu_platform VERL_PLATFORM=cpu OMP_NUM_THREADS=1
# --noconftest: tests/conftest.py needs the transformers of the main environment.
PYTHONPATH=$PWD "$at/bin/python" -m pytest -q -p no:cacheprovider --noconftest -o addopts= -o filterwarnings= tests/verl
