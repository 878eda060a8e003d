"""fusedmoe itself, without PyTorch in the arguments: NumPy, DLPack, sources, versions, errors."""

from __future__ import annotations

import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
import threading
import time
import typing
import weakref

import numpy as np
import pytest
import torch
from support import Layer, assert_close, dirty

import fusedmoe
from fusedmoe import ExpertWeights, PlanOptions, TensorView, WeightTensor
from fusedmoe import config as words


def numpy_layer() -> tuple[Layer, ExpertWeights]:
    layer = Layer(dtype=torch.float32)
    return layer, ExpertWeights(w13=layer.w13.numpy(), w2=layer.w2.numpy())


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint16).numpy()


class OnlyDlpack:
    """An array of a library that fusedmoe has never heard of."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **arguments):
        return self.tensor.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


# --- Arrays of every kind ---


def test_numpy_in_and_out_without_a_copy():
    layer, weights = numpy_layer()
    plan = fusedmoe.FusedMoe.create(layer.config, weights)
    hidden, router, ids = layer.tokens(17)
    output = np.full((17, layer.hidden_size + 5), np.nan, np.float32)
    plan.apply(output[:, :-5], hidden.numpy(), router.numpy(), ids.numpy())
    assert_close(torch.from_numpy(output[:, :-5].copy()), layer.expected(hidden, router, ids),
                 torch.float32)
    assert np.isnan(output[:, -5:]).all()  # behind each row


def test_every_kind_of_array_gives_the_same_bits():
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    want = dirty(9, layer.hidden_size, dtype=torch.bfloat16)
    fusedmoe.FusedMoe.create(layer.config, layer.weights).apply(want, hidden, router, ids)
    assert_close(want, layer.expected(hidden, router, ids), torch.bfloat16)

    class Extension:
        """As ml_dtypes makes them: NumPy's methods, and a dtype that DLPack does not know."""

        class dtype:
            name = "bfloat16"

        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor

        def view(self, dtype: str) -> np.ndarray:
            return bits(self.tensor).view(dtype)

    wrap = {
        "TensorView": lambda t: TensorView(bits(t), "bf16") if t.dtype == torch.bfloat16 else t.numpy(),
        "DLPack": OnlyDlpack,
        "extension type": lambda t: Extension(t) if t.dtype == torch.bfloat16 else t.numpy(),
        "Parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    }
    for name, wrapped in wrap.items():
        plan = fusedmoe.FusedMoe.create(
            layer.config, ExpertWeights(w13=wrapped(layer.w13), w2=wrapped(layer.w2)))
        got = dirty(9, layer.hidden_size, dtype=torch.bfloat16)
        plan.apply(got if name == "Parameter" else wrapped(got), wrapped(hidden), wrapped(router),
                   wrapped(ids))
        assert torch.equal(got, want), name


def test_layouts_and_transposed_views():  # case B110
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    want = dirty(9, layer.hidden_size, dtype=torch.bfloat16)
    fusedmoe.FusedMoe.create(layer.config, layer.weights).apply(want, hidden, router, ids)

    def flipped(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(1, 2).contiguous()

    padded = torch.zeros(layer.num_experts + 1, *layer.w2.shape[1:-1], layer.w2.shape[2] + 3,
                         dtype=torch.bfloat16)
    padded[1:, :, :-3] = layer.w2
    for weights in (
            ExpertWeights(w13=WeightTensor(data=flipped(layer.w13), layout="kn"),
                          w2=WeightTensor(data=flipped(layer.w2), layout="kn")),
            ExpertWeights(w13=flipped(layer.w13).transpose(1, 2),
                          w2=flipped(layer.w2).transpose(1, 2)),
            ExpertWeights(w13=layer.w13, w2=padded[1:, :, :-3]),
            ExpertWeights(w13=layer.w13[:, :layer.intermediate_size],
                          w13_up=layer.w13[:, layer.intermediate_size:], w2=layer.w2)):
        got = dirty(9, layer.hidden_size, dtype=torch.bfloat16)
        fusedmoe.FusedMoe.create(layer.config, weights).apply(got, hidden, router, ids)
        assert torch.equal(got, want)
    strided = torch.full((9, layer.hidden_size + 1), 7, dtype=torch.bfloat16)
    strided[:, :-1] = hidden
    got = torch.full((9, layer.hidden_size + 11), 7, dtype=torch.bfloat16)
    fusedmoe.FusedMoe.create(layer.config, layer.weights).apply(
        got[:, :-11], strided[:, :-1], router, ids)
    assert torch.equal(got[:, :-11], want)
    assert (got[:, -11:] == 7).all()  # case B111
    for w2 in (layer.w2[:, :, ::2], layer.w2.expand(1, -1, -1, -1)[0, :1].expand_as(layer.w2)):
        with pytest.raises(fusedmoe.errors.InvalidArgument, match="weights.w2: expected"):
            fusedmoe.FusedMoe.create(layer.config, ExpertWeights(w13=layer.w13, w2=w2))


def test_dtypes_by_any_name():
    for dtype in ("bf16", "bfloat16", torch.bfloat16, "torch.bfloat16"):
        layer = Layer()
        plan = fusedmoe.FusedMoe.create(
            fusedmoe.MoeConfig(hidden_size=131, intermediate_size=77, num_experts=7, top_k=3,
                               dtype=dtype, output_dtype=np.float32), layer.weights)
        assert (plan.config.dtype, plan.config.output_dtype) == ("bf16", "f32")
    assert numpy_config(np.dtype("float16")).dtype == "f16"


def numpy_config(dtype) -> fusedmoe.MoeConfig:
    layer = Layer(dtype=torch.float16)
    config = fusedmoe.MoeConfig(hidden_size=131, intermediate_size=77, num_experts=7, top_k=3,
                                dtype=dtype)
    return fusedmoe.FusedMoe.create(config, layer.weights).config


def test_config_comes_back_as_it_went_in():
    config = fusedmoe.MoeConfig(
        hidden_size=131, intermediate_size=77, num_experts=7, top_k=3, dtype="f32",
        output_dtype="bf16", gate_up_layout="interleaved", gate_up_order="up_gate",
        clamp_limit=6.5, apply_router_weight_on_input=True, activation="gelu_tanh")
    layer = Layer(dtype=torch.float32)
    got = fusedmoe.FusedMoe.create(config, layer.weights).config
    assert got.activation.kind == "gelu_tanh"
    for field in ("hidden_size", "top_k", "output_dtype", "gate_up_layout", "gate_up_order",
                  "clamp_limit", "apply_router_weight_on_input"):
        assert getattr(got, field) == getattr(config, field)
    config = dataclasses.replace(config, activation=fusedmoe.ActivationConfig(kind="swigluoai"),
                                 clamp_limit=None)
    assert fusedmoe.FusedMoe.create(config, layer.weights).config == config


# --- Sources, versions, storage ---


def test_a_source_yields_one_expert_at_a_time():
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    alive: list[weakref.ref] = []
    most = 0

    def source(expert: int) -> ExpertWeights:
        nonlocal most
        w13, w2 = layer.w13[expert:expert + 1].clone(), layer.w2[expert:expert + 1].clone()
        most = max(most, sum(ref() is not None for ref in alive))
        alive.append(weakref.ref(w13))
        return ExpertWeights(w13=w13, w2=w2)

    def stated(tensor: torch.Tensor) -> WeightTensor:
        return WeightTensor(format="bf16", shape=tuple(tensor.shape))

    weights = ExpertWeights(w13=stated(layer.w13), w2=stated(layer.w2), source=source)
    plan = fusedmoe.FusedMoe.create(layer.config, weights)
    assert len(alive) == layer.num_experts and most <= 1  # the one before, until the next is taken
    del weights
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0
    want, got = torch.empty_like(hidden), torch.empty_like(hidden)
    fusedmoe.FusedMoe.create(layer.config, layer.weights).apply(want, hidden, router, ids)
    plan.apply(got, hidden, router, ids)
    assert torch.equal(got, want)

    def broken(expert: int) -> ExpertWeights:
        raise KeyError(f"expert {expert} is not in the file")

    with pytest.raises(KeyError, match="expert 0 is not in the file"):
        fusedmoe.FusedMoe.create(layer.config, ExpertWeights(
            w13=stated(layer.w13), w2=stated(layer.w2), source=broken))
    with pytest.raises(KeyError):
        plan.refresh(ExpertWeights(w13=stated(layer.w13), w2=stated(layer.w2), source=broken))
    with pytest.raises(fusedmoe.errors.StaleWeights, match="refresh"):
        plan.apply(got, hidden, router, ids)
    plan.refresh(layer.weights)
    plan.apply(got, hidden, router, ids)
    assert torch.equal(got, want)


@pytest.mark.parametrize("on_stale", ["raise", "refresh"])
def test_the_owners_version(on_stale):
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    version = fusedmoe.WeightsVersion()
    plan = fusedmoe.FusedMoe.create(
        layer.config, ExpertWeights(w13=layer.w13, w2=layer.w2, version=version),
        PlanOptions(on_stale=on_stale))
    layer.w2.mul_(2)
    assert version.bump() == version.value == 1
    output = torch.empty_like(hidden)
    if on_stale == "raise":
        with pytest.raises(fusedmoe.errors.StaleWeights, match="version 1"):
            plan.apply(output, hidden, router, ids)
        plan.refresh(ExpertWeights(w13=layer.w13, w2=layer.w2, version=version))
    plan.apply(output, hidden, router, ids)
    assert plan.weights_version == 2
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


def test_refresh_of_some_experts():
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights)
    layer.w13[[4, 0]] += 0.25
    plan.refresh_experts([4, 0], ExpertWeights(w13=layer.w13[[4, 0]], w2=layer.w2[[4, 0]]))
    output = dirty(9, layer.hidden_size, dtype=torch.bfloat16)
    plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="local_experts: .* got 7"):
        plan.refresh_experts([7], ExpertWeights(w13=layer.w13[:1], w2=layer.w2[:1]))


