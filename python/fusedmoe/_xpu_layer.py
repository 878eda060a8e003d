"""From the arguments of XpuFusedMoe to a layer of the library: what the activation means, which
experts are here. What its tensors are is in _xpu_formats.py.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from typing import Any

import torch

from ._xpu_formats import (
    Kind,
    Tensors,
    sizes_of,
    supports_format,
    weight_format,
    weights_of,
)
from .config import (
    Activation,
    ActivationConfig,
    ExpertWeights,
    GateUpLayout,
    MoeConfig,
    PlanOptions,
    WeightLayout,
)
from .errors import Error, InvalidArgument, Unsupported

Tensor = torch.Tensor

# --- Activations ----------------------------------------------------------------------------------

# Name of the peers -> (kind of the library, gate/up layout).
ACTIVATIONS: dict[str, tuple[Activation, GateUpLayout]] = {
    "silu": ("silu", "halves"),
    "gelu": ("gelu", "halves"),
    "gelu_tanh": ("gelu_tanh", "halves"),
    "swigluoai": ("swigluoai", "interleaved"),
    "swigluoai_uninterleave": ("swigluoai", "halves"),
    "relu2_no_mul": ("relu2", "halves"),
    "swiglustep": ("swiglustep", "halves"),
    "situ": ("situ", "halves"),
}
_LIMIT, _ALPHA = 7.0, 1.702  # the peers' constants of swigluoai and swiglustep


def activation_name(activation: Any) -> str:
    """Strings and enumerators; a text that contains SWIGLUOAI counts, as with the peers."""
    value = activation.value if isinstance(activation, enum.Enum) else activation
    text = str(value)
    if text not in ACTIVATIONS and "SWIGLUOAI" in text:
        text = "swigluoai_uninterleave" if "UNINTERLEAVE" in text else "swigluoai"
    if text not in ACTIVATIONS:
        raise InvalidArgument(f"activation: expected one of {', '.join(ACTIVATIONS)}, got "
                              f"'{activation}'; use one of them")
    return text


def _activation(name: str, clamp: float | None, beta: float | None, linear_beta: float | None
                ) -> tuple[ActivationConfig, GateUpLayout, float | None]:
    """The library's activation, gate/up layout and clamp."""
    kind, layout = ACTIVATIONS[name]
    if clamp is not None and math.isnan(clamp):
        raise InvalidArgument("gemm1_clamp_limit: expected a number or None, got nan; pass None")
    if clamp is not None and (clamp <= 0 or math.isinf(clamp)):
        clamp = None  # the peers clamp with positive limits only
    limit = _LIMIT
    if kind == "swigluoai" and clamp is not None:
        # It clamps by itself, at 7; a clamp before that leaves the smaller of both.
        limit, clamp = min(limit, clamp), None
    if kind == "situ":
        if beta is None or not math.isfinite(beta) or beta <= 0:
            raise InvalidArgument("activation_situ_beta: expected a finite number > 0 for situ, "
                                  f"got {beta}; set the model's beta")
        if linear_beta is not None and not linear_beta > 0:
            linear_beta = None  # the peers spell "none" as -1
    if clamp is not None and kind not in ("silu", "gelu", "gelu_tanh"):
        raise Unsupported(f"gemm1_clamp_limit: expected None for {name}, got {clamp}; it is "
                          "defined for silu, gelu and gelu_tanh")
    config = ActivationConfig(kind=kind, alpha=_ALPHA, limit=limit,
                              beta=(beta or 0.0) if kind == "situ" else 0.0,
                              linear_beta=(linear_beta or 0.0) if kind == "situ" else 0.0)
    return config, layout, clamp


# --- From the peers' arguments to a layer ---------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a plan is made of."""

    config: MoeConfig
    weights: ExpertWeights
    options: PlanOptions
    kind: Kind


def device_name(device: torch.device) -> str:
    """As the library spells it; what it does not know it refuses by that name."""
    return device.type if device.type == "cpu" else f"{device.type}:{device.index or 0}"


def _hidden_dtype(tensors: Tensors) -> torch.dtype:
    """The weights say it, or what else is in the dtype of the activations, or PyTorch's default
    dtype, which engines set to the model's while they load it."""
    for tensor in (tensors.w13, tensors.w13_bias, tensors.w2_bias, tensors.w13_scales):
        if tensor is not None and tensor.dtype in (torch.bfloat16, torch.float16):
            return tensor.dtype
    if tensors.w13.dtype == torch.float32:
        return torch.float32
    default = torch.get_default_dtype()
    return default if default in (torch.bfloat16, torch.float16) else torch.bfloat16


