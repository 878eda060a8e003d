"""``experts_implementation="fusedmoe"`` for Hugging Face transformers, version 5 and later.

Importing this module registers the name; every model whose experts go through transformers' experts
interface can then use it: ``from_pretrained(..., experts_implementation="fusedmoe")``,
``from_config(...)`` and ``model.set_experts_implementation("fusedmoe")``. For inference.

Each experts module gets a plan when it is first called, or by :func:`prepare`. Plans are kept
beside the modules, never on them: copies, pickles and checkpoints of a model know nothing of them,
and a plan dies with its module.
"""

from __future__ import annotations

import operator
import threading
import weakref
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ._fork import ForkLock
from ._gate import REMEDY, activation_of
from .config import ExpertWeights, MoeConfig, PlanOptions, WeightScales, WeightTensor
from .errors import Error, InvalidArgument, Unsupported
from .torch import _REFRESH, _RELEASE, FusedMoe, translate

__all__ = ["NAME", "configure", "plans", "prepare", "refresh"]

NAME = "fusedmoe"
"""What ``experts_implementation`` is set to."""

# 4096 tokens of a bf16 layer of 64 experts, hidden 2048, intermediate 768, top_k 8 need 81 MiB in
# one piece; in 64 MiB they take 1.03 of its time, in 16 MiB 1.12 (borrowed; packed 1.00 and 1.03).
_WORKSPACE_BYTES = 64 << 20


class _Options(NamedTuple):
    weights: str = "borrowed"
    counters: bool = False
    max_workspace_bytes: int = _WORKSPACE_BYTES
    isa: str = ""
    max_threads: int = 0


class _Traits(NamedTuple):
    """What transformers' decorator says about a class of experts."""

    has_gate: bool
    has_bias: bool
    is_transposed: bool
    is_concatenated: bool
    is_expert_parallel: bool
    # Of FP8Experts: outputs and inputs under one scale, () for one per matrix; None = no scales.
    block_size: tuple[int, ...] | None


class _Layer:
    """A plan, and what a call needs of it. Holds tensors, never the module."""

    __slots__ = ("plan", "traits", "group", "handle", "fixed", "per_token", "most", "compiled")

    def __init__(self, plan: FusedMoe, traits: _Traits, group: Any, max_bytes: int) -> None:
        self.plan, self.traits, self.group = plan, traits, group
        self.handle = plan.handle
        formula = plan.workspace_formula
        self.fixed, self.per_token = formula.fixed, formula.per_token
        self.most = max(max_bytes, plan.min_workspace_size().bytes)
        self.compiled = False  # whether a compiled function knows the handle


class _State:
    """The plans of one experts module."""

    __slots__ = ("lock", "options", "layers", "group")

    def __init__(self) -> None:
        self.lock = ForkLock()
        self.options: _Options | None = None  # None = the default, whatever it is by then
        self.layers: dict[Any, _Layer] = {}
        # Options and shapes of the weights that were used last; there are no plans of others, but
        # for those that compiled functions know.
        self.group: Any = None


_states: weakref.WeakKeyDictionary[torch.nn.Module, _State] = weakref.WeakKeyDictionary()
_states_lock = ForkLock()
_default = _Options()


def _state_of(module: torch.nn.Module) -> _State:
    state = _states.get(module)
    if state is None:
        with _states_lock:
            state = _states.setdefault(module, _State())
    return state


# --- Plans --------------------------------------------------------------------------------------


def _traits_of(module: Any) -> _Traits:
    block_size = None
    if hasattr(module, "down_proj_scale_inv"):
        block_size = tuple(module.block_size or ())
    return _Traits(module.has_gate, module.has_bias, module.is_transposed, module.is_concatenated,
                   module._is_expert_parallel, block_size)


def _tensors_of(module: Any) -> tuple[torch.Tensor, ...]:
    """w13, w2 and, where there are some, their biases and scales: the order in which plans watch
    them."""
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = [up, "down_proj"]
    if module.has_bias:
        names += [f"{up}_bias", "down_proj_bias"]
    if hasattr(module, "down_proj_scale_inv"):
        names += [f"{up}_scale_inv", "down_proj_scale_inv"]
    return tuple([getattr(module, name) for name in names])


