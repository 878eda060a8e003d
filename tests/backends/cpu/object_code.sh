#!/bin/sh
# What the object code of kernels for one instruction set must be, whatever the compiler made of it:
#   - no weak function: the linker may pick such a copy for units that run on any machine;
#   - no initialiser: it would run when the library is loaded, on any machine;
#   - no spill in the hot loops: the loops of gemm_* (AVX2: of weights that are floats; codes take registers
#     of their own), chain_rows and segment_rows (of weights that are vectors already, and of
#     four-bit codes) that multiply touch neither the stack nor memory other than to read inputs and
#     weights;
#   - full tiles: the largest loop has as many multiply-adds as accumulators, 12 for AVX2 and 24, of
#     whole registers, for AVX-512. AMX's sums lie in tiles: there must be some of its instructions.
#
#   object_code.sh CXX OBJECT...   checks those OBJECTs that are such kernels; first, that it finds
#                                  each fault in objects made by CXX for the purpose
set -u
export LC_ALL=C

# Prints what is wrong with object $1. $2: prefix of its hot functions. $3: multiply-adds of a full
# tile, or the instruction of a tile. $4: the registers that count. $5: what multiplies, as a pattern.
faults() {
  nm -C "$1" | awk '$2 ~ /^[WV]$/ || $1 ~ /^[wv]$/ { print "weak symbol: " $0 }'
  objdump -h "$1" | awk '$2 ~ /^\.(init_array|ctors)/ { print "initialiser: " $2 }'
  if [ "$4" = - ]; then
    objdump -d -C --no-show-raw-insn "$1" | grep -q "$3 " || echo "no $3 in $2*"
    return
  fi
  # A loop is what lies between a backward jump and its target; a hot one multiplies at least a
  # whole panel and has no other loop inside.
  objdump -d -C --no-show-raw-insn "$1" | awk -v prefix="$2" -v full="$3" -v wide="%$4" \
    -v multiply="^(${5:-vfn?m(add|sub)[0-9]*ps|vdpbf16ps}) " '
    function address(text) { sub(/^ *(0x)?/, "", text); sub(/[: ].*/, "", text); return text }
    function finish(   i, j, k, fma, hot, best) {
      if (name == "") return
      best = 0
      for (i = 1; i <= n; i++) {
        if (!(target[i] in at) || at[target[i]] > i) continue
        fma = 0; hot = 1
        for (j = at[target[i]]; j <= i; j++) {
          if (code[j] ~ multiply && code[j] ~ wide) fma++
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
      if (best < full) print "no loop of " full " multiply-adds in " name " (most: " best ")"
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
# $3, $4, $5: as faults; $6: the compiler's options.
doctored_as() {
  # shellcheck disable=SC2086
  "$cxx" -std=c++20 -O2 -ffp-contract=off $6 -fno-tree-vectorize -x c++ -c - \
    -o "$folder/doctored.o" || exit 1
  found=$(faults "$folder/doctored.o" "$3" "$4" "$5")
  case "$found" in
    *"${2:-no fault at all}"*) ;;
    "") [ -z "$2" ] || { echo "a doctored object ($1) passes"; exit 1; } ;;
    *) echo "a doctored object ($1) gives: $found"; exit 1 ;;
  esac
}
doctored() { doctored_as "$1" "$2" gemm_avx2_fma_ 12 ymm "-mavx2 -mfma"; }
doctored_512() {
  doctored_as "$1" "$2" gemm_avx512_ 24 zmm "-mavx512f -mavx512vl -mfma -mavx512bf16"
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

kernel_512() {  # $1: accumulators; $2: a multiply-add; $3: what stands in the loop besides
  cat <<END
#include <immintrin.h>
void gemm_avx512_x(const float* a, const float* w, float* c, long k) {
  constexpr int n = $1;
  __m512 s[n];
  volatile float on_stack[16] = {};
  (void)on_stack;
#pragma GCC unroll 32
  for (int r = 0; r < n; ++r) s[r] = _mm512_setzero_ps();
  for (long i = 0; i < k; ++i) {
    const __m512 y = _mm512_loadu_ps(w + 16 * i);
#pragma GCC unroll 32
    for (int r = 0; r < n; ++r) s[r] = $2;
    $3
  }
#pragma GCC unroll 32
  for (int r = 0; r < n; ++r) _mm512_storeu_ps(c + 16 * r, s[r]);
}
END
}
fma_512='_mm512_fmadd_ps(_mm512_set1_ps(a[n * i + r]), y, s[r])'
dot_512='_mm512_dpbf16_ps(s[r], (__m512bh)_mm512_set1_ps(a[n * i + r]), (__m512bh)y)'

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
kernel_512 24 "$fma_512" "" | doctored_512 "sound, AVX-512" "" || exit 1
kernel_512 24 "$dot_512" "" | doctored_512 "sound, BF16" "" || exit 1
kernel_512 20 "$dot_512" "" | doctored_512 "small tile, BF16" "no loop of 24" || exit 1
kernel_512 24 "$fma_512" "" | sed 's/512/256/g; s/16 \*/8 */g; s/gemm_avx256/gemm_avx512/' |
  doctored_512 "half registers" "no loop of 24" || exit 1
kernel_512 24 "$dot_512" "on_stack[i & 7] = 1;" |
  doctored_512 "stack, BF16" "stack in the loop" || exit 1
kernel_512 24 "$fma_512" "_mm512_storeu_ps(c + 16 * i, s[5]);" |
  doctored_512 "store, AVX-512" "store in the loop" || exit 1
kernel_512 32 "$fma_512" "" | doctored_512 "more sums than registers" "in the loop" || exit 1
amx="gemm_amx_bf16_ tdpbf16ps -"
# shellcheck disable=SC2086
{ echo 'void gemm_amx_bf16_x() { asm volatile("tdpbf16ps %tmm6, %tmm4, %tmm0"); }' |
    doctored_as "sound, AMX" "" $amx "" || exit 1
  echo 'void gemm_amx_bf16_x() {}' | doctored_as "no tiles" "no tdpbf16ps" $amx "" || exit 1
  echo 'inline int weak() { return 1; } auto f() { return &weak; }' |
    doctored_as "weak, AMX" "weak symbol" $amx "" || exit 1; }

checked=0
status=0
for object in "$@"; do
  case "$object" in
    */kernels/avx2_fma.cpp.o) kind="gemm_avx2_fma_(f32|f16|bf16) 12 ymm" ;;
    */kernels/avx512.cpp.o) kind="chain_rows<.*FmaStep<.fusedmoe::cpu::Code.[012]>,.12,.[0-9],.[0-9]> 24 zmm" ;;
    */kernels/avx512_bf16.cpp.o) kind="(chain|segment)_rows<.*(Dot|Nibble)Step.*,.12,.[0-9],.[0-9]> 24 zmm vdpbf16ps" ;;
    */kernels/avx512_vnni.cpp.o) kind="segment_rows<.*,.12,.[0-9],.[0-9]> 24 zmm vpdpbusd" ;;
    */kernels/amx_bf16.cpp.o) kind=$amx ;;
    */kernels/amx_int8.cpp.o) kind="gemm_a8_amx_int8_ tdpbssd -" ;;
    *) continue ;;
  esac
  checked=$((checked + 1))
  # shellcheck disable=SC2086
  found=$(faults "$object" $kind)
  [ -z "$found" ] || { echo "$object:"; echo "$found"; status=1; }
done
[ "$checked" -eq 6 ] || { echo "expected 6 objects of instruction sets, got $checked"; exit 1; }
[ "$status" -ne 0 ] || echo "$checked object(s) sound"
exit $status
