"""fusedmoe.torch: the operators in eager code and torch.compile, and the watch over weights. Runs
twice: with the operators of this installation, and with those in Python (see test_fallback.py)."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from support import Layer, assert_close, dirty

import fusedmoe
import fusedmoe.torch
from fusedmoe import ExpertWeights, PlanOptions, WeightTensor
from fusedmoe.torch import OPERATOR, FusedMoe, translate

ops = torch.ops.fusedmoe
IN_CPP = OPERATOR.startswith("C++")


def plan_of(layer: Layer, watch: bool = True, weights=None, **options) -> FusedMoe:
    return FusedMoe.create(layer.config, weights or layer.weights, PlanOptions(**options),
                           watch=watch)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


# --- Calls ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_values(dtype, ids_dtype):
    layer = Layer(dtype=dtype)
    plan = plan_of(layer)
    workspace = dirty(plan.workspace_size(40).bytes, dtype=torch.uint8)
    for count, weights in ((1, torch.float32), (7, torch.bfloat16), (40, torch.float16)):
        hidden, router, ids = layer.tokens(count, ids_dtype, weights)
        expected = layer.expected(hidden, router, ids)
        got = dirty(count, layer.hidden_size, dtype=dtype)
        plan.apply(got, hidden, router, ids, workspace)
        assert_close(got, expected, dtype)
        for scratch in (None, plan.workspace(count), dirty(plan.min_workspace_size().bytes,
                                                           dtype=torch.uint8)):
            again = dirty(count, layer.hidden_size, dtype=dtype)
            plan.apply(again, hidden, router, ids, scratch)
            assert torch.equal(bits(again), bits(got))
        in_place = hidden.clone()
        plan.apply(in_place, in_place, router, ids)
        assert torch.equal(bits(in_place), bits(got))
    empty = torch.empty(0, layer.hidden_size, dtype=dtype)
    plan.apply(empty, empty, torch.empty(0, 3), torch.empty(0, 3, dtype=ids_dtype))


def test_two_spans_and_maps():
    layer = Layer()
    hidden, router, ids = layer.tokens(21)
    plan = plan_of(layer)
    want = torch.empty_like(hidden)
    plan.apply(want, hidden, router, ids)
    first, second = plan.workspace_sizes_13_2(21)
    span13, span2 = dirty(first.bytes // 2, dtype=torch.bfloat16), dirty(second.bytes,
                                                                         dtype=torch.uint8)
    got = dirty(21, layer.hidden_size, dtype=torch.bfloat16)
    plan.apply(got, hidden, router, ids, span2, workspace13=span13)
    assert torch.equal(bits(got), bits(want))
    for span in (span13, span2):  # both are used
        assert (bits(span) != 0xFF).any()
    turned = torch.tensor([6, 5, 4, 3, 2, 1, 0], dtype=torch.int32)
    plan.apply(got, hidden, router, ids, expert_map=turned)
    plan.apply(want, hidden, router, torch.where(ids < 0, ids, 6 - ids))
    # The same experts, added in another order of local ids.
    assert_close(got, want, torch.bfloat16)
    for bad in (turned.long(), turned[:3], turned.view(torch.float32), turned[None]):
        with pytest.raises(fusedmoe.errors.InvalidArgument, match="expert_map: expected"):
            plan.apply(got, hidden, router, ids, expert_map=bad)


def test_errors_carry_the_whole_message_and_write_nothing():
    layer = Layer()
    plan = plan_of(layer)
    hidden, router, ids = layer.tokens(5)
    got = dirty(5, layer.hidden_size, dtype=torch.bfloat16)
    before = got.view(torch.int16).clone()
    small = torch.empty(plan.min_workspace_size().bytes - 1, dtype=torch.uint8)
    shared = torch.empty(plan.workspace_size(5).bytes + 64, dtype=torch.uint8)
    inside = shared[:5 * layer.hidden_size * 2].view(torch.bfloat16).view(5, -1)
    far = ids.clone()
    far[4, 2] = 7
    invalid = fusedmoe.errors.InvalidArgument
    for arguments, kind, text in (
            ((got, hidden.float(), router, ids), invalid, "hidden: expected bfloat16 .* cast it"),
            ((got, hidden, router, ids.short()), invalid, "topk_ids: expected int32 or int64"),
            ((got, hidden, router, far), invalid, r"topk_ids: .* got 7 at \[4, 2\]"),
            ((got, hidden[0], router, ids), invalid, "hidden: expected 2 dimensions"),
            ((got, hidden.t().contiguous().t(), router, ids), invalid, "contiguous last dimension"),
            ((got, hidden, router, ids, small), fusedmoe.errors.WorkspaceTooSmall, "got"),
            ((got, hidden, router, ids, shared[1:]), invalid, "multiple of 64"),
            ((got, hidden, router, ids, shared[::2]), invalid, "contiguous"),
            ((inside, hidden, router, ids, shared[:-64]), invalid, "apart from")):
        with pytest.raises(kind, match=text):
            plan.apply(*arguments)
        assert torch.equal(got.view(torch.int16), before)
    # The operator itself: PyTorch's own exception, from which the library's is made again.
    with pytest.raises(RuntimeError, match="topk_ids: expected int32 or int64") as caught:
        ops.apply(got, hidden, router, ids.short(), None, plan.handle)
    assert isinstance(translate(caught.value), invalid)
    with pytest.raises(RuntimeError, match="plan: expected the handle of a living plan, got 0"):
        ops.apply(got, hidden, router, ids, None, 0)
    plan.apply(got, hidden, router, ids)
    assert_close(got, layer.expected(hidden, router, ids), torch.bfloat16)


def test_opcheck():
    layer = Layer()
    plan = plan_of(layer)
    hidden, router, ids = layer.tokens(5)
    output, workspace = torch.empty_like(hidden), plan.workspace(5)
    span13, span2 = (torch.empty(size.bytes, dtype=torch.uint8)
                     for size in plan.workspace_sizes_13_2(5))
    expert_map = torch.arange(7, dtype=torch.int32)
    tensors = [layer.w13, layer.w2]
    changing = plan_of(layer, on_stale="refresh")  # opcheck passes copies of the tensors
    for op, arguments in (
            (ops.apply, (output, hidden, router, ids, workspace, plan.handle)),
            (ops.apply, (output, hidden, router, ids, None, plan.handle)),
            (ops.apply_weights, (output, hidden, router, ids, workspace, tensors, changing.handle)),
            (ops.apply_lent, (output, hidden, router, ids, span13, span2, expert_map, plan.handle)),
            (ops.apply_lent, (output, hidden, router, ids, None, None, None, plan.handle))):
        results = torch.library.opcheck(op, arguments)
        assert set(results.values()) == {"SUCCESS"}, results


def test_schemas_mutate_output_and_workspaces_only():  # case B168
    written = {"apply": {"output", "workspace"}, "apply_weights": {"output", "workspace"},
               "apply_lent": {"output", "workspace13", "workspace2"}}
    for name, arguments in written.items():
        schema = getattr(ops, name).default._schema
        assert {a.name for a in schema.arguments
                if a.alias_info and a.alias_info.is_write} == arguments
        assert not schema.returns


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_gives_the_bits_of_eager(backend):  # cases B168, B170
    layer = Layer()
    plan = plan_of(layer)
    formula = plan.workspace_formula

    def layer_of_a_model(hidden, router, ids):
        output = torch.empty_like(hidden)
        workspace = torch.empty(formula.fixed + formula.per_token * hidden.shape[0],
                                dtype=torch.uint8)
        plan.apply(output, hidden, router, ids, workspace)
        return output + hidden

    torch._dynamo.reset()
    compiled = torch.compile(layer_of_a_model, backend=backend, fullgraph=True, dynamic=True)
    for count in (7, 1, 64, 33):
        hidden, router, ids = layer.tokens(count)
        with torch.no_grad():
            want = layer_of_a_model(hidden, router, ids)
            got = compiled(hidden, router, ids)
        assert torch.equal(bits(got), bits(want)), count
    layer.w2.mul_(2)
    with pytest.raises(RuntimeError, match="weights: expected the tensors .* unchanged"):
        compiled(hidden, router, ids)
    plan.refresh()
    assert torch.equal(bits(compiled(hidden, router, ids)),
                       bits(layer_of_a_model(hidden, router, ids)))


def test_exported_programs_name_the_operator():
    layer = Layer()
    plan = plan_of(layer)

    class Module(torch.nn.Module):
        def forward(self, hidden, router, ids):
            output = torch.empty_like(hidden)
            ops.apply(output, hidden, router, ids, None, plan.handle)
            return output

    hidden, router, ids = layer.tokens(5)
    program = torch.export.export(Module(), (hidden, router, ids))
    assert "fusedmoe.apply" in str(program.graph)
    assert torch.equal(bits(program.module()(hidden, router, ids)),
                       bits(Module()(hidden, router, ids)))


# --- The watch ---


def changed_in_place(layer, plan):
    layer.w2.mul_(2)


def rebound_data(layer, plan):
    layer.w2.data = layer.w2.data * 2


def moved_and_back(layer, plan):
    layer.w2.data = layer.w2.data.clone()
    layer.w2.mul_(2)


def reloaded(layer, plan):
    module = torch.nn.Module()
    module.w2 = layer.w2
    module.load_state_dict({"w2": layer.w2 * 2})


@pytest.mark.parametrize("change", [changed_in_place, rebound_data, moved_and_back, reloaded])
@pytest.mark.parametrize("storage", ["own", "borrowed"])
@pytest.mark.parametrize("on_stale", ["raise", "refresh"])
def test_changed_weights_are_never_used_silently(change, storage, on_stale):
    layer = Layer()
    layer.w2 = torch.nn.Parameter(layer.w2, requires_grad=False)
    plan = plan_of(layer, weight_storage=storage, on_stale=on_stale)
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
    address = layer.w2.data_ptr()
    change(layer, plan)
    raises = on_stale == "raise" and (storage == "own" or layer.w2.data_ptr() != address)
    if raises:
        before = output.clone()
        with pytest.raises(fusedmoe.errors.StaleWeights, match="refresh"):
            plan.apply(output, hidden, router, ids)
        assert torch.equal(output, before)
        plan.refresh()
    plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
    refreshed = storage == "own" or layer.w2.data_ptr() != address
    assert plan.weights_version == (2 if refreshed else 1)
    version = plan.weights_version
    plan.apply(output, hidden, router, ids)
    assert plan.weights_version == version  # once


def test_what_pytorch_does_not_count_needs_refresh():
    layer = Layer()
    plan = plan_of(layer)
    borrowed = plan_of(layer, weight_storage="borrowed")
    hidden, router, ids = layer.tokens(9)
    old, output = torch.empty_like(hidden), torch.empty_like(hidden)
    plan.apply(old, hidden, router, ids)
    layer.w2.data.copy_(layer.w2.data * 2)
    plan.apply(output, hidden, router, ids)
    assert torch.equal(output, old)  # not seen: documented, with this as its remedy
    plan.refresh()
    for fresh in (plan, borrowed):
        fresh.apply(output, hidden, router, ids)
        assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


@pytest.mark.parametrize("on_stale", ["raise", "refresh"])
def test_memory_given_away_and_back_is_no_old_memory(on_stale):
    """After `p.data = x` twice with no call between, the second x may lie where the packed data
    lay, with the same version: what was read is kept, so that nothing new can lie there."""
    layer = Layer(hidden_size=64, intermediate_size=64)
    layer.w2 = torch.nn.Parameter(layer.w2, requires_grad=False)
    plan = plan_of(layer, on_stale=on_stale)
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    for turn in range(40):
        first = layer.w2.data_ptr()
        layer.w2.data = torch.zeros(0, dtype=torch.bfloat16)  # slept
        layer.w2.data = Layer(hidden_size=64, intermediate_size=64, seed=turn).w2  # woken
        assert layer.w2.data_ptr() != first
        if on_stale == "raise":
            with pytest.raises(fusedmoe.errors.StaleWeights):
                plan.apply(output, hidden, router, ids)
            plan.refresh()
        plan.apply(output, hidden, router, ids)
        assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


def test_refresh_reads_what_is_watched_now():
    layer, other = Layer(), Layer(seed=1)
    plan = plan_of(layer, on_stale="refresh")
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    ops.apply_weights(output, hidden, router, ids, None, [other.w13, other.w2], plan.handle)
    plan.refresh()
    plan.apply(output, hidden, router, ids)
    assert_close(output, other.expected(hidden, router, ids), torch.bfloat16)


def test_a_change_while_a_plan_is_built_is_seen(monkeypatch):
    layer = Layer()

    class Meanwhile:
        @staticmethod
        def _create_unheld(*arguments):
            plan = fusedmoe.FusedMoe._create_unheld(*arguments)
            layer.w2.mul_(2)  # another thread, behind what has been read
            return plan

    class Core:
        FusedMoe = Meanwhile
        _NativeWeights = fusedmoe._core._NativeWeights

    monkeypatch.setattr(fusedmoe.torch, "_core", Core)
    plan = plan_of(layer)
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


def test_the_owners_version_counts_beside_the_watch():
    layer = Layer()
    version = fusedmoe.WeightsVersion()
    weights = ExpertWeights(w13=layer.w13, w2=layer.w2, version=version)
    plans = [plan_of(layer, weights=weights), plan_of(layer, weights=weights, on_stale="refresh"),
             plan_of(layer, weights=weights, weight_storage="borrowed", on_stale="refresh")]
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    layer.w2.data.copy_(layer.w2.data * 2)  # not counted by PyTorch
    version.bump()
    with pytest.raises(fusedmoe.errors.StaleWeights, match="version"):
        plans[0].apply(output, hidden, router, ids)
    plans[0].refresh()
    for plan in plans:
        plan.apply(output, hidden, router, ids)
        assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
    # The counter lives as long as a plan that asks it, also when the refresh that brought it fails.
    ref = weakref.ref(layer.w13)
    plans[0].refresh(ExpertWeights(w13=layer.w13, w2=layer.w2, version=fusedmoe.WeightsVersion()))
    plans[0].release_weights()
    with pytest.raises(fusedmoe.errors.StaleWeights, match="released"):
        plans[0].apply(output, hidden, router, ids)
    del version, weights
    gc.collect()
    assert ref() is not None
    plans[0].refresh(layer.weights)
    plans[0].apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


def test_a_new_tensor_at_the_old_address_is_seen():
    """Parametrised weights are a new temporary at each access, with version 0, often at the address
    of the last: the plan holds what it has read, so that none can take it."""
    layer = Layer()
    plan = plan_of(layer, on_stale="refresh",
                   weights=ExpertWeights(w13=layer.w13, w2=layer.w2 * 1))
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    base = layer.w2
    for scale in (1.0, -1.0, 2.0, 0.5, 1.0):
        layer.w2 = base * scale
        ops.apply_weights(output, hidden, router, ids, None, [layer.w13, base * scale], plan.handle)
        assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


def test_other_shapes_or_dtypes_need_another_plan():
    layer = Layer()
    plan = plan_of(layer, on_stale="refresh")
    hidden, router, ids = layer.tokens(5)
    output = torch.empty_like(hidden)
    for w2 in (layer.w2.half(), layer.w2[:, :, :-1], layer.w2.transpose(1, 2)):
        with pytest.raises(RuntimeError, match="build another plan") as caught:
            ops.apply_weights(output, hidden, router, ids, None, [layer.w13, w2], plan.handle)
        assert isinstance(translate(caught.value), fusedmoe.errors.StaleWeights)
    with pytest.raises(RuntimeError, match="expected the 2 tensors .* got 1"):
        ops.apply_weights(output, hidden, router, ids, None, [layer.w13], plan.handle)
    plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


def test_inference_tensors_have_no_version():
    with torch.inference_mode():
        layer = Layer()
        layer.w2 = layer.w2 * 1
        assert layer.w2.is_inference()
        plan = plan_of(layer)
        hidden, router, ids = layer.tokens(5)
        output = torch.empty_like(hidden)
        plan.apply(output, hidden, router, ids)
        assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
        layer.w2.mul_(2)
        plan.refresh()
        plan.apply(output, hidden, router, ids)
        assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)


@pytest.mark.parametrize("on_stale", ["raise", "refresh"])
def test_every_tensor_is_watched(on_stale):
    layer = Layer()
    tensors = dict(w13=layer.w13[:, :77].clone(), w13_up=layer.w13[:, 77:].clone(), w2=layer.w2,
                   w13_bias=layer.b13, w2_bias=layer.b2)
    plan = plan_of(layer, weights=ExpertWeights(**tensors), on_stale=on_stale)
    hidden, router, ids = layer.tokens(5)
    output = torch.empty_like(hidden)

    def check() -> None:
        plan.apply(output, hidden, router, ids)
        layer.w13 = torch.cat((tensors["w13"], tensors["w13_up"]), 1)
        assert_close(output, layer.expected(hidden, router, ids, b13=layer.b13, b2=layer.b2),
                     torch.bfloat16)

    check()
    for tensor in tensors.values():
        tensor.data = tensor.data + 0.25
        if on_stale == "raise":
            with pytest.raises(fusedmoe.errors.StaleWeights):
                plan.apply(output, hidden, router, ids)
            plan.refresh()
        check()
    assert plan.weights_version == 6


def test_refresh_with_other_tensors():
    layer, other = Layer(), Layer(seed=1)
    plan = plan_of(layer)
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    plan.refresh(other.weights)
    layer.w2.mul_(3)  # nobody watches it any more
    plan.apply(output, hidden, router, ids)
    assert_close(output, other.expected(hidden, router, ids), torch.bfloat16)
    ref = weakref.ref(layer.w2)
    del layer
    gc.collect()
    assert ref() is None
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="weights.w2"):
        plan.refresh(ExpertWeights(w13=other.w13, w2=other.w2[:, :, :-1].contiguous()))
    plan.apply(output, hidden, router, ids)  # a refused argument changes nothing
    assert_close(output, other.expected(hidden, router, ids), torch.bfloat16)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="expected a torch tensor"):
        plan.refresh(ExpertWeights(w13=other.w13.float().numpy(), w2=other.w2))


@pytest.mark.parametrize("on_stale", ["raise", "refresh"])
def test_refresh_from_a_source_lets_go_of_the_tensors(on_stale):
    layer, other = Layer(), Layer(seed=1)
    plan = plan_of(layer, on_stale=on_stale)
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)

    def stated(tensor: torch.Tensor) -> WeightTensor:
        return WeightTensor(format="bf16", shape=tuple(tensor.shape))

    def of(source) -> ExpertWeights:
        return ExpertWeights(w13=stated(layer.w13), w2=stated(layer.w2), source=source)

    def broken(expert: int) -> ExpertWeights:
        raise KeyError(expert)

    with pytest.raises(fusedmoe.errors.InvalidArgument):  # refused: nothing changes
        plan.refresh(ExpertWeights(w13=stated(layer.w13[:, :-1]), w2=stated(layer.w2),
                                   source=broken))
    plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
    with pytest.raises(KeyError):
        plan.refresh(of(broken))
    with pytest.raises(fusedmoe.errors.StaleWeights, match="refresh"):
        plan.apply(output, hidden, router, ids)
    plan.refresh(of(lambda e: ExpertWeights(w13=other.w13[e:e + 1], w2=other.w2[e:e + 1])))
    for _ in range(2):
        layer.w13.add_(0)  # nobody watches it any more
        plan.apply(output, hidden, router, ids)
        assert_close(output, other.expected(hidden, router, ids), torch.bfloat16)
        other.w2.mul_(2)
        plan.refresh()  # the source again
    plan.apply(output, hidden, router, ids)
    assert_close(output, other.expected(hidden, router, ids), torch.bfloat16)


def test_release_and_calls_at_once():
    """A call either runs on the weights or raises; none wakes a plan that was released."""
    layer = Layer()
    plan = plan_of(layer, on_stale="refresh")
    hidden, router, ids = layer.tokens(5)
    stop = threading.Event()

    def work() -> None:
        output = torch.empty_like(hidden)
        while not stop.is_set():
            try:
                plan.apply(output, hidden, router, ids)
            except fusedmoe.errors.StaleWeights:
                pass

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    output = torch.empty_like(hidden)
    try:
        for _ in range(300):
            layer.w2.add_(0)  # calls want to read it again
            plan.release_weights()
            with pytest.raises(fusedmoe.errors.StaleWeights, match="released"):
                plan.apply(output, hidden, router, ids)
            plan.refresh(layer.weights)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_sleep_frees_packed_weights_and_tensors():
    layer = Layer()
    expected_layer = Layer()
    plan = plan_of(layer)
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    ref = weakref.ref(layer.w13)
    del layer
    plan.release_weights()
    gc.collect()
    assert ref() is None
    with pytest.raises(fusedmoe.errors.StaleWeights, match="released"):
        plan.apply(output, hidden, router, ids)
    plan.refresh(expected_layer.weights)
    plan.apply(output, hidden, router, ids)
    assert_close(output, expected_layer.expected(hidden, router, ids), torch.bfloat16)


def test_without_a_watch_tensors_are_free_after_packing():
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    expected = layer.expected(hidden, router, ids)
    plan = plan_of(layer, watch=False)
    ref = weakref.ref(layer.w13)
    del layer
    gc.collect()
    assert ref() is None
    output = torch.empty_like(hidden)
    plan.apply(output, hidden, router, ids)
    assert_close(output, expected, torch.bfloat16)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="watches none"):
        plan.refresh()
    borrowed = plan_of(other := Layer(), watch=False, weight_storage="borrowed")
    del other
    gc.collect()
    borrowed.apply(output, hidden, router, ids)  # what is borrowed is held whatever was asked
    assert_close(output, expected, torch.bfloat16)


def test_packed_into_a_tensor_that_the_engine_owns():
    layer = Layer()
    size = fusedmoe.FusedMoe.packed_weights_size(layer.config, layer.weights)
    parameter = torch.nn.Parameter(torch.empty(size.bytes, dtype=torch.uint8), requires_grad=False)
    plan = plan_of(layer, weight_storage="caller", storage=parameter, watch=False)
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
    saved = parameter.data.clone()
    parameter.data.zero_()  # slept
    parameter.data.copy_(saved)  # woken
    again = torch.empty_like(hidden)
    plan.apply(again, hidden, router, ids)
    assert torch.equal(again, output)


# --- Lifetimes ---


def test_a_plan_dies_with_its_last_reference():
    layer = Layer()
    plan = plan_of(layer)
    handle, inner = plan.handle, weakref.ref(layer.w13)
    hidden, router, ids = layer.tokens(5)
    output = torch.empty_like(hidden)
    ops.apply(output, hidden, router, ids, None, handle)
    del plan, layer
    gc.collect()
    assert inner() is None
    with pytest.raises(RuntimeError, match=f"living plan, got {handle}"):
        ops.apply(output, hidden, router, ids, None, handle)


def test_the_copy_of_a_model_has_its_own_plan():
    layer = Layer()
    model = torch.nn.Module()
    model.w13 = torch.nn.Parameter(layer.w13, requires_grad=False)
    model.w2 = torch.nn.Parameter(layer.w2, requires_grad=False)
    model.plan = plan_of(layer, on_stale="refresh",
                         weights=ExpertWeights(w13=model.w13,
                                               w2=WeightTensor(data=model.w2, layout="nk")))
    twin = copy.deepcopy(model)
    assert twin.plan.handle != model.plan.handle
    twin.w2.mul_(2)
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    model.plan.apply(output, hidden, router, ids)
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
    twin.plan.apply(output, hidden, router, ids)
    layer.w2 = twin.w2
    assert_close(output, layer.expected(hidden, router, ids), torch.bfloat16)
    released = plan_of(layer)
    released.release_weights()
    with pytest.raises(fusedmoe.errors.InvalidArgument, match="release_weights"):
        copy.deepcopy(released)
    versioned = plan_of(layer, weights=ExpertWeights(w13=layer.w13, w2=layer.w2,
                                                     version=fusedmoe.WeightsVersion()))
    assert copy.deepcopy(versioned).handle != versioned.handle
    unwatched = plan_of(layer, watch=False)
    assert copy.deepcopy(unwatched) is unwatched
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(model.plan)


# --- Threads ---


def test_threads_apply_while_weights_change():
    """Calls see the weights of before or of after, never a mixture, and after refresh() only those
    of after."""
    layer = Layer()
    plan = plan_of(layer)
    other = Layer(seed=1)
    hidden, router, ids = layer.tokens(33)
    results = []
    for weights in (layer.weights, other.weights):
        plan.refresh(weights)
        results.append(torch.empty_like(hidden))
        plan.apply(results[-1], hidden, router, ids)
    failures: list[str] = []
    stop = threading.Event()

    def work() -> None:
        workspace = plan.workspace(33)
        while not stop.is_set():
            got = dirty(33, layer.hidden_size, dtype=torch.bfloat16)
            plan.apply(got, hidden, router, ids, workspace)
            if not any(torch.equal(bits(got), bits(want)) for want in results):
                failures.append("a mixture")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(30):
        plan.refresh((layer, other)[turn % 2].weights)
        got = torch.empty_like(hidden)
        plan.apply(got, hidden, router, ids)
        if not torch.equal(bits(got), bits(results[turn % 2])):
            failures.append("stale after refresh()")
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_that_pass_different_weights_each_get_their_own():
    """As adapters that are switched between calls: a call never runs on what another has passed. A
    tiny layer and many calls, since what could go wrong takes a microsecond."""
    layer = Layer(hidden_size=8, intermediate_size=8, num_experts=3, top_k=2)
    plan = plan_of(layer, on_stale="refresh", max_threads=1)
    hidden, router, ids = layer.tokens(3)
    scaled = [[layer.w13, layer.w2 * scale] for scale in (1.0, -1.0, 2.0)]
    want = []
    for tensors in scaled:
        want.append(torch.empty_like(hidden))
        ops.apply_weights(want[-1], hidden, router, ids, None, tensors, plan.handle)
    failures: list[str] = []

    def work(index: int) -> None:
        got = dirty(3, layer.hidden_size, dtype=torch.bfloat16)
        for _ in range(3000):
            ops.apply_weights(got, hidden, router, ids, None, scaled[index], plan.handle)
            if not torch.equal(bits(got), bits(want[index])):
                failures.append(f"weights {index}")

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_many_threads_build_and_drop_plans():
    layer = Layer()
    hidden, router, ids = layer.tokens(9)
    want = torch.empty_like(hidden)
    plan_of(layer).apply(want, hidden, router, ids)
    failures: list[str] = []
    handles: set[int] = set()

    def work() -> None:
        for _ in range(20):
            plan = plan_of(layer)
            handles.add(plan.handle)
            got = dirty(9, layer.hidden_size, dtype=torch.bfloat16)
            plan.apply(got, hidden, router, ids)
            if not torch.equal(bits(got), bits(want)):
                failures.append("other bits")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(handles) == 80


@pytest.mark.skipif(not IN_CPP, reason="the operators in Python use the library's own threads")
def test_it_runs_on_the_threads_of_pytorch():
    """No thread of the library's own is started, PyTorch's setting is obeyed at each call, and the
    bits are those of one thread."""
    code = """
