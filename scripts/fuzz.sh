#!/bin/sh
# Runs each fuzz target for some seconds on a copy of its committed corpus.
#   scripts/fuzz.sh SECONDS [BUILD_FOLDER]
set -eu
cd "$(dirname "$0")/.."
seconds=$1
build=${2:-build-asan}
for target in "$build"/fuzz/fuzz_*; do
  [ -x "$target" ] && [ -f "$target" ] || continue
  name=$(basename "$target")
  corpus="$build/corpus/${name#fuzz_}"
  mkdir -p "$corpus"
  cp -r "fuzz/corpus/${name#fuzz_}/." "$corpus"
  echo "fuzz: $name for $seconds s"
  "$target" -max_total_time="$seconds" -rss_limit_mb=4096 -timeout=20 -print_final_stats=1 \
    -artifact_prefix="$build/" "$corpus" >"$build/$name.log" 2>&1 ||
    { tail -40 "$build/$name.log"; echo "fuzz: $name failed; its input is in $build/"; exit 1; }
  grep -E 'stat::number_of_executed_units' "$build/$name.log"
done
