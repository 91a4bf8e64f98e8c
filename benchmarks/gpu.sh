#!/usr/bin/env bash
# One command for a machine with one NVIDIA GPU and no network: build, check, time, write results.
#
#   bash benchmarks/gpu.sh [OUT]          OUT: where results go (default benchmarks/results/<gpu>)
#
# Needs, already installed: torch >= 2.11 with CUDA, numpy, typer, rich, pytest, hypothesis, transformers, nvcc, cmake,
# ninja, pybind11 (MPICH and torchtitan are left out where absent). Installs nothing and downloads nothing.
#
# Steps: 1. builds the native core in place   2. the contract suite on CUDA tensors against the CPU oracle
#        3. the layer against Hugging Face's grouped_mm   4. JSON and a table, with date, commit and command
# A failing step does not stop the later ones; the exit code is 1 if any failed. PYTHON=... chooses the interpreter.
#
# Until benchmarks/results holds a run, nothing here has been seen on a GPU.
set -uo pipefail
command_line="bash benchmarks/gpu.sh $*"
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name())' 2> /dev/null) \
  || { echo "gpu.sh: torch sees no CUDA device" >&2; exit 2; }
slug=$(tr '[:upper:] ' '[:lower:]-' <<< "$gpu" | tr -cd 'a-z0-9-')
out=${1:-benchmarks/results/$slug}
mkdir -p "$out" || exit 2
started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
commit=$(git rev-parse HEAD 2> /dev/null || echo unknown)
[ -z "$(git status --porcelain --untracked-files=no 2> /dev/null)" ] || commit="$commit (with changes)"

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8   # torch's deterministic mode, which the contract suite uses, asks for it
export HF_HUB_OFFLINE=1
failed=0
declare -A status
step() {
  local name=$1
  shift
  echo "== $name: $*"
  if "$@" > "$out/$name.log" 2>&1; then
    status["$name"]=passed
  else
    status["$name"]="failed ($?)"
    failed=1
    tail -n 40 "$out/$name.log"
  fi
  tail -n 3 "$out/$name.log"
}

step build env MOE_COMM_CUDA=on "$python" setup.py build_ext --inplace
step doctor "$python" -m moe_comm doctor --json
step contract "$python" -m pytest tests/gpu -p no:cacheprovider -q
step contract-ranks "$python" -m pytest tests/dispatch/test_contract.py --device cuda -p no:cacheprovider -q \
  -k "not shared_memory"
step check-grads "$python" -m moe_comm check-grads --ranks 1 --device cuda
for preset in comm compute; do
  for dtype in float32 bfloat16; do
    step "layer-$preset-$dtype" "$python" -m moe_comm bench layer --device cuda --ranks 1 --preset "$preset" \
      --dtype "$dtype" --json "$out/layer-$preset-$dtype.json"
  done
done
step dispatch "$python" -m moe_comm bench dispatch --device cuda --ranks 1 --dtype bfloat16 --json "$out/dispatch.json"

{
  echo "# $gpu"
  echo
  echo "- date: $started"
  echo "- commit: $commit"
  echo "- command: \`$command_line\`"
  echo "- torch: $("$python" -c 'import torch; print(torch.__version__, "CUDA", torch.version.cuda)')"
  echo "- nvcc: $(nvcc --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
  echo
  echo "| step | result |"
  echo "|---|---|"
  for name in build doctor contract contract-ranks check-grads layer-{comm,compute}-{float32,bfloat16} dispatch; do
    echo "| $name | ${status[$name]} |"
  done
  "$python" benchmarks/gpu_table.py "$out" --date "$started" --commit "$commit" --command "$command_line"
} > "$out/README.md"
echo "== $out/README.md"
cat "$out/README.md"
exit "$failed"
