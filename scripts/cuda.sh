#!/usr/bin/env bash
# Makes sure that there is an nvcc for ep-cuda/build.rs, and prints its CUDA_HOME.
#
#   scripts/cuda.sh
#
# A toolkit that EP_NVCC, CUDA_HOME or PATH names is taken as it is; otherwise the registry's wheel is
# installed under build/cuda: the compiler alone, without a driver, 100 MB to download, 270 MB on disk.
# Quick when it is there.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

venv=$PWD/build/cuda
# 13.0: its cubins run on every driver of CUDA 13, the first one included.
packages=('cuda-toolkit[nvcc,cccl]==13.0.*')

wheel_home() {
    local home
    for home in "$venv"/lib/python3*/site-packages/nvidia/cu13; do
        [ -x "$home/bin/nvcc" ] && { printf '%s\n' "$home"; return; }
    done
    return 1
}

machine_home() {
    local nvcc
    if [ -n "${EP_NVCC:-}" ] && [ -x "$EP_NVCC" ]; then
        nvcc=$EP_NVCC
    elif [ -n "${CUDA_HOME:-}" ] && [ -x "$CUDA_HOME/bin/nvcc" ]; then
        nvcc=$CUDA_HOME/bin/nvcc
    else
        nvcc=$(command -v nvcc) || return 1
    fi
    dirname "$(dirname "$(readlink -f "$nvcc")")"
}

install() {
    if ! command -v python3 >/dev/null; then
        say "cuda: python3 is needed to install the nvcc wheel; install it, or set CUDA_HOME"
        exit 1
    fi
    if [ ! -x "$venv/bin/pip" ] && ! python3 -m venv "$venv" >&2; then
        say "cuda: python3 -m venv failed; on Debian: sudo apt-get install python3-venv"
        exit 1
    fi
    say "cuda: installing $*"
    # One command for all: wheels that share the nvidia directory do not merge otherwise.
    "$venv/bin/pip" install --quiet --disable-pip-version-check "$@" >&2
}

[ $# -eq 0 ] || { say "usage: scripts/cuda.sh"; exit 2; }

if ! home=$(machine_home) && ! home=$(wheel_home); then
    install "${packages[@]}"
    home=$(wheel_home) || { say "cuda: the wheel has no nvcc where it is expected, under $venv"; exit 1; }
fi
printf '%s\n' "$home"
