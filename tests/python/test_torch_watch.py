"""fusedmoe.torch: weights that change are never used silently. Runs twice, as test_torch.py."""

from __future__ import annotations

import copy
import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from support import Layer, assert_close, quantised
from torch_plans import plan_of

import fusedmoe
import fusedmoe.torch
from fusedmoe import ExpertWeights, WeightScales, WeightTensor
from fusedmoe.torch import translate

ops = torch.ops.fusedmoe


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


QUANTISED = [("fp8_e4m3", dict(parts="halves")), ("nvfp4", dict(parts="halves")), ("mxfp4", {}),
             ("int4", dict(group_size=32, zero_points=True, scale_type="bf16")), ("int8", {})]


def watched(weights: ExpertWeights) -> list[torch.Tensor]:
    """In the order of the operators."""
    pairs = [weights.w13.scales, weights.w2.scales]
    return [weights.w13.data, weights.w2.data,
            *[part for scales in pairs for part in (scales.data, scales.zero_points,
                                                    scales.global_scales) if part is not None]]


def changed(tensor: torch.Tensor) -> None:
    """Another value for each element, in place, counted by PyTorch."""
    if tensor.itemsize == 1:  # codes: bits that stay sound numbers
        signed = tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
        tensor.view(torch.uint8).bitwise_xor_(0x80 if signed else 1)
    else:
        tensor.mul_(0.5)


def check_values(plan, layer: Layer, weights: ExpertWeights) -> torch.Tensor:
    layer.w13, layer.w2 = fusedmoe.dequantize(weights.w13), fusedmoe.dequantize(weights.w2)
    tokens = layer.tokens(5)
    output = torch.empty_like(tokens[0])
    plan.apply(output, *tokens)
    assert_close(output, layer.expected(*tokens), layer.dtype, quantised=True)
    return output


@pytest.mark.parametrize("format, options", QUANTISED)
@pytest.mark.parametrize("on_stale", ["raise", "refresh"])
@pytest.mark.parametrize("storage", ["own", "borrowed"])
def test_scales_are_watched_as_weights_are(format, options, on_stale, storage):
    layer = Layer()
    weights = quantised(layer, format, **options)
    plan = plan_of(layer, weights=weights, on_stale=on_stale, weight_storage=storage)
    check_values(plan, layer, weights)
    tokens = layer.tokens(5)
    output = torch.empty_like(tokens[0])
    tensors = watched(weights)
    for tensor in tensors:
        changed(tensor)
        if storage == "own" and on_stale == "raise":
            with pytest.raises(fusedmoe.errors.StaleWeights, match="refresh"):
                plan.apply(output, *tokens)
            plan.refresh()
        check_values(plan, layer, weights)
    assert plan.weights_version == (1 if storage == "borrowed" else 1 + len(tensors))
    for tensor in tensors:
        tensor.data = tensor.data.clone()  # elsewhere, the same values
        if on_stale == "raise":
            with pytest.raises(fusedmoe.errors.StaleWeights, match="refresh"):
                plan.apply(output, *tokens)
            plan.refresh()
        check_values(plan, layer, weights)


def test_scales_of_gate_and_up_in_two_tensors_are_watched():
    layer = Layer()
    whole = quantised(layer, "int4", group_size=32, zero_points=True)
    gate, up = (dataclasses.replace(whole.w13, data=whole.w13.data[:, rows].clone(), shape=(
        7, 77, 131), scales=dataclasses.replace(
            whole.w13.scales, data=whole.w13.scales.data[:, rows].clone(),
            zero_points=whole.w13.scales.zero_points[:, rows].clone()))
        for rows in (slice(77), slice(77, None)))
    plan = plan_of(layer, weights=ExpertWeights(w13=gate, w13_up=up, w2=whole.w2),
                   on_stale="refresh")
    joined = dataclasses.replace(whole)
    for part in (gate.scales, up.scales):
        for tensor in (part.data, part.zero_points):
            changed(tensor)
            scales = dataclasses.replace(
                whole.w13.scales, data=torch.cat((gate.scales.data, up.scales.data), 1),
                zero_points=torch.cat((gate.scales.zero_points, up.scales.zero_points), 1))
            joined = ExpertWeights(w13=dataclasses.replace(whole.w13, scales=scales), w2=whole.w2)
            check_values(plan, layer, joined)
    assert plan.weights_version == 5