def _scales(traits: _Traits, scales: torch.Tensor, gate_and_up: bool) -> WeightScales:
    """Those of FP8Experts, where gate and up were quantised apart."""
    parts: Literal["one", "halves"] = "halves" if gate_and_up else "one"
    if not traits.block_size:  # [E, 2, 1] and [E, 1, 1]
        return WeightScales(data=scales, layout="tensor", parts=parts)
    block_n, block_k = traits.block_size
    return WeightScales(data=scales, layout="block", block_n=block_n, block_k=block_k, parts=parts)


def _as_weights(traits: _Traits, tensors: Any) -> ExpertWeights:
    layout: Literal["nk", "kn"] = "kn" if traits.is_transposed else "nk"
    w13, w2, *others = tensors
    b13, b2 = others[:2] if traits.has_bias else (None, None)
    s13 = s2 = None
    if traits.block_size is not None:
        s13, s2 = _scales(traits, others[-2], traits.has_gate), _scales(traits, others[-1], False)
    return ExpertWeights(w13=WeightTensor(data=w13, layout=layout, scales=s13),
                         w2=WeightTensor(data=w2, layout=layout, scales=s2), w13_bias=b13,
                         w2_bias=b2)


def _build(module: torch.nn.Module, traits: _Traits, tensors: tuple[torch.Tensor, ...],
           options: _Options, dtype: torch.dtype, top_k: int) -> FusedMoe:
    activation, clamp_limit = activation_of(module)
    experts, *sizes = tensors[1].shape
    hidden_size, intermediate_size = sizes[::-1] if traits.is_transposed else sizes
    # Under expert parallelism ids are local, and one more says: an expert of another rank.
    skip = 1 if traits.is_expert_parallel else 0
    config = MoeConfig(hidden_size=hidden_size, intermediate_size=intermediate_size,
                       num_experts=experts + skip, top_k=top_k, activation=activation, dtype=dtype,
                       gate_up_layout="halves" if traits.is_concatenated else "interleaved",
                       clamp_limit=clamp_limit)
    plan_options = PlanOptions(device=str(tensors[0].device), isa=options.isa,
                               expert_map=[*range(experts), -1] if skip else None,
                               max_threads=options.max_threads, counters=options.counters,
                               weight_storage="borrowed" if options.weights == "borrowed" else
                               "own", on_stale="refresh")
    try:
        plan = FusedMoe.create(config, _as_weights(traits, tensors), plan_options)
    except Error as error:
        raise type(error)(f"{type(module).__name__}: {error}; or {REMEDY}") from None
    # The operator watches them from here on, and follows when others come; these would stay.
    plan._weights = None
    return plan


def _let_go(layer: _Layer) -> None:
    """The plan holds neither packed weights nor tensors until a call brings weights again."""
    _, shapes = layer.group
    stand_ins = []
    for dtype, _, shape, stride in shapes:
        # Of that shape, and without memory: no tensor of a call is equal to it.
        stand_ins.append(torch.empty_strided(shape, stride, dtype=dtype, device="cpu"))
        stand_ins[-1].untyped_storage().resize_(0)
    layer.plan._watch(_as_weights(layer.traits, stand_ins), _RELEASE)


def _switch(state: _State, group: Any) -> None:
    """From now on weights are of this group. Caller holds the state's lock."""
    if group is state.group:
        return
    for key, layer in list(state.layers.items()):
        if layer.group != group:
            _let_go(layer)
            if not layer.compiled:  # a handle in a graph has to stay good
                del state.layers[key]
    state.group = group


def _layer_of(module: torch.nn.Module, tensors: tuple[torch.Tensor, ...], dtype: torch.dtype,
              top_k: int) -> _Layer:
    """The layer for hidden of `dtype` and these weights; builds it where it is not there yet. Safe
    from any thread."""
    state = _state_of(module)
    options = state.options or _default
    group = (options, tuple([(x.dtype, x.device, x.shape, x.stride()) for x in tensors]))
    traits = _traits_of(module)
    key = (group, traits, dtype, top_k)
    layer = state.layers.get(key)
    if layer is not None and layer.group is state.group:
        return layer
    with state.lock:
        layer = state.layers.get(key)
        if layer is None:
            # One object for equal groups, so that the test above can ask for identity.
            group = next((x.group for x in state.layers.values() if x.group == group), group)
            _switch(state, group)  # first: an old packed copy goes before a new one comes
            plan = _build(module, traits, tensors, options, dtype, top_k)
            state.layers[key] = layer = _Layer(plan, traits, group, options.max_workspace_bytes)
        _switch(state, layer.group)
        return layer


