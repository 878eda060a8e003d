"""What the Python tests share: a layer of odd sizes, the oracle in fp64, and dirty tensors."""

from __future__ import annotations

import dataclasses

import torch

import fusedmoe

# Relative L2 error against fp64, by dtype of hidden and output; the maximum error is twice that.
# Two roundings at their worst, and sums in fp32: as src/reference/tolerance.cpp has it.
TOLERANCE = {torch.float32: 2 * 2**-24 + 1e-5, torch.float16: 2 * 2**-11 + 1e-5,
             torch.bfloat16: 2 * 2**-8 + 1e-5}

A8_ISA = "scalar"  # mode a8 on any machine


def activate(x: torch.Tensor, kind: str = "silu", *, limit: float | None = None,
             alpha: float = 1.702, layout: str = "halves", beta: float = 1.0,
             linear_beta: float = 0.0) -> torch.Tensor:
    """x: [..., 2I] (gate and up), or [..., I] for relu2 -> [..., I]; limit: of swigluoai and
    swiglustep, else the clamp before the activation."""
    if kind == "relu2":
        return torch.relu(x).square()
    gate, up = (x[..., ::2], x[..., 1::2]) if layout == "interleaved" else x.chunk(2, -1)
    if kind == "swigluoai":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate * torch.sigmoid(alpha * gate)
    if kind == "swiglustep":
        return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    if kind == "situ":
        other = linear_beta * torch.tanh(up / linear_beta) if linear_beta else up
        return beta * torch.tanh(gate / beta) * torch.sigmoid(gate) * other
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if kind == "silu":
        return torch.nn.functional.silu(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh" if kind == "gelu_tanh" else "none") * up


def oracle(hidden: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, topk_weights: torch.Tensor,
           topk_ids: torch.Tensor, *, b13: torch.Tensor | None = None,
           b2: torch.Tensor | None = None, expert_map: list[int] | None = None,
           **activation) -> torch.Tensor:
    """fp64 [T, H]; w13 [E, N, K], w2 [E, H, I]; a loop over tokens and their experts."""
    out = torch.zeros(hidden.shape[0], w2.shape[1], dtype=torch.float64)
    for t in range(hidden.shape[0]):
        for k in range(topk_ids.shape[1]):
            expert = int(topk_ids[t, k])
            if expert >= 0 and expert_map is not None:
                expert = int(expert_map[expert])
            if expert < 0:
                continue
            x = w13[expert].double() @ hidden[t].double()
            if b13 is not None:
                x = x + b13[expert].double()
            y = w2[expert].double() @ activate(x, **activation)
            if b2 is not None:
                y = y + b2[expert].double()
            out[t] += topk_weights[t, k].double() * y
    return out


def errors(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Relative L2 error and maximum error; infinite when something is not finite."""
    difference = got.double() - expected.double()
    if not torch.isfinite(difference).all():
        return float("inf"), float("inf")
    return (float(difference.norm() / expected.double().norm()),
            float(difference.abs().max() / expected.double().abs().max()))


def assert_close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype,
                 quantised: bool = False) -> None:
    """quantised: a scale may go into the weight, which is then rounded once more to the dtype."""
    rel_l2, max_error = errors(got, expected)
    limit = TOLERANCE[dtype]
    if quantised and dtype != torch.float32:
        limit += 3 * torch.finfo(dtype).eps / 2
    assert rel_l2 <= limit and max_error <= 2 * limit, (
        f"rel_l2 {rel_l2:.2e} (at most {limit:.1e}), max {max_error:.2e} (at most {2 * limit:.1e})")


def dirty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Every byte 0xFF."""
    return torch.full((*shape, dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)[..., 0]


@dataclasses.dataclass
class Layer:
    """No size is a multiple of a vector, a panel or a block of rows."""

    hidden_size: int = 131
    intermediate_size: int = 77
    num_experts: int = 7
    top_k: int = 3
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    gated: bool = True

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        rows = (2 if self.gated else 1) * self.intermediate_size

        def random(*shape: int) -> torch.Tensor:
            return (0.2 * torch.randn(*shape, generator=generator)).to(self.dtype)

        self.w13 = random(self.num_experts, rows, self.hidden_size)
        self.w2 = random(self.num_experts, self.hidden_size, self.intermediate_size)
        self.b13 = random(self.num_experts, rows)
        self.b2 = random(self.num_experts, self.hidden_size)
        self.generator = generator

    @property
    def config(self) -> fusedmoe.MoeConfig:
        return fusedmoe.MoeConfig(hidden_size=self.hidden_size,
                                  intermediate_size=self.intermediate_size,
                                  num_experts=self.num_experts, top_k=self.top_k, dtype=self.dtype)

    @property
    def weights(self) -> fusedmoe.ExpertWeights:
        return fusedmoe.ExpertWeights(w13=self.w13, w2=self.w2)

    def tokens(self, count: int, ids: torch.dtype = torch.int32,
               weights: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
        """hidden, topk_weights, topk_ids; skewed: every token chooses expert 0, and one none."""
        hidden = torch.randn(count, self.hidden_size, generator=self.generator).to(self.dtype)
        router = torch.rand(count, self.top_k, generator=self.generator).to(weights)
        chosen = torch.stack([torch.cat((torch.zeros(1, dtype=torch.long), 1 + torch.randperm(
            self.num_experts - 1, generator=self.generator)[:self.top_k - 1]))
            for _ in range(count)]) if count else torch.zeros(0, self.top_k, dtype=torch.long)
        if count > 2:
            chosen[2] = -1
        return hidden, router, chosen.to(ids)

    def expected(self, hidden: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor,
                 **options) -> torch.Tensor:
        return oracle(hidden, self.w13, self.w2, topk_weights, topk_ids, **options)


def quantised(layer: Layer, format: str, **options) -> fusedmoe.ExpertWeights:
    """The layer's weights in a format; its own become what those are worth."""
    w13 = fusedmoe.quantize(layer.w13, format, **options)
    w2 = fusedmoe.quantize(layer.w2, format, **{**options, "parts": "one"})
    layer.w13, layer.w2 = fusedmoe.dequantize(w13), fusedmoe.dequantize(w2)
    return fusedmoe.ExpertWeights(w13=w13, w2=w2)