@pytest.mark.parametrize("format, options", QUANTISED)
def test_quantised_tensors_of_a_call(format, options):
    layer, other = Layer(), Layer(seed=1)
    first, second = quantised(layer, format, **options), quantised(other, format, **options)
    plan = plan_of(layer, weights=first, on_stale="refresh")
    hidden, router, ids = layer.tokens(9)
    output = torch.empty_like(hidden)
    for one, given in ((other, second), (layer, first), (layer, first)):
        ops.apply_weights(output, hidden, router, ids, None, watched(given), plan.handle)
        assert_close(output, one.expected(hidden, router, ids), torch.bfloat16, quantised=True)
    assert plan.weights_version == 3
    with pytest.raises(RuntimeError, match="then scales, zero points and global scales"):
        ops.apply_weights(output, hidden, router, ids, None, watched(first)[:2], plan.handle)
    short = watched(first)
    short[2] = short[2][:, :1]  # scales of another shape
    with pytest.raises(RuntimeError, match="build another plan"):
        ops.apply_weights(output, hidden, router, ids, None, short, plan.handle)


def test_opcheck_of_quantised_tensors():
    layer = Layer()
    weights = quantised(layer, "int4", group_size=32, zero_points=True)
    plan = plan_of(layer, weights=weights, on_stale="refresh")  # opcheck passes copies
    hidden, router, ids = layer.tokens(5)
    arguments = (torch.empty_like(hidden), hidden, router, ids, plan.workspace(5), watched(weights),
                 plan.handle)
    results = torch.library.opcheck(ops.apply_weights, arguments)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.parametrize("format, options", QUANTISED)
def test_copies_and_refreshes_of_quantised_plans(format, options):
    layer, other = Layer(), Layer(seed=1)
    first, second = quantised(layer, format, **options), quantised(other, format, **options)
    plan = plan_of(layer, weights=first)
    twin = copy.deepcopy(plan)
    before = layer.w13, layer.w2
    for tensor in watched(first)[2:]:
        changed(tensor)
    tokens = layer.tokens(5)
    output = torch.empty_like(tokens[0])
    twin.apply(output, *tokens)  # of tensors of its own
    layer.w13, layer.w2 = before
    assert_close(output, layer.expected(*tokens), torch.bfloat16, quantised=True)
    plan.refresh(second)
    check_values(plan, layer, second)
    changed(watched(first)[0])  # nobody watches it any more
    check_values(plan, layer, second)
    plan.release_weights()
    with pytest.raises(fusedmoe.errors.StaleWeights, match="released"):
        plan.apply(output, *tokens)
    plan.refresh(first)
    check_values(plan, layer, first)
    scales = dataclasses.replace(first.w2.scales, data=first.w2.scales.data.float().numpy())
    with pytest.raises(fusedmoe.errors.InvalidArgument,
                       match="weights.w2.scales.data: expected a torch tensor, got ndarray"):
        plan.refresh(ExpertWeights(w13=first.w13, w2=dataclasses.replace(first.w2, scales=scales)))


def test_a_refresh_in_another_format_is_refused():
    layer = Layer()
    weights = quantised(layer, "int8")
    plan = plan_of(layer, weights=weights)
    for bad in (Layer().weights, quantised(Layer(), "int8", group_size=32),
                quantised(Layer(), "fp8_e4m3")):
        with pytest.raises(fusedmoe.errors.InvalidArgument, match="build another plan"):
            plan.refresh(bad)
        check_values(plan, layer, weights)


@pytest.mark.parametrize("format, options", QUANTISED)
def test_quantised_plans_compile(format, options):  # case B170
    layer = Layer()
    weights = quantised(layer, format, **options)
    plan = plan_of(layer, weights=weights)

    def step(hidden, router, ids):
        output = torch.empty_like(hidden)
        plan.apply(output, hidden, router, ids)
        return output + hidden

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    with torch.no_grad():
        for count in (7, 1, 64):
            tokens = layer.tokens(count)
            assert torch.equal(compiled(*tokens), step(*tokens))
        changed(weights.w13.scales.data)
        with pytest.raises(RuntimeError, match="weights: expected the tensors .* unchanged"):
            compiled(*tokens)
        plan.refresh()
        assert torch.equal(compiled(*tokens), step(*tokens))
    hidden, router, ids = (tensor.to("meta") for tensor in layer.tokens(3))
    output = torch.empty_like(hidden)
    ops.apply_weights(output, hidden, router, ids, None, [t.to("meta") for t in watched(weights)],
                      plan.handle)


def test_a_refused_scale_changes_nothing():
    layer = Layer()
    weights = quantised(layer, "int4", group_size=32)
    plan = plan_of(layer, weights=weights)
    scales = WeightScales(data=torch.ones(7, 154, 4), layout="group", group_size=32)
    bad = dataclasses.replace(weights.w13, scales=scales)
    with pytest.raises(fusedmoe.errors.InvalidArgument, match=r"weights.w13.scales.data: expected "
                                                              r"float32 \[7, 154, 5\]"):
        plan.refresh(ExpertWeights(w13=bad, w2=weights.w2))
    check_values(plan, layer, weights)


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
