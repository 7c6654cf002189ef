#!/usr/bin/env bash
# The SmolLM2 experiment on a GPU host, from the source tree: train until it stops or the time is over, evaluate on the
# test split, draw the curves.
#   scripts/gpu_smollm2.sh MODEL CORPUS OUT SECONDS [KEY=VALUE ...]
# MODEL    folder made by `poimen model smollm2`
# CORPUS   folder made by `poimen corpus convert hotpotqa`
# OUT      folder for what is worth keeping: curves.png, curves.md, metrics.jsonl, eval-test.txt, test.json, run.tar.gz
# SECONDS  wall clock of warm start and training; evaluation and curves take about two minutes more
# SAMPLES  environment: readings a question in the evaluation (default 4)
# The packages of pyproject.toml must be importable; the package itself need not be installed.
set -euo pipefail
model=$(realpath "$1") corpus=$(realpath "$2") out=$3 seconds=$4
shift 4
mkdir -p "$out"
out=$(realpath "$out")
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
python=${PYTHON:-python3}
run=$PWD/multirun/smollm2/$(date +%Y-%m-%d_%H-%M-%S)/0
poimen() { "$python" -c 'from poimen_exp.cli import main; main()' "$@"; }
clock() { echo "== $1: ${SECONDS} s since the start"; }

SECONDS=0
status=0
timeout --signal=INT --kill-after=60 "$seconds" "$python" -m poimen_exp +experiment=smollm2 tracking=none \
  "corpus.path=$corpus" "actor_rollout_ref.model.path=$model" "hydra.run.dir=$run" "$@" || status=$?
clock "training ended with $status"
# 124 and 130: the time was over; its adapter is then one of its checkpoints (adapter.weights). Other failures end here.
if [[ $status -eq 124 || $status -eq 130 || $status -eq 137 ]]; then
  last=$(find "$run/checkpoints" -path '*/global_step_*/manifest.json' | sed 's|.*global_step_||; s|/.*||' | sort -n | tail -1)
  if [[ ${last:-0} -eq 0 ]]; then
    echo "time over before the first checkpoint of a step: give it more than $seconds s" >&2
    exit 1
  fi
  echo "time over: going back to the last checkpoint, step $last"
  cp "$run/metrics.jsonl" "$out/metrics.jsonl" # resuming drops the steps after the last checkpoint
  poimen resume "$run" "trainer.total_training_steps=$last"
elif [[ $status -ne 0 ]]; then
  exit "$status"
else
  cp "$run/metrics.jsonl" "$out/metrics.jsonl"
fi
clock "adapter written"

"$python" - "$out" <<'PY'
import sys
from pathlib import Path

from poimen_exp.evaluation.curves import write_curves

out = Path(sys.argv[1])
write_curves(out, out / "curves.png", out / "curves.md")
PY
clock "curves drawn"
poimen eval "$run" --split test --samples "${SAMPLES:-4}" | tee "$out/eval-test.txt"
cp "$run/evaluation/test.json" "$out/test.json"
clock "evaluated"
tar -C "$run" -czf "$out/run.tar.gz" --exclude=checkpoints --exclude='*.safetensors' .
