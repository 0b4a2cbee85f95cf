#!/usr/bin/env bash
# Everything worth measuring on a machine with one GPU or TPU and no network, in under 8 minutes; one table last.
#
#   bash experiments/on_device.sh [work folder]
#
# Needs an environment with the extra `tpu` or `cuda13`; PYTHON names its interpreter.
set -uo pipefail
cd "$(dirname "$0")/.."
WORK=${1:-runs/on_device}
PYTHON=${PYTHON:-python3}
mkdir -p "$WORK"
SUMMARY=$WORK/summary.txt
: >"$SUMMARY"

# step NAME SECONDS command…: runs it, whatever happened before, and notes how it ended.
step() {
  local name=$1 limit=$2 began=$SECONDS
  shift 2
  echo "== $name"
  timeout "$limit" "$@" >"$WORK/$name.log" 2>&1
  local code=$?
  printf '%-16s exit %-4s %4d s\n' "$name" "$code" $((SECONDS - began)) | tee -a "$SUMMARY"
}

step kernel_tests 150 "$PYTHON" -m pytest -q tests/kernels_test.py
step bench_kernels 120 "$PYTHON" -m experiments.bench_kernels --config=configs/kernels/bench.py --workdir="$WORK/bench_kernels"
step qwen3_4b_sps 120 "$PYTHON" -m experiments.profile_sps --config=configs/qwen3_4b/sps.py --workdir="$WORK/qwen3_4b_sps"
step wide_drafter 60 "$PYTHON" -m experiments.profile_sps --config=configs/qwen3_4b/sps.py:wide --workdir="$WORK/wide_sps"
step train_tiny 60 "$PYTHON" -m experiments.bench_training --config=configs/tiny/training_speed.py --workdir="$WORK/train_tiny"
echo
cat "$WORK"/*/*.md 2>/dev/null
echo
cat "$SUMMARY"
