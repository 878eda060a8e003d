"""experts_implementation="fusedmoe": tiny random models of many families, what becomes of their
weights under a plan, and what is refused. Nothing is downloaded."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import json
import logging
import pathlib
import pickle
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

transformers = pytest.importorskip("transformers", minversion="5")

import fusedmoe  # noqa: E402
import fusedmoe.transformers as plugin  # noqa: E402
from fusedmoe import _gate  # noqa: E402
import support  # noqa: E402

STORAGES = ("borrowed", "packed")
# torch writes its traces through logging whoever listens, and pytest does: half of the time.
logging.getLogger("torch.__trace").propagate = False

# fp32: two orders of summation. bf16: a model rounds after every layer, and a rounding apart can
# send a token to another expert, so whole models only show that nothing is far off; one layer on
# equal inputs is held to the library's own tolerance.
MODEL_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.15}

COMMON = dict(vocab_size=300, hidden_size=64, num_hidden_layers=2, num_attention_heads=2,
              num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0, bos_token_id=1,
              eos_token_id=2)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2)
QWEN = dict(**EXPERTS, moe_intermediate_size=32, intermediate_size=96, head_dim=32)
LOCAL = dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=48)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
              intermediate_size=96, n_shared_experts=1, first_k_dense_replace=1, head_dim=32)
MLA = dict(num_key_value_heads=2, q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=32,
           qk_nope_head_dim=32, v_head_dim=32, n_group=4, topk_group=2)
LINEAR = dict(linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
              linear_num_value_heads=2, shared_expert_intermediate_size=48,
              layer_types=["linear_attention", "full_attention"])

# Configuration, its arguments, and what the plan must have made of the gate.
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_moe": ("Qwen3MoeConfig", dict(**QWEN, norm_topk_prob=True), "silu"),
    "qwen2_moe": ("Qwen2MoeConfig", dict(**EXPERTS, moe_intermediate_size=32, intermediate_size=96,
                                         shared_expert_intermediate_size=48), "silu"),
    "mixtral": ("MixtralConfig", LOCAL, "silu"),
    "gpt_oss": ("GptOssConfig", dict(**LOCAL, head_dim=32, sliding_window=32), "swigluoai"),
    "deepseek_v3": ("DeepseekV3Config", {**ROUTED, **MLA}, "silu"),
    "deepseek_v2": ("DeepseekV2Config", {**ROUTED, **MLA, "topk_method": "group_limited_greedy"},
                    "silu"),
    "deepseek_v4": ("DeepseekV4Config", dict(num_local_experts=8, num_experts_per_tok=2,
                                             moe_intermediate_size=32, n_shared_experts=1,
                                             swiglu_limit=0.05), "silu"),
    "olmoe": ("OlmoeConfig", dict(**EXPERTS, intermediate_size=48), "silu"),
    "granitemoe": ("GraniteMoeConfig", LOCAL, "silu"),
    "glm4_moe": ("Glm4MoeConfig", ROUTED, "silu"),
    "qwen3_next": ("Qwen3NextConfig", dict(**QWEN, **LINEAR), "silu"),
    "ernie4_5_moe": ("Ernie4_5_MoeConfig", dict(moe_num_experts=8, moe_k=2, intermediate_size=96,
                                                moe_intermediate_size=32, moe_num_shared_experts=1,
                                                moe_layer_start_index=1), "silu"),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", dict(num_experts=8, moe_topk=2, intermediate_size=48,
                                                  head_dim=32), "silu"),
    "minimax_m2": ("MiniMaxM2Config", dict(**LOCAL, head_dim=32), "silu"),
    "minimax_m3": ("MiniMaxM3VLTextConfig", dict(**LOCAL, head_dim=32), "swigluoai"),
    "jamba": ("JambaConfig", dict(**EXPERTS, intermediate_size=48, attn_layer_period=2,
                                  attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0,
                                  mamba_d_state=8, mamba_dt_rank=8,
                                  use_associative_scan=False), "silu"),
    "dots1": ("Dots1Config", dict(**ROUTED, n_group=1, topk_group=1), "silu"),
    "flex_olmo": ("FlexOlmoConfig", dict(**EXPERTS, intermediate_size=48), "silu"),
    "phimoe": ("PhimoeConfig", LOCAL, "silu"),
    "nemotron_h": ("NemotronHConfig", dict(
        n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, intermediate_size=96,
        n_shared_experts=1, moe_shared_expert_intermediate_size=32, hybrid_override_pattern="*E",
        head_dim=32, n_group=1, topk_group=1), "relu2"),
    "lfm2_moe": ("Lfm2MoeConfig", dict(**EXPERTS, moe_intermediate_size=32, intermediate_size=96,
                                       num_dense_layers=1,
                                       layer_types=["conv", "full_attention"]), "silu"),
    "gemma4": ("Gemma4TextConfig", dict(
        num_experts=8, top_k_experts=2, moe_intermediate_size=32, intermediate_size=96, head_dim=32,
        enable_moe_block=True, global_head_dim=32, vocab_size_per_layer_input=300,
        hidden_size_per_layer_input=16, num_kv_shared_layers=0), "gelu_tanh"),
    "aria_text": ("AriaTextConfig", dict(moe_num_experts=8, moe_topk=2, intermediate_size=48,
                                         moe_num_shared_experts=1), "silu"),
}

IDS = torch.randint(3, 300, (2, 11), generator=torch.Generator().manual_seed(1))
NEW_TOKENS = 4


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """One thread, counting plans, no gradients; nothing compiled is left to the next test."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plugin._default = plugin._Options(counters=True)
    with torch.no_grad():
        yield
    plugin._default = plugin._Options()
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def build(family: str = "qwen3_moe", dtype: torch.dtype = torch.float32, seed: int = 0,
          implementation: str = "fusedmoe", **changes: Any) -> nn.Module:
    name, arguments, _ = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **arguments, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype,
                                                          experts_implementation=implementation)
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():  # large enough for the choice of experts to matter
        noise = torch.randn(p.shape, generator=generator)
        p.copy_(noise * 0.15 if p.ndim > 1 else 1 + noise * 0.5)
    model.generation_config.eos_token_id = None
    return model.eval()


