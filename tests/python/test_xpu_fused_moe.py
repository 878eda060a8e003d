"""XpuFusedMoe and xpu_fused_moe: values against the oracle, workspaces against the allocating path,
weights that change, the signatures there were, and what is refused and why."""

from __future__ import annotations

import copy
import enum
import gc
import itertools
import re
import sys
import threading
import warnings
import weakref

import pytest
import torch
from support import A8_ISA, Layer, assert_close, dirty, oracle

import fusedmoe
from fusedmoe import _xpu_function, _xpu_install, errors, xpu
from fusedmoe.xpu import XpuFusedMoe, xpu_fused_moe

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
COUNTS = [1, 17, 3, 64, 0, 130, 5]


def kn(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous()


class Peer:
    """A layer and its tensors as vllm-xpu-kernels wants them."""

    def __init__(self, layer: Layer, bias: bool = False) -> None:
        self.layer = layer
        self.w13, self.w2 = kn(layer.w13), kn(layer.w2)
        self.b13, self.b2 = (layer.b13, layer.b2) if bias else (None, None)

    def build(self, activation="silu", **options) -> XpuFusedMoe:
        return XpuFusedMoe(self.w13, None, self.b13, self.w2, None, self.b2, self.layer.top_k,
                           activation, self.layer.num_experts, **options)

    def of_rank(self, experts: list[int], **options) -> XpuFusedMoe:
        return XpuFusedMoe(self.w13[experts].contiguous(), None, None,
                           self.w2[experts].contiguous(), None, None, self.layer.top_k, "silu",
                           len(experts), **options)

    def expected(self, hidden, weights, ids, **options):
        return self.layer.expected(hidden, weights, ids, b13=self.b13, b2=self.b2, **options)


def run(moe: XpuFusedMoe, tokens, **options) -> torch.Tensor:
    """Into a dirty output."""
    output = dirty(*tokens[0].shape, dtype=tokens[0].dtype)
    moe.apply(output, *tokens, **options)
    return output


# --- Values ---------------------------------------------------------------------------------------


class Named(enum.Enum):
    SWIGLUOAI = "swigluoai"
    GELU = "gelu"


ACTIVATIONS = [
    ("silu", {}, {"kind": "silu"}),
    ("silu", {"gemm1_clamp_limit": 0.3}, {"kind": "silu", "limit": 0.3}),
    ("silu", {"gemm1_clamp_limit": -1.0}, {"kind": "silu"}),
    ("gelu", {}, {"kind": "gelu"}),
    (Named.GELU, {"gemm1_clamp_limit": 0.3}, {"kind": "gelu", "limit": 0.3}),
    ("gelu_tanh", {}, {"kind": "gelu_tanh"}),
    ("swigluoai", {}, {"kind": "swigluoai", "limit": 7.0, "layout": "interleaved"}),
    ("swigluoai", {"gemm1_clamp_limit": 0.4},
     {"kind": "swigluoai", "limit": 0.4, "layout": "interleaved"}),
    ("MoEActivation.SWIGLUOAI", {}, {"kind": "swigluoai", "limit": 7.0, "layout": "interleaved"}),
    (Named.SWIGLUOAI, {}, {"kind": "swigluoai", "limit": 7.0, "layout": "interleaved"}),
    ("swigluoai_uninterleave", {}, {"kind": "swigluoai", "limit": 7.0}),
    ("MoEActivation.SWIGLUOAI_UNINTERLEAVE", {}, {"kind": "swigluoai", "limit": 7.0}),
    ("swiglustep", {}, {"kind": "swiglustep", "limit": 7.0}),
    ("relu2_no_mul", {}, {"kind": "relu2"}),
    ("situ", {"activation_situ_beta": 4.0}, {"kind": "situ", "beta": 4.0}),
    ("situ", {"activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.5},
     {"kind": "situ", "beta": 1.5, "linear_beta": 2.5}),
    ("situ", {"activation_situ_beta": 1.5, "activation_situ_linear_beta": -1.0},
     {"kind": "situ", "beta": 1.5}),
]


@pytest.mark.parametrize("activation, options, meaning", ACTIVATIONS)
def test_every_activation_matches_the_oracle(activation, options, meaning):
    for dtype, bias in itertools.product(DTYPES, (False, True)):
        peer = Peer(Layer(dtype=dtype, gated=meaning["kind"] != "relu2"), bias)
        moe = peer.build(activation, **options)
        for count in (1, 9):
            tokens = peer.layer.tokens(count, ids=torch.int64)
            assert_close(run(moe, tokens), peer.expected(*tokens, **meaning), dtype)


def test_a_limit_of_the_model_differs_from_none():
    """Guards the cases above: with these weights the clamps bite."""
    peer = Peer(Layer(dtype=torch.float32))
    tokens = peer.layer.tokens(9)
    plain = run(peer.build(), tokens)
    assert not torch.equal(plain, run(peer.build(gemm1_clamp_limit=0.3), tokens))
    assert not torch.equal(plain, run(peer.build("swiglustep"), tokens))


def test_a_row_of_skipped_slots_gives_zeros():
    peer = Peer(Layer(), bias=True)
    hidden, weights, ids = peer.layer.tokens(5)
    ids[:] = -1
    weights[:] = float("nan")
    assert torch.equal(run(peer.build(), (hidden, weights, ids)), torch.zeros_like(hidden))


def test_weights_as_transposed_views_and_of_two_dtypes():
    layer = Layer(dtype=torch.bfloat16)
    tokens = layer.tokens(9)
    views = XpuFusedMoe(layer.w13.transpose(1, 2), None, None, layer.w2.transpose(1, 2), None, None,
                        layer.top_k, "silu", layer.num_experts)
    assert torch.equal(run(views, tokens), run(Peer(layer).build(), tokens))
    mixed = XpuFusedMoe(kn(layer.w13), None, None, kn(layer.w2).float(), None, None, layer.top_k,
                        "silu", layer.num_experts)
    assert_close(run(mixed, tokens), layer.expected(*tokens), torch.bfloat16)


def test_hidden_may_have_another_dtype_than_the_weights():
    layer = Layer(dtype=torch.bfloat16)
    moe = Peer(layer).build(dtype=torch.float32)
    hidden, weights, ids = layer.tokens(9)
    hidden = hidden.float()
    assert_close(run(moe, (hidden, weights, ids)), layer.expected(hidden, weights, ids),
                 torch.float32)


def test_the_callers_tensors_are_never_modified():
    peer = Peer(Layer(), bias=True)
    tensors = [peer.w13, peer.w2, peer.b13, peer.b2, *peer.layer.tokens(9)]
    before = [(tensor.clone(), tensor._version, tensor.data_ptr()) for tensor in tensors]
    run(peer.build(), tensors[4:])
    xpu_fused_moe(tensors[4], peer.w13, None, peer.b13, peer.w2, None, peer.b2, tensors[5],
                  tensors[6], peer.layer.top_k, "silu", peer.layer.num_experts)
    for tensor, (value, version, address) in zip(tensors, before):
        assert torch.equal(tensor, value) and (tensor._version, tensor.data_ptr()) == (version,
                                                                                       address)
        assert not hasattr(tensor, "xpu_fused_moe")


# --- Workspaces: the allocating path is what every other must equal, bit for bit ------------------

MAP = [-1, -1, -1, 0, 1, 2, 3]
SCATTERED = [2, -1, 0, -1, -1, 1, 3]
ALTERNATE = [0, -1, 1, -1, 2, -1, 3, -1]
_MAPPED = dict(expert_map=torch.tensor(MAP, dtype=torch.int32))
# Of the constructor, of the call, which of the layer's experts are here, and the map in force.
EP = {
    "all experts": (dict(ep_rank=0, ep_size=1), None, None, None),
    "rank and size": (dict(ep_rank=1, ep_size=2), None, [4, 5, 6, 7], [-1] * 4 + [0, 1, 2, 3]),
    "map of the constructor": (_MAPPED, None, [3, 4, 5, 6], MAP),
    "map of the call": (_MAPPED, SCATTERED, [3, 4, 5, 6], SCATTERED),
    "map of the call over a rank": (dict(ep_rank=0, ep_size=2), ALTERNATE, [0, 1, 2, 3], ALTERNATE),
}


@pytest.mark.parametrize("name", EP)
def test_reused_workspaces_equal_the_allocating_path(name):
    options, map_of_call, experts, table = EP[name]
    layer = Layer(num_experts=8 if "rank" in name else 7)
    peer = Peer(layer)
    moe = peer.build(**options) if experts is None else peer.of_rank(experts, **options)
    call = {}
    if map_of_call is not None:
        call["expert_map"] = torch.tensor(map_of_call, dtype=torch.int32)
    most = max(COUNTS)
    whole = dirty(moe.workspace_size(most).bytes, dtype=torch.uint8)
    one = dirty(moe.min_workspace_size().bytes, dtype=torch.uint8)
    first, second = (dirty(size, dtype=torch.uint8) for size in moe.workspace_sizes(most))
    assert first.numel() + second.numel() == whole.numel()
    for count in COUNTS + COUNTS[::-1]:
        tokens = layer.tokens(count)
        plain = run(moe, tokens, **call)
        local = slice(None) if experts is None else experts
        expected = oracle(tokens[0], layer.w13[local], layer.w2[local], *tokens[1:],
                          expert_map=table)
        if expected.any():
            assert_close(plain, expected, layer.dtype)
        else:  # no token, or none for these experts
            assert not plain.any()
        ways = {
            "workspace2": dict(workspace2=whole),
            "workspace13": dict(workspace13=whole),
            "both": dict(workspace13=first, workspace2=second),
            "one token at a time": dict(workspace2=one),
            "an empty one beside it": dict(workspace13=torch.empty(0), workspace2=whole),
            "two empty ones": dict(workspace13=torch.empty(0), workspace2=torch.empty(0, 3)),
            "exact": dict(workspace2=dirty(moe.workspace_size(count).bytes, dtype=torch.uint8)),
        }
        for way, workspaces in ways.items():
            for tensor in workspaces.values():
                tensor.view(torch.uint8).fill_(0xFF)
            assert torch.equal(run(moe, tokens, **call, **workspaces), plain), (way, count)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.int64, torch.bfloat16,
                                   torch.float64, torch.complex64, torch.float8_e4m3fn])