# --- Calls --------------------------------------------------------------------------------------


class _Scratch(threading.local):
    """One workspace for each thread, for all layers of all models."""

    tensor: torch.Tensor | None = None


_scratch = _Scratch()


def _workspace(size: int) -> torch.Tensor:
    tensor = _scratch.tensor
    if tensor is None or tensor.numel() < size:
        _scratch.tensor = tensor = None  # the old one goes before the new one comes
        _scratch.tensor = tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
    return tensor


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _constants(module: torch.nn.Module, dtype: torch.dtype, top_k: int) -> tuple[int, ...]:
    """What a compiled function keeps of a layer. Runs while it is being traced, on the module
    itself; the compiler then also guards on which module it is."""
    with _state_of(module).lock:
        layer = _layer_of(module, _tensors_of(module), dtype, top_k)
        layer.compiled = True
    return layer.handle, layer.fixed, layer.per_token, layer.most


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _refuse_gradients(module: torch.nn.Module) -> NoReturn:
    raise Unsupported(
        f"{type(module).__name__}: expected a call without gradients, got hidden states, router "
        "weights or expert weights that require them; call under torch.no_grad() or "
        "torch.inference_mode(), or model.set_experts_implementation('grouped_mm') to train")


_apply_weights = torch.ops.fusedmoe.apply_weights.default


def _experts_forward(self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor,
                     top_k_weights: torch.Tensor) -> torch.Tensor:
    """What transformers calls instead of the experts' own forward.

    hidden_states [num_tokens, hidden_size]; top_k_index [num_tokens, top_k], int32 or int64;
    top_k_weights [num_tokens, top_k], f32, f16 or bf16. Returns [num_tokens, hidden_size], of the
    dtype of hidden_states. Raises Unsupported where gradients are wanted, where the gate is none of
    the library's activations, and where the library has no kernel for these weights or their
    device; under torch.compile what fails while running is a RuntimeError with the same message.
    """
    tensors = _tensors_of(self)
    if torch.is_grad_enabled() and (hidden_states.requires_grad or top_k_weights.requires_grad
                                    or any([x.requires_grad for x in tensors])):
        _refuse_gradients(self)
    hidden = hidden_states.contiguous()
    index, router = top_k_index.contiguous(), top_k_weights.contiguous()
    output = torch.empty_like(hidden)
    # index(), not int(): the compiler takes it for a request for the number, and guards on it.
    num_tokens, top_k = hidden.shape[0], operator.index(index.shape[1])
    if torch.compiler.is_compiling():
        handle, fixed, per_token, most = _constants(self, hidden.dtype, top_k)
        workspace = torch.empty(min(fixed + per_token * num_tokens, most), dtype=torch.uint8,
                                device=hidden.device)
        _apply_weights(output, hidden, router, index, workspace, list(tensors), handle)
        return output
    layer = _layer_of(self, tensors, hidden.dtype, top_k)
    workspace = _workspace(min(layer.fixed + layer.per_token * num_tokens, layer.most))
    try:
        _apply_weights(output, hidden, router, index, workspace, list(tensors), layer.handle)
    except RuntimeError as error:
        raise translate(error) from None
    return output


ALL_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)
try:  # FP8Experts look names up in a list of their own
    from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
except ImportError:  # a transformers without it
    pass
else:
    ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, _experts_forward)

# --- What users call ----------------------------------------------------------------------------


def _experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    found = [x for x in model.modules() if hasattr(x, "is_concatenated") and hasattr(x, "has_gate")]
    if not found:
        raise InvalidArgument(
            f"model: expected one with experts of transformers' experts interface, got "
            f"{type(model).__name__}, which has none; its family does not use the interface")
    return found


