#!/bin/sh
# The tests of the binding and of the operators on a package built with the address and
# undefined-behaviour sanitizers (g++).
#   scripts/sanitize_python.sh VENV
# Left out: what forks or starts processes of its own, and inductor, which takes minutes.
set -eu
cd "$(dirname "$0")/.."
python=$PWD/$1/bin/python
work=$PWD/build/python-asan
"$1/bin/pip" install -q --disable-pip-version-check --no-build-isolation --no-deps --upgrade \
  --target "$work/package" . -C build-dir="$work/build" -C cmake.build-type=RelWithDebInfo \
  -C cmake.define.FUSEDMOE_SANITIZE=address,undefined -C install.strip=false
for library in libasan.so libubsan.so libstdc++.so; do
  preload="${preload:+$preload:}$(g++ -print-file-name=$library)"
done
cd "$work"
# Leaks: Python's own at exit drown everything.
LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
  PYTHONPATH="$work/package" OMP_NUM_THREADS=2 "$python" -m pytest -q -p no:cacheprovider \
  -k "not inductor and not fork and not import_order and not threads_of_pytorch and not without_torch and not exported" \
  ../../tests/python/test_binding.py ../../tests/python/test_quantize.py \
  ../../tests/python/test_torch.py ../../tests/python/test_torch_watch.py
