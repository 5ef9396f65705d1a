#!/usr/bin/env bash
# Runs every check, goes on after a failing one, and ends with a table of what ran.
#
#   scripts/test.sh [STEP...]     all steps but `hosts`, or only the named ones
#
# CI=true             a step that cannot run counts as failed: CI promises every step
# EP_TEST_SLOW=0      leaves out the slow tests (release build, `slow_*` and #[ignore])
# EP_STEP_TIMEOUT=s   seconds after which a step is killed and counts as failed (default 1800)
set -uo pipefail
cd "$(dirname "$0")/.."

cargo=${CARGO:-cargo}
logs=$PWD/target/test-logs
all_steps=(fmt clippy doc test kernels slow install bench)

title_of() {
    case $1 in
    fmt) echo "format (cargo fmt --check)" ;;
    clippy) echo "clippy, warnings are errors" ;;
    doc) echo "rustdoc, warnings are errors" ;;
    test) echo "cargo test --workspace" ;;
    kernels) echo "CUDA kernels: all architectures, budget" ;;
    slow) echo "slow tests, release build" ;;
    install) echo "make install, C and C++ consumers" ;;
    bench) echo "benchmark smoke run" ;;
    hosts) echo "ranks on several hosts (namespaces)" ;;
    *) return 1 ;;
    esac
}

# A step is a process of its own (`test.sh --step NAME`), so that it can be timed out.
# It leaves one line for the table in NAME.note; status 77 means that it could not run.
note() { printf '%s\n' "$*" >"$logs/$step.note"; }
skip() { note "$*"; exit 77; }
require() { command -v "$1" >/dev/null 2>&1 || skip "$1 is not installed"; }

# cargo_tests ARG...: runs `cargo test` and notes how many tests ran.
cargo_tests() {
    local status=0 out=$logs/$step.cargo
    "$cargo" test --locked --no-fail-fast "$@" 2>&1 | tee "$out" || status=${PIPESTATUS[0]}
    note "$(awk '/^test result:/ { p += $4; f += $6; i += $8 }
        END { printf "%d tests passed, %d failed, %d ignored", p, f, i }' "$out")"
    rm -f "$out"
    return "$status"
}

step_fmt() {
    "$cargo" fmt --version >/dev/null 2>&1 || skip "rustfmt is not installed"
    "$cargo" fmt --all --check
}

step_clippy() {
    "$cargo" clippy --version >/dev/null 2>&1 || skip "clippy is not installed"
    "$cargo" clippy --workspace --all-targets --locked -- -D warnings
}

step_doc() {
    # --lib: the command `ep` and the library `ep` would write the same page.
    RUSTDOCFLAGS="-D warnings" "$cargo" doc --workspace --lib --no-deps --locked
}

step_test() {
    cargo_tests --workspace
}

# Compiling needs no GPU: ep-cuda/build.rs has done it, this looks at the result.
step_kernels() {
    local out=$logs/$step.cargo
    "$cargo" test --locked -p ep-cuda --lib -- --nocapture images:: 2>&1 | tee "$out"
    local missing
    missing=$(sed -n 's/^skipped: //p' "$out" | head -n 1)
    [ -z "$missing" ] || skip "$missing"
    note "$(sed -n 's/^kernels: //p' "$out" | head -n 1); $(gpu_result)"
}

# What a GPU showed last, and whether that was this tree.
gpu_result() {
    local file=docs/perf/results/h200.txt seen now
    seen=$(sed -n 's/^tree \([0-9a-f]*\): .*/\1/p' "$file" | tail -n 1) now=$(scripts/gpu.sh tree)
    if [ "$seen" = "$now" ]; then
        echo "seen on a GPU: this tree"
    else
        echo "NOT SEEN ON A GPU: $file is of tree ${seen:-none}, this is $now"
    fi
}

# A slow test is named slow_* and is #[ignore]d, so that a plain `cargo test` stays quick.
step_slow() {
    [ "${EP_TEST_SLOW:-1}" = 1 ] || skip "EP_TEST_SLOW=${EP_TEST_SLOW}"
    EP_TEST_SLOW=1 cargo_tests --release --workspace --lib --bins --tests -- --ignored slow_
}

step_install() {
    local tool
    for tool in cc g++ pkg-config cmake nm readelf; do require "$tool"; done
    tests/install/run.sh
    note "$(cat target/install-test/note)"
}

