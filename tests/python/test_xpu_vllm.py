"""vLLM's XPUExperts on XpuFusedMoe: its own class, unchanged, and FusedMoeXpuExperts, through
vLLM's modular kernel on the CPU; and a tiny model through vllm.LLM.

Without vLLM these are skipped, unless FUSEDMOE_REQUIRE_VLLM=1 demands them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from support import Layer, assert_close, dirty
from test_xpu_fused_moe import Quantised

REQUIRED = os.environ.get("FUSEDMOE_REQUIRE_VLLM") == "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
try:
    import vllm
except ImportError as error:
    if REQUIRED:
        raise
    pytest.skip(f"vLLM is not importable: {error}", allow_module_level=True)

from vllm.model_executor.layers.fused_moe import modular_kernel  # noqa: E402
from vllm.model_executor.layers.fused_moe.activation import MoEActivation  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import (  # noqa: E402
    FUSED_MOE_UNQUANTIZED_CONFIG,
    FusedMoEConfig,
    FusedMoEParallelConfig,
    FusedMoEQuantConfig,
    RoutingMethodType,
    biased_moe_quant_config,
    fp8_w8a8_moe_quant_config,
    int4_w4a16_moe_quant_config,
    mxfp4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts import xpu_moe  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_oracle  # noqa: E402
from vllm.model_executor.layers.fused_moe.oracle import unquantized as oracle_  # noqa: E402

from fusedmoe import _xpu_install, errors, xpu, xpu_vllm  # noqa: E402

COUNTS = [1, 17, 3, 64, 130]
UNCHANGED = xpu_moe.XPUExperts


@pytest.fixture(scope="module", autouse=True)
def intel_gpu():
    """The two questions that vLLM's class asks of a driver, answered yes."""
    library = torch.library.Library("_xpu_C", "FRAGMENT")
    for name in ("is_xe2_arch", "is_xe3_arch"):
        library.define(f"{name}() -> bool")
        library.impl(name, lambda: True, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.fixture
def installed():
    xpu.install()
    yield
    xpu.uninstall()


class VllmLayer(torch.nn.Module):
    """What vLLM's methods see of a layer, after its transpose to [E, K, N], and the kernel."""

    def __init__(self, layer: Layer, experts_cls: type, activation=MoEActivation.SILU,
                 bias: bool = False, rank: int | None = None, eplb: bool = False,
                 **quant) -> None:
        super().__init__()
        local = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
        self.layer = layer

        def parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
            return torch.nn.Parameter(tensor.contiguous(), requires_grad=False)

        self.w13_weight = parameter(layer.w13[local].transpose(-1, -2))
        self.w2_weight = parameter(layer.w2[local].transpose(-1, -2))
        self.w13_bias = parameter(layer.b13[local]) if bias else None
        self.w2_bias = parameter(layer.b2[local]) if bias else None
        parallel = FusedMoEParallelConfig.make_no_parallel()
        self.expert_map = None
        if rank is not None:
            parallel = dataclasses.replace(parallel, ep_size=2, ep_rank=rank, use_ep=True,
                                           enable_eplb=eplb)
            self.expert_map = torch.full((8,), -1, dtype=torch.int32)
            self.expert_map[local] = torch.arange(4, dtype=torch.int32)
        elif eplb:
            parallel = dataclasses.replace(parallel, enable_eplb=True)
        self.activation = activation
        self.global_num_experts = layer.num_experts
        config = FusedMoEConfig(
            num_experts=layer.num_experts, experts_per_token=layer.top_k,
            hidden_dim=layer.hidden_size, intermediate_size=layer.intermediate_size,
            num_local_experts=self.w13_weight.shape[0], num_logical_experts=layer.num_experts,
            activation=activation, device="cpu", routing_method=RoutingMethodType.TopK,
            moe_parallel_config=parallel, in_dtype=layer.dtype, has_bias=bias,
            activation_situ_beta=quant.pop("situ_beta", None))
        quant_config = FUSED_MOE_UNQUANTIZED_CONFIG
        if bias:
            quant_config = biased_moe_quant_config(self.w13_bias, self.w2_bias, **quant)
        elif quant:
            quant_config = FusedMoEQuantConfig.make(**quant)
        self.kernel = oracle_.make_unquantized_moe_kernel(
            quant_config, config, oracle_.UnquantizedMoeBackend.XPU, experts_cls)
        self.experts.process_weights_after_loading(self)

    @property
    def experts(self):
        return self.kernel.fused_experts

    def forward(self, hidden, weights, ids, on_input: bool = False) -> torch.Tensor:
        return self.kernel.apply(
            hidden_states=hidden, w1=self.w13_weight, w2=self.w2_weight, topk_weights=weights,
            topk_ids=ids, activation=self.activation, global_num_experts=self.global_num_experts,
            expert_map=self.expert_map, apply_router_weight_on_input=on_input)


def direct(module: VllmLayer, tokens, **options) -> torch.Tensor:
    """XpuFusedMoe without vLLM."""
    moe = xpu.XpuFusedMoe(module.w13_weight, None, module.w13_bias, module.w2_weight, None,
                          module.w2_bias, module.layer.top_k, module.activation.value,
                          module.w13_weight.shape[0], expert_map=module.expert_map, **options)
    output = dirty(*tokens[0].shape, dtype=tokens[0].dtype)
    moe.apply(output, *tokens)
    return output


CLASSES = pytest.mark.parametrize("cls", [UNCHANGED, xpu_vllm.FusedMoeXpuExperts],
                                  ids=["unchanged", "ours"])


@CLASSES
@pytest.mark.parametrize("activation, bias, quant, meaning", [
    (MoEActivation.SILU, False, {}, {"kind": "silu"}),
    (MoEActivation.SILU, False, {"gemm1_clamp_limit": 0.3}, {"kind": "silu", "limit": 0.3}),
    (MoEActivation.GELU, False, {}, {"kind": "gelu"}),
    (MoEActivation.GELU_TANH, True, {}, {"kind": "gelu_tanh"}),
    (MoEActivation.SWIGLUOAI, True, {"gemm1_clamp_limit": 7.0},
     {"kind": "swigluoai", "limit": 7.0, "layout": "interleaved"}),
])  # not RELU2_NO_MUL: vLLM's config refuses it on the CPU
def test_the_modular_kernel_matches_the_oracle(installed, cls, activation, bias, quant, meaning):
    layer = Layer()
    module = VllmLayer(layer, cls, activation, bias, **quant)
    assert cls._supports_activation(activation)
    for count in COUNTS:
        tokens = layer.tokens(count)
        output = module(*tokens)
        assert torch.equal(output, direct(module, tokens, **quant))
        biases = dict(b13=layer.b13, b2=layer.b2) if bias else {}
        assert_close(output, layer.expected(*tokens, **biases, **meaning), layer.dtype)


def test_situ_is_ours_alone(installed):
    layer = Layer()
    module = VllmLayer(layer, xpu_vllm.FusedMoeXpuExperts, MoEActivation.SITU, situ_beta=1.5)
    tokens = layer.tokens(9)
    assert_close(module(*tokens), layer.expected(*tokens, kind="situ", beta=1.5), layer.dtype)
    assert not UNCHANGED._supports_activation(MoEActivation.SITU)


@CLASSES
def test_expert_parallelism_sums_to_the_layer(installed, cls):
    layer = Layer(num_experts=8)
    tokens = layer.tokens(17)
    whole = layer.expected(*tokens)
    ranks = [VllmLayer(layer, cls, rank=rank) for rank in (0, 1)]
    assert_close(sum(rank(*tokens).float() for rank in ranks), whole, layer.dtype)


def test_the_map_of_a_step_counts_under_eplb(installed):
    layer = Layer(num_experts=8)
    module = VllmLayer(layer, xpu_vllm.FusedMoeXpuExperts, rank=0, eplb=True)
    tokens = layer.tokens(17)
    for table in ([0, 1, 2, 3, -1, -1, -1, -1], [-1, 3, -1, 2, 0, -1, 1, -1]):
        module.expert_map = torch.tensor(table, dtype=torch.int32)
        assert torch.equal(module(*tokens), direct(module, tokens))


def test_vllms_own_workspace_is_used(installed, monkeypatch):
    """All of it in workspace2, exactly as large as needed; nothing is allocated beside it."""
    layer = Layer()
    module = VllmLayer(layer, xpu_vllm.FusedMoeXpuExperts)
    plan = module.experts.fused_moe_impl
    seen = []
    apply = type(module.experts).apply

    def spy(self, **arguments):
        seen.append(arguments)
        for name in ("workspace2", "output"):
            arguments[name].view(torch.uint8).fill_(0xFF)
        apply(self, **arguments)

    monkeypatch.setattr(type(module.experts), "apply", spy)
    for count in COUNTS:
        tokens = layer.tokens(count)
        assert torch.equal(module(*tokens), direct(module, tokens))
        arguments = seen.pop()
        assert arguments["workspace13"].numel() == 0
        assert arguments["workspace2"].nbytes == plan.workspace_size(count).bytes
    shapes = module.experts.workspace_shapes(5, 0, layer.hidden_size, 3, 7, 7, None,
                                             MoEActivation.SILU)
    assert shapes == ((0,), (plan.workspace_size(5).bytes // 2,), (5, layer.hidden_size))
    size = module.experts.moe_problem_size(tokens[0], module.w13_weight, module.w2_weight,
                                           tokens[2])
    assert size == (7, COUNTS[-1], 2 * layer.intermediate_size, layer.hidden_size, 3)


def test_a_router_weight_on_the_input_counts_once(installed):
    layer = Layer(top_k=1)
    module = VllmLayer(layer, xpu_vllm.FusedMoeXpuExperts)
    hidden, weights, ids = layer.tokens(9)
    scaled = hidden * weights.to(hidden.dtype)
    assert torch.equal(module(hidden, weights, ids, on_input=True),
                       direct(module, (scaled, torch.ones_like(weights), ids)))


def test_torch_compile_with_a_symbolic_number_of_tokens(installed):
    layer = Layer()
    module = VllmLayer(layer, xpu_vllm.FusedMoeXpuExperts, bias=True)
    compiled = torch.compile(lambda *tokens: module(*tokens) * 2, backend="aot_eager",
                             fullgraph=True, dynamic=True)
    for count in (3, 9, 17):
        tokens = layer.tokens(count)
        assert torch.equal(compiled(*tokens), module(*tokens) * 2)
    torch._dynamo.reset()


@CLASSES
def test_weights_that_vllm_changes(installed, cls):
    layer = Layer()
    module = VllmLayer(layer, cls)
    tokens = layer.tokens(9)
    module(*tokens)
    plan = module.experts.fused_moe_impl
    module.w13_weight.mul_(2)
    assert torch.equal(module(*tokens), direct(module, tokens))
    # As its reload_weights does it, past PyTorch's counters.
    from vllm.model_executor.model_loader.reload import layerwise
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
    info = LayerReloadingInfo(restore_metadata=({}, {}), restore_device=torch.device("cpu"))
    info.kernel_tensors = (dict(module.named_parameters(recurse=False)), {})
    info.kernel_non_persistent_buffers = set()
    kept = module.w13_weight
    module.w13_weight = torch.nn.Parameter(kept.detach() * 3, requires_grad=False)
    layerwise._copy_and_restore_kernel_tensors(module, info)
    assert module.w13_weight is kept
    assert torch.equal(module(*tokens), direct(module, tokens))
    assert module.experts.fused_moe_impl is plan and plan.weights_version == 3
    module.experts.process_weights_after_loading(module)
    assert torch.equal(module(*tokens), direct(module, tokens))


# --- Quantised weights ----------------------------------------------------------------------------

# Of Quantised, with vLLM's class for it and ours.
SCHEMES = {
    "fp8": (xpu_moe.XPUExpertsFp8, xpu_vllm.FusedMoeXpuExpertsFp8),
    "fp8_block": (xpu_moe.XPUExpertsBlockFp8, xpu_vllm.FusedMoeXpuExpertsBlockFp8),
    "mxfp8_u8": (xpu_moe.XPUExpertsFp8, xpu_vllm.FusedMoeXpuExpertsMxFp8),
    "mxfp4_u8": (xpu_moe.XPUExpertsMxFp4, xpu_vllm.FusedMoeXpuExpertsMxFp4),
    "int4": (xpu_moe.XPUExpertsWNA16, xpu_vllm.FusedMoeXpuExpertsWNA16),
}


class QuantisedVllmLayer(torch.nn.Module):
    """As VllmLayer, after vLLM's own conversion of quantised weights for Intel GPUs."""

    def __init__(self, peer: Quantised, experts_cls: type, rank: int | None = None) -> None:
        super().__init__()
        layer, self.peer = peer.layer, peer
        local = slice(None) if rank is None else slice(4 * rank, 4 * rank + 4)
        self.w13, self.s13, self.w2, self.s2 = (
            t[local] if t.itemsize > 1 else t.view(torch.uint8)[local].view(t.dtype)
            for t in (peer.w13, peer.s13, peer.w2, peer.s2))
        parallel = FusedMoEParallelConfig.make_no_parallel()
        self.expert_map = None
        if rank is not None:
            parallel = dataclasses.replace(parallel, ep_size=2, ep_rank=rank, use_ep=True)
            self.expert_map = torch.full((8,), -1, dtype=torch.int32)
            self.expert_map[local] = torch.arange(4, dtype=torch.int32)
        self.config = FusedMoEConfig(
            num_experts=layer.num_experts, experts_per_token=layer.top_k,
            hidden_dim=layer.hidden_size, intermediate_size=layer.intermediate_size,
            num_local_experts=self.w13.shape[0], num_logical_experts=layer.num_experts,
            activation=MoEActivation.SILU, device="cpu", routing_method=RoutingMethodType.TopK,
            moe_parallel_config=parallel, in_dtype=layer.dtype)
        make = {"fp8": fp8_w8a8_moe_quant_config, "mxfp8": fp8_w8a8_moe_quant_config,
                "mxfp4": mxfp4_w4a16_moe_quant_config,
                "int4": int4_w4a16_moe_quant_config}[peer.name.split("_")[0]]
        self.kernel = fp8_oracle.make_fp8_moe_kernel(
            make(w1_scale=self.s13, w2_scale=self.s2), self.config, experts_cls,
            fp8_oracle.Fp8MoeBackend.XPU)

    @property
    def experts(self):
        return self.kernel.fused_experts

    def forward(self, hidden, weights, ids) -> torch.Tensor:
        return self.kernel.apply(
            hidden_states=hidden, w1=self.w13, w2=self.w2, topk_weights=weights, topk_ids=ids,
            activation=MoEActivation.SILU, global_num_experts=self.peer.layer.num_experts,
            expert_map=self.expert_map, apply_router_weight_on_input=False)


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("which", [0, 1], ids=["unchanged", "ours"])
def test_quantised_layers_match_the_oracle(installed, name, which):
    for sizes in ((128, 64), (131, 77)):
        layer = Layer(*sizes)
        peer = Quantised(layer, name)
        module = QuantisedVllmLayer(peer, SCHEMES[name][which])
        for count in COUNTS:
            tokens = layer.tokens(count)
            output = module(*tokens)
            assert_close(output, layer.expected(*tokens), layer.dtype, quantised=True)
            plain = dirty(*tokens[0].shape, dtype=layer.dtype)
            peer.build().apply(plain, *tokens)
            assert torch.equal(output, plain)


@pytest.mark.parametrize("name", SCHEMES)
def test_quantised_layers_of_ranks_and_changes(installed, name):
    layer = Layer(128, 64, num_experts=8)
    peer = Quantised(layer, name)
    tokens = layer.tokens(17)
    ranks = [QuantisedVllmLayer(peer, SCHEMES[name][1], rank=rank) for rank in (0, 1)]
    total = sum(rank(*tokens).float() for rank in ranks)
    assert_close(total, layer.expected(*tokens), layer.dtype, quantised=True)
    whole = QuantisedVllmLayer(peer, SCHEMES[name][1])
    whole(*tokens)
    plan = whole.experts.fused_moe_impl
    for tensor in (peer.w13, peer.s13, peer.w2, peer.s2):
        fp8 = tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        if tensor.itemsize > 1:
            tensor.mul_(0.5)
        else:
            tensor.view(torch.uint8).bitwise_xor_(0x80 if fp8 else 1)
        plain = dirty(*tokens[0].shape, dtype=layer.dtype)
        peer.build().apply(plain, *tokens)
        assert torch.equal(whole(*tokens), plain)
    assert whole.experts.fused_moe_impl is plan and plan.weights_version == 5
    layer_of_vllm = torch.nn.Module()  # as the methods that call the hook
    layer_of_vllm.w13_weight, layer_of_vllm.w2_weight = peer.w13, peer.w2
    again = QuantisedVllmLayer(peer, SCHEMES[name][1])
    again.experts.process_weights_after_loading(layer_of_vllm)
    built = again.experts.fused_moe_impl
    assert torch.equal(again(*tokens), plain) and again.experts.fused_moe_impl is built
    compiled = torch.compile(lambda *given: again(*given) * 2, backend="aot_eager", fullgraph=True,
                             dynamic=True)
    assert torch.equal(compiled(*tokens), plain * 2)
    torch._dynamo.reset()


def test_a_wrong_handle_cannot_give_the_wrong_layers_result(installed):
    """A compiled graph holds the handle as a number: one from another process may name another
    plan."""
    first, second = (VllmLayer(Layer(seed=seed), xpu_vllm.FusedMoeXpuExperts) for seed in (0, 1))
    tokens = first.layer.tokens(9)
    right = direct(second, tokens)
    first.experts.fused_moe_impl.plan.handle, kept = (second.experts.fused_moe_impl.plan.handle,
                                                      first.experts.fused_moe_impl.plan.handle)
    assert torch.equal(first(*tokens), direct(first, tokens))
    assert torch.equal(second(*tokens), right)
    first.experts.fused_moe_impl.plan.handle = kept


def test_what_it_supports_is_what_the_library_does(monkeypatch):
    ours, utils = xpu_vllm.FusedMoeXpuExperts, xpu_vllm.quant_utils
    assert ours._supports_current_device() and not UNCHANGED._supports_current_device()
    pairs = [(None, None), (utils.kFp8StaticTensorSym, None),
             (utils.kFp8StaticTensorSym, utils.kFp8DynamicTensorSym),
             (utils.kFp8Static128BlockSym, utils.kFp8Dynamic128Sym), (utils.kMxfp8Static, None),
             (utils.kMxfp4Static, None), (utils.kInt4Static, None), (utils.kInt4Static32, None)]
    taken = 0
    for cls, pair in itertools.product(xpu_vllm._CLASSES, pairs):
        assert cls._supports_quant_scheme(*pair) == cls._peer._supports_quant_scheme(*pair)
        taken += cls._supports_quant_scheme(*pair)
    assert taken == 3 + 2 + 1 + 1 + 1 + 2
    with monkeypatch.context() as patch:
        patch.setattr(xpu, "supports_format", lambda *which: False)
        assert not any(cls._supports_quant_scheme(*pair) for cls in xpu_vllm._CLASSES
                       for pair in pairs)
    layer = Layer()
    with pytest.raises(errors.Unsupported, match="gemm1_alpha: expected 1.702 for swigluoai"):
        VllmLayer(layer, ours, MoEActivation.SWIGLUOAI, gemm1_alpha=1.0)
    bare = ours(VllmLayer(layer, ours).experts.moe_config, FUSED_MOE_UNQUANTIZED_CONFIG)
    with pytest.raises(errors.InvalidArgument, match="before process_weights_after_loading"):
        bare.workspace_shapes(1, 1, 1, 1, 1, 1, None, MoEActivation.SILU)


def test_errors_name_the_argument(installed):
    layer = Layer()
    module = VllmLayer(layer, xpu_vllm.FusedMoeXpuExperts)
    hidden, weights, ids = layer.tokens(9)
    with pytest.raises(errors.InvalidArgument, match="topk_ids: expected -1 or an id below"):
        module(hidden, weights, ids + 7)


def test_install_puts_the_class_where_vllm_looks(monkeypatch):
    where = xpu_vllm.install()
    try:
        assert len(where) == 8 and xpu_moe.XpuFusedMoe is xpu.EngineXpuFusedMoe
        chosen = oracle_.backend_to_kernel_cls(oracle_.UnquantizedMoeBackend.XPU)
        assert chosen == [xpu_vllm.FusedMoeXpuExperts]
        chosen = fp8_oracle.backend_to_kernel_cls(fp8_oracle.Fp8MoeBackend.XPU)
        assert {xpu_vllm.FusedMoeXpuExpertsFp8, xpu_vllm.FusedMoeXpuExpertsBlockFp8,
                xpu_vllm.FusedMoeXpuExpertsMxFp8} == set(chosen)
    finally:
        xpu_vllm.uninstall()
    assert xpu_moe.XPUExperts is UNCHANGED and not hasattr(xpu_moe, "XpuFusedMoe")


def test_a_vllm_that_calls_otherwise_is_refused_in_one_line(monkeypatch):
    base = modular_kernel.FusedMoEExpertsModular

    def apply(self, output, hidden_states, something_new):
        raise NotImplementedError

    with monkeypatch.context() as patch:
        patch.setattr(base, "apply", apply)
        with pytest.raises(errors.Unsupported) as caught:
            xpu_vllm._check()
    text = str(caught.value)
    assert "\n" not in text and vllm.__version__ in text and "something_new" in text
    xpu_vllm._check()
    found = _xpu_install._vllm_source(xpu_moe.__name__)
    assert found and _xpu_install.calls_out_of_step(found[1], xpu.EngineXpuFusedMoe) == []
    newer = found[1].replace("a1q_scale=a1q_scale,\n        )", "a1q_scale=a1q_scale, is_new=1)")
    with monkeypatch.context() as patch:
        patch.setattr(_xpu_install, "_vllm_source", lambda module: (found[0], newer))
        with pytest.raises(errors.Unsupported, match="calls XpuFusedMoe.apply: .*is_new"):
            xpu.install()


def test_a_model_gives_vllms_own_tokens_also_after_a_reload(tmp_path):
    script = pathlib.Path(__file__).with_name("vllm_models.py")
    environment = {**os.environ, "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True,
                          env=environment, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert [results[mode]["experts"] for mode in ("unchanged", "ours")] == [
        ["XPUExperts"], ["FusedMoeXpuExperts"]]
    for mode in ("unchanged", "ours"):
        assert results[mode]["tokens"] == results["in-tree"]["tokens"]
        assert results[mode]["reloaded"] == results["in-tree on the second"]["tokens"]
    assert results["in-tree"]["tokens"] != results["in-tree on the second"]["tokens"]
