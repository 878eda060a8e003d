"""From the arguments of XpuFusedMoe to a layer of the library: which format the tensors are, what
the activation means, which experts are here.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from typing import Any, NamedTuple, NoReturn, cast

import torch

from . import _core
from .config import (
    Activation,
    ActivationConfig,
    ExpertWeights,
    GateUpLayout,
    MoeConfig,
    PlanOptions,
    ScaleParts,
    Support,
    WeightFormat,
    WeightLayout,
    WeightScales,
    WeightTensor,
)
from .errors import Error, InvalidArgument, Unsupported

Tensor = torch.Tensor

# --- Formats: the dtype of w13, then the dtype and rank of its scales -----------------------------

_FP8: dict[torch.dtype, WeightFormat] = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2"}
FLOATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_FP4 = getattr(torch, "float4_e2m1fn_x2", None)  # PyTorch >= 2.8
_E8M0 = (torch.uint8, torch.float8_e8m0fnu)
_MX_GROUP = 32  # elements under one scale, by the definition of mxfp4 and mxfp8
_BLOCK = 128  # rows and columns of a block of block-scaled fp8
# Flags of older constructors, in their order, and the format that each claims; the order in which
# they win is that of the peers: the narrower description first.
FLAGS = {"is_fp8": "fp8", "is_int4": "int4", "is_mxfp4": "mxfp4", "is_mxfp8": "mxfp8",
          "is_block_fp8": "fp8_block"}
_PRECEDENCE = ("mxfp8", "fp8_block", "mxfp4", "int4", "fp8")
_IN_WORDS = {
    "fp8": "fp8 with a scale per expert",
    "fp8_block": "fp8 with a scale per block of 128 x 128",
    "mxfp8": "mxfp8",
    "mxfp4": "mxfp4",
    "int4": "int4 (q - 8, the low nibble first)",
    "int4_signed": "int4 rewritten as two's complement",
}


def weight_format(w13: Tensor, w13_scales: Tensor | None = None, **flags: bool | None) -> str:
    """Which format such tensors are: f32, f16, bf16, fp8, fp8_block, mxfp8, mxfp4, int4, or
    int4_signed (int8 with the mark ``xpu_fused_moe``: int4 that was rewritten in place).

    ``flags``: is_fp8, is_int4, is_mxfp4, is_mxfp8, is_block_fp8 of older callers; a true one wins
    over what the dtypes say, when it fits them. Raises InvalidArgument for what is no format.
    """
    dtype = w13.dtype
    if dtype in _FP8:
        found = "fp8"
        if w13_scales is not None and w13_scales.dtype in _E8M0:
            found = "mxfp8"
        elif w13_scales is not None and w13_scales.dtype == torch.float32 and w13_scales.ndim == 3:
            found = "fp8_block"
        possible = {"fp8", "fp8_block", "mxfp8"}
    elif _FP4 is not None and dtype == _FP4:
        found, possible = "mxfp4", {"mxfp4"}
    elif dtype == torch.uint8:
        found, possible = "int4", {"int4", "mxfp4"}
        if hasattr(w13, "xpu_fused_moe"):  # rewritten by a version that kept the dtype
            found = "int4_signed"
    elif dtype == torch.int8 and hasattr(w13, "xpu_fused_moe"):
        found, possible = "int4_signed", {"int4"}
    elif dtype in FLOATS:
        return FLOATS[dtype] if not any(flags.values()) else _refuse_flags(w13, flags)
    else:
        raise InvalidArgument(
            f"w13: expected float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, "
            f"float4_e2m1fn_x2 or uint8 (int4), got {dtype}"
            + (" without the mark xpu_fused_moe" if dtype == torch.int8 else "") + "; convert it")
    claimed = {FLAGS[name] for name, value in flags.items() if value}
    for name in _PRECEDENCE:
        if name not in claimed:
            continue
        if name not in possible:
            _refuse_flags(w13, flags)
        return found if name == "int4" else name
    return found


def _refuse_flags(w13: Tensor, flags: dict[str, bool | None]) -> NoReturn:
    said = ", ".join(f"{name}=True" for name, value in flags.items() if value)
    raise InvalidArgument(f"w13: expected weights in the format that {said} claims, got "
                          f"{w13.dtype}; drop the flags, the dtypes say the format")


def _is_four_bit(format: str) -> bool:
    return format in ("mxfp4", "int4", "int4_signed")


class Kind(NamedTuple):
    """What the tensors of a layer are, besides their shapes."""

    format: str
    layout: WeightLayout  # of formats of 8 bits and more
    parts: ScaleParts  # whether scales of w13 are those of two matrices, and how its rows lie


def _check_rank(name: str, w: Tensor, format: str) -> None:
    if w.ndim == 3:
        return
    order = "[experts, N, K / 2]" if _is_four_bit(format) else "[experts, K, N]"
    raise InvalidArgument(f"{name}: expected {order}, got {list(w.shape)}; reshape it")


def _sizes(tensors: Tensors, kind: Kind) -> tuple[int, int]:
    """Inputs and outputs of w13. In 4 bits, where a byte holds two inputs, the outputs of w2 say
    how many there are."""
    for name in ("w13", "w2"):
        _check_rank(name, getattr(tensors, name), kind.format)
    if _is_four_bit(kind.format):
        return tensors.w2.shape[1], tensors.w13.shape[1]
    _, first, second = tensors.w13.shape
    return (second, first) if kind.layout == "nk" else (first, second)


def _group_size(name: str, scales: Tensor, inputs: int) -> int:
    """Of scales [E, N, groups]: the power of two that gives so many groups, the last of which may
    be partial, or else an equal share of the inputs."""
    groups = scales.shape[2] if scales.ndim == 3 else 0
    if groups > 0:
        size = 1 << (max(-(-inputs // groups), 1) - 1).bit_length()
        if -(-inputs // size) == groups:
            return size
        if inputs % groups == 0:
            return inputs // groups
    raise InvalidArgument(f"{name}: expected [experts, N, K / group] with K = {inputs}, got "
                          f"{list(scales.shape)}; reshape them")


def _scales(name: str, scales: Tensor | None, kind: Kind, inputs: int, parts: ScaleParts
            ) -> WeightScales:
    if scales is None:
        raise InvalidArgument(f"{name}: expected the scales of {_IN_WORDS[kind.format]} weights, "
                              "got None; pass them")
    if kind.format == "fp8":
        return WeightScales(data=scales, layout="tensor")
    if kind.format == "fp8_block":  # [E, K / 128, N / 128]; gate and up start blocks of their own
        return WeightScales(data=scales, layout="block", block_n=_BLOCK, block_k=_BLOCK,
                            transposed=True, parts="halves" if parts == "halves" else "one")
    if kind.format == "mxfp8":  # [E, K / 32, N], as the weights
        return WeightScales(data=scales, layout="group", group_size=_MX_GROUP, transposed=True)
    if kind.format == "mxfp4":  # [E, N, K / 32]
        return WeightScales(data=scales, layout="group", group_size=_MX_GROUP)
    return WeightScales(data=scales, layout="group",
                        group_size=_group_size(name, scales, inputs))


def _weight(name: str, w: Tensor, scales: Tensor | None, kind: Kind, inputs: int,
            parts: ScaleParts = "one") -> WeightTensor:
    """``inputs``: K of this tensor."""
    if kind.format in FLOATS.values():  # w13 and w2 may differ in their float; no scales are read
        if w.dtype not in FLOATS:
            raise InvalidArgument(f"{name}: expected float32, float16 or bfloat16 as w13, got "
                                  f"{w.dtype}; convert it")
        return WeightTensor(data=w, layout=kind.layout)
    said = _scales(f"{name}_scales", scales, kind, inputs, parts)
    if kind.format in ("fp8", "fp8_block"):
        if w.dtype not in _FP8:
            raise InvalidArgument(f"{name}: expected float8_e4m3fn or float8_e5m2 as w13, got "
                                  f"{w.dtype}; convert it")
        return WeightTensor(data=w, format=_FP8[w.dtype], layout="kn", scales=said)
    if kind.format == "mxfp8":
        if w.dtype != torch.float8_e4m3fn:
            raise Unsupported(f"{name}: expected float8_e4m3fn elements of mxfp8, got {w.dtype}; "
                              "convert them")
        return WeightTensor(data=w, format="mxfp8", layout="kn", scales=said)
    shape = (w.shape[0], w.shape[1], inputs)
    if kind.format == "int4_signed":  # -8..7 as two's complement -> 0..15 about 8
        if w.dtype not in (torch.int8, torch.uint8):
            raise InvalidArgument(f"{name}: expected int8 as w13, got {w.dtype}; give the tensor "
                                  "that was rewritten beside it")
        return WeightTensor(data=w.view(torch.uint8) ^ 0x88, format="int4", shape=shape,
                            scales=said)
    return WeightTensor(data=w, format=cast(WeightFormat, kind.format), shape=shape, scales=said)


def _never_called(expert: int) -> ExpertWeights:
    raise AssertionError("supports() reads no weights")


def supports_format(format: str, device: str = "cpu") -> Support:
    """Whether weights in a format of :func:`weight_format` can be computed on a device, and if
    not, why: asks the library with a small layer."""
    names = {"fp8": "fp8_e4m3", "fp8_block": "fp8_e4m3", "int4_signed": "int4"}
    name = cast(WeightFormat, names.get(format, format))
    layout: WeightLayout = "nk" if _is_four_bit(format) else "kn"
    scales = {
        "fp8": WeightScales(layout="tensor", type="f32"),
        "fp8_block": WeightScales(layout="block", type="f32", block_n=_BLOCK, block_k=_BLOCK,
                                  transposed=True),
        "mxfp8": WeightScales(layout="group", type="e8m0", group_size=_MX_GROUP, transposed=True),
        "mxfp4": WeightScales(layout="group", type="e8m0", group_size=_MX_GROUP),
        "int4": WeightScales(layout="group", type="bf16", group_size=_BLOCK),
    }.get("int4" if name == "int4" else format)

    def tensor(outputs: int, inputs: int) -> WeightTensor:
        return WeightTensor(format=name, layout=layout, shape=(1, outputs, inputs), scales=scales)

    config = MoeConfig(hidden_size=_BLOCK, intermediate_size=_BLOCK, num_experts=1, top_k=1)
    weights = ExpertWeights(w13=tensor(2 * _BLOCK, _BLOCK), w2=tensor(_BLOCK, _BLOCK),
                            source=_never_called)  # states shapes; nothing is read
    return _core.FusedMoe.supports(config, weights, PlanOptions(device=device))


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


@dataclasses.dataclass(frozen=True, eq=False)
class Tensors:
    """The six tensors of a layer, as they were given."""

    w13: Tensor
    w13_scales: Tensor | None
    w13_bias: Tensor | None
    w2: Tensor
    w2_scales: Tensor | None
    w2_bias: Tensor | None


TENSORS = tuple(field.name for field in dataclasses.fields(Tensors))


def _device_name(device: torch.device) -> str:
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
    inputs, outputs = _sizes(tensors, kind)
    if gated and outputs % 2:
        raise InvalidArgument(f"w13: expected gate and up, an even number of outputs, got "
                              f"{outputs} in {list(tensors.w13.shape)}; {name} has a gate")
    config = MoeConfig(
        hidden_size=inputs, intermediate_size=outputs // 2 if gated else outputs,
        num_experts=num_experts if table is None else len(table), top_k=top_k, activation=act,
        dtype=dtype or _hidden_dtype(tensors), output_dtype=output_dtype,
        gate_up_layout=gate_up_layout, clamp_limit=clamp)
    options = dataclasses.replace(options, device=_device_name(tensors.w13.device),
                                  expert_map=table)
    layer = Layer(config, weights_of(tensors, kind), options, kind)
    _refuse_if_unsupported(layer, tensors)
    return layer


def weights_of(tensors: Tensors, kind: Kind) -> ExpertWeights:
    """As the library describes them. Those of int4_signed are converted copies."""
    for name in ("w13_scales", "w13_bias", "w2", "w2_scales", "w2_bias"):
        tensor = getattr(tensors, name)
        if tensor is not None and tensor.device != tensors.w13.device:
            raise InvalidArgument(f"{name}: expected a tensor on {tensors.w13.device} as w13, got "
                                  f"one on {tensor.device}; move it")
    inputs, outputs = _sizes(tensors, kind)
    return ExpertWeights(
        w13=_weight("w13", tensors.w13, tensors.w13_scales, kind, inputs, kind.parts),
        w2=_weight("w2", tensors.w2, tensors.w2_scales, kind,
                   outputs if kind.parts == "one" else outputs // 2),
        w13_bias=tensors.w13_bias, w2_bias=tensors.w2_bias)


def _refuse_if_unsupported(layer: Layer, tensors: Tensors) -> None:
    """Asks the library, which gives the reason; create() does the rest of the checks."""
    device = tensors.w13.device
    if device.type not in ("cpu", "cuda", "xpu"):
        raise InvalidArgument(f"w13: expected a tensor on cpu, cuda or xpu, got one on {device}; "
                              "move it")
    if device.type != "cpu":  # its memory is not read before the device is known to be there
        answer = supports_format(layer.kind.format, _device_name(device))
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