import os, time, torch
torch.set_num_threads(3)
torch.randn(512, 512) @ torch.randn(512, 512)  # PyTorch's own are there now
import fusedmoe
from fusedmoe.torch import FusedMoe
count = lambda: len(os.listdir("/proc/self/task"))
w13, w2 = torch.randn(8, 512, 512).bfloat16(), torch.randn(8, 512, 256).bfloat16()
config = fusedmoe.MoeConfig(hidden_size=512, intermediate_size=256, num_experts=8, top_k=2)
before = count()
plan = FusedMoe.create(config, fusedmoe.ExpertWeights(w13=w13, w2=w2))
assert plan.plan.num_threads == 3, plan.plan.num_threads
h, w = torch.randn(64, 512).bfloat16(), torch.rand(64, 2)
i = torch.stack([torch.randperm(8)[:2] for _ in range(64)])
outs = []
for threads in (3, 1, 2, 7):
    torch.set_num_threads(threads)
    outs.append(torch.empty_like(h))
    plan.apply(outs[-1], h, w, i)
assert all(torch.equal(outs[0], o) for o in outs)
# With one thread nobody else works: CPU time of the process against that of this thread.
torch.set_num_threads(1)
time.sleep(.2)  # OpenMP's others spin for a while before they sleep
h, w, i = h.repeat(64, 1), w.repeat(64, 1), i.repeat(64, 1)
out = torch.empty_like(h)
mine, all_ = time.thread_time(), time.process_time()
for _ in range(5):
    plan.apply(out, h, w, i)
