"""fusedmoe.torch: the operators in eager code and torch.compile, lifetimes, threads. Runs twice: with
the operators of this installation, and with those in Python (see test_fallback.py). The watch over
weights is in test_torch_watch.py."""

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
from torch_plans import bits, plan_of

import fusedmoe
import fusedmoe.torch
from fusedmoe import ExpertWeights, WeightTensor
from fusedmoe.torch import OPERATOR, translate

ops = torch.ops.fusedmoe
IN_CPP = OPERATOR.startswith("C++")


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
            ((got, hidden, router, ids, fusedmoe.WorkspaceBuffer(64)), invalid,
             "workspace: expected a torch tensor, got WorkspaceBuffer"),
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
