"""quantize and dequantize against NumPy implementations of the formats and PyTorch's own conversions, for
every format, layout of scales and type; and what arrays of weights and scales are refused."""

from __future__ import annotations

import dataclasses
import itertools

import formats
import numpy as np
import pytest
import torch
from support import A8_ISA, Layer, assert_close, quantised

import fusedmoe
from fusedmoe import ExpertWeights, FusedMoe, TensorView, WeightScales, WeightTensor, errors

E, N, K = 2, 12, 70  # no group and no block divides K, no block N or N / 2
VALUES = np.random.default_rng(0).standard_normal((E, N, K), dtype=np.float32)
VALUES[0, 3] = 0  # a group, a channel of zeros
VALUES[1, :, 5] *= 100


def as_numpy(array) -> np.ndarray:
    """The bits of an array or tensor of 8 bits, the values of others."""
    if isinstance(array, torch.Tensor):
        if array.itemsize == 1 and array.dtype != torch.int8:
            array = array.view(torch.uint8)
        elif array.dtype == torch.bfloat16:
            array = array.float()
        array = array.numpy()
    return array


def number(bits: np.ndarray, type: str) -> np.ndarray:
    """Scales as f64."""
    if type in ("e8m0", "e4m3"):
        return (formats.E8M0 if type == "e8m0" else formats.E4M3)[bits]
    if bits.dtype == np.uint16:  # bf16 of NumPy
        bits = (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float64)


def rounded(values: np.ndarray, type: str) -> np.ndarray:
    """f64 -> the type of a scale -> f64."""
    if type == "bf16":
        return torch.from_numpy(values.astype(np.float32)).bfloat16().double().numpy()
    if type == "e4m3":
        return formats.E4M3[formats.nearest(formats.E4M3, values)]
    return values.astype(np.float32).astype({"f32": np.float32, "f16": np.float16}[type]).astype(
        np.float64)


_FP8 = [dict(scales="tensor"), dict(scales="tensor", parts="halves"),
        dict(scales="tensor", parts="interleaved"), dict(scales="channel"),
        dict(scales="block", block=(4, 32)), dict(block=(4, 32), parts="halves"),
        dict(block=(5, 64), transposed=True), dict(block=(100, 100))]
_INT = [dict(scales="channel"), dict(group_size=32), dict(group_size=16, transposed=True),
        dict(group_size=100)]
CASES = [
    *[("fp8_e4m3", case, type) for case in _FP8 for type in ("f32", "f16", "bf16")],
    *[("fp8_e5m2", case, "f32") for case in _FP8],
    *[(format, case, "e8m0") for format in ("mxfp8", "mxfp4")
      for case in (dict(), dict(transposed=True), dict(group_size=32))],
    *[("nvfp4", dict(parts=parts), "e4m3") for parts in ("one", "halves", "interleaved")],
    *[("int8", case, type) for case in _INT for type in ("f32", "bf16")],
    *[("int4", {**case, "zero_points": points}, type) for case in _INT
      for points in (False, True) for type in ("f32", "f16", "bf16")],
]


