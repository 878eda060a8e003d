#!/bin/sh
# Compiles and runs the first C++ block of README.md against the library of a build folder.
#   readme_example.sh SOURCE_FOLDER BUILD_FOLDER CXX [FLAGS]
set -eu
source=$1
build=$2
cxx=$3
shift 3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
awk '/^```cpp$/ && !done {on = 1; next} /^```$/ && on {on = 0; done = 1} on' "$source/README.md" \
  >"$work/example.cpp"
[ -s "$work/example.cpp" ] || { echo "README.md has no C++ block"; exit 1; }
"$cxx" -std=c++20 "$@" -I"$source/include" -I"$build/include" "$work/example.cpp" \
  -o "$work/example" -L"$build/src" -lfusedmoe -Wl,-rpath,"$build/src"
"$work/example"
