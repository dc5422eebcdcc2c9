"""One torch op per function and one for its hand-written backward, the same pair for every backend.

So an op compiles, exports and autocasts as torch's own do. A backend is a module with

    forward(*tensors, *options) -> outputs
    backward(*grads of the outputs, *outputs, *tensors, *options) -> one gradient per tensor, None where there is none

and the reference gives second derivatives: the backward's own backward differentiates it twice.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_TENSOR = "<tensor>"  # stands for a saved tensor among an op's arguments


class TorchOp:
    """``seqzoo::<name>`` and ``seqzoo::<name>_backward``.

    name        of the op
    tensors     schema of its tensor arguments, such as ("Tensor x", "Tensor? phase")
    options     schema of the others, such as ("bool reverse", "int chunk_size")
    outputs     how many tensors it returns; the first `len(plain(...))` of them are differentiable
    backends    name -> module, as above
    fake        (*tensors, *options) -> empty outputs of the right shape, dtype and device
    plain       (*tensors, *options) -> the differentiable outputs, in differentiable torch
    keeps_outputs   False: backward is given no outputs, and none are kept for it
    """

    def __init__(
        self,
        name: str,
        *,
        tensors: Sequence[str],
        options: Sequence[str],
        outputs: int,
        backends: Mapping[str, Any],
        fake: Callable[..., tuple[Tensor, ...]],
        plain: Callable[..., tuple[Tensor, ...]],
        keeps_outputs: bool = True,
    ) -> None:
        self.name = name
        self.num_tensors = len(tensors)
        self.num_outputs = outputs
        self.per_output = 1 + keeps_outputs  # tensors of backward: the gradient, and the output itself
        self.keep = _keep_all if keeps_outputs else _keep_inputs
        self.backends = backends
        self.plain = plain
        arguments = ", ".join([*tensors, *options, "str backend"])
        own = ("grad", "out")[: self.per_output]
        given = ", ".join([f"Tensor {kind}_{i}" for i in range(outputs) for kind in own])
        self._forward = torch.library.custom_op(
            f"seqzoo::{name}",
            self._run_forward,
            mutates_args=(),
            schema=f"({arguments}) -> ({_tensors(outputs)})",
        )
        self._backward = torch.library.custom_op(
            f"seqzoo::{name}_backward",
            self._run_backward,
            mutates_args=(),
            schema=f"({given}, {arguments}) -> ({_tensors(len(tensors))})",
        )
        self._forward.register_fake(lambda *args: fake(*args[:-1]) if outputs > 1 else fake(*args[:-1])[0])
        self._backward.register_fake(self._fake_backward)
        torch.library.register_autograd(self._forward, self._differentiate, setup_context=self.keep)
        torch.library.register_autograd(self._backward, self._differentiate_twice, setup_context=_keep_inputs)

    def __call__(self, *args: Any) -> tuple[Tensor, ...]:
        if torch.compiler.is_compiling() or traced():
            result = self._forward(*args)
        elif torch.is_grad_enabled():
            result = _Eager.apply(self, *args)
        else:
            result = self._run_forward(*args)
        return (result,) if self.num_outputs == 1 else result

    def _run_forward(self, *args: Any) -> Any:
        *inputs, backend = args
        with without_autocast(inputs):
            result = tuple(t.contiguous() for t in self.backends[backend].forward(*inputs))
        return result[0] if self.num_outputs == 1 else result

    def _run_backward(self, *args: Any) -> tuple[Tensor, ...]:
        *given, backend = args
        grads, outputs, inputs = self._parts(given)
        with without_autocast(given):
            result = self.backends[backend].backward(*grads, *outputs, *inputs)
        return tuple(_empty(given[0]) if t is None else t.contiguous() for t in result)

    def _parts(self, given: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """The gradients of the outputs, the outputs, and what forward was given, of the arguments of backward."""
        each, end = self.per_output, self.per_output * self.num_outputs
        return list(given[0:end:each]), list(given[1:end:each]) if each > 1 else [], list(given[end:])

    def _fake_backward(self, *args: Any) -> tuple[Tensor, ...]:
        tensors = self._parts(args)[2][: self.num_tensors]
        return tuple(t.new_empty(t.shape) if _differentiable(t) else _empty(args[0]) for t in tensors)

    def _differentiate(self, ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, outputs = _kept(ctx)
        pairs = (
            grads if self.per_output == 1 else [t for pair in zip(grads, outputs, strict=True) for t in pair]
        )
        plain = torch.is_grad_enabled() or torch.compiler.is_compiling() or traced()
        result = (self._backward if plain else self._run_backward)(*pairs, *inputs)
        tensors = inputs[: self.num_tensors]
        kept = [g if _differentiable(t) else None for g, t in zip(result, tensors, strict=True)]
        return (*kept, *[None] * (len(inputs) - self.num_tensors))

    def _differentiate_twice(self, ctx: Any, *seconds: Tensor) -> tuple[Tensor | None, ...]:
        given, _ = _kept(ctx)
        grads, _, (*inputs, _) = self._parts(given)
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad(), without_autocast(given):
            where = [i for i in range(self.num_tensors) if _differentiable(inputs[i])]
            for i in where:
                inputs[i] = _alias(inputs[i])
            outs = self.plain(*inputs)
            out_grads = [_alias(g) for g in grads[: len(outs)]]
            variables = [inputs[i] for i in where]
            first = _grad(outs, variables, out_grads, create_graph=True)
            wanted = [*out_grads, *variables]
            second = _grad(first, wanted, [seconds[i] for i in where], create_graph=create_graph)
        result: list[Tensor | None] = [None] * len(given)
        for i, g in enumerate(second[: len(outs)]):
            result[self.per_output * i] = g
        for i, g in zip(where, second[len(outs) :], strict=True):
            result[self.per_output * self.num_outputs + i] = g
        return tuple(result)


class _Eager(torch.autograd.Function):
    """The op where nobody needs to see it as a torch op: the same functions, without the dispatcher's 0.1 ms."""

    @staticmethod
    def forward(ctx: Any, op: TorchOp, *args: Any) -> Any:
        result = op._run_forward(*args)
        ctx.op = op
        op.keep(ctx, args, result)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (None, *ctx.op._differentiate(ctx, *grads))