mine, all_ = time.thread_time() - mine, time.process_time() - all_
assert all_ < 1.3 * mine, (mine, all_)
assert count() <= before + 5, (before, count())  # at most what set_num_threads(7) asked for
print(plan.describe())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "options.max_threads, on options.runner" in result.stdout


@pytest.mark.parametrize("first", ["torch", "fusedmoe"])
def test_either_import_order(first):  # case B148
    """The library brings no OpenMP of its own: no hang, whichever comes first."""
    second = "fusedmoe" if first == "torch" else "torch"
    code = f"""
import {first}, {second}
import fusedmoe.torch, torch
w13, w2 = torch.randn(4, 64, 32), torch.randn(4, 32, 32)
config = fusedmoe.MoeConfig(hidden_size=32, intermediate_size=32, num_experts=4, top_k=2, dtype="f32")
weights = fusedmoe.ExpertWeights(w13=w13, w2=w2)
plans = [fusedmoe.FusedMoe.create(config, weights), fusedmoe.torch.FusedMoe.create(config, weights)]
h, w, i = torch.randn(40, 32), torch.rand(40, 2), torch.randint(0, 4, (40, 2))
for _ in range(100):
    outs = [torch.empty_like(h) for _ in plans]
    for plan, out in zip(plans, outs):
        plan.apply(out, h, w, i)
    (h @ h.t()).sum()
    assert torch.equal(*outs)
maps = open("/proc/self/maps").read()
print(sorted({{line.split("/")[-1].split(".so")[0] for line in maps.splitlines()
              if "libgomp" in line or "libiomp" in line or "libomp" in line}}))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            check=False, timeout=120)
    assert result.returncode == 0, result.stderr
    assert len(eval(result.stdout)) <= 1, result.stdout


def test_after_a_fork():
    """A child works, or says what to do; it never hangs."""
    code = """
