"""What the adapters over torch share: finding torch, its threads, tensors of the shared memory, and
the environment in which OpenMP runs best. A peer derives from TorchPeer."""

import os
import sys

from _adapter import Missing, Refused

_READY = "FUSEDMOE_PEER_READY"


def restart_with(threads, preload):
    """Starts this program again with OpenMP set up and with `preload`, paths of libraries: both are
    read when a process starts. What the user has set wins."""
    if os.environ.get(_READY):
        return
    environment = dict(os.environ)
    environment[_READY] = "1"
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        # Layers follow each other within microseconds, so this costs nothing inside a step; the
        # default of 200 ms would let the threads spin into the other side's turn.
        "KMP_BLOCKTIME": "1",
    }
    if len(os.sched_getaffinity(0)) > threads:
        # As vLLM binds its threads. Not where every CPU has a thread anyway: there it gains
        # nothing, and a thread that shares its CPU with another program holds up all others
        # (medians 3 to 20 times slower on a machine of 2 CPUs where a compiler ran).
        defaults |= {"OMP_PROC_BIND": "close", "OMP_PLACES": "cores"}
    for name, value in defaults.items():
        environment.setdefault(name, value)
    libraries = [environment["LD_PRELOAD"]] if environment.get("LD_PRELOAD") else []
    environment["LD_PRELOAD"] = ":".join(preload + libraries)
    if not environment["LD_PRELOAD"]:
        del environment["LD_PRELOAD"]
    os.execve(sys.executable, [sys.executable] + sys.argv, environment)


def import_torch(install):
    try:
        import torch
    except (ImportError, OSError) as error:
        raise Missing(f"torch: {str(error).splitlines()[0]}", install) from None
    return torch


class TorchPeer:
    """Keeps the inputs as tensors; a subclass packs layers and applies them."""

    def __init__(self, torch, threads):
        self.torch = torch
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.dtypes = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
        # Of a format's codes as they lie in memory; those of four bits, two in a byte.
        self.codes = self.dtypes | {"fp8_e4m3": torch.float8_e4m3fn, "int8": torch.int8,
                                    "mxfp4": torch.uint8, "int4": torch.uint8}
        self.scale_types = self.dtypes | {"e8m0": torch.uint8}
        self.clear()

    def clear(self):
        self.layers = []
        self.hidden = self.output = None
        self.routings = []  # of (topk_ids, topk_weights)

    def tensor(self, view, dtype, *shape):
        return self.torch.frombuffer(view, dtype=dtype).view(*shape)

    def matrices(self, shape, tensors):
        """w13 [E, 2I, H], w2 [E, H, I] in the shared memory; a peer packs or copies them. Of four
        bits, [.., H / 2] and [.., I / 2] bytes."""
        dtype = self.codes[shape["format"]]
        per_byte = 2 if shape["format"] in ("mxfp4", "int4") else 1
        experts, hidden = shape["num_experts"], shape["hidden_size"]
        inner = shape["intermediate_size"]
        self.shape = shape
        return (self.tensor(tensors["w13"], dtype, experts, 2 * inner, hidden // per_byte),
                self.tensor(tensors["w2"], dtype, experts, hidden, inner // per_byte))

    def scales(self, shape, tensors):
        """Those of w13 and w2, [E, along N, along K], in the shared memory."""
        experts = shape["num_experts"]
        dtype = self.scale_types[shape["scales"]["type"]]
        layout, block_n = shape["scales"]["layout"], shape["scales"]["block_n"]
        rows = {"w13": 2 * shape["intermediate_size"], "w2": shape["hidden_size"]}
        if layout == "block":
            parts = 1 if shape["scales"]["w13_parts"] == "one" else 2
            rows = {"w13": parts * -(-rows["w13"] // parts // block_n),
                    "w2": -(-rows["w2"] // block_n)}
        return tuple(self.tensor(tensors[name + "_scales"], dtype, experts, rows[name], -1)
                     for name in ("w13", "w2"))

    def biases(self, shape, tensors, dtype):
        """[E, 2I] and [E, H] as copies in the dtype that a kernel takes, or (None, None)."""
        if not shape["bias"]:
            return None, None
        experts = shape["num_experts"]
        f32 = self.torch.float32
        return tuple(self.tensor(tensors[name], f32, experts, -1).to(dtype, copy=True)
                     for name in ("w13_bias", "w2_bias"))

    def check_shape(self, shape, formats=("bf16",)):
        """Refuses what no adapter here drives, and formats that this one does not."""
        if shape["format"] not in formats:
            raise Refused(f"this adapter drives format {', '.join(formats)} only, "
                          f"not {shape['format']}")
        for name, value in {"dtype": "bf16", "expert_parallel": False}.items():
            if shape[name] != value:
                raise Refused(f"this adapter drives {name} {value} only, not {shape[name]}")
        # The kernels expect gate and up rows in turns for swigluoai, as checkpoints have them.
        kind = (shape["activation"], shape["interleaved"])
        if kind not in (("silu", False), ("swigluoai", True)):
            raise Refused("this adapter drives silu with halves and swigluoai with interleaved "
                          f"rows, not {shape['activation']}")
        if shape["activation"] == "swigluoai" and not shape["bias"]:
            raise Refused("this adapter drives swigluoai with biases only")

    def set_inputs(self, num_tokens, hidden, routings, output):
        torch, shape = self.torch, self.shape
        dtype = self.dtypes[shape["dtype"]]
        self.hidden = self.tensor(hidden, dtype, num_tokens, shape["hidden_size"]).clone()
        self.output = self.tensor(output, dtype, num_tokens, shape["hidden_size"])
        self.routings = [
            (self.tensor(ids, torch.int32, num_tokens, shape["top_k"]).clone(),
             self.tensor(weights, torch.float32, num_tokens, shape["top_k"]).clone())
            for ids, weights in routings
        ]