def test_packed_weights_in_the_callers_memory():
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    size = fusedmoe.FusedMoe.packed_weights_size(layer.config, layer.weights)
    storage = torch.full((size.bytes,), 0xFF, dtype=torch.uint8)
    assert storage.data_ptr() % size.alignment == 0
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights,
                                    PlanOptions(weight_storage="caller", storage=storage))
    want, got = torch.empty_like(hidden), torch.empty_like(hidden)
    plan.apply(want, hidden, router, ids)
    assert_close(want, layer.expected(hidden, router, ids), torch.bfloat16)
    # Slept and woken somewhere else: an equal plan adopts the bytes as they are.
    moved = storage.clone()
    del plan
    stated = ExpertWeights(w13=WeightTensor(format="bf16", shape=tuple(layer.w13.shape)),
                           w2=WeightTensor(format="bf16", shape=tuple(layer.w2.shape)))
    adopted = fusedmoe.FusedMoe.create(layer.config, stated,
                                       PlanOptions(weight_storage="adopt", storage=moved))
    adopted.apply(got, hidden, router, ids)
    assert torch.equal(got, want)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="options.storage"):
        fusedmoe.FusedMoe.create(layer.config, layer.weights,
                                 PlanOptions(weight_storage="caller", storage=storage[:-64]))
    storage = np.zeros(size.bytes + 64, np.uint8)
    storage = storage[-storage.ctypes.data % 64:][:size.bytes]
    storage.flags.writeable = False
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="options.storage: .* writable"):
        fusedmoe.FusedMoe.create(layer.config, layer.weights,
                                 PlanOptions(weight_storage="caller", storage=storage))


