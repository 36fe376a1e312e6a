#!/usr/bin/env bash
# Measure everything that needs a CUDA GPU, in order of worth, within half an hour:
#
#   examples/gpu_node.sh FOLDER              on a GPU
#   examples/gpu_node.sh --preset cpu FOLDER the same steps, tiny and on a CPU: tries the script
#   --only NAME,...  these steps; --limit S: none longer than S seconds; --list: their names, limits and commands
#   PYTHON=...       another Python than the one that `make setup` made
#
# Each step has a time limit of its own, and writes FOLDER/STEP.log and its results below FOLDER/STEP as they come; a line
# of FOLDER/summary.txt says how it ended.  A step that fails or is cut short costs only itself; Ctrl-C ends the run and
# keeps what is there.  A step that ended well is not repeated when the script is started again with the same FOLDER.
# Exit code: 0 if every step ended well, 1 if not, 2 for bad usage, 130 after Ctrl-C.
set -uo pipefail

usage() {
    echo "usage: examples/gpu_node.sh [--preset gpu|cpu] [--only STEP,...] [--limit S] [--list] FOLDER" >&2
    exit 2
}

preset=gpu only='' list='' folder='' most=100000
while [ $# -gt 0 ]; do
    case $1 in
    --preset) [ $# -gt 1 ] || usage; preset=$2; shift ;;
    --only) [ $# -gt 1 ] || usage; only=$2; shift ;;
    --limit) [ $# -gt 1 ] || usage; most=$2; shift ;;
    --list) list=yes ;;
    -*) usage ;;
    *) [ -z "$folder" ] || usage; folder=$1 ;;
    esac
    shift
