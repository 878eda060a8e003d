"""Peers for the tests of bench --compare: the layer in plain Python over the real protocol helper,
and one way to go wrong for each file beside this one."""

import math
import os
import struct
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "../../../bench/peers"))

from _adapter import Missing, Refused, serve  # noqa: E402,F401


def from_bf16(view):
    halves = struct.unpack(f"{len(view) // 2}H", view)
    words = struct.pack(f"{len(halves)}I", *(half << 16 for half in halves))
    return struct.unpack(f"{len(halves)}f", words)


def to_bf16(values):
    words = struct.unpack(f"{len(values)}I", struct.pack(f"{len(values)}f", *values))
    return struct.pack(f"{len(words)}H", *((w + 0x7fff + (w >> 16 & 1)) >> 16 for w in words))


def log(text):
    """Into the file that a test names, to see what was asked and in which order."""
    path = os.environ.get("FAKE_PEER_LOG")
    if path:
        with open(path, "a") as file:
            file.write(text + "\n")


class Fake:
    version = "1.2.3"
    about = "plain Python"
    factor = 1.0  # of every output
    mode = "a16"

    def __init__(self, threads):
        self.name = os.path.splitext(os.path.basename(sys.argv[0]))[0]
        self.clear()
        log(f"{self.name} starts {threads}")

    def clear(self):
        self.layers = []

    def add_layer(self, shape, tensors):
        self.shape = shape
        self.layers.append((self.weights("w13", tensors, shape["hidden_size"]),
                            self.weights("w2", tensors, shape["intermediate_size"])))
        return {"mode": self.mode}

    def weights(self, name, tensors, inputs):
        """bf16, or int8 with an f32 scale for each row."""
        if self.shape["format"] == "bf16":
            return from_bf16(tensors[name])
        assert self.shape["format"] == "int8" and self.shape["scales"]["layout"] == "channel"
        codes = struct.unpack(f"{len(tensors[name])}b", tensors[name])
        view = tensors[name + "_scales"]
        scales = struct.unpack(f"{len(view) // 4}f", view)
        return [code * scales[i // inputs] for i, code in enumerate(codes)]

    def set_inputs(self, num_tokens, hidden, routings, output):
        self.num_tokens, self.output = num_tokens, output
        self.hidden = from_bf16(hidden)
        count = num_tokens * self.shape["top_k"]
        self.routings = [(struct.unpack(f"{count}i", ids), struct.unpack(f"{count}f", weights))
                         for ids, weights in routings]

    def apply(self, layer, routing):
        log(f"{self.name} apply {layer} {routing}")
        w13, w2 = self.layers[layer]
        ids, weights = self.routings[routing]
        size, inner, top_k = (self.shape[n] for n in ("hidden_size", "intermediate_size", "top_k"))
        sums = [0.0] * (self.num_tokens * size)
        for slot, (expert, weight) in enumerate(zip(ids, weights)):
            token = slot // top_k
            x = self.hidden[token * size:(token + 1) * size]
            first = expert * 2 * inner * size
            rows = [sum(map(float.__mul__, w13[at:at + size], x))
                    for at in range(first, first + 2 * inner * size, size)]
            act = [g / (1 + math.exp(-g)) * u for g, u in zip(rows[:inner], rows[inner:])]
            for i in range(size):
                at = (expert * size + i) * inner
                sums[token * size + i] += weight * sum(map(float.__mul__, w2[at:at + inner], act))
        self.output[:] = to_bf16([self.factor * value for value in sums])