def experts(model: nn.Module) -> list[nn.Module]:
    return [x for x in model.modules() if hasattr(x, "is_concatenated")]


def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS, use_cache=False).logits


@contextlib.contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    model.set_experts_implementation("eager")
    yield
    model.set_experts_implementation("fusedmoe")


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return support.errors(got, expected)[0]


def model_error(model: nn.Module, call: Any = None) -> float:
    """Of ours, or of the compiled function of it, against transformers' own."""
    got = (model if call is None else call)(IDS, use_cache=False).logits
    with eager(model):
        return error(got, logits(model))


def calls(model: nn.Module) -> int:
    return sum(plan.counters().calls for plan in plugin.plans(model))


def experts_input(tokens: int = 11, dtype: torch.dtype = torch.float32, top_k: int = 2,
                  hidden: int = 64, num_experts: int = 8) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k]
                       for _ in range(tokens)])
    return (torch.randn(tokens, hidden, generator=generator).to(dtype), ids,
            torch.rand(tokens, top_k, generator=generator).to(dtype))


# --- Families -----------------------------------------------------------------------------------


def captured_inputs(model: nn.Module) -> tuple[torch.Tensor, ...]:
    """What the last experts module is called with, by transformers' own implementation."""
    seen: list[tuple[torch.Tensor, ...]] = []
    hook = experts(model)[-1].register_forward_pre_hook(lambda _, given: seen.append(given))
    logits(model)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("dtype", MODEL_TOLERANCE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, dtype: torch.dtype) -> None:
    model = build(family, dtype, implementation="eager")
    expected = logits(model)
    expected_tokens = model.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False)
    inputs = captured_inputs(model)
    assert plugin.plans(model) == []
    results = {}
    for storage in STORAGES:
        plugin.configure(model, weights=storage)
        model.set_experts_implementation("fusedmoe")
        got = logits(model)
        tokens = model.generate(IDS, max_new_tokens=NEW_TOKENS, do_sample=False)
        results[storage] = got
        plans = plugin.plans(model)
        counted = [plan.counters() for plan in plans]
        print(f"{family} {dtype} {storage}: {len(plans)} plans, {plans[0].config.activation.kind}, "
              f"calls {[c.calls for c in counted]}, tokens {[c.tokens for c in counted]}, "
              f"rel {error(got, expected):.1e}, "
              f"tokens {'equal' if torch.equal(tokens, expected_tokens) else 'differ'}")
        # One call for the logits; a prompt and NEW_TOKENS - 1 steps for the tokens.
        assert len(plans) == len(experts(model))
        for counters in counted:
            assert counters.calls == 1 + NEW_TOKENS
            assert counters.tokens == IDS.numel() * 2 + IDS.shape[0] * (NEW_TOKENS - 1)
        assert error(got, expected) < MODEL_TOLERANCE[dtype]
        if dtype == torch.float32:
            assert torch.equal(tokens, expected_tokens)
    assert torch.equal(results["borrowed"], results["packed"])
    activation = plugin.plans(model)[0].config.activation
    assert activation.kind == FAMILIES[family][2]

    # One layer, equal inputs, against transformers' own in fp64.
    last = experts(model)[-1]
    got = last(*inputs)
    reference = copy.deepcopy(last).double()
    reference.config = copy.copy(last.config)
    reference.config._experts_implementation_internal = "eager"
    hidden, index, router = inputs
    support.assert_close(got, reference(hidden.double(), index, router.double()), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_compiled(family: str) -> None:
    model = build(family)
    expected = logits(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = calls(model)
    got = compiled(IDS, use_cache=False).logits
    assert torch.equal(got, expected)
    assert calls(model) == before + len(experts(model))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_inductor(family: str) -> None:
    """A whole model: inductor fuses the other layers, which moves their bits, not ours."""
    model = build(family)
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    got = compiled(IDS, use_cache=False).logits
    assert calls(model) == len(experts(model))
    assert error(got, logits(model)) < 1e-5


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_bits_at_any_length(backend: str, storage: str) -> None:
    layer = experts(build(dtype=torch.bfloat16))[0]
    plugin.configure(layer, weights=storage)
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    stats = torch._dynamo.utils.counters["stats"]
    stats.clear()
    for tokens in (1, 7, 64):
        inputs = experts_input(tokens, torch.bfloat16)
        before = calls(layer)
        got = compiled(*inputs)
        assert calls(layer) == before + 1
        assert torch.equal(got, layer(*inputs))
    # 1 is a size of its own to Dynamo; 7 and 64 share a graph.
    assert stats["unique_graphs"] == 2


def test_static_cache_generates_the_same() -> None:
    model = build()
    arguments = dict(max_new_tokens=3, do_sample=False)
    expected = model.generate(IDS, **arguments)
    assert torch.equal(model.generate(IDS, cache_implementation="static", disable_compile=True,
                                      **arguments), expected)


# --- What becomes of weights --------------------------------------------------------------------

Call = Any


def _plain(model: nn.Module) -> Call:
    return model


def _compiled(model: nn.Module) -> Call:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


MODES = pytest.mark.parametrize("mode", [_plain, _compiled], ids=["eager", "compiled"])
STORED = pytest.mark.parametrize("storage", STORAGES)


@STORED
@MODES
def test_weights_that_change(mode: Any, storage: str) -> None:
    model, other = build(), build(seed=7)
    plugin.configure(model, weights=storage)
    call = mode(model)
    layer = experts(model)[0]
    assert model_error(model, call) < 1e-5

    model.load_state_dict(other.state_dict())
    assert model_error(model, call) < 1e-5
    layer.down_proj.mul_(0.5)
    assert model_error(model, call) < 1e-5
    layer.gate_up_proj = nn.Parameter(layer.gate_up_proj * 2)
    assert model_error(model, call) < 1e-5
    layer.down_proj.data = layer.down_proj.data * 3
    assert model_error(model, call) < 1e-5

    # PyTorch does not count this: only who reads in place sees it.
    layer.down_proj.data.copy_(layer.down_proj.data * 0.3)
    assert (model_error(model, call) < 1e-5) == (storage == "borrowed")
    plugin.refresh(model)
    assert model_error(model, call) < 1e-5
    assert len(plugin.plans(model)) == len(experts(model))


@STORED
@MODES
def test_dtypes_round_trip(mode: Any, storage: str) -> None:
    model = build(num_hidden_layers=1)
    plugin.configure(model, weights=storage)
    call = mode(model)
    first = experts(model)[0]
    held = []
    for convert, limit in (("float", 1e-5), ("bfloat16", 0.05), ("float", 1e-5), ("half", 0.01),
                           ("bfloat16", 0.05), ("float", 1e-5)):
        getattr(model, convert)()
        before = calls(model)
        assert model_error(model, call) < limit, convert
        assert calls(model) == before * (mode is _compiled) + 1
        held.append(plugin.plans(first)[-1])
    # Compiled functions keep their plans, one for each dtype however often it comes back.
    assert len(plugin.plans(first)) == (3 if mode is _compiled else 1)
    if mode is _plain:  # a plan of another dtype holds no memory, whoever holds the plan
        assert len(set(map(id, held))) == len(held)
        for plan in held[1:2] + held[3:5]:
            with pytest.raises(fusedmoe.errors.StaleWeights, match="released"):
                dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[plan.config.dtype]
                hidden, index, router = experts_input(dtype=dtype)
                plan.apply(torch.empty_like(hidden), hidden, router, index)


@STORED
def test_replaced_parameters_are_let_go(storage: str) -> None:
    model = build()
    plugin.configure(model, weights=storage)
    layer = experts(model)[0]
    logits(model)
    for dtype in (torch.float32, torch.bfloat16):
        old = [weakref.ref(layer.gate_up_proj), weakref.ref(layer.down_proj)]
        pointers = [weakref.ref(layer.gate_up_proj.untyped_storage())]
        layer.gate_up_proj = nn.Parameter(layer.gate_up_proj.to(dtype) * 1)
        layer.down_proj = nn.Parameter(layer.down_proj.to(dtype) * 1)
        layer(*experts_input(dtype=dtype))
        gc.collect()
        assert [x() for x in old] == [None, None]
        assert pointers[0]() is None


def test_a_packed_copy_knows_new_weights_at_an_old_address() -> None:
    """`p.data = x` twice, with no call between: the second x may lie where the first data lay, and
    PyTorch counts neither."""
    layer = experts(build(hidden_size=256, moe_intermediate_size=256))[0]
    plugin.configure(layer, weights="packed")
    inputs = experts_input(hidden=256)
    layer(*inputs)
    weight = layer.down_proj
    for attempt in range(8):
        weight.data = weight.data.half()
        weight.data = (weight.data * (1.5 if attempt % 2 else 0.5)).float()
        got = layer(*inputs)
        plugin.configure(layer, weights="borrowed")
        expected = layer(*inputs)
        plugin.configure(layer, weights="packed")
        assert torch.equal(got, expected)
        layer(*inputs)


class Adapter(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.randn_like(weight) * 0.1)
        self.register_buffer("scale", torch.zeros(()))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.scale * self.delta


@STORED
@MODES
def test_parametrised_weights(mode: Any, storage: str) -> None:
    """As adapters on expert weights are made: each access gives a new tensor of version 0, often
    at the address of the last one."""
    model = build(num_hidden_layers=1)
    plugin.configure(model, weights=storage)
    adapters = []
    for layer in experts(model):
        adapters.append(Adapter(layer.down_proj))
        parametrize.register_parametrization(layer, "down_proj", adapters[-1])
    call = mode(model)

    def switch(scale: float) -> None:
        for adapter in adapters:
            adapter.scale.fill_(scale)

    scales = (0.0, 1.0, -1.0, 2.0, 0.5)
    got = []
    for scale in scales:  # nothing runs in between
        switch(scale)
        got.append(call(IDS, use_cache=False).logits)
    for scale, mine in zip(scales, got):
        switch(scale)
        with eager(model):
            assert error(mine, logits(model)) < 1e-5, scale
    assert calls(model) == len(scales) * len(adapters)


@STORED
@MODES
def test_a_copied_model_has_its_own_plans(mode: Any, storage: str) -> None:
    model = build(num_hidden_layers=1)
    plugin.configure(weights=storage)
    call = mode(model)
    expected = call(IDS, use_cache=False).logits
    twin = copy.deepcopy(model)
    assert plugin.plans(twin) == []
    twin_call = mode(twin)
    assert torch.equal(twin_call(IDS, use_cache=False).logits, expected)
    mine, theirs = plugin.plans(model), plugin.plans(twin)
    assert len(theirs) == len(mine) and not set(map(id, mine)) & set(map(id, theirs))

    experts(twin)[0].down_proj.mul_(2)
    before = calls(model), calls(twin)
    assert not torch.equal(twin_call(IDS, use_cache=False).logits, expected)
    assert (calls(model), calls(twin)) == (before[0], before[1] + 1)
    assert torch.equal(call(IDS, use_cache=False).logits, expected)
    assert (calls(model), calls(twin)) == (before[0] + 1, before[1] + 1)
    assert model_error(twin) < 1e-5


def test_layers_compiled_one_by_one_keep_their_own_plans() -> None:
    """They share code, which Dynamo could take for a reason to share the graph."""
    model = build()
    inputs = experts_input()
    for layer in experts(model):
        expected = layer(*inputs)
        before = calls(layer)
        assert torch.equal(torch.compile(layer, backend="aot_eager", fullgraph=True)(*inputs),
                           expected)
        assert calls(layer) == before + 1


@MODES
def test_a_plan_dies_with_its_module(mode: Any) -> None:
    model = build(num_hidden_layers=1)
    call = mode(model)
    call(IDS, use_cache=False)
    plans = [weakref.ref(plan) for plan in plugin.plans(model)]
    handle = plans[0]().handle
    parameter = weakref.ref(experts(model)[0].down_proj)
    del model, call
    torch._dynamo.reset()
    gc.collect()
    assert [plan() for plan in plans] == [None]
    assert parameter() is None
    hidden, index, router = experts_input()
    with pytest.raises(RuntimeError, match=f"handle of a living plan, got {handle}"):
        torch.ops.fusedmoe.apply(torch.empty_like(hidden), hidden, router, index, None, handle)


def test_models_are_saved_without_plans(tmp_path: pathlib.Path) -> None:
    model = build()
    expected = logits(model)
    model.save_pretrained(tmp_path)
    assert "fusedmoe" not in (tmp_path / "config.json").read_text()
    for arguments in (dict(experts_implementation="fusedmoe"), {}):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **arguments)
        if not arguments:
            loaded.set_experts_implementation("fusedmoe")
        assert error(logits(loaded), expected) < 1e-6
        assert calls(loaded) == len(experts(loaded))

    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for again in (torch.load(buffer, weights_only=False), pickle.loads(pickle.dumps(model))):
        assert plugin.plans(again) == []
        again.set_experts_implementation("fusedmoe")
        assert torch.equal(logits(again), expected)


# --- Options, threads, scratch ------------------------------------------------------------------


def test_prepare_builds_what_calls_use() -> None:
    for family in ("qwen3_moe", "hunyuan_v1_moe", "ernie4_5_moe", "gemma4"):
        model = build(family)
        prepared = plugin.prepare(model)
        assert len(prepared) == len(experts(model))
        assert plugin.prepare(model) == prepared
        logits(model)
        assert plugin.plans(model) == prepared
        assert all(plan.counters().calls == 1 for plan in prepared)
    del model.config.top_k_experts
    for layer in experts(model):
        layer.config = model.config
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="pass top_k"):
        plugin.prepare(model)
    assert plugin.prepare(model, top_k=2) == prepared