def test_a_workspace_of_any_dtype_and_shape(dtype):
    peer = Peer(Layer())
    moe, tokens = peer.build(), peer.layer.tokens(9)
    rows = -(-moe.workspace_size(9).bytes // (4 * dtype.itemsize))
    workspace = dirty(rows, 4, dtype=dtype)
    assert torch.equal(run(moe, tokens, workspace2=workspace), run(moe, tokens))


def test_one_workspace_for_all_layers():
    peers = [Peer(Layer()), Peer(Layer(hidden_size=65, intermediate_size=33, top_k=1)),
             Peer(Layer(dtype=torch.float32))]
    layers = [peer.build() for peer in peers]
    workspace = xpu.shared_workspace(layers, 17)
    assert workspace.numel() == max(layer.workspace_size(17).bytes for layer in layers)
    workspace.fill_(0xFF)
    for peer, layer in zip(peers, layers):
        tokens = peer.layer.tokens(17)
        assert torch.equal(run(layer, tokens, workspace2=workspace), run(layer, tokens))
    formula = layers[0].workspace_formula
    assert layers[0].workspace_size(5).bytes == formula.fixed + 5 * formula.per_token
    assert layers[0].workspace(5).numel() == layers[0].workspace_size(5).bytes
    with pytest.raises(errors.InvalidArgument, match="at least one"):
        xpu.shared_workspace([], 1)


def refused(moe, tokens, kind, *parts, output=None, **options):
    """Raises that, names those, and writes nothing."""
    given = [tensor for tensor in options.values() if isinstance(tensor, torch.Tensor)
             and not tensor.is_meta]
    output = dirty(*tokens[0].shape, dtype=tokens[0].dtype) if output is None else output
    before = [tensor.view(torch.uint8).clone() if tensor.is_contiguous() else tensor.clone()
              for tensor in (output, *given) if not tensor.is_meta]
    with pytest.raises(kind) as caught:
        moe.apply(output, *tokens, **options)
    for part in parts:
        assert part in str(caught.value), str(caught.value)
    after = [tensor.view(torch.uint8) if tensor.is_contiguous() else tensor
             for tensor in (output, *given) if not tensor.is_meta]
    for a, b in zip(before, after):
        assert torch.equal(a, b)


def test_workspaces_that_are_refused_by_name():
    peer = Peer(Layer())
    moe, tokens = peer.build(), peer.layer.tokens(9)
    least = moe.min_workspace_size().bytes
    small = errors.WorkspaceTooSmall
    wrong = errors.InvalidArgument
    bytes_of = lambda size: torch.zeros(size, dtype=torch.uint8)  # noqa: E731
    refused(moe, tokens, small, "workspace2: expected at least", str(least), f"got {least - 1}",
            "min_workspace_size", workspace2=bytes_of(least - 1))
    refused(moe, tokens, small, "workspace13: expected at least", workspace13=bytes_of(3))
    refused(moe, tokens, small, "workspace13 and workspace2: expected at least", "got 3 + 5",
            workspace13=bytes_of(3), workspace2=bytes_of(5))
    gaps = torch.zeros(least, 2, dtype=torch.uint8)[:, ::2]
    refused(moe, tokens, wrong, "workspace2: expected contiguous", "with gaps", ".contiguous()",
            workspace2=gaps)
    refused(moe, tokens, wrong, "workspace13: expected contiguous", workspace13=gaps,
            workspace2=bytes_of(least))
    refused(moe, tokens, wrong, "workspace2: expected a tensor on cpu", "meta", "move it",
            workspace2=torch.empty(2 * least, dtype=torch.uint8, device="meta"))
    refused(moe, tokens, wrong, "workspace13: expected a tensor on cpu", "meta",
            workspace13=torch.empty(2 * least, dtype=torch.uint8, device="meta"))
    off = bytes_of(2 * least)[1:]
    refused(moe, tokens, wrong, "multiple of 64", "align", workspace2=off)
    refused(moe, tokens, wrong, "on meta",
            output=torch.empty_like(tokens[0], device="meta"))


def test_workspaces_that_overlap():
    peer = Peer(Layer(hidden_size=64, intermediate_size=48, dtype=torch.float32))
    moe = peer.build()
    first, second = moe.workspace_sizes(8)
    arena = torch.zeros(2 * (first + second), dtype=torch.uint8)
    hidden, weights, ids = peer.layer.tokens(8)
    rows = arena[:8 * 64 * 4].view(torch.float32).view(8, 64)
    wrong = errors.InvalidArgument
    with pytest.raises(wrong, match="workspace2: expected memory apart from output"):
        moe.apply(rows, hidden, weights, ids, workspace2=arena)
    with pytest.raises(wrong, match="workspace2: expected memory apart from hidden_states"):
        moe.apply(torch.empty(8, 64), rows, weights, ids, workspace2=arena)
    with pytest.raises(wrong, match="workspace13: expected memory apart from output"):
        moe.apply(rows, hidden, weights, ids, workspace13=arena[:first], workspace2=arena[-second:])
    with pytest.raises(wrong, match="workspace13: expected memory apart from workspace2"):
        moe.apply(torch.empty(8, 64), hidden, weights, ids, workspace13=arena[:first],
                  workspace2=arena[:second])
    assert not arena.any()
    moe.apply(hidden, hidden, weights, ids, workspace2=arena)  # in place is fine


def test_one_workspace_in_two_calls_at_once_is_refused():
    peer = Peer(Layer(hidden_size=256, intermediate_size=256))
    moe, tokens = peer.build(), peer.layer.tokens(256)
    workspace, right = moe.workspace(256), run(moe, tokens)
    busy, wrong = [], []
    start, deadline = threading.Barrier(4), threading.Event()

    def work() -> None:
        start.wait()
        while not deadline.is_set() and not busy:
            output = dirty(*tokens[0].shape, dtype=tokens[0].dtype)
            try:
                moe.apply(output, *tokens, workspace2=workspace)
            except errors.Busy as error:
                busy.append(str(error))
                wrong.extend(["written"] if not torch.equal(
                    output.view(torch.uint8), torch.full_like(output.view(torch.uint8), 0xFF))
                    else [])
            else:
                wrong.extend([] if torch.equal(output, right) else ["another result"])

    threads = [threading.Thread(target=work) for _ in range(4)]
    timer = threading.Timer(20, deadline.set)
    timer.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timer.cancel()
    assert busy and busy[0].startswith("workspace2: expected memory that no other call uses")
    assert not wrong


# --- Building -------------------------------------------------------------------------------------


def at_once(count: int, body) -> list:
    """The results of body(), in that many threads that start together."""
    start, results = threading.Barrier(count), []

    def work() -> None:
        start.wait()
        try:
            results.append(body())
        except BaseException as error:  # noqa: BLE001
            results.append(error)

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_several_threads_build_at_once():
    peer = Peer(Layer(), bias=True)
    tokens = peer.layer.tokens(17)
    right = run(peer.build(), tokens)

    class Lazy:
        """As XPUExperts: no lock around the first call."""

        impl = None

        def apply(self) -> torch.Tensor:
            if self.impl is None:
                self.impl = peer.build()
            return run(self.impl, tokens)

    for output in at_once(8, Lazy().apply):
        assert torch.equal(output, right)


def test_several_threads_build_one_plan_of_the_function(monkeypatch):
    peer = Peer(Layer())
    tokens = peer.layer.tokens(17)
    right = run(peer.build(), tokens)
    built = []
    create = _xpu_function.FusedMoe.create
    monkeypatch.setattr(_xpu_function.FusedMoe, "create",
                        lambda *a, **k: built.append(1) or create(*a, **k))
    outputs = at_once(8, lambda: xpu_fused_moe(
        tokens[0], peer.w13, None, None, peer.w2, None, None, *tokens[1:], peer.layer.top_k, "silu",
        peer.layer.num_experts))
    assert all(torch.equal(output, right) for output in outputs) and len(built) == 1


def test_the_plan_is_on_the_weights_device():
    from torch._subclasses import FakeTensorMode
    assert Peer(Layer()).build().plan.plan.device == "cpu"
    with FakeTensorMode():
        w13, w2 = torch.empty(2, 8, 12, device="xpu:1"), torch.empty(2, 6, 8, device="xpu:1")
    with pytest.raises(errors.Unsupported, match="device: xpu:1 is not available: .*fusedmoe info"):
        XpuFusedMoe(w13, None, None, w2, None, None, 1, "silu", 2)
    meta = torch.empty(2, 8, 12, device="meta")
    with pytest.raises(errors.InvalidArgument, match="w13: expected a tensor on cpu, cuda or xpu"):
        XpuFusedMoe(meta, None, None, meta, None, None, 1, "silu", 2)
    with pytest.raises(errors.InvalidArgument, match="w2: expected a tensor on cpu as w13"):
        XpuFusedMoe(torch.empty(2, 8, 12), None, None, meta, None, None, 1, "silu", 2)


@pytest.mark.parametrize("change, kind, parts", [
    (dict(activation="silu_no_mul"), ValueError,
     ["activation: expected one of silu, gelu, gelu_tanh, swigluoai", "'silu_no_mul'"]),
    (dict(activation="relu2"), ValueError, ["relu2_no_mul", "got 'relu2'"]),
    (dict(activation="situ"), ValueError, ["activation_situ_beta: expected a finite number > 0"]),
    (dict(activation="situ", activation_situ_beta=float("inf")), ValueError, ["got inf"]),
    (dict(activation="situ", activation_situ_beta=0.0), ValueError, ["got 0.0"]),
    (dict(activation="swiglustep", gemm1_clamp_limit=3.0), NotImplementedError,
     ["gemm1_clamp_limit: expected None for swiglustep, got 3.0"]),
    (dict(gemm1_clamp_limit=float("nan")), ValueError, ["gemm1_clamp_limit", "nan"]),
    (dict(num_experts=0), ValueError, ["num_experts: expected at least 1 local expert, got 0"]),
    (dict(num_experts=-1), ValueError, ["num_experts", "got -1"]),
    (dict(num_experts=6), ValueError, ["w13: expected [6, 131, 154]", "[7, 131, 154]"]),
    (dict(ep_rank=2, ep_size=2), ValueError, ["ep_rank: expected 0 to ep_size - 1 = 1, got 2"]),
    (dict(expert_map=torch.tensor([0, 1, -1])), ValueError,
     ["num_experts: expected 2, the experts that expert_map places here, got 7"]),
    (dict(w13=torch.zeros(7, 131)), ValueError, ["w13: expected [experts, K, N], got [7, 131]"]),
    (dict(w13=torch.zeros(7, 131, 77)), ValueError, ["an even number of outputs, got 77"]),
    (dict(w13=torch.zeros(7, 131, 154, dtype=torch.float64)), ValueError, ["got torch.float64"]),
    (dict(w13=torch.zeros(7, 131, 154, dtype=torch.int8)), ValueError,
     ["torch.int8 without the mark xpu_fused_moe"]),
    (dict(w2=torch.zeros(7, 131, 77)), ValueError, ["w2: expected [7, 77, 131]", "[7, 131, 77]"]),
    (dict(w13_bias=torch.zeros(7, 3)), ValueError, ["w13_bias: expected [7, 154], got [7, 3]"]),
    (dict(is_fp8=True), ValueError, ["is_fp8=True claims, got torch.float32"]),
    (dict(n_experts_per_token=8), ValueError, ["top_k", "at most num_experts = 7, got 8"]),
])
def test_what_the_constructor_refuses(change, kind, parts):
    peer = Peer(Layer(dtype=torch.float32))
    arguments = dict(w13=peer.w13, w13_scales=None, w13_bias=None, w2=peer.w2, w2_scales=None,
                     w2_bias=None, n_experts_per_token=3, activation="silu", num_experts=7)
    with pytest.raises(kind) as caught:
        XpuFusedMoe(**{**arguments, **change})
    assert isinstance(caught.value, fusedmoe.Error)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_what_apply_refuses():
    peer = Peer(Layer())
    moe, tokens = peer.build(), peer.layer.tokens(9)
    hidden, weights, ids = tokens
    refused(moe, tokens, errors.Unsupported, "a1q_scale: expected None", a1q_scale=hidden)
    refused(moe, tokens, errors.InvalidArgument, "expert_map: expected int32 [7], got int32 [6]",
            expert_map=torch.zeros(6, dtype=torch.int32))
    refused(moe, tokens, errors.InvalidArgument, "got float32 [7]", expert_map=torch.zeros(7))
    refused(moe, (hidden[:, :5], weights, ids), errors.InvalidArgument, "hidden_states: expected")
    refused(moe, (hidden, weights, ids[:, :2]), errors.InvalidArgument, "topk_ids: expected")
    bad = ids.clone()
    bad[4, 1] = 7
    refused(moe, (hidden, weights, bad), errors.InvalidArgument, "got 7 at [4, 1]", "with -1")
    with pytest.raises(TypeError):  # workspaces are named: a1q_scale is where a proposal had them
        moe.apply(torch.empty_like(hidden), hidden, weights, ids, None, None, moe.workspace(9))


# --- Formats --------------------------------------------------------------------------------------

FORMATS = ["fp8", "fp8_e5m2", "fp8_block", "mxfp8", "mxfp8_u8", "mxfp4", "mxfp4_u8", "int4", "int4_16",
           "int4_f32", "int4_signed", "int4_signed_u8"]


class Quantised(Peer):
    """The same with quantised weights; the layer's become what they are worth."""

    def __init__(self, layer: Layer, name: str, bias: bool = False, layout: str = "halves") -> None:
        super().__init__(layer, bias)
        self.name, self.layout = name, layout
        self.w13, self.s13, layer.w13 = self.convert(layer.w13, layer.gated)
        self.w2, self.s2, layer.w2 = self.convert(layer.w2, False)
        if "signed" in name:
            self.w13.xpu_fused_moe = True  # of w13 only, as the peers mark it

    def convert(self, values: torch.Tensor, gate_and_up: bool):
        kind, _, more = self.name.partition("_")
        if kind == "int4":
            type = {"f32": "f32", "16": "f16"}.get(more, "bf16")
            q = fusedmoe.quantize(values, "int4", group_size=16 if more == "16" else 32,
                                  scale_type=type)
        elif kind == "mxfp4":
            q = fusedmoe.quantize(values, "mxfp4")
        elif kind == "mxfp8":
            q = fusedmoe.quantize(values, "mxfp8", layout="kn", transposed=True)
        elif more == "block":
            parts = "halves" if gate_and_up and self.layout == "halves" else "one"
            q = fusedmoe.quantize(values, "fp8_e4m3", block=(128, 128), parts=parts, layout="kn",
                                  transposed=True)
        else:
            q = fusedmoe.quantize(values, "fp8_e5m2" if more else "fp8_e4m3", layout="kn")
        data, scales = q.data, q.scales.data
        if self.name == "mxfp4":
            data = data.view(torch.float4_e2m1fn_x2)
        if more == "u8":
            scales = scales.view(torch.uint8)
        if "signed" in more:  # by another way than the library's
            low, high = ((data.int() & 15) - 8) & 15, ((data.int() >> 4) - 8) & 15
            data = (low | high << 4).to(torch.uint8)
            data = data if more.endswith("u8") else data.view(torch.int8)
        return data, scales, fusedmoe.dequantize(q)

    @property
    def flags(self) -> dict[str, bool]:
        return {"is_mxfp4": True} if self.name == "mxfp4_u8" else {}

    @property
    def format(self) -> str:
        name = self.name.removesuffix("_u8").removesuffix("_16").removesuffix("_f32")
        return name.removesuffix("_e5m2")

    @property
    def six(self) -> tuple:
        return self.w13, self.s13, self.b13, self.w2, self.s2, self.b2

    def build(self, activation="silu", **options) -> XpuFusedMoe:
        return XpuFusedMoe(*self.six, self.layer.top_k, activation, self.layer.num_experts,
                           dtype=self.layer.dtype, **{**self.flags, **options})


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("activation, meaning", [
    ("silu", {"kind": "silu"}), ("relu2_no_mul", {"kind": "relu2"}),
    ("swigluoai", {"kind": "swigluoai", "limit": 7.0, "layout": "interleaved"})])
def test_quantised_formats_match_the_oracle(name, activation, meaning):
    for dtype, (hidden, inter) in itertools.product((torch.bfloat16, torch.float32),
                                                    ((131, 77), (256, 192))):
        peer = Quantised(Layer(hidden, inter, dtype=dtype, gated=activation != "relu2_no_mul"), name,
                         bias=True, layout=meaning.get("layout", "halves"))
        assert xpu.weight_format(peer.w13, peer.s13, **peer.flags) == peer.format
        assert xpu.supports_format(peer.format)
        tensors = [tensor for tensor in peer.six if tensor is not None]
        before = [(tensor.view(torch.uint8).clone(), tensor._version, tensor.data_ptr(),
                   tensor.dtype) for tensor in tensors]
        moe = peer.build(activation)
        assert moe.format == peer.format
        flags = [moe.is_fp8, moe.is_int4, moe.is_mxfp4, moe.is_mxfp8, moe.is_block_fp8]
        assert flags == [peer.format == "fp8", peer.format.startswith("int4"),
                         *[peer.format == one for one in ("mxfp4", "mxfp8", "fp8_block")]]
        for count in (1, 9):
            tokens = peer.layer.tokens(count)
            plain = run(moe, tokens)
            assert_close(plain, peer.expected(*tokens, **meaning), dtype, quantised=True)
            workspace = dirty(moe.workspace_size(count).bytes, dtype=torch.uint8)
            assert torch.equal(run(moe, tokens, workspace2=workspace), plain)
            called = xpu_fused_moe(tokens[0], *peer.six, tokens[1], tokens[2], peer.layer.top_k,
                                   activation, peer.layer.num_experts, **peer.flags)
            assert torch.equal(called, plain)
        for tensor, (value, version, address, kind) in zip(tensors, before):
            assert torch.equal(tensor.view(torch.uint8), value)
            assert (tensor._version, tensor.data_ptr(), tensor.dtype) == (version, address, kind)


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_experts_of_two_ranks_add_up(name):
    layer = Layer(num_experts=8)
    peer = Quantised(layer, name)
    tokens = layer.tokens(9)
    total = torch.zeros_like(tokens[0], dtype=torch.float32)
    for rank in (0, 1):
        mine = slice(4 * rank, 4 * rank + 4)
        w13, s13, _, w2, s2, _ = [
            t if t is None else t[mine] if t.itemsize > 1 else
            t.view(torch.uint8)[mine].view(t.dtype) for t in peer.six]
        if "signed" in name:
            w13.xpu_fused_moe = True
        moe = XpuFusedMoe(w13, s13, None, w2, s2, None, 3, "silu", 4, rank, 2, dtype=layer.dtype,
                          **peer.flags)
        total += run(moe, tokens).float()
    whole = run(peer.build(), tokens)
    rel_l2 = (total - whole.float()).norm() / whole.float().norm()
    assert rel_l2 < 0.01


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("on_stale", ["raise", "refresh"])
def test_quantised_weights_that_change(name, on_stale):
    peer = Quantised(Layer(), name)
    moe, tokens = peer.build(on_stale=on_stale), peer.layer.tokens(9)

    def flip(tensor):  # another sound value, counted by PyTorch
        if tensor.itemsize > 1:
            tensor.mul_(0.5)
        elif tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            tensor.view(torch.uint8).bitwise_xor_(0x80)
        else:
            tensor.view(torch.uint8).bitwise_xor_(1)

    for tensor in (peer.w13, peer.s13, peer.w2, peer.s2):
        for change in (lambda: flip(tensor), lambda: setattr(tensor, "data", tensor.data.clone())):
            old = run(moe, tokens)
            change()
            if on_stale == "raise":
                refused(moe, tokens, errors.StaleWeights, "weights: expected the tensors",
                        "refresh()")
                moe.refresh()
            assert torch.equal(run(moe, tokens), run(peer.build(), tokens))
        assert torch.equal(run(moe, tokens), old)
    assert moe.weights_version == 9


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights_slept_woken_copied_and_compiled(name):
    peer, other = Quantised(Layer(), name), Quantised(Layer(seed=1), name)
    moe, tokens = peer.build(), peer.layer.tokens(9)
    before = run(moe, tokens)
    twin = copy.deepcopy(moe)
    peer.s13.view(torch.uint8).bitwise_xor_(1)
    assert torch.equal(run(twin, tokens), before)
    refused(moe, tokens, errors.StaleWeights, "refresh")
    names = dict(zip(("w13", "w13_scales", "w2", "w2_scales"), (other.w13, other.s13, other.w2,
                                                               other.s2)))
    moe.refresh(**names)
    assert moe.w13_scales is other.s13 and moe.w2_scales is other.s2
    right = run(other.build(), tokens)
    assert torch.equal(run(moe, tokens), right)
    moe.release_weights()
    refused(moe, tokens, errors.StaleWeights, "refresh")
    moe.refresh(**names)
    assert torch.equal(run(moe, tokens), right)
    with pytest.raises(errors.InvalidArgument, match="as at the start|is_mxfp4=True claims"):
        moe.refresh(w13=torch.zeros(7, 131, 154), w2=torch.zeros(7, 77, 131))
    twin.w2.view(torch.uint8).bitwise_xor_(1)
    refused(twin, tokens, errors.StaleWeights, "refresh")

    def step(output, *tensors):
        moe.apply(output, *tensors)
        return output + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(dirty(9, 131, dtype=torch.bfloat16), *tokens), right + 1)