def _expert_map(expert_map: Any, num_experts: int, ep_rank: int, ep_size: int) -> list[int] | None:
    """Global -> local id; None = all experts are here."""
    if num_experts <= 0:
        raise InvalidArgument(f"num_experts: expected at least 1 local expert, got {num_experts}; "
                              "a rank without experts needs no layer, its output is zeros")
    if expert_map is None and ep_size == 1 and ep_rank == 0:
        return None
    if expert_map is None:
        if ep_size < 1 or not 0 <= ep_rank < ep_size:
            raise InvalidArgument(f"ep_rank: expected 0 to ep_size - 1 = {ep_size - 1}, got "
                                  f"{ep_rank}; pass the rank in the expert-parallel group")
        first = ep_rank * num_experts
        return [g - first if first <= g < first + num_experts else -1
                for g in range(num_experts * ep_size)]
    table = expert_map.tolist() if hasattr(expert_map, "tolist") else list(expert_map)
    local = sum(1 for entry in table if entry >= 0)
    if local != num_experts:
        raise InvalidArgument(f"num_experts: expected {local}, the experts that expert_map places "
                              f"here, got {num_experts}; it counts local experts")
    return table


def describe(tensors: Tensors, top_k: int, activation: Any, num_experts: int, ep_rank: int,
              ep_size: int, expert_map: Any, clamp: float | None, beta: float | None,
              linear_beta: float | None, flags: dict[str, bool | None],
              dtype: torch.dtype | None, output_dtype: torch.dtype | None,
              options: PlanOptions, layout: WeightLayout = "kn") -> Layer:
    name = activation_name(activation)
    act, gate_up_layout, clamp = _activation(name, clamp, beta, linear_beta)
    table = _expert_map(expert_map, num_experts, ep_rank, ep_size)
    gated = act.kind != "relu2"
    kind = Kind(weight_format(tensors.w13, tensors.w13_scales, **flags), layout,
                gate_up_layout if gated else "one")
    inputs, outputs = sizes_of(tensors, kind)
    if gated and outputs % 2:
        raise InvalidArgument(f"w13: expected gate and up, an even number of outputs, got "
                              f"{outputs} in {list(tensors.w13.shape)}; {name} has a gate")
    config = MoeConfig(
        hidden_size=inputs, intermediate_size=outputs // 2 if gated else outputs,
        num_experts=num_experts if table is None else len(table), top_k=top_k, activation=act,
        dtype=dtype or _hidden_dtype(tensors), output_dtype=output_dtype,
        gate_up_layout=gate_up_layout, clamp_limit=clamp)
    options = dataclasses.replace(options, device=device_name(tensors.w13.device),
                                  expert_map=table)
    layer = Layer(config, weights_of(tensors, kind), options, kind)
    _refuse_if_unsupported(layer, tensors)
    return layer


def _refuse_if_unsupported(layer: Layer, tensors: Tensors) -> None:
    """Asks the library, which gives the reason; create() does the rest of the checks."""
    device = tensors.w13.device
    if device.type not in ("cpu", "cuda", "xpu"):
        raise InvalidArgument(f"w13: expected a tensor on cpu, cuda or xpu, got one on {device}; "
                              "move it")
    if device.type != "cpu":  # its memory is not read before the device is known to be there
        answer = supports_format(layer.kind.format, device_name(device))
        if not answer:
            raise Unsupported(answer.reason)


def in_words_of_constructor(error: Error) -> Error:
    """The same error with the names that the constructor has for its arguments."""
    text = re.sub(r"^weights\.(w13|w2)\.scales\.data(?=:)", r"\1_scales", str(error))
    return type(error)(re.sub(r"^weights\.(?=w13|w2)", "", text))


def in_words_of_apply(error: Error, workspace13: Tensor | None = None,
                      workspace2: Tensor | None = None) -> Error:
    """The same error with the names that ``apply`` has for its arguments."""
    lent = [name for name, tensor in (("workspace13", workspace13), ("workspace2", workspace2))
            if tensor is not None]
    text = str(error)
    if lent:
        one = "workspace2" if workspace2 is not None else "workspace13"
        both = " and ".join(lent) if " + " in text else one
        text = re.sub(r"^workspace(?=:)", both, text)
        text = re.sub(r"(?<=apart from )workspace(?= at)", one, text)
    text = re.sub(r"^hidden(?=[:.])", "hidden_states", text)
    text = re.sub(r"(?<=apart from )hidden(?= at)", "hidden_states", text)
    return type(error)(text)