def test_options_reach_the_plans() -> None:
    model = build()
    first = experts(model)[0]
    plugin.configure(first, weights="packed", isa="avx2", max_threads=1, counters=False)
    plans = plugin.prepare(model)
    assert plans[0].plan.weight_bytes > 0 and plans[1].plan.weight_bytes == 0
    assert "instruction set avx2 " in plans[0].describe()
    assert "borrowed" in plans[1].describe()
    logits(model)
    assert [plan.counters().calls for plan in plans] == [0, 1]

    plugin.configure(first, weights="borrowed")  # the packed copy goes at once
    with pytest.raises(fusedmoe.errors.StaleWeights, match="released"):
        hidden, index, router = experts_input()
        plans[0].apply(torch.empty_like(hidden), hidden, router, index)
    assert model_error(model) < 1e-5
    now = plugin.plans(model)
    assert len(now) == 2 and now[0] is not plans[0] and now[1] is plans[1]
    assert "instruction set avx2 " in now[0].describe(), "what is not named stays"
    for wrong in (dict(weights="own"), dict(max_workspace_bytes=-1)):
        with pytest.raises(fusedmoe.errors.InvalidArgument, match=f"^{next(iter(wrong))}: "):
            plugin.configure(model, **wrong)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="Linear, which has none"):
        plugin.plans(nn.Linear(2, 2))