def test_refreshes_at_once_keep_what_the_plan_reads():
    """Whichever of two refreshes of a borrowed plan comes last: its tensors are the ones kept."""
    plan = None
    for turn in range(60):
        layers = [Layer(seed=seed) for seed in range(3)]
        if plan is None:
            plan = fusedmoe.FusedMoe.create(layers[0].config, layers[0].weights,
                                            PlanOptions(weight_storage="borrowed"))
        threads = [threading.Thread(target=plan.refresh, args=(layer.weights,))
                   for layer in layers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        hidden, router, ids = layers[0].tokens(3)
        expected = [layer.expected(hidden, router, ids) for layer in layers]
        refs = [weakref.ref(layer.w13) for layer in layers]
        del layers, threads
        gc.collect()
        output = torch.empty_like(hidden)
        plan.apply(output, hidden, router, ids)
        alive = [i for i, ref in enumerate(refs) if ref() is not None]
        assert len(alive) == 1, turn
        assert_close(output, expected[alive[0]], torch.bfloat16)


def test_sleep_and_wake():
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights)
    plan.release_weights()
    output = dirty(9, layer.hidden_size, dtype=torch.bfloat16)
    before = output.view(torch.int16).clone()
    with pytest.raises(fusedmoe.errors.StaleWeights, match="released"):
        plan.apply(output, hidden, router, ids)
    assert torch.equal(output.view(torch.int16), before)
    plan.refresh(layer.weights)
    plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