def configure(model: torch.nn.Module | None = None, *,
              weights: Literal["borrowed", "packed"] | None = None, counters: bool | None = None,
              max_workspace_bytes: int | None = None, isa: str | None = None,
              max_threads: int | None = None) -> None:
    """How plans run the layers of ``model``; of None: of all that have not been configured.

    weights              "borrowed" (at first) reads the model's own tensors at every call: no
                         second copy, never stale. "packed" keeps a copy in the order of the
                         kernels: up to three times as fast, see docs/transformers.md.
    counters             count calls and tokens: see :func:`plans`. At first False.
    max_workspace_bytes  of scratch, per thread; longer inputs go in chunks, with the same bits. At
                         least what one token needs is used. At first 64 MiB.
    isa                  the best instruction set to use, as ``fusedmoe.info()`` prints it; empty,
                         as at first, is the machine's best.
    max_threads          0, as at first, is PyTorch's number of threads when a plan is built.

    What is not named stays as it is. Takes effect at the next call, which builds plans anew;
    functions compiled before keep what they were compiled with until ``torch._dynamo.reset()``. A
    deep copy of a model has not been configured. Raises InvalidArgument.
    """
    global _default
    if weights not in (None, "borrowed", "packed"):
        raise InvalidArgument(f"weights: expected 'borrowed' or 'packed', got {weights!r}; choose "
                              "one")
    if max_workspace_bytes is not None and (not isinstance(max_workspace_bytes, int)
                                            or max_workspace_bytes < 0):
        raise InvalidArgument("max_workspace_bytes: expected a number of bytes, got "
                              f"{max_workspace_bytes!r}; 0 is the least that works")
    named = dict(weights=weights, counters=counters, max_workspace_bytes=max_workspace_bytes,
                 isa=isa, max_threads=max_threads)
    changes: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if model is None:
        _default = _default._replace(**changes)
        return
    for module in _experts(model):
        state = _state_of(module)
        with state.lock:
            state.options = (state.options or _default)._replace(**changes)
            if state.group is not None and state.group[0] != state.options:
                _switch(state, None)


def prepare(model: torch.nn.Module, *, dtype: torch.dtype | None = None,
            top_k: int | None = None) -> list[FusedMoe]:
    """Build the plans of all layers now instead of at their first calls, and return them.

    ``dtype``: of the hidden states; None = that of the weights or, where these are quantised, of the
    model's configuration. ``top_k``: experts per token; None
    = ``num_experts_per_tok`` of the model's configuration. Plans that are there stay. Raises
    Unsupported for a layer that cannot run, with the reason, and InvalidArgument.
    """
    built = []
    for module in _experts(model):
        count = top_k
        if count is None:
            names = ("num_experts_per_tok", "moe_topk", "top_k_experts")
            found = (getattr(module.config, name, None) for name in names)
            count = next((x for x in found if isinstance(x, int)), None)
        if count is None:
            raise InvalidArgument(f"top_k: expected a number of experts per token, got none from "
                                  f"the configuration of {type(module).__name__}; pass top_k")
        tensors = _tensors_of(module)
        hidden = dtype or tensors[0].dtype
        if hidden.itemsize == 1:
            said = getattr(module.config, "dtype", None)
            hidden = said if isinstance(said, torch.dtype) else torch.bfloat16
        built.append(_layer_of(module, tensors, hidden, count).plan)
    return built


def plans(model: torch.nn.Module) -> list[FusedMoe]:
    """The plans of the layers of ``model``, in the order of its modules: none until the first call
    or :func:`prepare`; more than one for a layer where calls differ in top_k or in the dtype of
    hidden, or compiled functions know older ones. ``describe()`` says what runs, ``counters()`` how
    often. Their weights are the model's: refresh them by :func:`refresh`."""
    found = []
    for module in _experts(model):
        state = _states.get(module)
        found += [layer.plan for layer in list(state.layers.values())] if state else []
    return found


def refresh(model: torch.nn.Module) -> None:
    """Read the weights of all layers again, into the same memory.

    Only needed for packed weights, and only after a change that PyTorch does not count:
    ``p.data.copy_(...)``, ``p.data.mul_(...)`` or a write to memory behind its back. Raises as
    ``fusedmoe.FusedMoe.refresh``.
    """
    for module in _experts(model):
        state = _states.get(module)
        if state is None:
            continue
        tensors = _tensors_of(module)
        shapes = tuple([(x.dtype, x.device, x.shape, x.stride()) for x in tensors])
        with state.lock:
            for layer in state.layers.values():
                _, known = layer.group
                # A compiled function may be using a plan of other options.
                if known == shapes and (layer.group == state.group or layer.compiled):
                    layer.plan._watch(_as_weights(layer.traits, tensors), _REFRESH)
