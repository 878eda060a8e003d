#!/usr/bin/env bash
# exports.sh NM LIBRARY C_HEADER
# Fails when the shared library exports a symbol that is not of the C ABI or of namespace fusedmoe
# (its functions, vtables and typeinfo), or when it lacks a function that the C header declares.
set -euo pipefail

nm=${1:?usage: exports.sh NM LIBRARY C_HEADER}
library=${2:?}
header=${3:?}
symbols=$("$nm" -D --defined-only "$library" | awk '{print $NF}' | sed 's/@.*//' | sort -u)

foreign=$(grep -vE '^(fusedmoe_[a-z0-9_]+|_ZNK?8fusedmoe.*|_ZT[VIS]N8fusedmoe.*)$' \
  <<<"$symbols" || true)
if [[ -n "$foreign" ]]; then
  printf 'install.exports: FAILED, foreign symbols in %s:\n%s\n' "$library" "$foreign" >&2
  exit 1
fi

# Declarations: FUSEDMOE_EXPORT, a type, the name, an opening parenthesis.
declared=$(tr '\n' ' ' <"$header" | grep -oE 'FUSEDMOE_EXPORT[^(;]+\(' |
  grep -oE 'fusedmoe_[a-z0-9_]+ *\($' | tr -d ' (' | sort -u)
missing=$(comm -23 <(echo "$declared") <(echo "$symbols"))
if [[ -z "$declared" || -n "$missing" ]]; then
  printf 'install.exports: FAILED, declared in %s but not exported:\n%s\n' "$header" "$missing" >&2
  exit 1
fi
echo "install.exports: passed ($(wc -l <<<"$symbols") symbols, $(wc -l <<<"$declared") of them C)"