@STORED
@MODES
def test_a_small_workspace_gives_the_same_bits(mode: Any, storage: str) -> None:
    layer = experts(build(dtype=torch.bfloat16))[0]
    inputs = experts_input(64, torch.bfloat16)
    plugin.configure(layer, weights=storage)
    expected = mode(layer)(*inputs)
    torch._dynamo.reset()
    plan = plugin.prepare(layer, top_k=2)[0]
    least = plan.min_workspace_size().bytes
    for limit in (0, least, plan.workspace_size(5).bytes + 1):
        plugin._scratch.tensor = None
        plugin.configure(layer, weights=storage, max_workspace_bytes=limit)
        torch._dynamo.reset()
        assert torch.equal(mode(layer)(*inputs), expected)
        if mode is _plain:
            assert plugin._scratch.tensor.numel() == max(limit, least)


def test_one_workspace_serves_all_layers() -> None:
    plugin._scratch.tensor = None
    model = build()
    plans = plugin.prepare(model)
    seen = []
    for layer in experts(model):
        layer.register_forward_hook(lambda *_: seen.append(plugin._scratch.tensor))
    logits(model)
    assert seen[0] is seen[1]
    assert seen[0].numel() == plans[0].workspace_size(IDS.numel()).bytes
    with torch.inference_mode():
        plugin._scratch.tensor = None
        logits(model)
    logits(model)  # the workspace that was made in inference mode serves here too