@pytest.mark.parametrize("name", ["int4", "int4_signed"])
def test_mode_a8_passes_through(name):
    options = fusedmoe.PlanOptions(mode="a8", isa=A8_ISA)
    peer = Quantised(Layer(128, 64), name)
    tokens = peer.layer.tokens(9)
    exact = peer.layer.expected(*tokens)
    a16, a8 = run(peer.build(), tokens), run(peer.build(options=options), tokens)
    assert not torch.equal(a16, a8) and (a8.double() - exact).norm() < 0.05 * exact.norm()
    with pytest.raises(errors.Unsupported, match="a8"):
        Quantised(Layer(), "fp8").build(options=options)


def test_converted_weights_are_followed_to_the_address():
    """int4_signed: the plan's own watch sees copies, so the object compares the originals."""
    peer = Quantised(Layer(), "int4_signed")
    moe, tokens = peer.build(on_stale="refresh"), peer.layer.tokens(9)
    other = Quantised(Layer(seed=1), "int4_signed")
    for given in (other, Quantised(Layer(), "int4_signed"), other):
        peer.w2.data = torch.zeros(0, dtype=torch.int8)  # slept
        peer.w2.data, peer.s2.data = given.w2.data.clone(), given.s2.data.clone()
        assert torch.equal(run(moe, tokens), run(peer.build(), tokens))


