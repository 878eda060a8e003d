"""Which format the tensors of XpuFusedMoe are in, and the same tensors as the library describes
them.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, NoReturn, cast

import torch

from . import _core
from .config import (
    ExpertWeights,
    MoeConfig,
    PlanOptions,
    ScaleParts,
    Support,
    WeightFormat,
    WeightLayout,
    WeightScales,
    WeightTensor,
)
from .errors import InvalidArgument, Unsupported

Tensor = torch.Tensor


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


def sizes_of(tensors: Tensors, kind: Kind) -> tuple[int, int]:
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


# --- As the library describes them ---------------------------------------------------------------


def weights_of(tensors: Tensors, kind: Kind) -> ExpertWeights:
    """As the library describes them. Those of int4_signed are converted copies."""
    for name in ("w13_scales", "w13_bias", "w2", "w2_scales", "w2_bias"):
        tensor = getattr(tensors, name)
        if tensor is not None and tensor.device != tensors.w13.device:
            raise InvalidArgument(f"{name}: expected a tensor on {tensors.w13.device} as w13, got "
                                  f"one on {tensor.device}; move it")
    inputs, outputs = sizes_of(tensors, kind)
    return ExpertWeights(
        w13=_weight("w13", tensors.w13, tensors.w13_scales, kind, inputs, kind.parts),
        w2=_weight("w2", tensors.w2, tensors.w2_scales, kind,
                   outputs if kind.parts == "one" else outputs // 2),
        w13_bias=tensors.w13_bias, w2_bias=tensors.w2_bias)