# --- Who keeps what alive ---


def test_borrowed_tensors_live_as_long_as_the_plan_and_packed_ones_do_not():
    for storage, kept in (("borrowed", True), ("own", False)):
        layer = Layer()
        hidden, router, ids = layer.tokens(9)
        expected = layer.expected(hidden, router, ids)
        plan = fusedmoe.FusedMoe.create(layer.config, layer.weights,
                                        PlanOptions(weight_storage=storage))
        ref = weakref.ref(layer.w13)
        del layer
        gc.collect()
        assert (ref() is not None) == kept, storage
        output = torch.empty_like(hidden)
        plan.apply(output, hidden, router, ids)
        assert_close(output, expected, torch.bfloat16)
        del plan
        gc.collect()
        assert ref() is None


def test_copies_share_a_plan_and_pickle_is_refused():
    layer = Layer()
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights)
    assert copy.deepcopy({"a": plan})["a"] is plan and copy.copy(plan) is plan
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(plan)


# --- Workspaces ---


def test_workspaces():
    layer = Layer()
    hidden, router, ids = layer.tokens(33)
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights)
    want = torch.empty_like(hidden)
    plan.apply(want, hidden, router, ids)
    size, least, formula = (plan.workspace_size(33), plan.min_workspace_size(),
                            plan.workspace_formula)
    assert size.bytes == formula.fixed + 33 * formula.per_token and least.bytes < size.bytes
    buffer = fusedmoe.WorkspaceBuffer(size)
    pool = fusedmoe.WorkspacePool(2)
    pool.register_plan(plan, 33)
    pool.lock()
    first, second = plan.workspace_sizes_13_2(33)
    cases = [(buffer, None), (pool.lane(1), None),
             (dirty(size.bytes // 4, dtype=torch.float32), None),
             (dirty(least.bytes, dtype=torch.uint8), None),
             (dirty(second.bytes, dtype=torch.uint8), dirty(first.bytes, dtype=torch.uint8))]
    for workspace, workspace13 in cases:
        got = dirty(33, layer.hidden_size, dtype=torch.bfloat16)
        plan.apply(got, hidden, router, ids, workspace, workspace13=workspace13)
        assert torch.equal(got, want)
        for span in (workspace, workspace13):
            assert not isinstance(span, torch.Tensor) or (span.view(torch.uint8) != 0xFF).any()
    buffer.lock()
    with pytest.raises(fusedmoe.errors.WorkspaceTooSmall, match=str(buffer.bytes)):
        buffer.reserve(plan.workspace_size(3300))
    with pytest.raises(ValueError, match="lane"):
        pool.lane(2)
    got = dirty(33, layer.hidden_size, dtype=torch.bfloat16)
    before = got.view(torch.int16).clone()
    small = dirty(least.bytes - 1, dtype=torch.uint8)
    shared = torch.empty(size.bytes + 64, dtype=torch.uint8)
    for workspace, text in ((small, f"got {least.bytes - 1}"), (shared[1:], "multiple of 64"),
                            (shared[::2], "contiguous"), (3, "workspace: expected"),
                            (shared.to("meta"), "workspace: expected memory of the CPU")):
        with pytest.raises(fusedmoe.Error, match=text):
            plan.apply(got, hidden, router, ids, workspace)
    inside = shared[:33 * layer.hidden_size * 2].view(torch.bfloat16).view(33, -1)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="apart from"):
        plan.apply(inside, hidden, router, ids, shared[:size.bytes])
    assert torch.equal(got.view(torch.int16), before)


def test_size_queries_are_64_bit():  # cases B096, B099
    layer = Layer(hidden_size=7168, intermediate_size=16, num_experts=8, top_k=8)
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights)
    sizes = [plan.workspace_size(tokens).bytes for tokens in range(1, 8193)]
    assert sizes == sorted(sizes)
    assert plan.workspace_size(2**40).bytes > 2**50
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="num_tokens"):
        plan.workspace_size(-1)