def test_flags_of_older_callers_say_what_dtypes_leave_open():
    four = Quantised(Layer(), "mxfp4_u8")
    assert xpu.weight_format(four.w13, four.s13, is_mxfp4=True) == "mxfp4"
    assert xpu.weight_format(four.w13, four.s13, is_int4=True) == "int4"
    eight = Quantised(Layer(), "fp8")
    assert xpu.weight_format(eight.w13, eight.s13, is_fp8=True, is_mxfp8=True) == "mxfp8"
    assert xpu.weight_format(eight.w13, eight.s13, is_fp8=False, is_int4=None) == "fp8"
    marked = torch.zeros(1, 2, 2, dtype=torch.uint8)
    marked.xpu_fused_moe = True  # rewritten by a version that kept uint8
    assert xpu.weight_format(marked, None) == "int4_signed"
    tokens = eight.layer.tokens(9)
    right = run(eight.build(), tokens)
    flags = (True, False, False, False, False)
    for moe in (eight.build(is_fp8=True), XpuFusedMoe(*eight.six, 3, "silu", 7, 0, 1, None, *flags)):
        assert torch.equal(run(moe, tokens), right)
    assert torch.equal(xpu_fused_moe(tokens[0], *eight.six, *tokens[1:], 3, "silu", 7, 0, 1, None,
                                     None, *flags), right)


