#!/bin/sh
# Fails when clang-format would change a source file. With --fix it changes them.
set -eu
cd "$(dirname "$0")/.."
mode="--dry-run -Werror"
[ "${1:-}" = --fix ] && mode=-i
git ls-files '*.h' '*.cpp' '*.c' '*.inc' | xargs clang-format $mode