# --- Errors ---


def test_every_code_has_its_exception():
    errors = fusedmoe.errors
    for name, cls in (("invalid_argument", errors.InvalidArgument),
                      ("unsupported", errors.Unsupported), ("stale_weights", errors.StaleWeights),
                      ("workspace_too_small", errors.WorkspaceTooSmall), ("busy", errors.Busy),
                      ("out_of_memory", errors.OutOfMemory), ("device", errors.DeviceError),
                      ("io", errors.IoError), ("internal", errors.InternalError)):
        error = errors.from_code(name, "whole: message")
        assert type(error) is cls and error.code == name and str(error) == "whole: message"
        assert isinstance(error, fusedmoe.Error)


@pytest.mark.parametrize("change, kind, text", [
    (dict(hidden_size=0), ValueError, "config.hidden_size: expected"),
    (dict(top_k=8), ValueError, "config.top_k: expected at most num_experts = 7, got 8"),
    (dict(top_k="3"), ValueError, "config.top_k: expected an integer of 64 bits, got '3'"),
    (dict(activation="swish"), ValueError, "config.activation: expected one of silu, gelu"),
    (dict(dtype="int8"), ValueError, "config.dtype: expected f32, f16 or bf16, got 'int8'"),
    (dict(dtype=None), ValueError, "config.dtype"),
    (dict(apply_router_weight_on_input=1), ValueError, "expected True or False, got 1"),
    (dict(gate_up_layout="both"), ValueError, "config.gate_up_layout: expected one of halves"),
])
def test_configs_are_refused_by_name(change, kind, text):
    layer = Layer()
    with pytest.raises(kind, match=text) as caught:
        fusedmoe.FusedMoe.create(
            fusedmoe.MoeConfig(**{**dict(hidden_size=131, intermediate_size=77, num_experts=7,
                                         top_k=3), **change}), layer.weights)
    assert isinstance(caught.value, fusedmoe.errors.InvalidArgument)


def test_words_of_the_stubs_are_those_of_the_library():
    """The literals in config.py against what the library lists when it knows a word not."""
    layer = Layer()
    other = dataclasses.replace(layer.config, activation="?")
    unknown = ExpertWeights(w13=WeightTensor(data=layer.w13, format="?"), w2=layer.w2)
    for config, weights, literal in ((other, layer.weights, words.Activation),
                                     (layer.config, unknown, words.WeightFormat)):
        with pytest.raises(fusedmoe.errors.InvalidArgument, match="one of") as caught:
            fusedmoe.FusedMoe.create(config, weights)
        listed = str(caught.value).split("one of ")[1].split(", got")[0].split(", ")
        assert set(listed) == set(typing.get_args(literal))