@pytest.mark.parametrize("name, change, text", [
    ("fp8", dict(w13_scales=None), "w13_scales: expected the scales of fp8"),
    ("fp8", dict(w13_scales=torch.ones(7, 154)), "w13_scales: expected float32 [7], got float32 [7, 154]"),
    ("fp8", dict(w2_scales=torch.ones(7).double()), "w2_scales: expected f32, f16, bf16"),
    ("fp8", dict(w2=torch.zeros(7, 77, 131)), "w2: expected float8_e4m3fn or float8_e5m2 as w13"),
    ("fp8", dict(w13=torch.zeros(7, 131, 154).to(torch.float8_e4m3fnuz)),
     "w13: expected float32, float16, bfloat16, float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2 or uint8 "
     "(int4), got torch.float8_e4m3fnuz"),
    ("fp8_block", dict(w13_scales=torch.ones(7, 2, 3)),
     "w13_scales: expected float32 [7, 2, 2], got float32 [7, 2, 3]"),
    ("fp8_block", dict(w2_scales=torch.ones(7, 2, 2)),
     "w2_scales: expected float32 [7, 1, 2], got float32 [7, 2, 2]; check"),
    ("mxfp8", dict(w13_scales=torch.zeros(7, 4, 154, dtype=torch.uint8)),
     "w13_scales: expected uint8 [7, 5, 154], got uint8 [7, 4, 154]"),
    ("mxfp8", dict(w2=torch.zeros(7, 77, 131).to(torch.float8_e5m2)), "float8_e4m3fn elements of mxfp8"),
    ("mxfp4", dict(w2_scales=torch.ones(7, 131, 3)), "scales.type: expected e8m0 for mxfp4, got f32"),
    ("mxfp4", dict(w13=torch.zeros(7, 154, 60, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)),
     "w13: expected uint8 [7, 154, 66] for 131 inputs in mxfp4, got float4_e2m1fn_x2 [7, 154, 60]"),
    ("int4", dict(w13_scales=torch.ones(7, 154)), "w13_scales: expected [experts, N, K / group]"),
    ("int4", dict(w13_scales=torch.ones(7, 154, 90)), "w13_scales: expected [experts, N, K / group]"),
    ("int4", dict(w13_scales=torch.ones(7, 150, 5)), "w13_scales: expected float32 [7, 154, 5]"),
    ("int4_signed", dict(w2=torch.zeros(7, 131, 39)), "w2: expected int8 as w13, got torch.float32"),
    ("int4", dict(is_fp8=True), "is_fp8=True claims, got torch.uint8"),
])
def test_quantised_tensors_that_are_refused(name, change, text):
    peer = Quantised(Layer(), name)
    names = ("w13", "w13_scales", "w13_bias", "w2", "w2_scales", "w2_bias")
    with pytest.raises(fusedmoe.Error) as caught:
        XpuFusedMoe(**{**dict(zip(names, peer.six)), **change}, n_experts_per_token=3,
                    activation="silu", num_experts=7)
    assert text in str(caught.value), str(caught.value)


