#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with a GPU, which needs no compiler for that.
#
#   scripts/gpu.sh build            here: what the other machine runs, into build/gpu
#   scripts/gpu.sh run              there, from the root of the same tree: check, then measure
#   scripts/gpu.sh run ARG...       the same with arguments for gpu_check, see ep-cuda/examples/gpu_check
#   scripts/gpu.sh conformance      there: tests/conformance on CUDA, through the C ABI
#   scripts/gpu.sh tree             the hash of this tree, which results carry
#   scripts/gpu.sh sanitize         there: the checks under compute-sanitizer
#
# EP_CUDA_ARCHS (build) is sm_90a unless set. `run` refuses programs that were built from another tree.
# Several ranks share one GPU through MPS, which `run` starts with directories of its own, and stops.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }
out=build/gpu

# Of what decides what the programs do, as it lies here. Needs no git.
tree_hash() {
    LC_ALL=C find kernels ep-cuda ep-core src tests/conformance Cargo.lock -type f ! -name '*.swp' -print0 |
        LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum | cut -c 1-16
}

build() {
    local tree
    tree=$(tree_hash)
    CUDA_HOME=$(scripts/cuda.sh)
    export CUDA_HOME EP_REQUIRE_KERNELS=1 EP_CUDA_ARCHS="${EP_CUDA_ARCHS:-sm_90a}" EP_GPU_TREE=$tree
    "${CARGO:-cargo}" build --release --locked -p ep-cuda --example gpu_check
    rm -rf "$out"
    mkdir -p "$out"
    strip -o "$out/gpu_check" "${CARGO_TARGET_DIR:-target}/release/examples/gpu_check"
    local conformance
    conformance=$("${CARGO:-cargo}" test --release --locked -p ep --test conformance --no-run 2>&1 | tee /dev/stderr |
        sed -n 's/^ *Executable .*(\(.*\))$/\1/p')
    strip -o "$out/conformance" "$conformance"
    printf '%s\n' "$tree" >"$out/tree"
    du -sh "$out" >&2
}

mps_dir=
stop_mps() {
    [ -n "$mps_dir" ] || return 0
    echo quit | nvidia-cuda-mps-control >/dev/null 2>&1 || true
    # Its last log lines say why a client was ended.
    grep -ihE 'error|fatal|exception' "$mps_dir"/log/*.log 2>/dev/null | tail -n 5 >&2 || true
    rm -rf "$mps_dir"
    mps_dir=
}

start_mps() {
    if ! command -v nvidia-cuda-mps-control >/dev/null; then
        say "gpu: no nvidia-cuda-mps-control: ranks on one GPU take turns, which is slow"
        return
    fi
    mps_dir=$(mktemp -d)
    mkdir "$mps_dir/pipe" "$mps_dir/log"
    export CUDA_MPS_PIPE_DIRECTORY=$mps_dir/pipe CUDA_MPS_LOG_DIRECTORY=$mps_dir/log
    trap stop_mps EXIT
    nvidia-cuda-mps-control -d
}

# try ARG...: runs gpu_check; a failure does not stop the rest.
try() {
    printf '\n== gpu_check %s\n' "$*"
    timeout 200 "$out/gpu_check" "$@" || status=1
}

# At most 16 ranks, which share the SMs of one GPU, with calls in two lanes. Under MPS a process has two hardware
# queues unless told otherwise, and streams that share one wait for each other.
conform() {
    export EP_CUDA_MAX_SMS=${EP_CUDA_MAX_SMS:-4} CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-4}
    timeout 500 "$out/conformance" cuda_ --ignored --test-threads=1 || status=1
}

# One rank alone, and two as threads. racecheck does not know bulk copies, so the kernels that have them on their
# way here, ep_dispatch, are left out.
sanitize() {
    export CUDA_DEVICE_MAX_CONNECTIONS=32
    local tool ranks small="cases=8 sms=4 tokens=64 hidden=256 timeout_ms=60000"
    for tool in memcheck synccheck "racecheck --kernel-name regex=ep_plan|ep_combine"; do
        for ranks in "ranks=1" "ranks=2 threads=1"; do
            printf '\n== %s %s\n' "$tool" "$ranks"
            # API errors are no findings: a kernel is looked for in one module after the other.
            # shellcheck disable=SC2086
            timeout 200 compute-sanitizer --tool $tool --report-api-errors no --target-processes all \
                --error-exitcode 1 "$out/gpu_check" what=check $ranks $small || status=1
        done
    done
}

# run COMMAND...: checks the tree, then runs a function under MPS.
run() {
    local have want
    status=0
    [ -x "$out/gpu_check" ] || { say "gpu: $out/gpu_check is missing; scripts/gpu.sh build makes it"; exit 1; }
    have=$(cat "$out/tree") want=$(tree_hash)
    if [ "$have" != "$want" ]; then
        say "gpu: $out was built from tree $have, this is $want; build again"
        exit 1
    fi
    start_mps
    "$@"
    printf '\ntree %s: %s\n' "$have" "$([ $status = 0 ] && echo passed || echo FAILED)"
    return $status
}

only() {
    timeout 560 "$out/gpu_check" "$@" || status=1
}

everything() {
    try what=check ranks=1 cases=12 seed=3
    try what=check ranks=3 cases=32 seed=2
    try what=graph ranks=4 sms=16
    try what=alone ranks=1 cases=16
    CUDA_DEVICE_MAX_CONNECTIONS=1 try what=alone ranks=1 cases=8 seed=2
    try what=litmus ranks=3 sms=8
    # Threads of a process share its hardware queues: a queue each, or a rank waits behind its peer.
    CUDA_DEVICE_MAX_CONNECTIONS=32 try what=check threads=1 ranks=3 cases=12 seed=4 tokens=512
    try what=faults ranks=3
    # A client that was killed can leave MPS in a bad state.
    stop_mps
    start_mps
    try ranks=4 sms=24
    try what=bench ranks=4 sms=12
    try what=bench ranks=2 sms=12
    try what=bench ranks=8 sms=16
}

case ${1:-} in
build) build ;;
tree) tree_hash ;;
run)
    shift
    if [ $# -gt 0 ]; then run only "$@"; else run everything; fi
    ;;
conformance) run conform ;;
sanitize) run sanitize ;;
*)
    say "usage: scripts/gpu.sh build | tree | run [ARG...] | conformance | sanitize"
    exit 2
    ;;
esac
