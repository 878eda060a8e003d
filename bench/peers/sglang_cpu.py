"""SGLang's fused MoE kernel for CPUs (fused_experts_cpu), as the vLLM wheel for CPUs carries it."""

import _vllm_library
from _adapter import Missing, Refused, serve
from _torch_peer import TorchPeer

_UNQUANTISED = 0


class Peer(TorchPeer):
    def __init__(self, threads):
        torch, self.version = _vllm_library.load()
        super().__init__(torch, threads)
        self.ops = torch.ops._C
        if not hasattr(self.ops, "fused_experts_cpu"):
            raise Missing("this wheel has no fused_experts_cpu", _vllm_library.INSTALL)
        self.about = "SGLang's fused_experts_cpu in the vLLM wheel"

    def add_layer(self, shape, tensors):
        self.check_shape(shape)
        for name in ("hidden_size", "intermediate_size"):
            if shape[name] % 32 != 0:
                raise Refused(f"the kernel takes multiples of 32, not {name} {shape[name]}")
        w13, w2 = self.matrices(shape, tensors)
        biases = self.biases(shape, tensors, self.torch.float32)
        # alpha and limit choose swigluoai.
        self.activation = (1.702, 7.0) if shape["activation"] == "swigluoai" else (None, None)
        self.layers.append((self.ops.convert_weight_packed(w13),
                            self.ops.convert_weight_packed(w2), *biases))

    def apply(self, layer, routing):
        w13, w2, w13_bias, w2_bias = self.layers[layer]
        ids, weights = self.routings[routing]
        self.ops.fused_experts_cpu(self.output, self.hidden, w13, w2, weights, ids, _UNQUANTISED,
                                   None, None, None, None, None, None, w13_bias, w2_bias,
                                   *self.activation, True)


serve(Peer, _vllm_library.prepare)
