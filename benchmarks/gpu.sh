#!/usr/bin/env bash
# One command for a machine with one NVIDIA GPU and no network: build, check, time, write results.
#
#   bash benchmarks/gpu.sh [--only PART,...] [--again] [--list] [OUT]
#
#   OUT      where results go (default benchmarks/results/<gpu>)
#   --only   these parts; a part may be named by its beginning: --only build,layer
#   --again  also parts that have passed with these very files; without it they are left out, so that a run that was cut short
#            goes on where it ended
#   --list   the parts, and how long each may take
#
# Needs, already installed: torch >= 2.11 with CUDA, numpy, typer, rich, pytest, hypothesis, transformers, nvcc, cmake,
# ninja, pybind11 (Triton, matplotlib, MPICH and torchtitan are left out where absent). Installs and downloads nothing.
#
# Every part has its own limit and the whole has one (DEADLINE_S, 540 s): what there is no time for is said so and runs
# the next time. A failing part does not stop the later ones, but for build, without which nothing else means anything; the
# exit code is 1 if any failed or did not run. A part of tests in which none has passed, all skipped, has failed.
# PYTHON=... chooses the interpreter.
#
# Until benchmarks/results holds a run, nothing here has been seen on a GPU.
set -uo pipefail
command_line="bash benchmarks/gpu.sh $*"
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
began=$SECONDS
deadline_s=${DEADLINE_S:-540}

only="" again="" list="" out=""
while [ $# -gt 0 ]; do
  case $1 in
    --only) [ $# -gt 1 ] || { echo "gpu.sh: --only needs parts" >&2; exit 2; }; only=$2; shift ;;
    --again) again=yes ;;
    --list) list=yes ;;
    -*) echo "gpu.sh: unknown option $1" >&2; exit 2 ;;
    *) out=$1 ;;
  esac
  shift
done

# --- the parts: name, seconds it may take, command; @OUT@ is the folder of the results ---
names=() limits=() commands=()
part() {
  names+=("$1") limits+=("$2")
  shift 2
  commands+=("$(printf '%q ' "$@")")
}
bench_layer() { # name, seconds, then flags
  local name=$1 limit=$2
  shift 2
  part "layer-$name" "$limit" "$python" -m moe_comm bench layer --device cuda --ranks 1 --dtype bfloat16 --iterations 5 \
    --no-memory "$@" --json "@OUT@/layer-$name.json"
}
pytest=("$python" -m pytest -p no:cacheprovider -q)

part build 240 env MOE_COMM_CUDA=on "$python" setup.py build_ext --inplace
part doctor 60 "$python" -m moe_comm doctor --json
part contract 120 "${pytest[@]}" tests/gpu -m "not slow" --ignore-glob "*/test_triton_*"
part p2p-contract 120 env TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 "${pytest[@]}" tests/dispatch/test_contract.py \
  --device cuda -k peer_to_peer
# Triton compiles each kernel once for every dtype and width that it meets.
part triton 180 "${pytest[@]}" tests/gpu/test_triton_on_gpu.py tests/gpu/test_triton_around.py
part bench-p2p 90 "$python" benchmarks/gpu_bench.py dispatch --json "@OUT@/p2p-dispatch.json"
part bench-few 45 "$python" benchmarks/gpu_bench.py few --json "@OUT@/p2p-few.json"
part virtual 60 env CUDA_MODULE_LOADING=EAGER "${pytest[@]}" tests/gpu_host/test_virtual_ranks.py
part bench-virtual 45 env CUDA_MODULE_LOADING=EAGER "$python" benchmarks/gpu_bench.py virtual --json "@OUT@/p2p-virtual.json"
part bench-host 45 "$python" benchmarks/gpu_bench.py host --json "@OUT@/host.json"
bench_layer mixtral-8x7b 60 --tokens 4096 --hidden 4096 --ffn 14336 --experts 8 --top-k 2
bench_layer qwen3-30b-a3b 60 --tokens 4096 --hidden 2048 --ffn 768 --experts 128 --top-k 8
bench_layer deepseek-v3 75 --tokens 4096 --hidden 7168 --ffn 2048 --experts 256 --top-k 8
part check-grads 45 "$python" -m moe_comm check-grads --ranks 1 --device cuda
part contract-ranks 120 "${pytest[@]}" tests/dispatch/test_contract.py --device cuda \
  -k "not shared_memory and not peer_to_peer"
part dispatch 30 "$python" -m moe_comm bench dispatch --device cuda --ranks 1 --dtype bfloat16 --json "@OUT@/dispatch.json"

