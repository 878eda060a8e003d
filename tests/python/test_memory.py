"""Memory while a checkpoint is loaded: the packed weights and one expert, measured as the growth of
the process's anonymous memory (mapped files are the page cache's)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

CODE = """
import json, pathlib, sys, threading, time
import numpy as np
import fusedmoe

EXPERTS, H, I = 32, 1024, 1024
folder = pathlib.Path(sys.argv[1])


def write_checkpoint():
    # One tensor per expert, as Qwen3 has them; written without holding them all.
    names, offset, header = [], 0, {}
    for expert in range(EXPERTS):
        for matrix, shape in (("gate_proj", (I, H)), ("up_proj", (I, H)), ("down_proj", (H, I))):
            size = 2 * shape[0] * shape[1]
            name = f"model.layers.0.mlp.experts.{expert}.{matrix}.weight"
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
            offset += size
    size = 2 * EXPERTS * H
    header["model.layers.0.mlp.gate.weight"] = {
        "dtype": "BF16", "shape": (EXPERTS, H), "data_offsets": [offset, offset + size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        block = np.full(2 * I * H, 1, np.uint8).tobytes()
        for _ in range(3 * EXPERTS):
            file.write(block)
        file.write(bytes(size))
    (folder / "config.json").write_text(json.dumps({
        "model_type": "qwen3_moe", "hidden_size": H, "moe_intermediate_size": I,
        "num_experts": EXPERTS, "num_experts_per_tok": 4, "num_hidden_layers": 1,
        "hidden_act": "silu", "norm_topk_prob": True, "torch_dtype": "bfloat16",
        "decoder_sparse_step": 1, "mlp_only_layers": []}))


def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])


write_checkpoint()
options = fusedmoe.PlanOptions(max_threads=1)
stop, peak = threading.Event(), [0]


def watch():
    while not stop.is_set():
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.001)


thread = threading.Thread(target=watch)
thread.start()
time.sleep(0.05)
before = anonymous()
layer = fusedmoe.load_checkpoint(folder)[0]
plan = fusedmoe.FusedMoe.create(layer.config, layer.weights, options)
stop.set()
thread.join()
print(json.dumps({"before": before, "peak": peak[0], "packed": plan.weight_bytes,
                  "expert": 3 * 2 * I * H}))
"""


def test_loading_peaks_at_packed_weights_and_one_expert(tmp_path, capsys):
    result = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True,
                            text=True, check=False)
    assert result.returncode == 0, result.stderr
    sizes = json.loads(result.stdout)
    grown = sizes["peak"] - sizes["before"]
    with capsys.disabled():
        print(f"\nloading: packed {sizes['packed'] / 2**20:.1f} MiB, one expert "
              f"{sizes['expert'] / 2**20:.1f} MiB, peak growth {grown / 2**20:.1f} MiB")
    if grown == 0:
        pytest.skip("the kernel tells no RssAnon")
    slack = 4 * 2**20  # the interpreter's own
    assert sizes["packed"] * 0.9 < grown <= sizes["packed"] + sizes["expert"] + slack
