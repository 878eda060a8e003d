#!/bin/sh
# One binary on other processors, as qemu-user emulates them: right values on each, and the
# instruction set that it says it chose. qemu has no AVX-512: what it can show is SSE and AVX2.
#
#   emulated_cpus.sh COMMAND CHECKPOINT   exits with 77 (skipped) where qemu-x86_64 is missing
set -u
qemu=$(command -v qemu-x86_64) || { echo "skipped: qemu-x86_64 (qemu-user) is missing"; exit 77; }
status=0
unset FUSEDMOE_ISA
for machine in Nehalem:scalar SandyBridge:scalar Haswell:avx2 EPYC:avx2; do
  for limit in "" avx512 scalar; do
    isa=${machine#*:}
    [ "$limit" != scalar ] || isa=scalar
    result=$("$qemu" -cpu "${machine%:*}" "$1" verify "$2" --json ${limit:+--isa "$limit"} 2>&1)
    code=$?
    rows=$(echo "$result" | grep -c '"pass":true')
    named=$(echo "$result" | grep -c "\"isa\":\"$isa\"")
    if [ $code -ne 0 ] || [ "$rows" -eq 0 ] || [ "$rows" -ne "$named" ]; then
      echo "${machine%:*}, limit '$limit': exit $code, $rows rows pass, $named on $isa"
      echo "$result" | grep -v "TCG doesn't support"
      status=1
    fi
  done
done
[ $status -ne 0 ] || echo "4 processors, 3 limits each: sound"
exit $status