# --- Weights that change --------------------------------------------------------------------------


def test_weights_changed_in_place_are_stale_until_refreshed():
    peer = Peer(Layer(), bias=True)
    moe, tokens = peer.build(), peer.layer.tokens(9)
    for change in (lambda: peer.w13.mul_(2), lambda: peer.b2.add_(1),
                   lambda: peer.w2[3].neg_()):  # a view counts as well
        old = run(moe, tokens)
        change()
        refused(moe, tokens, errors.StaleWeights, "weights: expected the tensors", "refresh()")
        moe.refresh()
        new = run(moe, tokens)
        assert torch.equal(new, run(peer.build(), tokens)) and not torch.equal(new, old)


def test_on_stale_refresh_reads_them_by_itself():
    peer = Peer(Layer())
    moe, tokens = peer.build(on_stale="refresh"), peer.layer.tokens(9)
    peer.w13.mul_(2)
    assert torch.equal(run(moe, tokens), run(peer.build(), tokens))
    assert moe.weights_version == 2
    peer.w13.data = peer.w13.data.neg()
    assert torch.equal(run(moe, tokens), run(peer.build(), tokens))


def test_data_copy_needs_a_refresh():
    peer = Peer(Layer())
    moe, tokens = peer.build(), peer.layer.tokens(9)
    peer.w13.data.copy_(peer.w13 * 2)
    moe.refresh()
    assert torch.equal(run(moe, tokens), run(peer.build(), tokens))


def test_moved_and_rebound_weights():
    peer = Peer(Layer())
    moe, tokens = peer.build(), peer.layer.tokens(9)
    before = run(moe, tokens)
    peer.w13.data = peer.w13.data.clone()  # elsewhere, the same values
    refused(moe, tokens, errors.StaleWeights, "weights")
    moe.refresh()
    assert torch.equal(run(moe, tokens), before)
    with pytest.raises(AttributeError):  # silence would be worse
        moe.w13 = peer.w13
    other = Peer(Layer(seed=1))
    moe.refresh(w13=other.w13, w2=other.w2)
    assert moe.w13 is other.w13 and moe.w2 is other.w2
    assert torch.equal(run(moe, tokens), run(other.build(), tokens))
    peer.w13.zero_()  # no longer watched
    run(moe, tokens)
    with pytest.raises(errors.InvalidArgument, match="bf16 as at the start, got f32"):
        moe.refresh(w13=other.w13.float())
    with pytest.raises(errors.InvalidArgument, match=re.escape("w13: expected [7, 131, 154]")):
        moe.refresh(w13=other.w13[:6])
    assert torch.equal(run(moe, tokens), run(other.build(), tokens))


def test_slept_and_woken():
    peer = Peer(Layer(), bias=True)
    moe, tokens = peer.build(), peer.layer.tokens(9)
    before = run(moe, tokens)
    alive = weakref.ref(peer.w13)
    copies = {name: getattr(peer, name).clone() for name in ("w13", "w2", "b13", "b2")}
    moe.release_weights()
    del peer.w13
    gc.collect()
    assert alive() is None and moe.w13 is None
    refused(moe, tokens, errors.StaleWeights, "refresh")
    with pytest.raises(errors.InvalidArgument, match="after release_weights"):
        moe.refresh()
    moe.refresh(w13=copies["w13"], w13_bias=copies["b13"], w2=copies["w2"], w2_bias=copies["b2"])
    assert torch.equal(run(moe, tokens), before)


