"""SGLang's fused MoE kernels for CPUs (fused_experts_cpu), as the vLLM wheel for CPUs carries them:
bf16, int8 per channel (activations in int8, too), fp8 in blocks, mxfp4, and int4 in groups
(activations in int8, too)."""

import _vllm_library
from _adapter import Missing, Refused, serve
from _torch_peer import TorchPeer

# moe_comp_method of fused_experts_cpu.
_METHODS = {"bf16": 0, "int8": 1, "fp8_e4m3": 2, "int4": 3, "mxfp4": 4}
_AWQ = 0
# The columns, of eight, that the low and the high halves of a word's four bytes hold.
_AWQ_LOW, _AWQ_HIGH = (0, 4, 1, 5), (2, 6, 3, 7)


class Peer(TorchPeer):
    def __init__(self, threads):
        torch, self.version = _vllm_library.load()
        super().__init__(torch, threads)
        self.ops = torch.ops._C
        if not hasattr(self.ops, "fused_experts_cpu"):
            raise Missing("this wheel has no fused_experts_cpu", _vllm_library.INSTALL)
        self.about = "SGLang's fused_experts_cpu in the vLLM wheel"

    def add_layer(self, shape, tensors):
        self.check_shape(shape, tuple(_METHODS))
        self.check_layout(shape)
        try:
            self.layers.append(self.pack(shape, tensors))
            if len(self.layers) == 1:
                self.try_out(shape)
        except RuntimeError as error:
            text = str(error).splitlines()[0].split("  (Could this error message")[0]
            raise Refused("the kernel refuses: " + text[:200]) from None
        return {"mode": "a8" if shape["format"] in ("int8", "int4") else "a16"}

    def pack(self, shape, tensors):
        """(w13, w2) and the arguments behind topk_ids."""
        method = _METHODS[shape["format"]]
        w13, w2 = self.matrices(shape, tensors)
        s13 = s2 = z13 = z2 = block = None
        if shape["format"] != "bf16":
            s13, s2 = self.scales(shape, tensors)
        if shape["format"] == "int4":
            w13, z13, s13 = self.pack_int4(w13, s13, tensors.get("w13_zero_points"))
            w2, z2, s2 = self.pack_int4(w2, s2, tensors.get("w2_zero_points"))
        else:
            w13, w2 = (self.ops.convert_weight_packed(w) for w in (w13, w2))
        if shape["format"] == "mxfp4":
            s13, s2 = (self.ops.convert_scale_packed(s.clone()) for s in (s13, s2))
        elif shape["format"] == "int8":
            s13, s2 = (s.squeeze(-1).clone() for s in (s13, s2))
        elif shape["format"] == "fp8_e4m3":
            s13, s2 = s13.clone(), s2.clone()
            block = [shape["scales"]["block_n"], shape["scales"]["block_k"]]
        b13, b2 = self.biases(shape, tensors, self.torch.float32)
        # alpha and limit choose swigluoai.
        activation = (1.702, 7.0) if shape["activation"] == "swigluoai" else (None, None)
        return (w13, w2), (method, s13, s2, z13, z2, None, block, b13, b2, *activation, True)

    def check_layout(self, shape):
        """What the kernels do not compute, and would not refuse themselves."""
        scales = shape["scales"]
        for name in ("hidden_size", "intermediate_size"):
            if shape[name] % 32 != 0:
                raise Refused(f"the kernel takes multiples of 32, not {name} {shape[name]}")
            if shape["format"] == "int4" and shape[name] % scales["group_size"] != 0:
                raise Refused(f"the kernel takes whole groups, not {name} {shape[name]} in groups "
                              f"of {scales['group_size']}")
        wanted = {"int8": ("channel", "f32"), "fp8_e4m3": ("block", "f32")}
        layout, kind = wanted.get(shape["format"], (scales["layout"], scales["type"]))
        if (scales["layout"], scales["type"]) != (layout, kind):
            raise Refused(f"the kernel takes {shape['format']} with {kind} scales per {layout}, "
                          f"not {scales['type']} per {scales['layout']}")
        if shape["format"] == "int4" and (scales["layout"] != "group" or scales["type"] == "f32"):
            raise Refused("the kernel takes int4 with scales of 16 bits per group")
        if shape["format"] in ("int8", "int4") and shape["activation"] != "silu":
            raise Refused(f"the kernel of {shape['format']} computes silu without biases, "
                          f"whatever it is told, not {shape['activation']}")

    def pack_int4(self, weight, scales, zero_points):
        """weight [E, N, K / 2], scales [E, N, groups] -> what the kernel takes, through AWQ's form:
        vLLM says that its GPTQ form has bugs."""
        torch = self.torch
        experts, outputs, half = weight.shape
        groups = scales.shape[2]

        def awq(codes, to):  # [rows, N] of 0 to 15 -> [rows, N / 8] words
            codes = codes.view(-1, outputs // 8, 8)
            to.view(torch.uint8).view(-1, outputs // 8, 4).copy_(
                codes[..., _AWQ_LOW] | codes[..., _AWQ_HIGH] << 4)

        words = torch.empty(experts, 2 * half, outputs // 8, dtype=torch.int32)
        zeros = torch.empty(experts, groups, outputs // 8, dtype=torch.int32)
        if zero_points is None:
            points = torch.full((experts, outputs, groups), 8, dtype=torch.uint8)
        else:
            points = self.tensor(zero_points, torch.uint8, experts, outputs, groups)
        for expert in range(experts):
            codes = torch.stack((weight[expert] & 15, weight[expert] >> 4), dim=-1)
            awq(codes.view(outputs, 2 * half).t().contiguous(), words[expert])
            awq(points[expert].t().contiguous(), zeros[expert])
        return self.ops.convert_weight_packed_scale_zp(words, zeros,
                                                       scales.transpose(1, 2).contiguous(), _AWQ)

    def try_out(self, shape):
        """A call, so that a kernel that refuses does so now."""
        torch = self.torch
        hidden = torch.zeros(1, shape["hidden_size"], dtype=torch.bfloat16)
        ids = torch.arange(shape["top_k"], dtype=torch.int32).view(1, -1)
        weights = torch.ones(1, shape["top_k"])
        (w13, w2), rest = self.layers[0]
        self.ops.fused_experts_cpu(torch.empty_like(hidden), hidden, w13, w2, weights, ids, *rest)

    def apply(self, layer, routing):
        (w13, w2), rest = self.layers[layer]
        ids, weights = self.routings[routing]
        self.ops.fused_experts_cpu(self.output, self.hidden, w13, w2, weights, ids, *rest)


serve(Peer, _vllm_library.prepare)
