#!/usr/bin/env bash
# SmolLM2 on HotpotQA with verl, Ray and vLLM on a GPU host, from the source tree: train, mount the adapter in vLLM and
# measure its effect there, tell seconds a phase and tokens a second.
#   scripts/gpu_verl.sh MODEL CORPUS OUT STEPS [KEY=VALUE ...]
# MODEL    folder made by `poimen model smollm2`
# CORPUS   folder made by `poimen corpus convert hotpotqa`
# OUT      folder for what is worth keeping: summary.json, summary.md, metrics.jsonl, smoke.txt, train.log, run.tar.gz
# STEPS    training steps
# Two GPUs: trainer.n_gpus_per_node=2.
# WARM     environment: supervised steps in solo before it (default 480; 0 starts at the base model); or
# ADAPTER  environment: an adapter folder to start from instead
# SHARE    environment: of the GPU's memory, for the server that the adapter is mounted in (default 0.4)
# CACHE    environment: bytes of that server's cache, where other processes come and go on the GPU (default: measured)
# The packages of pyproject.toml and vLLM must be importable; the package itself need not be installed.
set -euo pipefail
model=$(realpath "$1") corpus=$(realpath "$2") out=$3 steps=$4
shift 4
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
python=${PYTHON:-python3} port=${PORT:-8123} adapter=${ADAPTER:-} warm=${WARM:-480}
run=$PWD/multirun/smollm2_verl/$(date +%Y-%m-%d_%H-%M-%S)/0
poimen() { "$python" -c 'from poimen_exp.cli import main; main()' "$@"; }
clock() { echo "== $1: ${SECONDS} s since the start"; }
server=
trap '[[ -z $server ]] || kill -- "-$server" 2>/dev/null || true' EXIT

SECONDS=0
if [[ -z $adapter && $warm -gt 0 ]]; then
  # One step of four readings at the schedule's first rate, which is 0: what is exported is the warm start.
  "$python" -m poimen_exp +experiment=smollm2 tracking=none "gates.warm_start.steps=$warm" data.train_batch_size=2 \
    actor_rollout_ref.actor.ppo_mini_batch_size=2 actor_rollout_ref.rollout.name=hf \
    actor_rollout_ref.rollout.n=2 trainer.total_training_steps=1 \
    trainer.val_before_train=false trainer.test_freq=-1 "corpus.path=$corpus" "actor_rollout_ref.model.path=$model" \
    "hydra.run.dir=$run-warm"
  adapter=$run-warm/adapter
  clock "warm start"
fi
start=()
[[ -z $adapter ]] || start=("actor_rollout_ref.model.lora_adapter_path=$(realpath "$adapter")")

# The log is kept, and its last lines shown, whatever the outcome.
status=0
"$python" -m poimen_exp +experiment=smollm2_verl tracking=none "trainer.total_training_steps=$steps" \
  "corpus.path=$corpus" "actor_rollout_ref.model.path=$model" "hydra.run.dir=$run" "${start[@]}" "$@" \
  > "$out/train.log" 2>&1 || status=$?
grep -E 'LoRA sync check|poimen_exp: |collapse alarm' "$out/train.log" || true
tail -n 25 "$out/train.log" | cut -c1-200
[[ ! -f $run/metrics.jsonl ]] || cp "$run/metrics.jsonl" "$out/metrics.jsonl"
clock "training ended with $status"
[[ $status -eq 0 ]] || exit "$status"

# setsid: a process group of its own, which the trap ends whole; vLLM's engine is a child of the server.
setsid "$python" -c 'from poimen_exp.cli import main; main()' adapter serve "$run/adapter" --base "$model" \
  --device cuda --port "$port" --enforce-eager --gpu-memory-utilization "${SHARE:-0.4}" \
  ${CACHE:+--kv-cache-memory-bytes "$CACHE"} > "$out/serve.log" 2>&1 &
server=$!
name=$(PYTHONWARNINGS=ignore "$python" -c 'import sys
from pathlib import Path
from poimen_exp.adapters.publish import resolve_adapter
from poimen_exp.adapters.registry import Registry
print(resolve_adapter(sys.argv[1], Registry(sys.argv[1]))[1])' "$run/adapter")
for _ in $(seq 300); do
  kill -0 "$server" 2>/dev/null || { tail -n 40 "$out/serve.log"; exit 1; }
  "$python" -c "import urllib.request as u; u.urlopen('http://127.0.0.1:$port/health', timeout=2)" 2>/dev/null && break
  sleep 1
done
clock "adapter served"
poimen adapter smoke "http://127.0.0.1:$port" "$name" | tee "$out/smoke.txt"
kill -- "-$server"
server=
clock "effect measured"

"$python" scripts/verl_summary.py "$run" "$out"
tar -C "$run" -czf "$out/run.tar.gz" --exclude=checkpoints --exclude='*.safetensors' .
clock "done"
