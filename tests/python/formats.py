"""The weight formats in NumPy, written from their definitions and from nothing of the library: what a
code is worth, which code a number becomes, where a scale lies. Slow, for small tensors."""

from __future__ import annotations

import dataclasses
import math

import numpy as np


def small_float(exponent: int, mantissa: int, bias: int, kind: str) -> np.ndarray:
    """The value of each code. kind: "ieee" (infinities and NaN), "fn" (one NaN), "finite"."""
    bits = 1 + exponent + mantissa
    values = np.empty(2**bits)
    for code in range(2**bits):
        sign = -1.0 if code >> (bits - 1) else 1.0
        e, m = code >> mantissa & (2**exponent - 1), code & (2**mantissa - 1)
        value = (m / 2**mantissa * 2.0**(1 - bias) if e == 0
                 else (1 + m / 2**mantissa) * 2.0**(e - bias))
        if kind == "ieee" and e == 2**exponent - 1:
            value = math.inf if m == 0 else math.nan
        if kind == "fn" and code & (2**(bits - 1) - 1) == 2**(bits - 1) - 1:
            value = math.nan
        values[code] = sign * value
    return values


E4M3 = small_float(4, 3, 7, "fn")
E5M2 = small_float(5, 2, 15, "ieee")
E2M1 = small_float(2, 1, 1, "finite")
E8M0 = np.array([2.0**(code - 127) for code in range(255)] + [math.nan])
# Elements: their values, and the exponent of the largest.
ELEMENTS = {"fp8_e4m3": (E4M3, 8), "fp8_e5m2": (E5M2, 15), "mxfp8": (E4M3, 8), "mxfp4": (E2M1, 2),
            "nvfp4": (E2M1, 2)}


def nearest(values: np.ndarray, x: np.ndarray) -> np.ndarray:
    """The code whose value is nearest; of two, the even one; beyond the largest, the largest."""
    order = [code for code in np.argsort(values[:len(values) // 2], kind="stable")
             if math.isfinite(values[code])]
    table = values[order]
    magnitude = np.minimum(np.abs(x), table[-1])
    above = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    low, high = magnitude - table[above - 1], table[above] - magnitude
    codes = np.array(order)
    take_low = (low < high) | ((low == high) & (codes[above - 1] % 2 == 0))
    code = np.where(take_low, codes[above - 1], codes[above])
    return (code | np.where(np.signbit(x), len(values) // 2, 0)).astype(np.uint8)


@dataclasses.dataclass
class Scaling:
    """Which scale covers (n, k): row and column of [rows, columns]."""

    rows: int
    columns: int
    row: np.ndarray
    column: np.ndarray

    def spread(self, scales: np.ndarray) -> np.ndarray:
        """[E, rows, columns] -> [E, N, K]."""
        return scales[:, self.row][:, :, self.column]

    def reduce(self, values: np.ndarray, function) -> np.ndarray:
        """[E, N, K] -> [E, rows, columns]."""
        return np.array([[[function(one[self.row == r][:, self.column == c])
                           for c in range(self.columns)] for r in range(self.rows)]
                         for one in values])


def part_of(outputs: int, parts: str) -> np.ndarray:
    n = np.arange(outputs)
    return {"one": 0 * n, "halves": (n >= outputs // 2) * 1, "interleaved": n % 2}[parts]


def scaling(outputs: int, inputs: int, layout: str, *, group_size: int = 0,
            block: tuple[int, int] = (0, 0), parts: str = "one") -> Scaling:
    n, k, count = np.arange(outputs), np.arange(inputs), 1 if parts == "one" else 2
    if layout == "tensor":
        return Scaling(count, 1, part_of(outputs, parts), 0 * k)
    if layout == "channel":
        return Scaling(outputs, 1, n, 0 * k)
    if layout == "group":
        return Scaling(outputs, -(-inputs // group_size), n, k // group_size)
    of_part = outputs // count
    rows = -(-of_part // block[0])
    part = part_of(outputs, parts)
    return Scaling(count * rows, -(-inputs // block[1]), part * rows + (n % of_part) // block[0],
                   k // block[1])


def nibbles(data: np.ndarray, inputs: int) -> np.ndarray:
    """[E, N, ceil(K / 2)] -> codes [E, N, K], the even k from the low half."""
    return np.stack((data & 15, data >> 4), -1).reshape(*data.shape[:2], -1)[..., :inputs]


def packed(codes: np.ndarray) -> np.ndarray:
    if codes.shape[2] % 2:
        codes = np.concatenate((codes, np.zeros_like(codes[..., :1])), 2)
    return (codes[..., ::2] | codes[..., 1::2] << 4).astype(np.uint8)


def decode(format: str, codes: np.ndarray, scales: np.ndarray | None,
           zero_points: np.ndarray | None = None) -> np.ndarray:
    """codes [E, N, K]; scales and zero points spread to [E, N, K], f64."""
    if format == "int8":
        return codes.astype(np.float64) * scales
    if format == "int4":
        zero = 8 if zero_points is None else zero_points.astype(np.float64)
        return (codes.astype(np.float64) - zero) * scales
    return ELEMENTS[format][0][codes] * scales


def half(data: np.ndarray) -> np.ndarray:
    return data.copy().view(np.float16).astype(np.float64)


def decode_k_blocks(format: str, data: np.ndarray) -> np.ndarray:
    """GGUF's q4_k, q5_k and q6_k, uint8 [E, N, bytes] -> f64 [E, N, K], element by element."""
    size = {"q4_k": 144, "q5_k": 176, "q6_k": 210}[format]
    blocks = data.reshape(-1, size)
    out = np.empty((len(blocks), 256))
    for block, values in zip(blocks, out):
        b = block.astype(int)
        if format == "q6_k":
            d = half(block[208:210])[0]
            for i in range(256):
                h, r = divmod(i, 128)
                quarter, n = divmod(r, 32)
                low = b[64 * h + 32 * (quarter & 1) + n] >> (4 if quarter >= 2 else 0) & 15
                high = b[128 + 32 * h + n] >> (2 * quarter) & 3
                scale = int(block[192 + i // 16].view(np.int8))
                values[i] = d * scale * ((low | high << 4) - 32)
            continue
        d, dmin = half(block[:2])[0], half(block[2:4])[0]
        s = b[4:16]
        start = 16 if format == "q4_k" else 48
        for i in range(256):
            j = i // 32
            if j < 4:
                scale, minimum = s[j] & 63, s[j + 4] & 63
            else:
                scale = s[j + 4] & 15 | s[j - 4] >> 6 << 4
                minimum = s[j + 4] >> 4 | s[j] >> 6 << 4
            code = b[start + i // 64 * 32 + i % 32] >> (4 if i % 64 >= 32 else 0) & 15
            if format == "q5_k":
                code |= (b[16 + i % 32] >> j & 1) << 4
            values[i] = d * scale * code - dmin * minimum
    return out.reshape(*data.shape[:2], -1)