@STORED
def test_many_threads_build_one_plan(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    plugin.configure(model, weights=storage)
    layer = experts(model)[0]
    built = []
    build_plan = plugin._build

    @functools.wraps(build_plan)
    def count(*arguments: Any) -> Any:
        built.append(threading.get_ident())
        time.sleep(0.1)  # long enough for all to come
        return build_plan(*arguments)

    monkeypatch.setattr(plugin, "_build", count)
    number = 6
    barrier = threading.Barrier(number, timeout=30)
    results: dict[int, list[torch.Tensor]] = {}
    scratch = set()

    @torch.no_grad()
    def work(index: int) -> None:
        barrier.wait()
        results[index] = [layer(*experts_input(tokens)) for tokens in (1 + index, 20, 3)]
        scratch.add(plugin._scratch.tensor.data_ptr())
        barrier.wait()  # nobody's is freed before all have been seen

    threads = [threading.Thread(target=work, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1 and len(plugin.plans(layer)) == 1 and len(scratch) == number
    assert plugin.plans(layer)[0].counters().calls == 3 * number
    for index in range(number):
        for tokens, got in zip((1 + index, 20, 3), results[index]):
            assert torch.equal(got, layer(*experts_input(tokens)))


# --- Expert parallelism -------------------------------------------------------------------------


@STORED
@MODES
def test_experts_of_other_ranks_are_skipped(mode: Any, storage: str) -> None:
    """Two ranks of four experts each add up to the layer; local ids, 4 = somewhere else."""
    layer = experts(build())[0]
    hidden, index, router = experts_input(33)
    index[0] = torch.tensor([0, 1])  # nothing for the second rank
    expected = layer(hidden, index, router)
    total = torch.zeros_like(expected)
    for rank in range(2):
        local = copy.deepcopy(layer)
        local.config = copy.copy(layer.config)
        plugin.configure(local, weights=storage)
        mine = slice(4 * rank, 4 * rank + 4)
        local.gate_up_proj = nn.Parameter(layer.gate_up_proj[mine].clone())
        local.down_proj = nn.Parameter(layer.down_proj[mine].clone())
        local.num_experts, local._is_expert_parallel = 4, True
        elsewhere = index // 4 != rank
        local_index = torch.where(elsewhere, 4, index % 4)
        local_router = router.masked_fill(elsewhere, 0)
        part = mode(local)(hidden, local_index, local_router)
        total += part
        counted = plugin.plans(local)[0].counters()
        assert sum(counted.rows_per_expert) == int((~elsewhere).sum())
        local.config._experts_implementation_internal = "eager"
        assert error(part, local(hidden, local_index, local_router)) < 1e-5
        if rank:
            assert not part[0].any()
    assert error(total, expected) < 1e-6
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="below num_experts=8, got 8"):
        layer(hidden, torch.full_like(index, 8), router)


# --- Activations --------------------------------------------------------------------------------

ACTIVATIONS = [
    (fusedmoe.ActivationConfig(kind="silu"), None),
    (fusedmoe.ActivationConfig(kind="silu"), 7.0),
    (fusedmoe.ActivationConfig(kind="gelu"), None),
    (fusedmoe.ActivationConfig(kind="gelu"), 3.0),
    (fusedmoe.ActivationConfig(kind="gelu_tanh"), None),
    (fusedmoe.ActivationConfig(kind="swigluoai", alpha=1.702, limit=7.0), None),
    (fusedmoe.ActivationConfig(kind="swigluoai", alpha=1.3, limit=float("inf")), None),
    (fusedmoe.ActivationConfig(kind="swiglustep", limit=2.5), None),
    (fusedmoe.ActivationConfig(kind="relu2"), None),
]


class Gate(nn.Module):
    """What is asked of a module to tell its activation."""

    def __init__(self, function: Any, has_gate: bool = True, is_concatenated: bool = True,
                 **attributes: float) -> None:
        super().__init__()
        self.function, self.has_gate = function, has_gate
        self.is_concatenated = is_concatenated
        self.__dict__.update(attributes)

    def _apply_gate(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_concatenated:
            return self.function(*x.chunk(2, -1))
        return self.function(x[..., ::2], x[..., 1::2])

    def act_fn(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x, x)


@pytest.mark.parametrize("activation, clamp", ACTIVATIONS, ids=lambda x: str(getattr(x, "kind", x)))
def test_formulas_are_the_librarys(activation: fusedmoe.ActivationConfig,
                                   clamp: float | None) -> None:
    """Through one expert whose weights are identities."""
    gate, up = _gate._probe()
    gated = activation.kind != "relu2"
    size = 64
    hidden = torch.cat((gate.view(-1, size), up.view(-1, size)), 1)
    eye = torch.eye(2 * size)
    weights = fusedmoe.ExpertWeights(w13=eye[None] if gated else eye[None, :size].contiguous(),
                                     w2=eye[None, :, :size].contiguous())
    config = fusedmoe.MoeConfig(hidden_size=2 * size, intermediate_size=size, num_experts=1,
                                top_k=1, dtype="f32", activation=activation, clamp_limit=clamp)
    output = torch.empty_like(hidden)
    plan = fusedmoe.FusedMoe.create(config, weights)
    rows = hidden.shape[0]
    plan.apply(output, hidden, torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.int32))
    expected = _gate._formula(activation, clamp)(gate, up)
    assert _gate._equal(output[:, :size].reshape(-1), expected, up)


@pytest.mark.parametrize("concatenated", [True, False], ids=["halves", "interleaved"])
@pytest.mark.parametrize("activation, clamp", ACTIVATIONS, ids=lambda x: str(getattr(x, "kind", x)))
def test_each_activation_is_told(activation: fusedmoe.ActivationConfig, clamp: float | None,
                                 concatenated: bool) -> None:
    gated = activation.kind != "relu2"
    limit = activation.limit if activation.kind.startswith("swiglu") else clamp
    # limit is there and not used, too: it must not be taken for one that is.
    for unused in (None, 5.0):
        for names in (("limit", "alpha"), ("swiglu_limit", "swiglu_alpha")):
            values = (unused if limit is None else limit, activation.alpha)
            gate = Gate(_gate._formula(activation, clamp), gated, concatenated,
                        **{k: v for k, v in zip(names, values) if v is not None})
            told, told_clamp = _gate.activation_of(gate)
            assert (told.kind, told_clamp) == (activation.kind, clamp)
            if activation.kind.startswith("swiglu"):
                assert told.limit == activation.limit
            if activation.kind == "swigluoai":
                assert told.alpha == activation.alpha


@pytest.mark.parametrize("name, function, gated", [
    ("mish", lambda g, u: nn.functional.mish(g) * u, True),
    ("quick_gelu", lambda g, u: g * torch.sigmoid(1.702 * g) * u, True),
    ("up instead of gate", lambda g, u: nn.functional.silu(u) * g, True),
    ("a clamp that no attribute states",
     lambda g, u: nn.functional.silu(g.clamp(max=200)) * u.clamp(-200, 200), True),
    ("normalised", lambda g, u: nn.functional.silu(g / g.norm(dim=-1, keepdim=True)) * u, True),
    ("relu without square", lambda g, u: torch.relu(g), False),
    ("fails", lambda g, u: g @ u, True),
])
def test_other_gates_are_refused(name: str, function: Any, gated: bool) -> None:
    with pytest.raises(fusedmoe.errors.Unsupported, match="experts_implementation='grouped_mm'"):
        _gate.activation_of(Gate(function, gated))


@pytest.mark.parametrize("act, kind", [("gelu", "gelu"), ("gelu_new", "gelu_tanh"),
                                       ("gelu_pytorch_tanh", "gelu_tanh"), ("swish", "silu"),
                                       ("relu", None), ("quick_gelu", None)])
def test_activations_by_configuration(act: str, kind: str | None) -> None:
    model = build(hidden_act=act)
    if kind:
        assert model_error(model) < 1e-5
        assert plugin.plans(model)[0].config.activation.kind == kind
        return
    for call in (model, torch.compile(model, backend="eager", fullgraph=True)):
        with pytest.raises(Exception, match="Qwen3MoeExperts: expected a gate that computes silu"):
            logits(call)
    assert plugin.plans(model) == []
    with pytest.raises(fusedmoe.errors.Unsupported):
        plugin.prepare(model)


# --- Refusals -----------------------------------------------------------------------------------


def test_gradients_are_refused() -> None:
    model = build()
    layer = experts(model)[0]
    inputs = experts_input()
    refused = pytest.raises(fusedmoe.errors.Unsupported, match="without gradients")
    with torch.enable_grad():
        with refused:
            model(IDS, labels=IDS)
        with pytest.raises(Exception, match="without gradients"):
            torch.compile(layer, backend="eager", fullgraph=True)(*inputs)
        with torch.no_grad():
            expected = logits(model)
        with torch.inference_mode():
            assert torch.equal(logits(model), expected)
        model.requires_grad_(False)
        assert torch.equal(logits(model), expected)
        for position in (0, 2):
            asks = [x.clone().requires_grad_(i == position) if x.is_floating_point() else x
                    for i, x in enumerate(inputs)]
            with refused:
                layer(*asks)
        layer.down_proj.requires_grad_(True)
        with refused:
            layer(*inputs)
        model.set_experts_implementation("grouped_mm")
        model(IDS, labels=IDS).loss.backward()
        assert layer.down_proj.grad is not None


def test_what_the_library_refuses_names_the_layer_and_a_way_out() -> None:
    layer = experts(build())[0]
    hidden, index, router = experts_input()
    expected = "Qwen3MoeExperts: .*grouped_mm"
    with pytest.raises(fusedmoe.errors.InvalidArgument, match=expected):
        copy.deepcopy(layer).double()(hidden.double(), index, router)
    with pytest.raises(fusedmoe.errors.Error, match=expected):
        copy.deepcopy(layer).to("meta")(hidden.to("meta"), index.to("meta"), router.to("meta"))
    gaps = copy.deepcopy(layer)
    gaps.down_proj = nn.Parameter(torch.cat((layer.down_proj, layer.down_proj), 2)[..., ::2])
    with pytest.raises(fusedmoe.errors.InvalidArgument, match=expected + "|contiguous"):
        gaps(hidden, index, router)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="^topk_ids: .*got 9"):
        layer(hidden, torch.full_like(index, 9), router)


def test_views_and_mixed_dtypes_are_taken_as_they_are() -> None:
    layer = experts(build(dtype=torch.bfloat16))[0]
    hidden, index, router = experts_input(12, torch.bfloat16)
    expected = layer(hidden, index, router)
    wide = torch.stack((hidden, hidden), 1).view(12, -1)[:, :64]  # rows apart
    columns = index.t().contiguous().t(), router.t().contiguous().t()
    assert torch.equal(layer(wide, *columns), expected)
    assert torch.equal(layer(hidden, index.int(), router.float()), expected)
    assert layer(hidden.float(), index, router).dtype == torch.float32
    assert layer(hidden[:0], index[:0], router[:0]).shape == (0, 64)
    transposed = copy.deepcopy(layer)  # a view of [E, K, N] memory
    kn = layer.down_proj.transpose(1, 2).contiguous()
    transposed.down_proj = nn.Parameter(kn.transpose(1, 2))
    assert torch.equal(transposed(hidden, index, router), expected)


# --- Quantised models ---------------------------------------------------------------------------


def to_fp8(layer: nn.Module, block_size: tuple[int, int] | None) -> nn.Module:
    """transformers' FP8Experts with the weights of a layer, which become what they are worth."""
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS, FP8Experts
    from transformers.integrations.moe import use_experts_implementation

    class Experts(FP8Experts):  # the decorator changes the class that it is given
        pass

    made = use_experts_implementation(Experts, experts_interface=ALL_FP8_EXPERTS_FUNCTIONS)(
        layer.config, block_size=block_size)
    how = dict(block=block_size) if block_size else dict(scales="tensor")
    for name in ("gate_up_proj", "down_proj"):
        q = fusedmoe.quantize(getattr(layer, name), "fp8_e4m3", **how,
                              parts="halves" if name == "gate_up_proj" else "one")
        scales = q.scales.data if block_size else q.scales.data.reshape(len(q.data), -1, 1)
        for suffix, tensor in (("", q.data), ("_scale_inv", scales)):
            assert getattr(made, name + suffix).dtype == tensor.dtype
            assert getattr(made, name + suffix).shape == tensor.shape
            setattr(made, name + suffix, nn.Parameter(tensor))
        getattr(layer, name).data.copy_(fusedmoe.dequantize(q))
    return made


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("block_size", [(32, 16), None], ids=str)
def test_fp8_experts_keep_their_weights(block_size: Any, storage: str) -> None:
    """FP8Experts of transformers, which run on GPUs alone otherwise: fp8 weights and their scales are
    read as they are."""
    model = build(dtype=torch.float32, implementation="eager")
    for block in model.model.layers:
        quantised = to_fp8(block.mlp.experts, block_size)
        block.mlp.quantised = quantised
    expected = logits(model)  # of what the fp8 weights are worth
    for block in model.model.layers:
        block.mlp.experts = block.mlp._modules.pop("quantised")
    model.set_experts_implementation("fusedmoe")
    plugin.configure(model, weights=storage, counters=True)
    plans = plugin.prepare(model, dtype=torch.float32)
    assert len(plans) == len(experts(model)) and all("fp8_e4m3" in p.describe() for p in plans)
    assert error(logits(model), expected) < 1e-5
    assert calls(model) == len(plans)
    assert plugin.prepare(experts(model)[0])[0].config.dtype == "f32"  # of the configuration
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(IDS, use_cache=False).logits, logits(model))
    layer = experts(model)[0]
    before = logits(model)
    layer.down_proj_scale_inv.mul_(0.5)  # seen as weights are
    halved = logits(model)
    assert not torch.equal(halved, before)
    layer.down_proj_scale_inv.mul_(2)
    assert torch.equal(logits(model), before)
    torch._dynamo.reset()


