"""Prints the folder of an installed torch whose headers have the stable ABI, or nothing.

Looks at files only: inside pip's isolated build, torch of the environment cannot be imported.
"""

import importlib.util
import pathlib
import sysconfig

candidates = []
spec = importlib.util.find_spec("torch")
if spec is not None and spec.submodule_search_locations:
    candidates.append(pathlib.Path(spec.submodule_search_locations[0]))
for key in ("purelib", "platlib"):
    candidates.append(pathlib.Path(sysconfig.get_path(key)) / "torch")
for folder in candidates:
    header = folder / "include/torch/csrc/stable/ops.h"
    if (header.is_file() and "parallel_for" in header.read_text()
            and (folder / "lib/libtorch_cpu.so").exists()):
        print(folder)
        break