def test_unsupported_is_told_before():
    layer = Layer()
    weights = ExpertWeights(w13=layer.w13.to(torch.float8_e4m3fn), w2=layer.w2)
    support = fusedmoe.supports(layer.config, weights)
    assert not support and "fp8_e4m3" in support.reason
    with pytest.raises(fusedmoe.errors.InvalidArgument) as caught:  # without scales
        fusedmoe.FusedMoe.create(layer.config, weights)
    assert str(caught.value) == support.reason
    with pytest.raises(fusedmoe.errors.Unsupported) as caught:
        fusedmoe.FusedMoe.create(layer.config, layer.weights, PlanOptions(mode="a8"))
    assert str(caught.value) == fusedmoe.supports(layer.config, layer.weights,
                                                  PlanOptions(mode="a8")).reason
    support = fusedmoe.supports(layer.config, ExpertWeights(w13=layer.w13.long(), w2=layer.w2))
    assert not support and "weights.w13: expected a dtype that is a format" in support.reason
    assert fusedmoe.supports(layer.config, layer.weights) == (True, "")
    for device in ("cuda:0", "xpu:0"):
        if not any(entry["name"] == device[:-2] and entry["available"]
                   for entry in fusedmoe.list_devices()):
            with pytest.raises(fusedmoe.errors.Unsupported, match=device[:-2]):
                fusedmoe.FusedMoe.create(layer.config, layer.weights, PlanOptions(device=device))


def test_calls_are_refused_by_name_and_write_nothing():
    layer = Layer()
    hidden, router, ids = layer.tokens(5)
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights)
    output = dirty(5, layer.hidden_size, dtype=torch.bfloat16)
    before = output.view(torch.int16).clone()
    bad_id = ids.clone()
    bad_id[1, 1] = 7
    read_only = np.zeros((5, 3), np.float32)
    read_only.flags.writeable = False
    for arguments, text in (
            ((output, hidden.float(), router, ids), "hidden: expected bfloat16"),
            ((output, hidden, router, ids.short()), "topk_ids: .* got int16"),
            ((output, hidden, router, ids[:, :2]), "topk_ids: .*top_k=3"),
            ((output, hidden, router, bad_id), r"topk_ids: .* got 7 at \[1, 1\]"),
            ((output, hidden, router[:4], ids), "topk_weights: .*num_tokens=5"),
            ((output, hidden[0], router, ids), "hidden: expected 2 dimensions"),
            ((output, hidden, router.bool(), ids), "topk_weights: .* got bool"),
            ((output, hidden.to("meta"), router, ids), "hidden: expected memory of cpu"),
            ((output, hidden.t().contiguous().t(), router, ids), "hidden: .* contiguous last"),
            ((output, "hidden", router, ids), "hidden: expected a NumPy array"),
            ((read_only, hidden, router, ids), "output: expected a writable array")):
        with pytest.raises(fusedmoe.errors.InvalidArgument, match=text):
            plan.apply(*arguments)
        assert torch.equal(output.view(torch.int16), before)
    plan.apply(output[:0], hidden[:0], router[:0], ids[:0])
    plan.apply(output, hidden, router, ids)  # still usable
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


