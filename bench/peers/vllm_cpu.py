"""vLLM's own fused MoE kernel for CPUs, from its wheel: grouped GEMMs over prepacked bf16 weights,
with AMX tiles where the CPU has them."""

import _vllm_library
from _adapter import Missing, Refused, serve
from _torch_peer import TorchPeer


class Peer(TorchPeer):
    def __init__(self, threads):
        torch, self.version = _vllm_library.load()
        super().__init__(torch, threads)
        self.ops = torch.ops._C
        if not hasattr(self.ops, "cpu_fused_moe"):
            raise Missing("this wheel has no cpu_fused_moe", _vllm_library.INSTALL)
        self.isa = "amx" if torch.cpu._is_amx_tile_supported() else "vec"
        self.about = f"vLLM's cpu_fused_moe, {self.isa}"

    def add_layer(self, shape, tensors):
        self.check_shape(shape)  # its kernels of int8 and int4 experts are for Arm
        for name in ("hidden_size", "intermediate_size"):
            if shape[name] % 32 != 0:
                raise Refused(f"the kernel takes multiples of 32, not {name} {shape[name]}")
        w13, w2 = self.matrices(shape, tensors)
        biases = self.biases(shape, tensors, self.torch.bfloat16)
        self.layers.append((self.pack(w13), self.pack(w2), *biases))

    def pack(self, weight):
        packed = self.torch.empty_like(weight)
        self.ops.prepack_moe_weight(weight, packed, self.isa)
        return packed

    def apply(self, layer, routing):
        w13, w2, w13_bias, w2_bias = self.layers[layer]
        ids, weights = self.routings[routing]
        self.ops.cpu_fused_moe(self.output, self.hidden, w13, w2, w13_bias, w2_bias, weights, ids,
                               False, self.shape["activation"], self.isa)


serve(Peer, _vllm_library.prepare)