def test_a_deep_copy_has_its_own_weights():
    peer = Peer(Layer(), bias=True)
    moe, tokens = peer.build(), peer.layer.tokens(9)
    before = run(moe, tokens)
    other = copy.deepcopy({"moe": moe, "w13": moe.w13})
    assert other["moe"].w13 is other["w13"] is not moe.w13
    peer.w13.zero_()
    assert torch.equal(run(other["moe"], tokens), before)
    other["w13"].mul_(2)
    refused(other["moe"], tokens, errors.StaleWeights, "weights")
    other["moe"].refresh()
    assert not torch.equal(run(other["moe"], tokens), before)


def test_borrowed_weights_are_never_stale():
    peer = Peer(Layer())
    options = fusedmoe.PlanOptions(weight_storage="borrowed")
    moe, tokens = peer.build(options=options), peer.layer.tokens(9)
    assert torch.equal(run(moe, tokens), run(peer.build(), tokens))
    peer.w13.data.copy_(peer.w13 * 2)
    assert torch.equal(run(moe, tokens), run(peer.build(), tokens))


def test_torch_compile_and_the_workspace():
    peer = Peer(Layer())
    moe = peer.build()

    def step(output, hidden, weights, ids, workspace):
        moe.apply(output, hidden, weights, ids, workspace2=workspace)
        return output + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (3, 9):
        tokens = peer.layer.tokens(count)
        got = compiled(dirty(count, 131, dtype=torch.bfloat16), *tokens, moe.workspace(count))
        assert torch.equal(got, run(moe, tokens) + 1)


# --- Signatures -----------------------------------------------------------------------------------


def test_older_constructors():
    peer = Peer(Layer())
    tokens = peer.layer.tokens(9)
    right = run(peer.build(), tokens)
    six = (peer.w13, None, None, peer.w2, None, None, 3, "silu", 7)
    flags = dict(is_fp8=False, is_int4=False, is_mxfp4=False, is_mxfp8=False, is_block_fp8=False)
    for moe in (XpuFusedMoe(*six), XpuFusedMoe(*six, **flags), XpuFusedMoe(*six, 0, 1, None),
                XpuFusedMoe(*six, 0, 1, None, *flags.values()),
                XpuFusedMoe(*six, 0, 1, None, *[None] * 5, None, None, None),
                XpuFusedMoe(*six, 0, 1, None, None, None, None)):
        assert torch.equal(run(moe, tokens), right)
        output = dirty(9, 131, dtype=torch.bfloat16)
        moe.apply(output, *tokens, None)  # before a1q_scale
        assert torch.equal(output, right)
        moe.apply(output=output, hidden_states=tokens[0], topk_weights=tokens[1],
                  topk_ids=tokens[2], a1q_scale=None)
        assert torch.equal(output, right)
    late = XpuFusedMoe(*six, 0, 1, None, *flags.values(), 0.3)
    assert torch.equal(run(late, tokens), run(peer.build(gemm1_clamp_limit=0.3), tokens))
    with pytest.raises(TypeError):
        XpuFusedMoe(*six, 0, 1, None, 0.3, None, None, 5)


def test_every_signature_of_the_function():
    layer = Layer()
    peer = Peer(layer, bias=True)
    hidden, weights, ids = layer.tokens(9)
    right = run(peer.build(), (hidden, weights, ids))
    core = (weights, ids, 3, "silu", 7)
    six = (peer.w13, None, peer.b13, peer.w2, None, peer.b2)
    output = dirty(9, 131, dtype=torch.bfloat16)
    no = (False,) * 3
    calls = [
        ((hidden, *six, *core), {}),
        ((hidden, *six, *core, *no), {}),
        ((hidden, *six, *core, 0, 1), {}),
        ((hidden, *six, *core, 0, 1, output, *no), {}),
        ((hidden, *six, *core, 0, 1, None, output, *no), {}),
        ((hidden, *six, *core, 0, 1, None, None, *no, False, False), {}),
        ((hidden, *six, *core), dict(is_fp8=False, is_int4=False)),
        ((hidden, *six), dict(topk_weights=weights, topk_ids=ids, n_experts_per_token=3,
                              activation="silu", num_experts=7, output=output)),
        ((hidden, peer.w13, peer.b13, peer.w2, peer.b2, *core), {}),
        ((hidden, layer.w13, peer.b13, layer.w2, peer.b2, *core), {}),  # [E, N, K]
        ((hidden, layer.w13, None, peer.b13, layer.w2, None, peer.b2, *core), {}),
        ((hidden, peer.w13, peer.w2, *core, None, None, peer.b13, peer.b2), {}),
        ((hidden, peer.w13, peer.w2, *core), dict(w13_bias=peer.b13, w2_bias=peer.b2,
                                                 act_quant=False)),
        ((), dict(hidden_states=hidden, w13=peer.w13, w13_scales=None, w13_bias=peer.b13,
                  w2=peer.w2, w2_scales=None, w2_bias=peer.b2, topk_weights=weights, topk_ids=ids,
                  n_experts_per_token=3, activation="silu", num_experts=7)),
    ]
    for arguments, named in calls:
        output.view(torch.uint8).fill_(0xFF)
        got = xpu_fused_moe(*arguments, **named)
        assert torch.equal(got, right), (len(arguments), sorted(named))
        if output is named.get("output") or any(one is output for one in arguments):
            assert got is output
    with pytest.raises(TypeError, match="signatures"):
        xpu_fused_moe(hidden, peer.w13, peer.w2)
    with pytest.raises(errors.Unsupported, match="act_quant"):
        xpu_fused_moe(hidden, peer.w13, peer.w2, *core, act_quant=True)


