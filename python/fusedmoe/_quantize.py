"""From numbers to the weight formats and back: the library's own encoders, for tests, tools and
models that come unquantised. Models that are quantised have better calibrated scales.
"""

from __future__ import annotations

import math
import sys
from typing import Any, cast

from . import _core
from .config import (
    Array,
    ScaleLayout,
    ScaleParts,
    ScaleType,
    TensorView,
    WeightFormat,
    WeightLayout,
    WeightScales,
    WeightTensor,
)
from .errors import InvalidArgument

__all__ = ["dequantize", "quantize"]

# Format or type of scales -> NumPy's dtype, and torch's where that says more. 4 bits and the
# blocks of the K-quants are bytes in both.
_NUMPY = {"f32": "float32", "f16": "float16", "bf16": "uint16", "int8": "int8"}
_TORCH = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "int8": "int8",
          "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "mxfp8": "float8_e4m3fn",
          "e8m0": "float8_e8m0fnu", "e4m3": "float8_e4m3fn"}
_GROUP = 128  # of formats that have none of their own
# Elements along K in a block, and its bytes.
_PACKED = {"mxfp4": (2, 1), "nvfp4": (2, 1), "int4": (2, 1), "q4_k": (256, 144),
           "q5_k": (256, 176), "q6_k": (256, 210)}


def _torch_of(array: Any) -> Any:
    """The torch module, when this is a tensor of it."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(array, torch.Tensor) else None


def _array(bits: Any, name: str, shape: tuple[int, ...], torch: Any) -> Any:
    """Bytes from the library as an array of what they are."""
    if bits is None:
        return None
    if torch is None:
        return bits.view(_NUMPY.get(name, "uint8")).reshape(shape)
    dtype = getattr(torch, _TORCH.get(name, "uint8"), torch.uint8)
    return torch.from_numpy(bits).view(dtype).reshape(shape)


def quantize(
    tensor: Array,
    format: WeightFormat,
    *,
    scales: ScaleLayout | None = None,
    group_size: int = 0,
    block: tuple[int, int] | None = None,
    scale_type: ScaleType | None = None,
    parts: ScaleParts = "one",
    transposed: bool = False,
    zero_points: bool = False,
    layout: WeightLayout = "nk",
) -> WeightTensor:
    """``tensor`` in another format, with scales of its own, as :class:`WeightTensor` describes it.

    tensor       [experts, outputs, inputs], f32, f16 or bf16, on the CPU; any strides
    scales       what one scale covers: "tensor", "channel", "group" or "block". None = "block" or
                 "group" where ``block`` or ``group_size`` say so, else the format's own: per
                 tensor for fp8, per channel for int8, groups of 32 for mxfp8 and mxfp4, of 16 for
                 nvfp4, of 128 for int4
    group_size   inputs under one scale; the last group may be partial
    block        (outputs, inputs) under one scale; those at the edges may be partial
    scale_type   "f32" (where None), "f16" or "bf16" for fp8, int8 and int4; others have their own
    parts        "halves" or "interleaved": gate and up of one w13 get scales of their own (per
                 tensor and block, and the global scales of nvfp4)
    transposed   group and block: scales are [experts, along inputs, along outputs]
    zero_points  int4: choose them, too; otherwise they are 8
    layout       "kn": data are [experts, inputs, outputs]; for formats of 8 bits and more

    Elements are rounded to nearest even. A scale is the largest magnitude that it covers over the
    format's largest element; for mx formats the power of two of the OCP specification; for int4
    with zero points the range that holds 0, over 15 steps; nvfp4 adds a global scale, the largest
    magnitude over 6 * 448.

    ``data``, ``scales.data``, ``scales.zero_points`` and ``scales.global_scales`` are torch tensors
    when ``tensor`` is one, else NumPy arrays. Torch tensors have torch's own dtype of 8 bits; bits
    that the framework has no name for are uint8, and bf16 of NumPy uint16. Formats of 4 bits are
    [experts, outputs, ceil(inputs / 2)], q4_k, q5_k and q6_k the blocks of GGUF,
    [experts, outputs, inputs / 256 * 144, 176 or 210]; ``shape`` says what they hold.

    Takes up to 0.1 us an element, on one thread, without the GIL. Raises InvalidArgument for what
    the format does not have.
    """
    data = tensor.data if isinstance(tensor, TensorView) else tensor
    sizes = tuple(int(size) for size in getattr(data, "shape", ()))
    if len(sizes) != 3:
        raise InvalidArgument(f"tensor: expected [experts, outputs, inputs], got {list(sizes)} of "
                              f"{type(data).__name__}; reshape it")
    said, type_, size = _core._default_scales(format)
    if scales is None:
        scales = "block" if block else "group" if group_size else cast(ScaleLayout, said)
    if scales == "group" and not group_size:
        group_size = size or _GROUP
    if scales == "none" and (parts != "one" or transposed):
        raise InvalidArgument(f"parts, transposed: expected none for {format}, which has no scales "
                              f"beside its data, got {parts!r}, {transposed}; leave them out")
    block_n, block_k = block or (0, 0)
    description = WeightScales(layout=scales, type=scale_type or cast(ScaleType, type_),
                               group_size=group_size, block_n=block_n, block_k=block_k,
                               transposed=transposed, parts=parts)
    bits, scale_bits, points, global_scales, scale_shape, global_shape = _core._quantize(
        tensor, WeightTensor(format=format, layout=layout, shape=(sizes[0], sizes[1], sizes[2]),
                             scales=description), zero_points)
    torch = _torch_of(tensor)
    experts, outputs, inputs = sizes
    stored: tuple[int, ...] = sizes if layout == "nk" else (experts, inputs, outputs)
    if format in _PACKED:
        elements, bytes_ = _PACKED[format]
        stored = experts, outputs, math.ceil(inputs / elements) * bytes_
    made = None if scale_bits is None else WeightScales(
        data=_array(scale_bits, description.type or "f32", tuple(scale_shape), torch),
        layout=scales, type=description.type, group_size=group_size, block_n=block_n,
        block_k=block_k, transposed=transposed, parts=parts,
        zero_points=_array(points, "u8", tuple(scale_shape), torch),
        global_scales=_array(global_scales, "f32", tuple(global_shape), torch))
    return WeightTensor(data=_array(bits, format, stored, torch), format=format, layout=layout,
                        shape=(sizes[0], sizes[1], sizes[2]), scales=made)


def dequantize(tensor: WeightTensor | Array) -> Array:
    """What weights are worth: f32 [experts, outputs, inputs], rounded once from the exact value.

    ``tensor``: a :class:`WeightTensor` of any format, layout and strides, on the CPU, or a plain
    array as :class:`ExpertWeights` takes it. Returns a torch tensor when its data are one, else a
    NumPy array. Raises InvalidArgument.
    """
    values = _core._dequantize(tensor)
    data = tensor.data if isinstance(tensor, WeightTensor) else tensor
    torch = _torch_of(data)
    return values if torch is None else torch.from_numpy(values)
