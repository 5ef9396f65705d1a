#!/usr/bin/env bash
# Installs into a staging directory, moves the tree, and checks what a user of it relies on:
# the files, the name and symbols of the libraries, and C and C++ programs found through pkg-config
# and CMake, shared and static. The last line of the work goes to target/install-test/note.
set -euo pipefail
export LC_ALL=C
cd "$(dirname "$0")/../.."

root=$PWD
work=$root/target/install-test
rm -rf "$work"
mkdir -p "$work/empty"

say() { printf -- '-- %s\n' "$*"; }
fail() { printf 'install test: %s\n' "$*" >&2; exit 1; }
same() { diff -u "$1" "$2" >&2 || fail "$3"; }

version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
major=${version%%.*}

say "install into a staging directory, then move the tree"
make --no-print-directory install PREFIX=/opt/ep DESTDIR="$work/stage"
mv "$work/stage/opt/ep" "$work/moved"
[ -z "$(find "$work/stage" ! -type d)" ] || fail "files were installed outside of PREFIX"
prefix=$work/moved

sort >"$work/files.expected" <<LIST
bin/ep
include/ep.h
lib/cmake/ep/ep-config-version.cmake
lib/cmake/ep/ep-config.cmake
lib/libep.a
lib/libep.so
lib/libep.so.$major
lib/libep.so.$version
lib/pkgconfig/ep.pc
LIST
(cd "$prefix" && find . ! -type d | sed 's|^\./||' | sort) >"$work/files"
same "$work/files.expected" "$work/files" "the installed files differ from the list in tests/install/run.sh"
! grep -rIl "$work/stage" "$prefix" || fail "an installed file names the staging directory"

so=$prefix/lib/libep.so.$version
say "the shared object: name, symbols, versions"
for file in "$so" "${CARGO_TARGET_DIR:-target}/release/libep.so"; do
    readelf -d "$file" | grep -q "(SONAME).*\[libep.so.$major\]" || fail "the soname of $file is not libep.so.$major"
done
! readelf -d "$so" | grep -Eq '\((RPATH|RUNPATH|TEXTREL)\)' || fail "a search path or text relocation"
# The version nodes themselves are listed as absolute symbols.
nm -D --defined-only "$so" | awk '$2 != "A" { print $3 }' | sort >"$work/symbols"
same packaging/libep.symbols "$work/symbols" \
    "the exported symbols differ from packaging/libep.symbols; a released one may not go or change"
sed -n 's/^EP_API .*[ *]\(ep_[a-z0-9_]*\)(.*/\1/p' include/ep.h | sort >"$work/header.names"
sed 's/@@.*//' packaging/libep.symbols | sort >"$work/symbols.names"
same "$work/header.names" "$work/symbols.names" "ep.h and packaging/libep.symbols name different functions"

say "the archive: nothing but ep_* is visible"
nm -g --defined-only "$prefix/lib/libep.a" | awk 'NF == 3 { print $3 }' | sort >"$work/archive.names"
same "$work/header.names" "$work/archive.names" "libep.a does not define exactly the functions of ep.h"

say "the libraries that a static link needs are those that rustc names"
${CARGO:-cargo} rustc --release --locked --quiet -p ep --lib --crate-type staticlib -- \
    --print native-static-libs 2>&1 | sed -n 's/.*native-static-libs: //p' | tr ' ' '\n' |
    grep -vx -e '-lgcc_s' -e '-lc' | sort -u >"$work/libs.rustc"
sed -n 's/^Libs.private: //p' "$prefix/lib/pkgconfig/ep.pc" | tr ' ' '\n' | sort -u >"$work/libs.pc"
same "$work/libs.rustc" "$work/libs.pc" "native_libs in packaging/install.sh is out of date"

export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
[ "$(pkg-config --modversion ep)" = "$version" ] || fail "ep.pc has another version"
"$prefix/bin/ep" --version | grep -qF "$version" || fail "bin/ep --version does not print $version"