wanted() { # is the part called $1 asked for?
  local each
  [ -n "$only" ] || return 0
  for each in ${only//,/ }; do
    case $1 in "$each"*) return 0 ;; esac
  done
  return 1
}
for each in ${only//,/ }; do
  found=""
  for name in "${names[@]}"; do case $name in "$each"*) found=yes ;; esac; done
  [ -n "$found" ] || { echo "gpu.sh: no part begins with '$each'; there are: ${names[*]}" >&2; exit 2; }
done
if [ -n "$list" ]; then
  for i in "${!names[@]}"; do
    if wanted "${names[i]}"; then echo "${names[i]} (${limits[i]} s): ${commands[i]}"; fi
  done
  exit 0
fi

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name())' 2> /dev/null) \
  || { echo "gpu.sh: torch sees no CUDA device" >&2; exit 2; }
slug=$(tr '[:upper:] ' '[:lower:]-' <<< "$gpu" | tr -cd 'a-z0-9-')
out=${out:-benchmarks/results/$slug}
mkdir -p "$out/parts" || exit 2
started=$(date -u +%Y-%m-%dT%H:%M:%SZ)
commit=$(git rev-parse HEAD 2> /dev/null || echo unknown)
[ -z "$(git status --porcelain --untracked-files=no 2> /dev/null)" ] || commit="$commit (with changes)"
# What a part has passed with: the files, since a commit says nothing of changes, or is not there at all.
tree=$(find csrc moe_comm tests benchmarks setup.py CMakeLists.txt -type f \
  \( -name '*.py' -o -name '*.sh' -o -name '*.txt' -o -name '*.h' -o -name '*.c*' -o -name '*.inc' \) \
  -not -path 'benchmarks/results/*' | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-12)

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export CUBLAS_WORKSPACE_CONFIG=:4096:8   # torch's deterministic mode, which the contract suite uses, asks for it
export HF_HUB_OFFLINE=1
failed=0 unbuilt=""

# What became of a part is one file, with a line each for the result, the tree, the date and the seconds.
line_of() { sed -n "$2p" "$out/parts/$1" 2> /dev/null; }
for i in "${!names[@]}"; do
  name=${names[i]} limit=${limits[i]}
  wanted "$name" || continue
  if [ -n "$unbuilt" ]; then
    echo "== $name: not run, since the build failed"
    continue
  fi
  if [ -z "$again" ] && [ "$(line_of "$name" 1)" = passed ] && [ "$(line_of "$name" 2)" = "$tree" ]; then
    # The native core of the last run may be gone while its results are still there.
    if [ "$name" != build ] || "$python" -c 'import moe_comm._C' 2> /dev/null; then
      echo "== $name: has passed with these files"
      continue
    fi
  fi
  left=$((deadline_s - (SECONDS - began)))
  if [ "$left" -lt 10 ]; then
    echo "== $name: no time left; run the same command again"
    failed=1
    continue
  fi
  [ "$limit" -lt "$left" ] || limit=$left
  command=${commands[i]//@OUT@/$(printf '%q' "$out")}
  echo "== $name (at most $limit s): $command"
  at=$SECONDS
  if timeout -k 5 "$limit" bash -c "$command" > "$out/$name.log" 2>&1; then
    result=passed
    if [[ $command == *" -m pytest "* ]] && ! grep -Eq '(^|[^0-9])[1-9][0-9]* passed' "$out/$name.log"; then
      result="failed (no test passed)"
      failed=1
    fi
  else
    code=$?
    result="failed ($code)"
    [ "$code" -ne 124 ] && [ "$code" -ne 137 ] || result="took longer than $limit s"
    failed=1
    [ "$name" != build ] || unbuilt=yes
    tail -n 40 "$out/$name.log"
  fi
  printf '%s\n%s\n%s\n%s\n' "$result" "$tree" "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$((SECONDS - at))" > "$out/parts/$name"
  tail -n 3 "$out/$name.log"
done

{
  echo "# $gpu"
  echo
  echo "- date: $started"
  echo "- commit: $commit"
  echo "- command: \`$command_line\`"
  echo "- torch: $("$python" -c 'import torch; print(torch.__version__, "CUDA", torch.version.cuda)')"
  echo "- driver: $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null | head -n 1)"
  echo "- nvcc: $(nvcc --version 2> /dev/null | sed -n 's/.*release \([0-9.]*\).*/\1/p')"
  echo
  echo "| part | result | seconds |"
  echo "|---|---|---:|"
  for name in "${names[@]}"; do
    result=$(line_of "$name" 1)
    if [ -n "$result" ] && [ "$(line_of "$name" 2)" != "$tree" ]; then
      result="$result, with other files, $(line_of "$name" 3)"
    fi
    echo "| $name | ${result:-not run} | $(line_of "$name" 4) |"
  done
  "$python" benchmarks/gpu_table.py "$out" --date "$started" --commit "$commit" --command "$command_line"
} > "$out/README.md"
echo "== $out/README.md"
cat "$out/README.md"
exit "$failed"
