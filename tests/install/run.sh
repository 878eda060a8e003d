#!/usr/bin/env bash
# run.sh install | find_package | pkg_config | c | add_subdirectory
# `install` installs the build into a prefix that is then moved, as a package would be; the others
# build a small program against it and run it. CTest sets the variables: see CMakeLists.txt.
set -euo pipefail

kind=${1:?usage: run.sh install|find_package|pkg_config|c|add_subdirectory}
here=$(cd "$(dirname "$0")" && pwd)
prefix="$WORK_DIR/prefix"
out="$WORK_DIR/$kind"
trap 'echo "install.$kind: FAILED at line $LINENO: $BASH_COMMAND" >&2' ERR
mkdir -p "$WORK_DIR"

# Compiler flags of the installed pkg-config file.
flags() {
  local file
  file=$(find "$prefix" -name fusedmoe.pc)
  PKG_CONFIG_PATH=$(dirname "$file") pkg-config --cflags --libs fusedmoe
}

# Runs a program with the installed library; a static one needs no path.
run_installed() {
  local library
  library=$(find "$prefix" -name 'libfusedmoe.*' | head -n 1)
  LD_LIBRARY_PATH=$(dirname "$library") "$1"
}

case "$kind" in
  install)
    rm -rf "$prefix" "$WORK_DIR/staging"
    "$CMAKE" --install "$BUILD_DIR" --config "$CONFIG" --prefix "$WORK_DIR/staging" >/dev/null
    mv "$WORK_DIR/staging" "$prefix"
    for header in "$SOURCE_DIR"/include/fusedmoe/*.h; do
      test -f "$prefix/include/fusedmoe/$(basename "$header")"
    done
    test -f "$prefix/include/fusedmoe/version.h"
    if [[ -x "$prefix/bin/fusedmoe" ]]; then
      "$prefix/bin/fusedmoe" --help >/dev/null
    fi
    ;;
  find_package)
    rm -rf "$out"
    "$CMAKE" -S "$here/find_package" -B "$out" -G "$GENERATOR" -DCMAKE_PREFIX_PATH="$prefix" \
      -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" >/dev/null
    "$CMAKE" --build "$out" --parallel 2
    "$out/consumer"
    "$out/consumer_c"
    ;;
  pkg_config)
    mkdir -p "$out"
    # shellcheck disable=SC2046 # the flags are words
    "$CXX" -std=c++20 -Wall -Wextra -Werror "$here/consumer.cpp" $(flags) -o "$out/consumer"
    run_installed "$out/consumer"
    ;;
  c)
    mkdir -p "$out"
    # shellcheck disable=SC2046 # the flags are words
    "$CC" -std=c99 -pedantic -Wall -Wextra -Werror "$here/consumer.c" $(flags) -o "$out/consumer"
    run_installed "$out/consumer"
    ;;
  add_subdirectory)
    # The library is built again here. With ccache it comes from the cache, as the flags are those
    # of a plain build; without, compile time counts more than speed.
    type=Debug
    launcher=()
    if [[ -n "$LAUNCHER" ]]; then
      type=${CONFIG:-Release}
      launcher=(-DCMAKE_C_COMPILER_LAUNCHER="$LAUNCHER" -DCMAKE_CXX_COMPILER_LAUNCHER="$LAUNCHER")
    fi
    "$CMAKE" -S "$here/add_subdirectory" -B "$out" -G "$GENERATOR" -DFUSEDMOE_DIR="$SOURCE_DIR" \
      -DCMAKE_BUILD_TYPE="$type" -DCMAKE_C_COMPILER="$CC" -DCMAKE_CXX_COMPILER="$CXX" \
      "${launcher[@]}" >/dev/null
    "$CMAKE" --build "$out" --target consumer --parallel 2
    "$out/consumer"
    ;;
  *)
    echo "install: unknown kind '$kind'" >&2
    exit 2
    ;;
esac
echo "install.$kind: passed"