num_programs=0
# program NAME COMPILER ARG...: builds a consumer and runs it with no library path set.
program() {
    local name=$1
    shift
    "$@" -Wall -Wextra -pedantic -Werror -o "$work/$name" || fail "$name does not build: $*"
    (cd "$work/empty" && env -u LD_LIBRARY_PATH "$work/$name") || fail "$name fails"
    num_programs=$((num_programs + 1))
}

say "pkg-config: C and C++, shared and static"
read -ra cflags <<<"$(pkg-config --cflags ep)"
read -ra shared <<<"$(pkg-config --libs ep) -Wl,-rpath,$prefix/lib"
read -ra static <<<"$(pkg-config --variable=static_archive ep) $(pkg-config --static --libs-only-l ep)"
read -ra full_static <<<"$(pkg-config --static --libs ep)"
# The archive is named in full, so the -lep among the libraries has nothing left to give.
static=("${static[@]/#-lep/}")
program pc_c_shared cc -std=c99 tests/install/consumer.c "${cflags[@]}" "${shared[@]}"
program pc_c_static cc -std=c99 -DEP_STATIC tests/install/consumer.c "${cflags[@]}" ${static[@]}
if [ -e "$(cc -print-file-name=libc.a)" ]; then
    # The linker warns about name lookup in a static libc; it is right, and it is the user's choice.
    program pc_c_full_static cc -static -std=c11 tests/install/consumer.c "${cflags[@]}" "${full_static[@]}"
fi
if command -v valgrind >/dev/null 2>&1; then
    say "the shared and the static program are clean under valgrind"
    for name in pc_c_shared pc_c_static; do
        env -u LD_LIBRARY_PATH valgrind --quiet --error-exitcode=99 --leak-check=full --fair-sched=yes \
            --errors-for-leak-kinds=definite,possible --suppressions=tests/c/valgrind.supp "$work/$name" ||
            fail "$name is not clean under valgrind"
    done
fi
program pc_cxx_shared g++ -std=c++11 tests/install/consumer.cpp "${cflags[@]}" "${shared[@]}"
program pc_cxx_static g++ -std=c++17 tests/install/consumer.cpp "${cflags[@]}" ${static[@]}
readelf -d "$work/pc_c_shared" | grep -q "(NEEDED).*\[libep.so.$major\]" || fail "a program needs another name"
! readelf -d "$work/pc_c_static" | grep -q libep || fail "the static program needs the shared object"

for example in examples/c/*.c; do
    [ -e "$example" ] || continue
    say "$example builds against the installed library"
    cc -std=c11 -Wall -Wextra -Werror "$example" "${cflags[@]}" "${shared[@]}" -lm -lpthread \
        -o "$work/$(basename "$example" .c)" || fail "$example does not build"
done

say "CMake: C and C++, shared and static"
# logged WHAT COMMAND...: shows the output only when the command fails.
logged() {
    local what=$1
    shift
    "$@" >"$work/cmake.log" 2>&1 || { cat "$work/cmake.log" >&2; fail "$what"; }
}
logged "find_package(ep) fails" cmake -S tests/install -B "$work/cmake" -DCMAKE_PREFIX_PATH="$prefix"
logged "the CMake build fails" cmake --build "$work/cmake"
logged "a program built by CMake fails" \
    env -u LD_LIBRARY_PATH -C "$work/cmake" ctest --no-tests=error --output-on-failure
num_programs=$((num_programs + 4))
if cmake -S tests/install -B "$work/cmake-newer" -DCMAKE_PREFIX_PATH="$prefix" \
    -DEP_TEST_WANTED=$((major + 1)) >/dev/null 2>&1; then
    fail "find_package accepts a request for version $((major + 1))"
fi

echo "$num_programs programs; $(wc -l <"$work/symbols") symbols, all versioned" >"$work/note"
say "$(cat "$work/note")"