def test_fp8_experts_that_are_refused() -> None:
    layer = to_fp8(experts(build())[0], (32, 16))
    inputs = experts_input()
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="Experts: .*scales.data: expected "
                                                              r"float32 \[8, 2, 4\]"):
        bad = copy.deepcopy(layer)
        bad.gate_up_proj_scale_inv = nn.Parameter(bad.gate_up_proj_scale_inv[:, :1].contiguous())
        bad(*inputs)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="scales.type: expected f32 or f16 or "
                                                              "bf16 for fp8_e4m3, got e8m0"):
        bad = copy.deepcopy(layer)
        for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
            setattr(bad, name, nn.Parameter(torch.full_like(
                getattr(bad, name), 1).to(torch.float8_e8m0fnu), requires_grad=False))
        bad(*inputs)


def test_gpt_oss_in_mxfp4_is_loaded_as_bf16(tmp_path: pathlib.Path) -> None:
    """Without a GPU transformers makes bf16 of the blocks; the checkpoint reader keeps them."""
    from safetensors.torch import load_file, save_file
    model = build("gpt_oss", torch.bfloat16, implementation="eager", intermediate_size=64)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        q = fusedmoe.quantize(tensors.pop(name).mT, "mxfp4")  # [E, K, N] -> [E, N, K]
        tensors[f"{name}_blocks"] = q.data.reshape(*q.shape[:2], -1, 16)
        tensors[f"{name}_scales"] = q.scales.data.view(torch.uint8)
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, experts_implementation="fusedmoe",
        quantization_config=transformers.Mxfp4Config(dequantize=True))
    layer = experts(loaded)[0]
    assert layer.gate_up_proj.dtype == torch.bfloat16
    with torch.no_grad():
        got = loaded(IDS, use_cache=False).logits
        with eager(loaded):
            assert error(got, logits(loaded)) < MODEL_TOLERANCE[torch.bfloat16]
    first = next(iter(fusedmoe.load_checkpoint(tmp_path)))
    assert first.formats == ["mxfp4"]
    plan = fusedmoe.FusedMoe.create(first.config, first.weights)
    hidden, index, router = experts_input(7, torch.bfloat16, hidden=first.config.hidden_size,
                                          num_experts=first.config.num_experts)
    output = torch.empty_like(hidden)
    plan.apply(output, hidden, router, index)
    with torch.no_grad():
        support.assert_close(output, layer(hidden, index, router), torch.bfloat16, quantised=True)
