#!/bin/sh
# Compiles and runs the C++ blocks of docs/guide.md against the library of a build folder, each in
# a scope of its own behind guide_prelude.inc.
#   guide_blocks.sh SOURCE_FOLDER BUILD_FOLDER CXX
set -eu
source=$1
build=$2
cxx=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{
  cat "$source/tests/docs/guide_prelude.inc"
  echo "int main() {"
  # #line keeps the page's own lines in messages of the compiler.
  awk -v page="docs/guide.md" '
    /^```cpp$/ {on = 1; ++blocks; printf "{\n#line %d \"%s\"\n", NR + 1, page; next}
    /^```$/ && on {on = 0; print "}"}
    on
    END {if (blocks < 3) exit 1}' "$source/docs/guide.md"
  echo '#line 1 "end"'
  echo 'std::printf("%g ", output_data[0]); return output_data[0] > 0 && my_pool > 0 ? 0 : 1; }'
} >"$work/guide.cpp" || { echo "docs/guide.md has too few C++ blocks"; exit 1; }
"$cxx" -std=c++20 -I"$source/include" -I"$build/include" "$work/guide.cpp" -o "$work/guide" \
  -L"$build/src" -lfusedmoe -Wl,-rpath,"$build/src"
"$work/guide"
