#!/usr/bin/env bash
# Makes sure that there is a libfabric 2 for the tests, beside the distribution's, and prints its path.
#
#   scripts/fabric.sh
#
# It comes from the registry's wheel of MPICH, pinned by version and hash: a library that needs libc alone.
# Nothing of it is linked or shipped; tests open it at run time.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '%s\n' "$*" >&2; }

home=$PWD/build/fabric
library=$home/libfabric.so.1
wheel='mpich==5.0.2 --hash=sha256:8fed465ebff269ea2ebac179a25de02671ddf8df476e0f115be089015015cfd4'
member=mpich-5.0.2.data/data/lib/mpich/libfabric.so.1

[ $# -eq 0 ] || { say "usage: scripts/fabric.sh"; exit 2; }

install() {
    if [ "$(uname -m)" != x86_64 ]; then
        say "fabric: the pinned wheel is for x86_64; set EP_LIBFABRIC to a libfabric 2 instead"
        exit 1
    fi
    if ! command -v python3 >/dev/null; then
        say "fabric: python3 is needed to install the wheel; install it"
        exit 1
    fi
    local work
    work=$(mktemp -d)
    # shellcheck disable=SC2064  # the directory of now
    trap "rm -rf '$work'" EXIT
    if ! python3 -m venv "$work/venv" >&2; then
        say "fabric: python3 -m venv failed; on Debian: sudo apt-get install python3-venv"
        exit 1
    fi
    say "fabric: installing libfabric 2.5.1 of ${wheel%% *}"
    printf '%s\n' "$wheel" >"$work/wheels.txt"
    "$work/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --only-binary :all: \
        --require-hashes --dest "$work" -r "$work/wheels.txt" >&2
    python3 -m zipfile -e "$work"/mpich-*.whl "$work/wheel"
    mkdir -p "$home"
    # Into place in one step: another job may look for it.
    cp "$work/wheel/$member" "$library.$$"
    mv "$library.$$" "$library"
}

[ -f "$library" ] || install
printf '%s\n' "$library"
