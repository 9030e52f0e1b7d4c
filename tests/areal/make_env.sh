#!/usr/bin/env bash
# Make an environment with AReaL 1.0.4 and this checkout, and run the contract tests in it: tests/areal/make_env.sh DIRECTORY
# AReaL wants torch below 2.11 and transformers up to 5.3; Meshwright wants 2.11 and 5.23 or later. No resolver can have
# both, but AReaL's modules run with the newer ones: so AReaL is installed without its dependencies, and those that its
# modules import are named here.
# PYTHON=python3.12, PIP_ARGS="--extra-index-url URL" for another build of torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

at=${1:?give a directory for the environment}
pinned=$(grep -E '^(torch|transformers|numpy|peft|datasets)==' requirements/constraints.txt)
"${PYTHON:-python3}" -m venv "$at"
pip() { "$at/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} "$@"; }
pip $pinned pytest pytest-timeout
pip torchdata omegaconf hydra-core colorlog pyyaml aiohttp aiofiles pillow tabulate orjson requests msgspec pybase64 \
    psutil httpx uvloop fastapi uvicorn flask ray redis pebble einops numba tensorboardx lark tenacity openai swanlab \
    trackio wandb
pip safetensors fsspec huggingface_hub xxhash pyarrow filelock pydantic packaging rich
pip --no-deps "areal==1.0.4"
pip --no-deps --editable .

export OMP_NUM_THREADS=1
# --noconftest: tests/conftest.py needs packages of the main environment.
PYTHONPATH=$PWD "$at/bin/python" -m pytest -q -p no:cacheprovider --noconftest -o addopts= -o filterwarnings= tests/areal