def test_the_function_under_expert_parallelism():
    layer = Layer(num_experts=8)
    hidden, weights, ids = layer.tokens(9)
    whole = run(Peer(layer).build(), (hidden, weights, ids)).float()
    total = torch.zeros_like(whole)
    for rank in (0, 1):
        mine = slice(4 * rank, 4 * rank + 4)
        w13, w2 = kn(layer.w13[mine]), kn(layer.w2[mine])
        got = xpu_fused_moe(hidden, w13, None, None, w2, None, None, weights, ids, 3, "silu", 4,
                            rank, 2)
        table = [g - 4 * rank if g // 4 == rank else -1 for g in range(8)]
        for dtype in (torch.int32, torch.int64):
            again = xpu_fused_moe(hidden, w13, None, None, w2, None, None, weights, ids, 3, "silu",
                                  4, expert_map=torch.tensor(table, dtype=dtype))
            assert torch.equal(again, got)
        total += got.float()
    assert_close(total, whole, torch.bfloat16)


def test_plans_of_the_function_are_found_again_and_die_with_their_weights(monkeypatch):
    built = []
    create = _xpu_function.FusedMoe.create
    monkeypatch.setattr(_xpu_function.FusedMoe, "create",
                        lambda *a, **k: built.append(1) or create(*a, **k))
    peer = Peer(Layer(), bias=True)
    tokens = peer.layer.tokens(9)
    entries = len(_xpu_function._cache)

    def call(p=peer, **named):
        return xpu_fused_moe(tokens[0], p.w13, None, p.b13, p.w2, None, p.b2, *tokens[1:], 3,
                             "silu", 7, **named)

    first = call()
    for _ in range(5):
        assert torch.equal(call(), first)
    assert len(built) == 1
    peer.w13.mul_(2)  # seen, and read again into the same plan
    second = call()
    assert torch.equal(second, run(peer.build(), tokens)) and not torch.equal(second, first)
    peer.w2.data = peer.w2.data.neg()
    assert torch.equal(call(), run(peer.build(), tokens))
    peer.b13.data.copy_(peer.b13 + 1)  # not seen
    assert xpu_fused_moe.refresh(peer.w13) == 1
    assert torch.equal(call(), run(peer.build(), tokens))
    builds = len(built)
    view = peer.w13.view(7, 131, 154)  # of one tensor, whatever the object
    for _ in range(3):
        xpu_fused_moe(tokens[0], peer.w13[:], None, peer.b13, peer.w2, None, peer.b2, *tokens[1:],
                      3, "silu", 7)
    assert len(built) == builds
    del view
    other = Peer(Layer(seed=3), bias=True)
    assert torch.equal(call(other), run(other.build(), tokens))
    assert len(_xpu_function._cache) == entries + 2
    alive = [weakref.ref(peer.w13), weakref.ref(other.w2)]
    plan = weakref.ref(next(entry.plan for key, entry in _xpu_function._cache.items()
                            if key[0][0] == id(peer.w13)))
    del peer.w13
    gc.collect()
    assert alive[0]() is None and plan() is None
    assert len(_xpu_function._cache) == entries + 1
    del other
    gc.collect()
    assert alive[1]() is None and len(_xpu_function._cache) == entries


def test_new_tensor_objects_at_each_call_are_right_and_warned_of():
    peer = Peer(Layer())
    tokens = peer.layer.tokens(9)
    with pytest.warns(RuntimeWarning, match="new tensor objects"):
        for _ in range(5):
            peer.w13.mul_(1.5)
            got = xpu_fused_moe(tokens[0], peer.w13.data, None, None, peer.w2, None, None,
                                *tokens[1:], 3, "silu", 7)
            assert torch.equal(got, run(peer.build(), tokens))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once
        xpu_fused_moe(tokens[0], peer.w13.data, None, None, peer.w2, None, None, *tokens[1:], 3,
                      "silu", 7)


# --- Installing -----------------------------------------------------------------------------------


def test_install_and_uninstall(monkeypatch):
    monkeypatch.setattr(_xpu_install, "_vllm_source", lambda module: None)
    before = set(sys.modules)
    try:
        assert "vllm_xpu_kernels.fused_moe_interface" in xpu.install()
        xpu.install()
        from vllm_xpu_kernels.fused_moe_interface import XpuFusedMoe as installed
        from vllm_xpu_kernels.fused_moe_interface import xpu_fused_moe as function
        assert issubclass(installed, XpuFusedMoe) and function is xpu_fused_moe
        peer = Peer(Layer())
        moe = installed(peer.w13, None, None, peer.w2, None, None, 3, "silu", 7)
        tokens = peer.layer.tokens(9)
        peer.w13.mul_(2)
        assert torch.equal(run(moe, tokens), run(peer.build(), tokens))  # engines never refresh
        with pytest.raises(ModuleNotFoundError, match="vllm_xpu_kernels._C"):
            import vllm_xpu_kernels._C  # noqa: F401
    finally:
        xpu.uninstall()
    assert not {name for name in set(sys.modules) - before if name.startswith("vllm_xpu_kernels")}
    with pytest.raises(ModuleNotFoundError):
        import vllm_xpu_kernels.fused_moe_interface  # noqa: F401


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_the_handshake_says_what_is_out_of_step(monkeypatch, tmp_path):
    xpu.handshake()
    with monkeypatch.context() as patch:
        patch.setitem(_xpu_install._OPERATORS, "apply", ("output", "hidden"))
        with pytest.raises(errors.Unsupported) as caught:
            xpu.install()
        assert "expected an operator apply(output, hidden), got output, hidden, topk" in one_line(
            caught)
    with monkeypatch.context() as patch:
        patch.setattr(_xpu_install.binding, "OPERATOR", "Python, since x.so does not load: why")
        with pytest.raises(errors.Unsupported, match="does not load: why; install"):
            xpu.install()

    class Distribution:
        version = "0.0.9"

        def locate_file(self, name):
            return _xpu_install.pathlib.Path(_xpu_install.__file__).parent

    with monkeypatch.context() as patch:
        patch.setattr(_xpu_install.importlib.metadata, "distribution", lambda name: Distribution())
        with pytest.raises(errors.Unsupported, match="package 0.0.9 with a compiled core 0.1"):
            xpu.install()
    with monkeypatch.context() as patch:
        source = "self.fused_moe_impl = XpuFusedMoe(w13=w1, is_new=1)\n"
        patch.setattr(_xpu_install, "_vllm_source",
                      lambda module: (tmp_path / "xpu_moe.py", source))
        with pytest.raises(errors.Unsupported) as caught:
            xpu.install()
        text = one_line(caught)
        assert "xpu_moe.py" in text and "line 1 calls XpuFusedMoe" in text
        source = "def _copy_elsewhere(layer, info): pass"
        with pytest.raises(errors.Unsupported, match="to copy reloaded weights, got another"):
            xpu.install()
    assert "vllm_xpu_kernels" not in sys.modules


def test_calls_out_of_step():
    check = lambda text: _xpu_install.calls_out_of_step(text, XpuFusedMoe)  # noqa: E731
    assert check("x.fused_moe_impl.apply(output=o, hidden_states=h, topk_weights=w, topk_ids=i, "
                 "a1q_scale=None)") == []
    assert check("x.fused_moe_impl.apply(o, h, w, i, **more)") == []
    assert check("other.apply(1, 2, 3, nothing=4)") == []
    for wrong in ("x.fused_moe_impl.apply(o, h, w, i, topk_scale=3)", "XpuFusedMoe(w13)",
                  "x.fused_moe_impl.apply(o, h)", "x.fused_moe_impl.apply(o, h, w, i, m, a, ws)"):
        assert len(check(wrong)) == 1, wrong
