#!/usr/bin/env bash
# Builds the release libraries and installs them with their packaging files.
#
#   PREFIX=/usr/local DESTDIR= packaging/install.sh
#
# The shared object is linked here, from the archive: rustc passes an anonymous version script of its
# own for a cdylib, and a second one is ignored or refused, so symbol versions need a link of their own.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/.."

: "${PREFIX:=/usr/local}" "${DESTDIR:=}" "${CARGO:=cargo}" "${CC:=cc}"
case $PREFIX in
/*) ;;
*) echo "install: PREFIX must be an absolute path, and is '$PREFIX'" >&2; exit 2 ;;
esac

# What a program that links libep.a links as well. `rustc --print native-static-libs` names these and
# -lgcc_s -lc, which every compiler driver adds itself; naming -lgcc_s would break `cc -static`.
# tests/install/run.sh compares this line with what rustc prints.
native_libs="-lutil -lrt -lpthread -lm -ldl"

workspace_value() {
    sed -n "/^\[workspace.package\]/,/^\[/s/^$1 = \"\(.*\)\"/\1/p" Cargo.toml
}
version=$(workspace_value version)
url=$(workspace_value repository)
major=${version%%.*}

"$CARGO" build --release --locked -p ep -p ep-cli
built=${CARGO_TARGET_DIR:-target}/release

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$CC" -shared -o "$work/libep.so" \
    -Wl,--whole-archive "$built/libep.a" -Wl,--no-whole-archive \
    -Wl,--version-script=packaging/libep.map -Wl,-soname,"libep.so.$major" \
    -Wl,--gc-sections -Wl,--strip-debug -Wl,-z,defs -Wl,-z,relro,-z,now \
    -lgcc_s $native_libs

# The archive as one object that shows ep_* only, so that it can meet another Rust archive in one
# program. Grouped sections are made plain first: their signatures would become local names. The
# bitcode that rustc keeps beside std's machine code goes: joined, it is none, and plugins trip over it.
keep=()
while read -r symbol; do keep+=(-u "$symbol"); done < <(
    nm --defined-only -g "$built/libep.a" 2>/dev/null | awk '$3 ~ /^ep_/ { print $3 }' | sort -u)
if [ ${#keep[@]} -eq 0 ]; then
    echo "install: $built/libep.a defines no ep_ function" >&2
    exit 1
fi
ld -r --gc-sections --force-group-allocation "${keep[@]}" -o "$work/whole.o" "$built/libep.a"
objcopy --strip-debug --remove-section=.llvmbc --remove-section=.llvmcmd \
    --wildcard --keep-global-symbol='ep_*' "$work/whole.o" "$work/ep.o"
ar rcsD "$work/libep.a" "$work/ep.o"

fill() {
    sed -e "s|@VERSION@|$version|g" -e "s|@MAJOR@|$major|g" -e "s|@URL@|$url|g" \
        -e "s|@NATIVE_LIBS@|$native_libs|g" -e "s|@NATIVE_LIBS_CMAKE@|${native_libs// /;}|g" "$1"
}
for template in ep.pc ep-config.cmake ep-config-version.cmake; do
    fill "packaging/$template.in" >"$work/$template"
done

to=$DESTDIR$PREFIX
install -d "$to/bin" "$to/include" "$to/lib/pkgconfig" "$to/lib/cmake/ep"
install -m 755 "$built/ep" "$to/bin/ep"
install -m 644 include/ep.h "$to/include/ep.h"
install -m 755 "$work/libep.so" "$to/lib/libep.so.$version"
ln -sf "libep.so.$version" "$to/lib/libep.so.$major"
ln -sf "libep.so.$major" "$to/lib/libep.so"
install -m 644 "$work/libep.a" "$to/lib/libep.a"
install -m 644 "$work/ep.pc" "$to/lib/pkgconfig/ep.pc"
install -m 644 "$work/ep-config.cmake" "$work/ep-config-version.cmake" "$to/lib/cmake/ep/"

echo "Installed libep $version under $to"
if [ -z "$DESTDIR" ] && [ "$(id -u)" -eq 0 ]; then ldconfig 2>/dev/null || true; fi
