#!/bin/sh
# What the object code of kernels for one instruction set must be, whatever the compiler made of it:
#   - no weak symbol: the linker may pick such a copy for units that run on any machine;
#   - no initialiser: it would run when the library is loaded, on any machine;
#   - no spill in the hot loops: the loops of gemm_avx2_fma_* with FMA touch neither the stack nor
#     memory other than to read inputs and weights.
#
#   object_code.sh CXX OBJECT...   checks those OBJECTs that are such kernels; first, that it finds
#                                  each fault in objects made by CXX for the purpose
set -u
export LC_ALL=C

# Prints what is wrong with object $1; prefix of its hot functions in $2.
faults() {
  nm -C "$1" | awk '$2 ~ /^[WVu]$/ || $1 ~ /^[wv]$/ { print "weak symbol: " $0 }'
  objdump -h "$1" | awk '$2 ~ /^\.(init_array|ctors)/ { print "initialiser: " $2 }'
  # A loop is what lies between a backward jump and its target; a hot one multiplies at least a
  # whole panel and has no other loop inside. Registers: %ymm or %zmm.
  objdump -d -C --no-show-raw-insn "$1" | awk -v prefix="$2" '
    function address(text) { sub(/^ *(0x)?/, "", text); sub(/[: ].*/, "", text); return text }
    function finish(   i, j, k, fma, hot, best) {
      if (name == "") return
      best = 0
      for (i = 1; i <= n; i++) {
        if (!(target[i] in at) || at[target[i]] > i) continue
        fma = 0; hot = 1
        for (j = at[target[i]]; j <= i; j++) {
          if (code[j] ~ /vfn?m(add|sub)[0-9]*ps.*%[yz]mm/) fma++
          if (j < i && target[j] in at && at[target[j]] <= j && at[target[j]] >= at[target[i]]) hot = 0
        }
        if (!hot || fma < 4) continue
        if (fma > best) best = fma
        for (j = at[target[i]]; j <= i; j++) {
          if (code[j] ~ /%rsp/ || (frame && code[j] ~ /\(%rbp/))
            print "stack in the loop of " name ": " code[j]
          else if (code[j] ~ /^v[a-z0-9]+ .*%[xyz]mm[0-9]+,[^,]*\([^()]*\)$/)
            print "store in the loop of " name ": " code[j]
        }
      }
      found++
      if (best < 12) print "no loop of 12 multiply-adds in " name " (most: " best ")"
    }
    /^[0-9a-f]+ </ {
      finish()
      name = ""; n = 0; frame = 0; split("", at); split("", code); split("", target)
      if ($0 ~ ("[<:]" prefix)) { name = $0; sub(/^[^<]*</, "", name); sub(/\(.*/, "", name) }
      next
    }
    name != "" && /^ *[0-9a-f]+:\t/ {
      n++
      at[address($0)] = n
      line = $0; sub(/^[^\t]*\t/, "", line); gsub(/[ \t]+/, " ", line)
      sub(/ *#.*/, "", line)
      code[n] = line
      if (line ~ /^mov %rsp,%rbp/) frame = 1
      if (line ~ /^j/) { split(line, word, " "); target[n] = address(word[2]) }
    }
    END { finish(); if (!found) print "no function " prefix "*" }'
}

# Compiles the source on stdin; its object must have a fault with $2 in it, or none when empty.
doctored() {
  "$cxx" -std=c++20 -O2 -ffp-contract=off -mavx2 -mfma -fno-tree-vectorize -x c++ -c - \
    -o "$folder/doctored.o" || exit 1
  found=$(faults "$folder/doctored.o" gemm_avx2_fma_)
  case "$found" in
    *"${2:-no fault at all}"*) ;;
    "") [ -z "$2" ] || { echo "a doctored object ($1) passes"; exit 1; } ;;
    *) echo "a doctored object ($1) gives: $found"; exit 1 ;;
  esac
}

kernel() {  # $1: what stands in the loop besides its 12 multiply-adds
  cat <<END
#include <immintrin.h>
void gemm_avx2_fma_x(const float* a, const float* w, float* c, long k) {
  __m256 s0 = _mm256_setzero_ps(), s1 = s0, s2 = s0, s3 = s0, s4 = s0, s5 = s0;
  __m256 s6 = s0, s7 = s0, s8 = s0, s9 = s0, s10 = s0, s11 = s0;
  volatile float on_stack[8] = {};
  (void)on_stack;
  for (long i = 0; i < k; ++i) {
    const __m256 x = _mm256_broadcast_ss(a + i), y = _mm256_loadu_ps(w + 8 * i);
    s0 = _mm256_fmadd_ps(x, y, s0); s1 = _mm256_fmadd_ps(x, s0, s1);
    s2 = _mm256_fmadd_ps(y, y, s2); s3 = _mm256_fmadd_ps(x, s2, s3);
    s4 = _mm256_fmadd_ps(x, s1, s4); s5 = _mm256_fmadd_ps(y, s4, s5);
    s6 = _mm256_fmadd_ps(x, s3, s6); s7 = _mm256_fmadd_ps(y, s6, s7);
    s8 = _mm256_fmadd_ps(x, s5, s8); s9 = _mm256_fmadd_ps(y, s8, s9);
    s10 = _mm256_fmadd_ps(x, s7, s10); s11 = _mm256_fmadd_ps(y, s9, s11);
    $1
  }
  _mm256_storeu_ps(c, s9); _mm256_storeu_ps(c + 8, s10); _mm256_storeu_ps(c + 16, s11);
}
END
}

cxx=$1
shift
folder=$(mktemp -d) || exit 1
trap 'rm -rf "$folder"' EXIT

kernel "" | doctored "sound" "" || exit 1
kernel "on_stack[i & 7] = 1;" | doctored "scalar on the stack" "stack in the loop" || exit 1
kernel "*reinterpret_cast<__m256 volatile*>(const_cast<float*>(on_stack)) = s3;" |
  doctored "vector on the stack" "stack in the loop" || exit 1
kernel "_mm256_storeu_ps(c + 8 * i, s5);" | doctored "store" "store in the loop" || exit 1
kernel "" | grep -v '^    s[68] = ' | doctored "small tile" "no loop of 12" || exit 1
{ echo "inline int weak(int x) { return x * x + 1; }"
  kernel ""
  echo "int (*address())(int) { return &weak; }"; } | doctored "weak" "weak symbol" || exit 1
{ kernel ""; echo "int f(); int g = f();"; } | doctored "initialiser" "initialiser" || exit 1
echo "int unrelated;" | doctored "no kernel" "no function" || exit 1

checked=0
status=0
for object in "$@"; do
  case "$object" in
    */kernels/avx2_fma.cpp.o) prefix=gemm_avx2_fma_ ;;
    *) continue ;;
  esac
  checked=$((checked + 1))
  found=$(faults "$object" $prefix)
  [ -z "$found" ] || { echo "$object:"; echo "$found"; status=1; }
done
[ "$checked" -gt 0 ] || { echo "no object of an instruction set was given"; exit 1; }
[ "$status" -ne 0 ] || echo "$checked object(s) sound"
exit $status
