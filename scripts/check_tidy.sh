#!/bin/sh
# clang-tidy over every unit of the library, the command and the examples, two at a time, and of the
# Python binding where it has been built. Needs a configured build folder (default: build) for its
# compile commands.
set -eu
cd "$(dirname "$0")/.."
build=${1:-build}
tidy() {  # FOLDER, files on stdin
  xargs -P "$(nproc)" -n 4 clang-tidy -p "$1" --quiet --warnings-as-errors='*' \
    --extra-arg=-Wno-unknown-warning-option 2>/dev/null
}
git ls-files 'src/*.cpp' 'tools/*.cpp' 'examples/*.cpp' | tidy "$build"
for commands in "$build"/python/*/compile_commands.json; do
  [ -f "$commands" ] || continue
  git ls-files 'python/src/*.cpp' | tidy "$(dirname "$commands")"
  break
done