import os, sys, signal, time, torch, fusedmoe, fusedmoe.torch
import threading
torch.set_num_threads(2)
w13, w2 = torch.randn(4, 1024, 512), torch.randn(4, 512, 512)
config = fusedmoe.MoeConfig(hidden_size=512, intermediate_size=512, num_experts=4, top_k=2, dtype="f32")
weights = fusedmoe.ExpertWeights(w13=w13, w2=w2)
plan = fusedmoe.torch.FusedMoe.create(config, weights)
h, w, i = torch.randn(40, 512), torch.rand(40, 2), torch.randint(0, 4, (40, 2))
want = torch.empty_like(h)
plan.apply(want, h, w, i)
busy = fusedmoe.torch.FusedMoe.create(config, weights)  # held by others in mid-call at the fork
def work():
    out = torch.empty_like(h)
    while True:
        torch.ops.fusedmoe.apply_weights(out, h, w, i, None, [w13, w2], busy.handle)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(.1)
child = os.fork()
if child == 0:
    signal.alarm(60)
    got = torch.empty_like(h)
    torch.ops.fusedmoe.apply_weights(got, h, w, i, None, [w13, w2], busy.handle)
    plan.apply(got, h, w, i)
    torch.set_num_threads(1)  # for PyTorch's own maths, which would wait for OpenMP's threads
    w2.mul_(2)
    try:
        plan.apply(got, h, w, i)
        os._exit(2)
    except fusedmoe.errors.StaleWeights:
        plan.refresh()
        plan.apply(got, h, w, i)
    os._exit(0 if ((got - 2 * want).abs().max() < 1e-3 * want.abs().max()) else 3)
_, status = os.waitpid(child, 0)
os._exit(abs(os.waitstatus_to_exitcode(status)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                            check=False, timeout=120)
    assert result.returncode == 0, result.stderr