def test_expert_maps():
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    table = [1, -1, 0, -1, 2, -1, -1]
    chosen = [table.index(local) for local in range(3)]
    weights = ExpertWeights(w13=layer.w13[chosen], w2=layer.w2[chosen])
    expected = layer.expected(hidden, router, torch.where(
        torch.tensor(table)[ids.long()] >= 0, ids, -1))
    for given in (table, np.array(table), torch.tensor(table, dtype=torch.int32),
                  fusedmoe.ExpertMap.explicit_map(table)):
        plan = fusedmoe.FusedMoe.create(layer.config, weights, PlanOptions(expert_map=given))
        assert plan.num_local_experts == 3
        output = dirty(9, layer.hidden_size, dtype=torch.bfloat16)
        plan.apply(output, hidden, router, ids)
        assert_close(output, expected, torch.bfloat16)
    turned = [2, -1, 1, -1, 0, -1, -1]  # wins for one call
    back = [turned.index(local) for local in range(3)]
    plan = fusedmoe.FusedMoe.create(
        layer.config, ExpertWeights(w13=layer.w13[back], w2=layer.w2[back]),
        PlanOptions(expert_map=table))
    plan.apply(output, hidden, router, ids, expert_map=turned)
    assert_close(output, expected, torch.bfloat16)
    for bad, text in (([0, 0, 1, 2, -1, -1, -1], r"expert_map\[1\]"),  # case B084
                      (np.array([2**32, 1, 2, -1, -1, -1, -1]), r"\[0\]: expected a local id"),
                      ([0, 1, 2], "entries"), (torch.zeros(7), "int32 or int64")):
        with pytest.raises(fusedmoe.errors.InvalidArgument, match=text):
            fusedmoe.FusedMoe.create(layer.config, weights, PlanOptions(expert_map=bad))
    assert fusedmoe.ExpertMap.linear(1, 3).resolve(4) == [-1, -1, 0, -1]
    assert fusedmoe.ExpertMap.round_robin(1, 3).resolve(5) == [-1, 0, -1, -1, 1]


# --- Threads ---


@pytest.mark.parametrize("what", ["apply", "refresh", "create"])
def test_the_gil_is_free_while_the_library_works(what):
    """Another Python thread goes on while one long call runs. If the call held the GIL, that thread
    could look only just before and just after it: twice at the most. A busy machine may not let it
    look three times during one call, but does during one of many."""
    layer = Layer(hidden_size=1024, intermediate_size=1024, num_experts=8, top_k=4)
    options = PlanOptions(max_threads=1)
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights, options)
    hidden, router, ids = (t.repeat(128, 1) for t in layer.tokens(8))
    output = torch.empty_like(hidden)
    call = {"apply": lambda: plan.apply(output, hidden, router, ids),
            "refresh": lambda: plan.refresh(layer.weights),
            "create": lambda: fusedmoe.FusedMoe.create(layer.config, layer.weights, options)}[what]
    during, running = 0, False

    def work() -> None:
        nonlocal running
        running = True
        call()
        running = False

    for _ in range(200):
        during = 0
        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            time.sleep(0.001)
            during += running
        if during >= 3:
            return
    pytest.fail(f"another thread looked {during} times during the last of 200 calls, never 3 times")


def test_one_plan_many_threads():  # case B106
    layer = Layer()
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights, PlanOptions(counters=True))
    cases = []
    for count in (1, 5, 33, 64):
        hidden, router, ids = layer.tokens(count)
        want = torch.empty_like(hidden)
        plan.apply(want, hidden, router, ids)
        cases.append((hidden, router, ids, want))
    plan.reset_counters()
    failures: list[str] = []

    def work(seed: int) -> None:
        workspace = fusedmoe.WorkspaceBuffer(plan.workspace_size(64))
        for i in range(100):
            hidden, router, ids, want = cases[(seed + i) % len(cases)]
            got = dirty(*hidden.shape, dtype=hidden.dtype)
            plan.apply(got, hidden, router, ids, workspace)
            if not torch.equal(got, want):
                failures.append(f"thread {seed}, call {i}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert plan.counters().calls == 800


def test_a_workspace_in_use_is_refused():
    """One buffer in two calls at once: one of them is refused, and what the other writes is right."""
    layer = Layer(hidden_size=256, intermediate_size=256, num_experts=8, top_k=4)
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights, PlanOptions(max_threads=1))
    hidden, router, ids = layer.tokens(256)
    want = torch.empty_like(hidden)
    plan.apply(want, hidden, router, ids)
    workspace = fusedmoe.WorkspaceBuffer(plan.workspace_size(256))
    refused, wrong = [0], [0]

    def work() -> None:
        for _ in range(200):
            got = dirty(*hidden.shape, dtype=hidden.dtype)
            try:
                plan.apply(got, hidden, router, ids, workspace)
            except fusedmoe.errors.Busy:
                refused[0] += 1
                continue
            wrong[0] += not torch.equal(got, want)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused[0] > 0 and wrong[0] == 0


