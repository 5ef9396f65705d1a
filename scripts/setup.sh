#!/usr/bin/env bash
# Checks that this machine has what libep needs, and installs what is missing.
#
#   scripts/setup.sh SET...      SET: build demo bench lint test cuda
#
# Quiet when nothing is missing. Missing Debian packages are installed as root or through
# passwordless sudo; otherwise the one command to run is printed and the exit status is 1.
# EP_SKIP_SETUP=1 skips all of this: `make test` then skips the steps it has no tools for.
set -euo pipefail
cd "$(dirname "$0")/.."

[ "${EP_SKIP_SETUP:-0}" = 1 ] && exit 0

say() { printf '%s\n' "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

# Debian packages to install, filled by need.
packages=()

# need COMMAND PACKAGE...: asks for PACKAGE when COMMAND is not there.
need() {
    have "$1" || packages+=("${@:2}")
}

# need_library PATTERN PACKAGE...: asks for PACKAGE when the loader knows no such library.
need_library() {
    # Not grep -q: it would end ldconfig by a signal, which pipefail takes for "not there".
    /sbin/ldconfig -p 2>/dev/null | grep "$1" >/dev/null || packages+=("${@:2}")
}

# Python with what fills a virtual environment, which Debian's lacks.
need_venv() {
    need python3 python3 python3-venv
    ! have python3 || python3 -c 'import ensurepip' 2>/dev/null || packages+=(python3-venv)
}

# Never runs an installer from the network: says what to do and stops.
check_rust() {
    local wanted found
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
    if ! have cargo || ! have rustc; then
        say "libep needs Rust $wanted or newer, and cargo or rustc is not on PATH. Install it with:"
        say "    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"
        exit 1
    fi
    if ! found=$(rustc --version 2>/dev/null | awk '{print $2}') || [ -z "$found" ]; then
        say "rustc is on PATH but does not run. With rustup, install a toolchain with:"
        say "    rustup default stable"
        exit 1
    fi
    if [ "$(printf '%s\n%s\n' "$wanted" "${found%%-*}" | sort -V | head -n 1)" != "$wanted" ]; then
        say "libep needs Rust $wanted or newer; this is Rust $found. Update it with:"
        if have rustup; then
            say "    rustup update stable"
        else
            say "    curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh"
        fi
        exit 1
    fi
}

# rustup's minimal profile has neither rustfmt nor clippy.
check_rust_components() {
    if cargo fmt --version >/dev/null 2>&1 && cargo clippy --version >/dev/null 2>&1; then
        return
    fi
    if have rustup; then
        say "setup: adding rustfmt and clippy to the Rust toolchain"
        rustup component add rustfmt clippy >&2
    else
        say "rustfmt or clippy is missing, and Rust did not come from rustup. Install both, for example:"
        say "    sudo apt-get install rustfmt rust-clippy"
        exit 1
    fi
}

install_packages() {
    [ ${#packages[@]} -eq 0 ] && return
    if ! have apt-get; then
        say "missing, by Debian package name: ${packages[*]}"
        say "There is no apt-get here; install the equivalents and run this again."
        exit 1
    fi
    local as_root=()
    if [ "$(id -u)" -ne 0 ]; then
        if have sudo && sudo -n true 2>/dev/null; then
            as_root=(sudo -n)
        else
            say "Packages are missing and root is needed to install them. Run:"
            say "    sudo apt-get install -y ${packages[*]}"
            exit 1
        fi
    fi
    say "setup: installing ${packages[*]}"
    local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=300)
    local log
    log=$(mktemp)
    # Package lists may be absent (a container image) or stale; a failed refresh alone is no reason to stop.
    "${apt[@]}" update >"$log" 2>&1 || say "setup: apt-get update failed; trying with the lists at hand"
    if ! "${apt[@]}" install -y --no-install-recommends "${packages[@]}" >>"$log" 2>&1; then
        tail -n 30 "$log" >&2
        rm -f "$log"
        say "setup: apt-get could not install: ${packages[*]}"
        exit 1
    fi
    rm -f "$log"
}

[ $# -gt 0 ] || { say "usage: scripts/setup.sh SET...   SET: build demo bench lint test cuda"; exit 2; }

rust_components=0
cuda=0
fabric=0
for set in "$@"; do
    case $set in
    build | demo | bench)
        need cc gcc libc6-dev
        ;;
    lint)
        rust_components=1
        ;;
    test)
        rust_components=1
        need cc gcc libc6-dev
        need g++ g++
        need pkg-config pkg-config
        need cmake cmake
        need valgrind valgrind
        # The MPI peer that the benchmark compares with.
        need mpirun openmpi-bin
        need mpicc libopenmpi-dev
        fabric=1
        # libfabric 1.17 and its headers, and the libclang that the check of the bindings needs.
        need_library libfabric.so.1 libfabric1
        [ -f /usr/include/rdma/fabric.h ] || packages+=(libfabric-dev)
        need_library 'libclang-[0-9.]*so' libclang1-14
        need_venv
        ;;
    cuda)
        cuda=1
        need_venv
        need g++ g++
        ;;
    *)
        say "scripts/setup.sh: unknown set '$set'; known: build demo bench lint test cuda"
        exit 2
        ;;
    esac
done

check_rust
[ "$rust_components" = 1 ] && check_rust_components
install_packages
# The compiler of the CUDA kernels: that of the machine, or the registry's wheel.
[ "$cuda" = 0 ] || scripts/cuda.sh >/dev/null
# A libfabric 2 for the tests, beside the distribution's 1.17.
[ "$fabric" = 0 ] || scripts/fabric.sh >/dev/null
