"""Plans over torch tensors: an operator for eager code and ``torch.compile``, and a watch over the
tensors that a plan was made from.

The operator is ``torch.ops.fusedmoe.apply(output, hidden, topk_weights, topk_ids, workspace,
plan)``; ``plan`` is ``FusedMoe.handle``. It is written in C++ where the package was built beside
PyTorch and in Python otherwise: chosen once, when this module is imported; ``OPERATOR`` says which
and why. In C++ it runs on the process's own OpenMP threads, however an engine pinned them.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import pathlib
import weakref
from typing import Any

import torch

from . import _core
from ._roles import ROLES, part_of
from .config import (
    Counters,
    ExpertWeights,
    MoeConfig,
    PlanOptions,
    WorkspaceFormula,
    WorkspaceSize,
)
from .errors import Error, InvalidArgument, from_code

__all__ = ["OPERATOR", "FusedMoe", "thread_runner", "translate"]

_KEPT = len(ROLES)  # held, not watched
# torch_op::Before: what happens, in one step, before other tensors are watched.
_NOTHING, _REFRESH, _RELEASE = range(3)


class _CppOperators:
    """The operators of libfusedmoe_torch.so."""

    def register(self, plan: _core.FusedMoe, refresh: bool, contents: bool) -> int:
        return int(torch.ops.fusedmoe._register(plan._native, refresh, contents))

    def unregister(self, handle: int) -> None:
        torch.ops.fusedmoe._unregister(handle)

    def watch(self, handle: int, weights: Any, tensors: list[torch.Tensor], roles: list[int],
              before: int) -> None:
        native = _core._NativeWeights(weights, "cpu")
        torch.ops.fusedmoe._watch(handle, native.address, tensors, roles, before)

    def reread(self, handle: int) -> None:
        torch.ops.fusedmoe._reread(handle)

    def thread_runner(self) -> int:
        return int(torch.ops.fusedmoe._thread_runner())


def _load_operators() -> tuple[Any, str]:
    """FUSEDMOE_TORCH_OPERATOR=cpp or python insists on one; by default C++ where it loads."""
    wanted = os.environ.get("FUSEDMOE_TORCH_OPERATOR", "")
    if wanted not in ("", "cpp", "python"):
        raise InvalidArgument("FUSEDMOE_TORCH_OPERATOR: expected python, cpp or nothing, got "
                              f"{wanted!r}; spell it so")
    library = pathlib.Path(__file__).with_name("libfusedmoe_torch.so")
    if wanted == "python":
        reason = "FUSEDMOE_TORCH_OPERATOR asks for it"
    elif not library.is_file():
        reason = "the package was built without PyTorch; install it again beside torch"
    else:
        try:
            torch.ops.load_library(str(library))
            return _CppOperators(), f"C++ (stable ABI), torch {torch.__version__}"
        except (OSError, RuntimeError) as error:
            reason = f"{library.name} does not load: {str(error).splitlines()[0]}"
    if wanted == "cpp":
        raise ImportError(f"fusedmoe.torch: expected the operators in C++, got none: {reason}")
    from . import _torch_fallback
    return _torch_fallback.Operators(), f"Python, since {reason}"


def _fake_of(operator: Any) -> Any:
    """What the operator is to tracers: it only writes. Also called when some of its arguments are
    on the meta device, where silence would look like a result."""
    names = [argument.name for argument in operator._schema.arguments]

    def fake(*arguments: Any) -> None:
        device = arguments[0].device
        for name, argument in zip(names, arguments):
            for tensor in argument if isinstance(argument, list | tuple) else [argument]:
                if isinstance(tensor, torch.Tensor) and tensor.device != device:
                    raise InvalidArgument(f"{name}: expected a tensor on {device} as output, got "
                                          f"one on {tensor.device}; move it")

    return fake


_operators, OPERATOR = _load_operators()
for _name in ("apply", "apply_weights", "apply_lent"):
    torch.library.register_fake(f"fusedmoe::{_name}")(
        _fake_of(getattr(torch.ops.fusedmoe, _name).default))
_apply = torch.ops.fusedmoe.apply.default
_apply_weights = torch.ops.fusedmoe.apply_weights.default
_apply_lent = torch.ops.fusedmoe.apply_lent.default


def thread_runner() -> int:
    """For ``PlanOptions.runner``: the threads of PyTorch. 0 (the library's own threads) where the
    operators are in Python."""
    return int(_operators.thread_runner())


def translate(error: RuntimeError) -> BaseException:
    """The exception of fusedmoe that an operator's RuntimeError carries, with its whole message;
    the error itself, when it carries none."""
    text = str(error)
    if isinstance(error, Error) or not text.startswith("fusedmoe."):
        return error
    code, _, message = text.removeprefix("fusedmoe.").partition(": ")
    return from_code(code, message)


class _translated:
    """Makes the operators' RuntimeError an exception of fusedmoe."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError):
            other = translate(error)
            if other is not error:
                raise other from None


def _tensors_of(weights: Any) -> tuple[list[torch.Tensor], list[int]]:
    """The tensors to watch and their roles; none for weights that come from files or a source."""
    if not isinstance(weights, ExpertWeights) or weights.source is not None:
        return [], []
    tensors, roles = [], []
    for role in range(_KEPT):
        tensor = part_of(weights, role)
        if tensor is None:
            continue
        if not isinstance(tensor, torch.Tensor):
            name = ".".join(filter(None, ROLES[role]))
            raise InvalidArgument(f"weights.{name}: expected a torch tensor, got "
                                  f"{type(tensor).__name__}; use fusedmoe.FusedMoe for it")
        tensors.append(tensor)
        roles.append(role)
    return tensors, roles


def _state_of(tensor: torch.Tensor) -> tuple[int, int | None]:
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


class FusedMoe:
    """A plan over torch tensors: :class:`fusedmoe.FusedMoe` with a handle for the operators, on
    PyTorch's threads, which watches the tensors that it was made from.

    Before each call it compares data_ptr, version, dtype, device, shape and strides of each tensor,
    scales and zero points included, with what it has read (under 1 us in C++ for four); on a
    difference it raises ``StaleWeights`` or, with ``on_stale="refresh"``, reads them again into the
    same memory. Of borrowed weights only where they lie matters. The tensors are held, so that no other can take their address. What PyTorch
    does not count, it cannot see: after ``tensor.data.copy_()`` call :meth:`refresh`.
    """

    def __init__(self, plan: _core.FusedMoe, config: MoeConfig, weights: Any, options: PlanOptions,
                 watch: bool) -> None:
        self.plan = plan
        self._formula = plan.workspace_formula  # kept, so that torch.compile can read it
        self._create = (config, options, watch)
        self._weights = weights if watch else None
        borrowed = options.weight_storage == "borrowed"
        self.handle: int = _operators.register(plan, options.on_stale == "refresh", not borrowed)
        self._finalizer = weakref.finalize(self, _operators.unregister, self.handle)
        self._watch(weights if watch else None, _NOTHING)

    @classmethod
    def create(cls, config: MoeConfig, weights: Any, options: PlanOptions | None = None, *,
               watch: bool = True) -> "FusedMoe":
        """Build a plan. ``weights``: an ExpertWeights of torch tensors, or weights of a checkpoint.

        Its threads are PyTorch's: ``max_threads`` defaults to ``torch.get_num_threads()``.
        ``watch=False`` holds and watches nothing, for weights that nobody changes or that are freed
        after packing; borrowed weights are always held. Raises as ``fusedmoe.FusedMoe.create``.
        """
        options = options or PlanOptions()
        if options.weight_storage == "borrowed":
            watch = True
        if options.runner == 0:
            options = dataclasses.replace(
                options, runner=thread_runner(),
                max_threads=options.max_threads or torch.get_num_threads())
        tensors, _ = _tensors_of(weights)  # refuses what is no tensor before anything is packed
        before = [_state_of(tensor) for tensor in tensors]
        # What has changed is this class's to see; the library sees the owner's version, if any.
        versioned = getattr(weights, "version", None) is not None
        inner = options if versioned else dataclasses.replace(options, on_stale="raise")
        # Tensors are held by the watch, which follows the ones that replace them.
        held_here = watch and bool(tensors)
        create = _core.FusedMoe._create_unheld if held_here else _core.FusedMoe.create
        plan = create(config, weights, inner)
        made = cls(plan, config, weights, options, watch)
        if watch and [_state_of(tensor) for tensor in tensors] != before:
            made.refresh()  # another thread changed them while they were read
        return made

    def _watch(self, weights: Any, before: int) -> None:
        """Watch the tensors of ``weights`` from now on; those of files and sources are none."""
        tensors, roles = _tensors_of(weights)
        options = self._create[1]
        kept = [options.storage] if isinstance(options.storage, torch.Tensor) else []
        with _translated():
            _operators.watch(self.handle, weights if tensors else ExpertWeights(), tensors + kept,
                             roles + [_KEPT] * len(kept), before)

    # --- Calls ---

    def apply(self, output: torch.Tensor, hidden: torch.Tensor, topk_weights: torch.Tensor,
              topk_ids: torch.Tensor, workspace: torch.Tensor | None = None, *,
              workspace13: torch.Tensor | None = None,
              expert_map: torch.Tensor | None = None) -> None:
        """output[t] = sum over k of topk_weights[t, k] * expert(topk_ids[t, k])(hidden[t]).

        ``workspace``: a contiguous tensor of any dtype, of ``workspace_size(num_tokens).bytes`` or
        at least ``min_workspace_size().bytes``; None allocates for this call. ``workspace13``: the
        first of two spans of ``workspace_sizes_13_2(num_tokens)``. ``expert_map``: int32
        [num_experts], wins over the plan's for this call. Raises as ``fusedmoe.FusedMoe.apply``;
        inside ``torch.compile`` errors are RuntimeErrors, see :func:`translate`.
        """
        if torch.compiler.is_compiling():
            self._call(output, hidden, topk_weights, topk_ids, workspace, workspace13, expert_map)
            return
        try:
            self._call(output, hidden, topk_weights, topk_ids, workspace, workspace13, expert_map)
        except RuntimeError as error:
            for name, value in (("workspace", workspace), ("workspace13", workspace13)):
                if value is not None and not isinstance(value, torch.Tensor):
                    raise InvalidArgument(
                        f"{name}: expected a torch tensor, got {type(value).__name__}; pass "
                        "workspace(num_tokens), or use fusedmoe.FusedMoe") from None
            raise translate(error) from None

    def _call(self, output: torch.Tensor, hidden: torch.Tensor, topk_weights: torch.Tensor,
              topk_ids: torch.Tensor, workspace: torch.Tensor | None,
              workspace13: torch.Tensor | None, expert_map: torch.Tensor | None) -> None:
        if workspace13 is None and expert_map is None:
            _apply(output, hidden, topk_weights, topk_ids, workspace, self.handle)
        else:
            _apply_lent(output, hidden, topk_weights, topk_ids, workspace13, workspace, expert_map,
                        self.handle)

    def workspace(self, num_tokens: int) -> torch.Tensor:
        """A new workspace for that many tokens: one serves all layers, one call at a time."""
        return torch.empty(self.plan.workspace_size(num_tokens).bytes, dtype=torch.uint8)

    # --- Weights ---

    def refresh(self, weights: Any = None) -> None:
        """Read the weights again, into the same memory: those given, which are watched from now
        on, or the watched ones as they are. Raises as ``fusedmoe.FusedMoe.refresh``."""
        if weights is None and (self._weights is None or _tensors_of(self._weights)[0]):
            with _translated():
                _operators.reread(self.handle)
            return
        weights = self._weights if weights is None else weights  # of files or of a source
        if not self._create[2]:
            self.plan.refresh(weights)
        elif _tensors_of(weights)[0]:
            self._watch(weights, _REFRESH)
            self._weights = weights
        else:
            self._refresh_unwatched(weights)

    def _refresh_unwatched(self, weights: Any) -> None:
        """From files or a source, which may run Python: outside of the operators' locks. The old
        tensors are let go of first, or a call in between could read them again."""
        old = self._weights
        tensors, _ = _tensors_of(old)
        before = [_state_of(tensor) for tensor in tensors]
        self._watch(None, _NOTHING)
        try:
            self.plan.refresh(weights)
        except BaseException:
            if tensors:  # nothing was read, or the plan is stale until a refresh succeeds
                self._watch(old, _NOTHING)
                if [_state_of(tensor) for tensor in tensors] != before:
                    self.refresh(old)
            raise
        self._weights = weights

    def release_weights(self) -> None:
        """Give the memory of packed weights back and let go of the tensors (sleep). Until
        ``refresh(weights)``, calls raise StaleWeights."""
        self._watch(None, _RELEASE)
        self._weights = None

    @property
    def weights_version(self) -> int:
        """Starts at 1 and counts successful refreshes."""
        return self.plan.weights_version

    # --- The plan's words ---

    def workspace_size(self, num_tokens: int) -> WorkspaceSize:
        return self.plan.workspace_size(num_tokens)

    def min_workspace_size(self) -> WorkspaceSize:
        return self.plan.min_workspace_size()

    @property
    def workspace_formula(self) -> WorkspaceFormula:
        return self._formula

    def workspace_sizes_13_2(self, num_tokens: int) -> tuple[WorkspaceSize, WorkspaceSize]:
        return self.plan.workspace_sizes_13_2(num_tokens)

    def describe(self) -> str:
        return self.plan.describe()

    def counters(self) -> Counters:
        return self.plan.counters()

    def reset_counters(self) -> None:
        self.plan.reset_counters()

    @property
    def config(self) -> MoeConfig:
        return self.plan.config

    # --- Copies ---

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedMoe":
        """A plan of the copied tensors: the copy of a model must not follow the original. One that
        watches nothing is shared."""
        config, options, watch = self._create
        if not watch:
            return self
        if self._weights is None:
            raise InvalidArgument("deepcopy: expected a plan with its weights, got one after "
                                  "release_weights(); refresh it first")
        return type(self).create(config, copy.deepcopy(self._weights, memo),
                                 dataclasses.replace(
                                     options, storage=copy.deepcopy(options.storage, memo)),
                                 watch=watch)

    def __reduce__(self) -> Any:
        raise TypeError("fusedmoe.torch.FusedMoe cannot be pickled; build it again from its weights")