def traced() -> bool:
    """Whether some mode (fake tensors, a tracer, a profiler of operators) or transform wants to see each torch op."""
    return (
        torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _tensors(count: int) -> str:
    return ", ".join(["Tensor"] * count)


def _empty(like: Tensor) -> Tensor:
    return like.new_empty(0)


def _differentiable(value: object) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _alias(tensor: Tensor) -> Tensor:
    """The same values as a variable of its own, still joined to the graph they came from (for third derivatives)."""
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()


def _grad(
    outs: Sequence[Tensor | None], variables: list[Tensor], grads: Sequence[Tensor], *, create_graph: bool
) -> tuple[Tensor | None, ...]:
    pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if o is not None and o.requires_grad]
    if not pairs:
        return (None,) * len(variables)
    chosen, chosen_grads = zip(*pairs, strict=True)
    return torch.autograd.grad(chosen, variables, chosen_grads, create_graph=create_graph, allow_unused=True)


def without_autocast(values: Sequence[Any]) -> AbstractContextManager[Any]:
    device = next(v.device.type for v in values if isinstance(v, Tensor))
    device = device if device != "meta" else "cpu"
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _keep_all(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    outputs = (output,) if isinstance(output, Tensor) else tuple(output)
    _keep(ctx, inputs, outputs)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    _keep(ctx, inputs, ())


def _keep(ctx: Any, inputs: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """Save tensors through autograd and the rest on the context; `_kept` gives them back in order."""
    ctx.save_for_backward(*[v for v in inputs if isinstance(v, Tensor)], *outputs)
    ctx.template = [_TENSOR if isinstance(v, Tensor) else v for v in inputs]


def _kept(ctx: Any) -> tuple[list[Any], tuple[Tensor, ...]]:
    saved = iter(ctx.saved_tensors)
    values = [next(saved) if v == _TENSOR else v for v in ctx.template]
    return values, tuple(saved)