done
[ -n "$folder$list" ] || usage
python=${PYTHON:-.venv/main/bin/python}
case $python in /*) ;; */*) python=$(cd "$(dirname "$0")/.." && pwd)/$python ;; esac
[ -z "$list" ] || folder=${folder:-.}
case $folder in /*) ;; *) folder=$PWD/$folder ;; esac
cd "$(dirname "$0")/.." || exit 2
[ -n "$list" ] || command -v "$python" >/dev/null || {
    echo "gpu_node.sh: $python is not there: run make setup, or set PYTHON" >&2
    exit 2
}

# What differs between the presets: the device, and the sizes of each step.
case $preset in
gpu)
    device=cuda full=() batch=(--batch-size 30 --num-batches 20 --rounds 3) frames=(--sort-utterance true --max-frames 10000)
    first=torchaudio,reference,fused cases=() largest=(--memory-limit 60GB) vocabularies=500,1000,2000,4096
    profile=(--sort-utterance true --max-frames 30000) inference=() tests='on_the_gpu or side_stream or captured'
    ;;
cpu)
    device=cpu full=(--preset quick --num-batches 1) batch=(--batch-size 2 --rounds 1 --max-seconds 0.2)
    frames=(--sort-utterance true --max-frames 500 --rounds 1 --max-seconds 0.2) first=torchaudio,fused
    cases=(--cases many-targets) largest=(--preset quick --memory-limit 200MB --largest-cap 4) vocabularies=10,20
    profile=(--preset quick) inference=(--preset quick) tests='half_precision'
    ;;
*) usage ;;
esac
exact=(--only "$first") rows=()
[ "$preset" = gpu ] || rows=(--only "$first")

stopped='' child=''
trap 'stopped=yes; [ -z "$child" ] || kill "$child" 2>/dev/null' INT TERM

# step NAME SECONDS COMMAND...: run it, for SECONDS at most.
step() {
    local name=$1 limit=$2 began=$SECONDS code
    shift 2
    [ "$limit" -lt "$most" ] || limit=$most
    case ,$only, in ,, | *,"$name",*) ;; *) return ;; esac
    if [ -n "$list" ]; then
        printf '%-20s %4s s   %s\n' "$name" "$limit" "$*"
        return
    fi
    if [ -n "$stopped" ] || grep -qs "^$name 0 " "$folder/summary.txt"; then return; fi
    echo "== $name, for $limit s at most" >&2
    timeout --kill-after=20 "$limit" "$@" </dev/null >"$folder/$name.log" 2>&1 &
    child=$!
    wait "$child"
    code=$?
    if [ -n "$stopped" ]; then wait "$child"; fi
    child=''
    echo "$name $code $((SECONDS - began))s" >>"$folder/summary.txt"
    echo "   $name: exit code $code after $((SECONDS - began)) s; $folder/$name.log ends: $(tail -n 1 "$folder/$name.log")" >&2
}

[ -n "$list" ] || steps=$(bash examples/gpu_node.sh --preset "$preset" --list | cut -d' ' -f1)
for name in ${only//,/ }; do
    [ -n "$list" ] || grep -qx -- "$name" <<<"$steps" || {
        echo "gpu_node.sh: --only: no step is named '$name'; --list names them" >&2
        exit 2
    }
done
[ -n "$list" ] || { mkdir -p "$folder" || exit 2; }
bench=("$python" benchmark_all.py --device "$device" "${full[@]}" --quiet)

# 1. What is here, and whether what needs no build is right.
step machine 60 sh -c "nvidia-smi -q; '$python' -m torch.utils.collect_env; '$python' rnnt-bench list --device $device"
step first 180 "${bench[@]}" "${exact[@]}" --passes correctness --log-dir "$folder/first"
step fused-tests 180 "$python" -m pytest -q tests/test_fused_triton.py -k "$tests"
# 2. Rows that are compiled, and beside that the corner cases of those that need no build; then those of all.
builds() {
    for extension in warp_rnnt optimized_transducer fast_rnnt; do
        step "$extension" 240 "$python" -m rnnt_bench.setup.extensions "$extension" --device "$device"
    done
}
if [ -n "$list" ]; then builds; else builds & fi
step corners-first 180 "$python" rnnt-bench check "${exact[@]}" --device "$device" "${cases[@]}" --output "$folder/corners-first" \
    --log-dir "$folder/corners-first"
wait
step corners 300 "$python" rnnt-bench check "${rows[@]}" --device "$device" "${cases[@]}" --output "$folder/corners" \
    --log-dir "$folder/corners"
# 3. Time and memory.
step batch-30 300 "${bench[@]}" "${rows[@]}" "${batch[@]}" --passes correctness,timing,memory --log-dir "$folder/batch-30"
step max-frames 240 "${bench[@]}" "${rows[@]}" "${frames[@]}" --passes correctness,timing,memory --log-dir "$folder/max-frames"
step bfloat16 180 "${bench[@]}" "${rows[@]}" "${batch[@]}" --dtype bfloat16 --log-dir "$folder/bfloat16" \
    --passes correctness,timing,memory
step kernels 120 "${bench[@]}" --only fused "${batch[@]}" --passes trace --log-dir "$folder/kernels"
# 4. What fits, and how the vocabulary changes it.
step largest 240 "$python" rnnt-bench largest --device "$device" --quiet "${exact[@]}" "${largest[@]}" \
    --log-dir "$folder/largest"
step vocabularies 180 "${bench[@]}" "${rows[@]}" --sweep "vocab-size=$vocabularies" --log-dir "$folder/vocabularies"
# 5. A whole training step, and inference.
step profile 120 "$python" rnnt-bench profile --device "$device" "${profile[@]}" --quiet --log-dir "$folder/profile"
step inference 120 "$python" rnnt-bench inference --device "$device" "${inference[@]}" --quiet --log-dir "$folder/inference"
# 6. One page of it all.
step report 120 "$python" rnnt-bench report "$folder" --output "$folder/report.html"

[ -z "$list" ] || exit 0
cat "$folder/summary.txt" >&2
[ -z "$stopped" ] || exit 130
# the last line of each step counts
awk '{ code[$1] = $2 } END { for (name in code) if (code[name] != 0) exit 1 }' "$folder/summary.txt"