def expected(format: str, case: dict, type: str):
    """codes [E, N, K], scales, zero points and global scales, from VALUES; and the values."""
    values = VALUES.astype(np.float64)
    size = {"mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(format, case.get("group_size", 0))
    layout = case.get("scales") or ("block" if "block" in case else "group")
    where = formats.scaling(N, K, layout, group_size=size, block=case.get("block", (0, 0)),
                            parts=case.get("parts", "one"))
    largest = where.reduce(values, lambda x: np.abs(x).max())
    points = global_scales = None
    over_global = 1.0
    if format in ("mxfp8", "mxfp4"):
        top = formats.ELEMENTS[format][1]
        exponent = np.floor(np.log2(np.where(largest > 0, largest, 1))) - top
        scales = np.where(largest > 0, 2.0**exponent, 2.0**-top)
        scales = np.where(largest > 0, scales, 1.0)
    elif case.get("zero_points"):
        low = where.reduce(values, lambda x: min(x.min(), 0))
        high = where.reduce(values, lambda x: max(x.max(), 0))
        scales = np.where(high > low, (high - low) / 15, 1.0)
        points = np.clip(np.rint(-low / scales), 0, 15).astype(np.uint8)
        scales = rounded(scales, type)
    else:
        steps = {"fp8_e4m3": 448, "fp8_e5m2": 57344, "int8": 127, "int4": 7, "nvfp4": 6}[format]
        scales = largest / steps
        if format == "nvfp4":
            parts = formats.part_of(N, case["parts"])
            count = 1 if case["parts"] == "one" else 2
            global_scales = np.array([[np.abs(one[parts == p]).max() / (6.0 * 448.0)
                                       for p in range(count)] for one in values]).astype(np.float32)
            over_global = global_scales[:, parts, None].astype(np.float64)
            scales = scales / over_global
        scales = rounded(np.where(scales > 0, scales, 1.0), type)
    spread = where.spread(scales) * over_global
    zero = None if points is None else where.spread(points)
    if format == "int8":
        codes = np.clip(np.rint(values / spread), -128, 127).astype(np.int8)
    elif format == "int4":
        z = 8 if zero is None else zero.astype(np.int64)
        codes = (np.clip(np.rint(values / spread), -z, 15 - z) + z).astype(np.uint8)
    else:
        codes = formats.nearest(formats.ELEMENTS[format][0], values / spread)
    return codes, scales, points, global_scales, formats.decode(format, codes, spread, zero)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("format, case, type", CASES)
def test_every_format_equals_its_definition(format, case, type, kind):
    codes, scales, points, global_scales, values = expected(format, case, type)
    given = VALUES if kind == "numpy" else torch.from_numpy(VALUES)
    if type in ("f16", "bf16"):
        case = {**case, "scale_type": type}
    got = fusedmoe.quantize(given, format, **case)
    assert (got.format, got.layout, got.shape, got.scales.type) == (format, "nk", (E, N, K), type)
    arrays = [got.data, got.scales.data, got.scales.zero_points, got.scales.global_scales]
    assert all(array is None or isinstance(array, np.ndarray) == (kind == "numpy")
               for array in arrays)
    if kind == "torch":
        assert got.data.dtype == {"fp8_e4m3": torch.float8_e4m3fn, "mxfp8": torch.float8_e4m3fn,
                                  "fp8_e5m2": torch.float8_e5m2, "int8": torch.int8}.get(
                                      format, torch.uint8)
        assert got.scales.data.dtype == {
            "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16,
            "e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}[type]
    four = format in ("mxfp4", "nvfp4", "int4")
    assert np.array_equal(as_numpy(got.data), formats.packed(codes) if four else codes)
    if case.get("transposed"):
        scales = scales.swapaxes(1, 2)
    found = number(as_numpy(got.scales.data), type)
    assert found.size == scales.size and found.shape[0] == E
    assert np.array_equal(found.reshape(scales.shape), scales)
    assert found.ndim == 3 if got.scales.layout in ("group", "block") else found.ndim < 3
    if points is None:
        assert got.scales.zero_points is None
    else:
        points = points.swapaxes(1, 2) if case.get("transposed") else points
        assert np.array_equal(as_numpy(got.scales.zero_points).reshape(points.shape), points)
    if global_scales is not None:
        found = as_numpy(got.scales.global_scales)
        assert np.array_equal(found.reshape(global_scales.shape), global_scales)
        assert found.ndim == (1 if case["parts"] == "one" else 2)
    back = fusedmoe.dequantize(got)
    assert isinstance(back, np.ndarray if kind == "numpy" else torch.Tensor)
    assert np.array_equal(as_numpy(back), values.astype(np.float32))


@pytest.mark.parametrize("format", ["q4_k", "q5_k", "q6_k"])
def test_k_quants_decode_as_ggufs_blocks_and_are_near(format):
    values = np.random.default_rng(1).standard_normal((2, 3, 512), dtype=np.float32)
    values[0, 1] = 0
    got = fusedmoe.quantize(values, format)
    assert got.shape == (2, 3, 512) and got.scales is None
    back = fusedmoe.dequantize(got)
    assert np.array_equal(back, formats.decode_k_blocks(format, got.data).astype(np.float32))
    largest = np.abs(values).max()
    steps = {"q4_k": 15, "q5_k": 31, "q6_k": 32}[format]
    assert np.abs(back - values).max() <= 1.2 * largest / steps
    # Any bytes: no field of a block may be missed.
    noise = np.random.default_rng(2).integers(0, 256, got.data.shape, np.uint8)
    size = noise.shape[2] // 2
    for block in (noise[..., :size], noise[..., size:]):  # sound f16
        for at in ([208] if format == "q6_k" else [0, 2]):
            block[..., at + 1] &= 0x3B
    back = fusedmoe.dequantize(WeightTensor(data=noise, format=format))
    assert np.array_equal(back, formats.decode_k_blocks(format, noise).astype(np.float32))


@pytest.mark.parametrize("format", ["f32", "f16", "bf16"])
def test_floats_are_rounded_as_pytorch_does(format):
    dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[format]
    values = torch.from_numpy(VALUES)
    got = fusedmoe.quantize(values, format)
    assert got.data.dtype == dtype and torch.equal(got.data, values.to(dtype))
    assert torch.equal(fusedmoe.dequantize(got), values.to(dtype).float())
    bits = fusedmoe.quantize(VALUES, format)
    assert torch.equal(torch.from_numpy(bits.data).view(dtype), values.to(dtype))
    assert np.array_equal(fusedmoe.dequantize(bits), values.to(dtype).float().numpy())


@pytest.mark.parametrize("format, dtype", [("fp8_e4m3", torch.float8_e4m3fn),
                                           ("fp8_e5m2", torch.float8_e5m2)])
def test_fp8_codes_are_pytorchs(format, dtype):
    """Each code is worth what PyTorch says, and numbers between two become what it makes of them."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).reshape(1, 1, 256)
    one = WeightScales(data=torch.ones(1), layout="tensor")
    back = fusedmoe.dequantize(WeightTensor(data=codes, scales=one))
    assert torch.equal(back.nan_to_num(777), codes.float().nan_to_num(777))
    finite = codes.float().flatten()
    finite = finite[finite.isfinite()].sort().values
    most = finite.max()
    middle = (finite[1:] + finite[:-1]) / 2
    values = torch.cat((finite, middle, torch.nextafter(middle, most), torch.nextafter(middle, -most)))
    values = values.reshape(1, 1, -1)
    got = fusedmoe.quantize(values, format)  # the scale is one: amax over the largest element
    assert got.scales.data.item() == 1
    assert torch.equal(got.data.float(), values.to(dtype).float())


def test_e8m0_scales_are_pytorchs():
    codes = torch.arange(256, dtype=torch.uint8)
    scales = codes.view(torch.float8_e8m0fnu).reshape(1, 256, 1)
    data = torch.full((1, 256, 32), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 1.0
    back = fusedmoe.dequantize(WeightTensor(data=data, format="mxfp8", scales=WeightScales(
        data=scales, layout="group", group_size=32)))
    want = scales.float().expand(1, 256, 32)
    assert torch.equal(back.nan_to_num(777), want.nan_to_num(777))
    assert back[0, 0, 0] == 2.0**-127  # case B049


def test_nibbles_of_mxfp4_lie_low_half_first():  # case B048
    data = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8)[None, None]
    back = fusedmoe.dequantize(WeightTensor(data=data, format="mxfp4", scales=WeightScales(
        data=np.full((1, 1, 1), 127, np.uint8), layout="group", group_size=32)))
    values = [0, .5, 1, 1.5, 2, 3, 4, 6]
    assert back.flatten().tolist() == ([*values, *[-v for v in values]] * 2)
    assert np.signbit(back[0, 0, 8])


@pytest.mark.parametrize("format", ["f16", "fp8_e4m3", "mxfp8", "int8"])
def test_inputs_may_come_before_outputs(format):
    plain = fusedmoe.quantize(VALUES, format)
    turned = fusedmoe.quantize(VALUES, format, layout="kn")
    assert turned.data.shape == (E, K, N) and turned.shape == (E, N, K)
    assert np.array_equal(turned.data, plain.data.swapaxes(1, 2))
    assert np.array_equal(fusedmoe.dequantize(turned), fusedmoe.dequantize(plain))
    view = dataclasses.replace(plain, data=turned.data.swapaxes(1, 2))
    assert np.array_equal(fusedmoe.dequantize(view), fusedmoe.dequantize(plain))


def test_any_floats_and_strides_are_taken():
    values = torch.from_numpy(VALUES).bfloat16()
    want = fusedmoe.quantize(values.float(), "int8").data
    assert torch.equal(fusedmoe.quantize(values, "int8").data, want)
    assert torch.equal(fusedmoe.quantize(values.mT.contiguous().mT, "int8").data, want)
    bits = TensorView(values.view(torch.uint16).numpy(), "bf16")
    assert np.array_equal(fusedmoe.quantize(bits, "int8").data, want.numpy())
    spread = np.repeat(VALUES, 2, 2)[..., ::2]
    assert np.array_equal(fusedmoe.quantize(spread, "int8").data,
                          fusedmoe.quantize(VALUES, "int8").data)
    assert torch.equal(fusedmoe.dequantize(values), values.float())
    parameter = torch.nn.Parameter(values)
    assert torch.equal(fusedmoe.quantize(parameter, "int8").data, want)


def test_what_is_not_finite():
    values = VALUES.copy()
    values[0, 1, 0] = np.nan
    got = fusedmoe.dequantize(fusedmoe.quantize(values, "mxfp8"))
    assert np.isnan(got[0, 1, :32]).all() and np.isfinite(got[0, 1, 32:]).all()
    assert np.isfinite(got[0, 2]).all() and np.isfinite(got[1]).all()


def refused(text: str, call, kind=errors.InvalidArgument) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert text in str(caught.value), str(caught.value)


@pytest.mark.parametrize("format, options, text", [
    ("int8", dict(group_size=-1), "group_size: expected a count from 1 to 2^31, got -1; say layout "
                                  "channel"),  # case B156
    ("int8", dict(block=(4, 4)), "layout: expected channel or group for int8, got block"),
    ("fp8_e4m3", dict(group_size=32), "layout: expected tensor or channel or block"),
    ("fp8_e4m3", dict(scales="block"), "block_n: expected a count"),
    ("fp8_e4m3", dict(block=(4, 4), parts="interleaved"), "cannot share blocks"),
    ("mxfp4", dict(group_size=16), "group_size: expected 32, got 16"),
    ("nvfp4", dict(group_size=32), "group_size: expected 16, got 32"),
    ("mxfp4", dict(scale_type="f32"), "type: expected e8m0 for mxfp4, got f32"),  # case B050
    ("int8", dict(scale_type="e8m0"), "type: expected f32 or f16 or bf16 for int8, got e8m0"),
    ("mxfp4", dict(layout="kn"), "layout: expected nk for mxfp4, got kn"),
    ("q4_k", dict(), "inputs in multiples of 256 for q4_k, got 70"),
    ("f32", dict(scales="tensor"), "scales: expected none for f32"),
    ("f32", dict(parts="halves"), "parts, transposed: expected none for f32"),
    ("q4_k", dict(transposed=True), "parts, transposed: expected none for q4_k"),
    ("int8", dict(zero_points=True), "zero_points: expected False for int8"),
    ("fp4", dict(), "format: expected one of f32, f16"),
    ("int8", dict(scales="row"), "'row'"),
])
def test_what_quantize_refuses(format, options, text):
    refused(text, lambda: fusedmoe.quantize(VALUES, format, **options))


def test_what_quantize_refuses_of_arrays():
    for bad, text in ((VALUES.astype(np.float64), "float32, float16 or bfloat16"),
                      (VALUES[0], "expected [experts, outputs, inputs], got [12, 70]"),
                      ("text", "expected [experts, outputs, inputs]"),
                      (VALUES[:, :0], "sizes from 1 to 2^31"),
                      (torch.empty(1, 2, 3, device="meta"), "memory of the CPU")):
        refused(text, lambda: fusedmoe.quantize(bad, "int8"))
    refused("scales.layout: expected tensor or channel or block",
            lambda: fusedmoe.dequantize(torch.zeros(1, 2, 3).to(torch.float8_e4m3fn)))
    refused("data", lambda: fusedmoe.dequantize(WeightTensor(format="f32", shape=(1, 2, 3))))


# --- Arrays that are not what format and layout say ------------------------------------------------


def block_layer(rows: int, parts: str = "halves"):
    """Case B042: intermediate 192, blocks of 128 x 128."""
    config = fusedmoe.MoeConfig(hidden_size=3072, intermediate_size=192, num_experts=2, top_k=2,
                                dtype="bf16")
    w13 = torch.randn(2, 384, 3072).to(torch.float8_e4m3fn)
    w2 = torch.randn(2, 3072, 192).to(torch.float8_e4m3fn)
    scales = torch.rand(2, rows, 24) * 0.01 + 0.01
    block = dict(layout="block", block_n=128, block_k=128)
    return config, ExpertWeights(
        w13=WeightTensor(data=w13, scales=WeightScales(data=scales, parts=parts, **block)),
        w2=WeightTensor(data=w2, scales=WeightScales(data=torch.rand(2, 24, 2) * 0.01, **block)))


def test_block_scales_of_gate_and_up_apart():  # case B042
    config, weights = block_layer(4)
    plan = FusedMoe.create(config, weights)
    layer = Layer(hidden_size=3072, intermediate_size=192, num_experts=2, top_k=2)
    layer.w13, layer.w2 = fusedmoe.dequantize(weights.w13), fusedmoe.dequantize(weights.w2)
    scales = weights.w13.scales.data
    rows = torch.tensor([0] * 128 + [1] * 64 + [2] * 128 + [3] * 64)
    assert torch.equal(layer.w13, weights.w13.data.float() * scales[:, rows].repeat_interleave(128, 2))
    tokens = layer.tokens(3)
    output = torch.empty_like(tokens[0])
    plan.apply(output, *tokens)
    assert_close(output, layer.expected(*tokens), torch.bfloat16, quantised=True)
    for parts in ("halves", "one"):
        config, weights = block_layer(3, parts)
        answer = FusedMoe.supports(config, weights)
        assert not answer and "[2, 4, 24]" in answer.reason and "[2, 3, 24]" in answer.reason
        refused(answer.reason, lambda: FusedMoe.create(config, weights))
    refused("say parts='halves'", lambda: fusedmoe.dequantize(block_layer(4, "one")[1].w13))


def tensor(format: str, **options) -> WeightTensor:
    return fusedmoe.quantize(torch.from_numpy(VALUES), format, **options)


def with_scales(weights: WeightTensor, **changes) -> WeightTensor:
    return dataclasses.replace(weights, scales=dataclasses.replace(weights.scales, **changes))


@pytest.mark.parametrize("weights, text", [
    (with_scales(tensor("int4", group_size=32), data=torch.ones(E, N, 2)),
     "tensor.scales.data: expected float32 [2, 12, 3], got float32 [2, 12, 2]; check the layout"),
    (with_scales(tensor("int4", group_size=32), data=torch.ones(E, 3, N)), "say transposed=True"),
    (with_scales(tensor("int4", group_size=32, zero_points=True),
                 zero_points=torch.zeros(E, N, 2, dtype=torch.uint8)),
     "tensor.scales.zero_points: expected uint8 [2, 12, 3], got uint8 [2, 12, 2]; give one"),
    (with_scales(tensor("int4", group_size=32, zero_points=True),
                 zero_points=torch.zeros(E, N, 3, dtype=torch.int8)),
     "tensor.scales.zero_points: expected uint8 [2, 12, 3], got int8 [2, 12, 3]; cast them"),
    (with_scales(tensor("int8"), zero_points=torch.zeros(E, N, dtype=torch.uint8)),
     "tensor.scales.zero_points: expected none for int8"),
    (with_scales(tensor("nvfp4"), global_scales=torch.ones(E, 2)),
     "tensor.scales.global_scales: expected float32 [2], got float32 [2, 2]"),
    (with_scales(tensor("nvfp4"), global_scales=torch.ones(E).bfloat16()),
     "tensor.scales.global_scales: expected float32 [2], got bfloat16 [2]; cast it"),
    (with_scales(tensor("nvfp4"), global_scales=None), "tensor.scales.global: expected f32 global"),
    (with_scales(tensor("nvfp4", parts="halves"), global_scales=torch.ones(E)),
     "expected float32 [2, 2], got float32 [2]"),
    (with_scales(tensor("fp8_e4m3"), data=torch.ones(E, 2)), "if gate and up were quantised apart"),
    (with_scales(tensor("fp8_e4m3", parts="halves"), data=torch.ones(E)), "say parts='one'"),
    (with_scales(tensor("fp8_e4m3"), data=torch.ones(E).double(), type=None),
     "tensor.scales.data: expected f32, f16, bf16, e8m0 or e4m3, got float64 [2]; say its type"),
    (with_scales(tensor("fp8_e4m3"), data=torch.ones(E).half()),
     "tensor.scales.data: expected float32, got float16 [2]"),
    (with_scales(tensor("mxfp4"), data=torch.full((E, N, 3), 0.006975), type=None),  # case B050
     "tensor.scales.type: expected e8m0 for mxfp4, got f32; convert them"),
    (with_scales(tensor("mxfp4"), data=torch.full((E, N, 3), 0.006975)),
     "tensor.scales.data: expected float8_e8m0fnu or uint8, got float32 [2, 12, 3]"),
    (with_scales(tensor("nvfp4"), data=torch.ones(E, N, 5).to(torch.float8_e4m3fnuz)),
     "tensor.scales.data: expected float8_e4m3fn or uint8, got float8_e4m3fnuz [2, 12, 5]; no format"),
    (with_scales(tensor("nvfp4"), data=torch.ones(E, N, 5).to(torch.float8_e4m3fnuz), type=None),
     "got float8_e4m3fnuz [2, 12, 5]; no format"),
    (with_scales(tensor("int8"), data=None), "tensor.scales.data: expected f32 [2, 12, 1], got a null"),
    (WeightTensor(data=torch.ones(E, N, K).to(torch.float8_e4m3fnuz)),  # case B044
     "tensor: expected a dtype that is a format of weights, got float8_e4m3fnuz [2, 12, 70]; no format"),
    (WeightTensor(data=torch.ones(E, N, K).to(torch.float8_e4m3fnuz), format="fp8_e4m3"),
     "tensor: expected float8_e4m3fn or uint8, got float8_e4m3fnuz [2, 12, 70]; no format"),
    (dataclasses.replace(tensor("fp8_e4m3"), data=torch.ones(E, N, K).to(torch.float8_e5m2)),
     "tensor: expected float8_e4m3fn or uint8, got float8_e5m2"),
    (dataclasses.replace(tensor("int8"), data=torch.zeros(E, N, K, dtype=torch.uint8)),
     "tensor: expected int8, got uint8"),
    (dataclasses.replace(tensor("int4"), data=torch.zeros(E, N, K // 2, dtype=torch.int8)),
     "tensor: expected uint8, got int8"),
    (dataclasses.replace(tensor("int4"), data=torch.zeros(E, N, K, dtype=torch.uint8)),
     "tensor: expected uint8 [2, 12, 35] for 70 inputs in int4, got uint8 [2, 12, 70]"),
    (dataclasses.replace(tensor("int4"), data=torch.zeros(E, N + 1, K // 2, dtype=torch.uint8)),
     "tensor: expected the data of [2, 12, 70] (experts, outputs, inputs), got uint8 [2, 13, 35]"),
    (dataclasses.replace(tensor("int4"), data=torch.zeros(E, N, K, dtype=torch.uint8)[..., ::2]),
     "whose rows are contiguous and apart"),
    (dataclasses.replace(tensor("int4"), data=torch.zeros(E, N * K // 2, dtype=torch.uint8)),
     "[experts, outputs, bytes of a row], 1 for each 2 inputs"),
    (dataclasses.replace(tensor("int8"), shape=(E, N, K + 1)),
     "tensor: expected the data of [2, 12, 71] (experts, outputs, inputs), got int8 [2, 12, 70]"),
    (WeightTensor(data=torch.zeros(E, N, 145, dtype=torch.uint8), format="q4_k"),
     "tensor: expected whole blocks in a row, 144 for each 256 inputs, got uint8 [2, 12, 145]"),
    (WeightTensor(data=torch.zeros(E, N, 35, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
     "say it: WeightTensor(data=..., format=...)"),
])
def test_arrays_that_do_not_fit_are_refused_with_what_is_due(weights, text):
    refused(text, lambda: fusedmoe.dequantize(weights))


def test_the_same_arrays_in_other_words():
    """Dimensions of one, transposed views, bits of a dtype, blocks as a dimension, padded rows."""
    plain = tensor("fp8_e4m3")
    same = [
        (plain, with_scales(plain, data=plain.scales.data.reshape(E, 1, 1))),
        (plain, dataclasses.replace(plain, data=plain.data.view(torch.uint8), shape=None)),
        (plain, dataclasses.replace(plain, format=None)),
    ]
    channel = tensor("int8", scale_type="bf16")
    same += [
        (channel, with_scales(channel, data=channel.scales.data[..., None], type=None)),
        (channel, with_scales(channel, data=channel.scales.data.view(torch.uint16))),
    ]
    group = tensor("int4", group_size=32, zero_points=True)
    turned = {name: getattr(group.scales, name).mT.contiguous() for name in ("data", "zero_points")}
    same += [
        (group, with_scales(group, transposed=True, **turned)),
        (group, with_scales(group, **{name: one.mT for name, one in turned.items()})),
        (group, dataclasses.replace(group, data=torch.nn.functional.pad(group.data, (0, 5))[..., :-5])),
        (group, dataclasses.replace(group, data=group.data.reshape(E, N, 7, 5))),
        (group, dataclasses.replace(group, shape=None)),
    ]
    four = tensor("mxfp4")
    same += [
        (four, dataclasses.replace(four, data=four.data.view(torch.float4_e2m1fn_x2))),
        (four, with_scales(four, data=four.scales.data.view(torch.uint8), type=None)),
    ]
    for one, other in same:
        assert torch.equal(fusedmoe.dequantize(one), fusedmoe.dequantize(other))
    odd = fusedmoe.quantize(VALUES[..., :69], "int4")  # the last byte has one element
    assert odd.data.shape == (E, N, 35) and fusedmoe.dequantize(odd).shape == (E, N, 69)
    refused("order of those of the scales", lambda: fusedmoe.dequantize(
        with_scales(group, zero_points=turned["zero_points"].mT)))


# --- Plans of them ---------------------------------------------------------------------------------

PLANS = [("fp8_e4m3", {}), ("fp8_e4m3", dict(parts="halves")), ("fp8_e4m3", dict(scales="channel")),
         ("fp8_e5m2", dict(block=(32, 64), parts="halves")), ("mxfp8", {}), ("mxfp4", {}),
         ("nvfp4", {}), ("nvfp4", dict(parts="halves")), ("int8", {}), ("int8", dict(group_size=32)),
         ("int4", dict(group_size=32)), ("int4", dict(group_size=16, zero_points=True))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format, options", [*PLANS, ("q4_k", {}), ("q6_k", {})])
def test_plans_match_the_oracle(format, options, dtype):
    sizes = dict(hidden_size=256, intermediate_size=256, num_experts=3,
                 top_k=2) if format.startswith("q") else {}
    layer = Layer(dtype=dtype, **sizes)
    weights = quantised(layer, format, **options)
    plan = FusedMoe.create(layer.config, weights)
    tokens = layer.tokens(9)
    output = torch.empty_like(tokens[0])
    plan.apply(output, *tokens)
    assert_close(output, layer.expected(*tokens), dtype, quantised=True)
    arrays = ExpertWeights(  # the same bytes from NumPy
        w13=fusedmoe.quantize(Layer(dtype=dtype, **sizes).w13.float().numpy(), format, **options),
        w2=fusedmoe.quantize(Layer(dtype=dtype, **sizes).w2.float().numpy(), format,
                             **{**options, "parts": "one"}))
    again = torch.empty_like(output)
    FusedMoe.create(layer.config, arrays).apply(again, *tokens)
    assert torch.equal(again, output)


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "mxfp4", "int8"])
def test_gate_and_up_in_both_layouts(format):  # case B054
    """Gate rows give 1 and up rows 2: silu(1) * 2."""
    for layout, channel in itertools.product(("halves", "interleaved"), (False, True)):
        config = fusedmoe.MoeConfig(hidden_size=32, intermediate_size=16, num_experts=2, top_k=1,
                                    dtype="f32", gate_up_layout=layout)
        rows = torch.tensor([1.0, 2.0]).repeat(16) if layout == "interleaved" else torch.tensor(
            [1.0, 2.0]).repeat_interleave(16)
        w13 = (rows[:, None] / 32).expand(2, 32, 32).contiguous()
        w2 = torch.eye(16)[torch.arange(32) % 16].expand(2, 32, 16).contiguous()
        options = dict(scales="channel") if format == "fp8_e4m3" and channel else {}
        plan = FusedMoe.create(config, ExpertWeights(w13=fusedmoe.quantize(w13, format, **options),
                                                     w2=fusedmoe.quantize(w2, format, **options)))
        output = torch.empty(1, 32)
        plan.apply(output, torch.ones(1, 32), torch.ones(1, 1), torch.zeros(1, 1).int())
        assert (output - 1.46212).abs().max() < 2e-3


def test_one_expert_at_a_time():
    layer = Layer(dtype=torch.bfloat16)
    whole = quantised(layer, "int4", group_size=32, zero_points=True)

    def stated(weights: WeightTensor) -> WeightTensor:
        scales = dataclasses.replace(weights.scales, data=None, zero_points=True)
        return dataclasses.replace(weights, data=None, scales=scales)

    def one(weights: WeightTensor, e: int) -> WeightTensor:
        scales = dataclasses.replace(weights.scales, data=weights.scales.data[e:e + 1],
                                     zero_points=weights.scales.zero_points[e:e + 1])
        return dataclasses.replace(weights, data=weights.data[e:e + 1], scales=scales,
                                   shape=(1, *weights.shape[1:]))

    weights = ExpertWeights(
        w13=stated(whole.w13), w2=stated(whole.w2),
        source=lambda e: ExpertWeights(w13=one(whole.w13, e), w2=one(whole.w2, e)))
    tokens = layer.tokens(9)
    outputs = [torch.empty_like(tokens[0]) for _ in range(2)]
    for output, given in zip(outputs, (whole, weights)):
        FusedMoe.create(layer.config, given).apply(output, *tokens)
    assert torch.equal(*outputs)
    refused("zero_points: expected an array", lambda: fusedmoe.dequantize(
        with_scales(whole.w2, zero_points=True)))


# --- Mode a8 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("format, options", [("int8", {}), ("int4", dict(group_size=32))])
def test_mode_a8_reaches_the_plan(format, options):
    layer = Layer(hidden_size=128, intermediate_size=64)
    weights = quantised(layer, format, **options)
    a8 = FusedMoe.create(layer.config, weights, fusedmoe.PlanOptions(mode="a8", isa=A8_ISA))
    assert "a8" in a8.describe()
    tokens = layer.tokens(9)
    output, exact = torch.empty_like(tokens[0]), torch.empty_like(tokens[0])
    a8.apply(output, *tokens)
    FusedMoe.create(layer.config, weights).apply(exact, *tokens)
    assert not torch.equal(output, exact)  # activations were rounded
    difference = (output.double() - layer.expected(*tokens)).norm() / layer.expected(*tokens).norm()
    assert difference < 0.05


def test_mode_a8_is_refused_with_the_reason():
    layer = Layer()
    options = fusedmoe.PlanOptions(mode="a8")
    answer = FusedMoe.supports(layer.config, layer.weights, options)
    assert not answer and "a8" in answer.reason
    refused(answer.reason, lambda: FusedMoe.create(layer.config, layer.weights, options),
            errors.Unsupported)
