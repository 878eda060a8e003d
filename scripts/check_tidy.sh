#!/bin/sh
# clang-tidy over every unit of the library, the command and the examples, two at a time. Needs a
# configured build folder (default: build) for its compile commands.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build}
git ls-files 'src/*.cpp' 'tools/*.cpp' 'examples/*.cpp' |
  xargs -P "$(nproc)" -n 4 clang-tidy -p "$build" --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option 2>/dev/null