# --- Routing, checkpoints, telling ---


def test_routing():
    logits = torch.randn(11, 13, generator=torch.Generator().manual_seed(5))
    weights, ids = np.empty((11, 4), np.float32), np.empty((11, 4), np.int64)
    config = fusedmoe.RoutingConfig(top_k=4, renormalise="sum")
    fusedmoe.topk_softmax(config, logits, weights, ids)
    want_weights, want_ids = logits.softmax(-1).topk(4)
    assert (ids == want_ids.numpy()).all()
    want_weights /= want_weights.sum(-1, keepdim=True)
    np.testing.assert_allclose(weights, want_weights.numpy(), rtol=1e-6)
    bias = torch.randn(13, generator=torch.Generator().manual_seed(6))
    config = fusedmoe.RoutingConfig(top_k=4, score_function="sigmoid", selection_bias=bias,
                                    scaling_factor=2.5)
    fusedmoe.route(config, logits, weights, ids)
    want_ids = (logits.sigmoid() + bias).topk(4).indices
    assert (ids == want_ids.numpy()).all()
    np.testing.assert_allclose(weights, 2.5 * logits.sigmoid().gather(1, want_ids).numpy(),
                               rtol=1e-6)
    for function in (fusedmoe.topk_sigmoid, fusedmoe.topk_softplus_sqrt, fusedmoe.grouped_topk):
        function(fusedmoe.RoutingConfig(top_k=4), logits, weights, ids)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="top_k"):
        fusedmoe.route(fusedmoe.RoutingConfig(top_k=14, score_function="softmax"), logits, weights,
                       ids)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="topk_weights: .* writable"):
        weights.flags.writeable = False
        fusedmoe.topk_softmax(fusedmoe.RoutingConfig(top_k=4), logits, weights, ids)


def test_a_checkpoint_that_is_not_there(tmp_path):
    with pytest.raises(fusedmoe.errors.IoError, match="nothing-here"):
        fusedmoe.load_checkpoint(tmp_path / "nothing-here")


def test_what_it_tells():
    layer = Layer()
    plan = fusedmoe.FusedMoe.create(layer.config, layer.weights)
    assert "gemm1" in plan.describe() and plan.device == "cpu" and plan.weight_bytes > 0
    info = fusedmoe.info()
    assert info["version"] == fusedmoe.__version__ and info["torch_operator"]
    assert {"name", "available", "reason"} <= set(info["devices"][0])


def test_it_works_without_torch():
    """NumPy alone, in a process where torch cannot be imported."""
    code = """
import sys
sys.modules["torch"] = None
import numpy as np, fusedmoe
w13, w2 = np.full((2, 6, 4), .1, np.float32), np.full((2, 4, 3), .2, np.float32)
plan = fusedmoe.FusedMoe.create(
    fusedmoe.MoeConfig(hidden_size=4, intermediate_size=3, num_experts=2, top_k=1, dtype="f32"),
    fusedmoe.ExpertWeights(w13=w13, w2=w2))
out = np.empty((1, 4), np.float32)
plan.apply(out, np.ones((1, 4), np.float32), np.ones((1, 1), np.float32), np.zeros((1, 1), np.int32))
x = .4
np.testing.assert_allclose(out, 3 * .2 * x / (1 + np.exp(-x)) * x, rtol=1e-5)
print(fusedmoe.info()["torch_operator"])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("none: ")