step_bench() {
    "$cargo" build --release --locked --quiet -p ep-cli
    local ep=${CARGO_TARGET_DIR:-target}/release/ep
    "$ep" help 2>&1 | grep -qw bench || skip "the ep command has no bench yet"
    "$ep" bench --quick
}

# Hosts are network namespaces: needs root or user namespaces, iproute2, and a libfabric.
step_hosts() {
    local tool newer status=0
    for tool in ip tc nsenter unshare; do require "$tool"; done
    "$cargo" build --release --locked --quiet -p ep-cli
    local ep=${CARGO_TARGET_DIR:-target}/release/ep libraries=()
    if "$ep" bench fabric --quick --json >/dev/null; then libraries+=(""); fi
    newer=$(scripts/fabric.sh) && libraries+=("$newer")
    [ ${#libraries[@]} -gt 0 ] || skip "there is no libfabric"
    if [ "${CI:-}" = true ] && [ ${#libraries[@]} -lt 2 ]; then skip "two versions of libfabric are promised"; fi
    tests/hosts/run.sh "$ep" "${libraries[@]}" || status=$?
    [ $status != 77 ] || skip "neither user namespaces nor root: network namespaces cannot be made"
    [ $status = 0 ] || return $status
    note "$(cat target/hosts-test/note)"
}

# Whether a step has something to do in this tree; a step that has not is not promised.
applies() {
    case $1 in
    slow) grep -rqs --include='*.rs' --exclude-dir=target 'fn slow_' . ;;
    *) true ;;
    esac
}

rule() { printf '%s\n' "--------------------------------------------------------------------------------"; }

# run_step NAME: runs it and appends its row to the table.
run_step() {
    local name=$1 title status=0 verdict remark started elapsed
    title=$(title_of "$name")
    printf '\n== %s: %s\n' "$name" "$title"
    rm -f "$logs/$name.note"
    started=$EPOCHREALTIME
    timeout --kill-after=30 "${EP_STEP_TIMEOUT:-1800}" "$BASH" scripts/test.sh --step "$name" 2>&1 |
        tee "$logs/$name.log"
    status=${PIPESTATUS[0]}
    elapsed=$(awk -v a="$started" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }')
    remark=$(cat "$logs/$name.note" 2>/dev/null)
    case $status in
    0) verdict=passed ;;
    77) verdict=skipped ;;
    124 | 137) verdict=failed remark="killed after ${EP_STEP_TIMEOUT:-1800} s" ;;
    *) verdict=failed remark=${remark:-exit status $status} ;;
    esac
    if [ "$verdict" = skipped ] && [ "${CI:-}" = true ]; then
        verdict=failed remark="promised in CI, but could not run: $remark"
    fi
    case $verdict in
    passed) num_passed=$((num_passed + 1)) ;;
    failed) num_failed=$((num_failed + 1)) ;;
    skipped) num_skipped=$((num_skipped + 1)) ;;
    esac
    printf '== %s: %s in %s s\n' "$name" "$verdict" "$elapsed"
    printf '%-9s %8s s  %-36s %s\n' "$verdict" "$elapsed" "$title" "$remark" >>"$logs/summary.txt"
}

# Only a step's own process gets here with --step.
if [ "${1:-}" = --step ]; then
    step=$2
    set -e
    "step_$step"
    exit
fi

trap 'exit 130' INT TERM
num_passed=0 num_failed=0 num_skipped=0
mkdir -p "$logs"
: >"$logs/summary.txt"

steps=("$@")
if [ ${#steps[@]} -eq 0 ]; then steps=("${all_steps[@]}"); fi
for step in "${steps[@]}"; do
    title_of "$step" >/dev/null || { echo "unknown step '$step'; known: ${all_steps[*]}" >&2; exit 2; }
done
for step in "${steps[@]}"; do
    if applies "$step"; then
        run_step "$step"
    else
        printf '\n== %s: nothing to do in this tree\n' "$step"
    fi
done

{
    rule
    printf '%d passed, %d failed, %d skipped\n' "$num_passed" "$num_failed" "$num_skipped"
} >>"$logs/summary.txt"
printf '\n'
rule
cat "$logs/summary.txt"
[ "$num_failed" -eq 0 ]
