"""Networks as pure functions of parameters and inputs, the form that training uses."""

import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import errors, traverse_util
from jaxtyping import Array, Float, Num, PyTree

from bam.core import pytree
from bam.core.pytree import Params
from bam.errors import InputError
from bam.models import lora
from bam.models.interpreter import interpret
from bam.models.layers import convolutions_as
from bam.models.losses import Loss, cross_entropy

CROSS_ENTROPY = cross_entropy()
PRECISIONS = ("float32", "tensorfloat32", "bfloat16")

# `(key, inputs) -> params` and `(params, inputs) -> logits`.
Init: TypeAlias = Callable[[Array, Array], Params]
Apply: TypeAlias = Callable[[Params, Array], Array]
# A Linen module, an NNX module, or a pair `(init, apply)`.
Network: TypeAlias = object


class Model(NamedTuple):
    """A network as pure functions.

    Attributes:
      init: `key -> params`.
      logits: `(params, inputs [n, ...]) -> [n, classes]`, rows independent.
      loss: `(params, example) -> scalar`, the loss of one example
        `{"image": [views, ...], "label": int}`, averaged over its views. For a user, the example
        has all views of the user's examples, a label for each, and a mask `"present": [views]`.

    `logits` and `loss` also take `convolution`: a formulation other than the model's.
    """

    init: Callable[[Array], Params]
    logits: Callable[..., Float[Array, "n ... classes"]]
    loss: Callable[..., Float[Array, ""]]


def as_functions(
    network: Network,
    input_shape: tuple[int, ...],
    *,
    convolution: str = "",
    precision: str = "float32",
    lora_rank: int = 0,
    lora_targets: str = "",
    loss: Loss = CROSS_ENTROPY,
) -> Model:
    """Turns a network into the pure functions that training uses, and checks it by tracing.

    Args:
      network: maps `[n, *input_shape]` to logits and keeps no state besides parameters. It is a
        Flax Linen module; or a Flax NNX module, whose weights are then the initial parameters for
        any key; or a pair of functions `init(key, inputs) -> params` and
        `apply(params, inputs) -> logits`. The pair may use any pytree of parameters, which the
        result has as nested dicts of names.
      input_shape: the shape of one input, without batch axis.
      convolution: the formulation of convolutions, see `bam.models.layers.convolutions_as`.
      precision: the precision of the network, forwards and backwards. "float32" for all of it;
        "tensorfloat32" rounds the inputs of matrix products and convolutions to 10 bits of mantissa
        if the hardware can; "bfloat16" rounds weights and activations to bfloat16. In each case,
        parameters, normalisation statistics, the loss, the network's gradients, and everything
        after them (norms, clipping, sums, noise) are float32.
      lora_rank: rank of the LoRA factors of a Linen module, see `bam.models.lora`; 0 for none.
      lora_targets: a regular expression; linear layers whose name matches get factors.
      loss: the loss of one image, see `bam.models.losses`.

    Raises:
      InputError: if the network keeps state besides parameters (BatchNorm does), if it reduces
        such inputs to nothing, if two of its parameters have one name, and for an unknown
        convolution or precision.

    Examples:
      >>> import jax, flax.linen as nn
      >>> model = as_functions(nn.Dense(2), (3,))
      >>> model.logits(model.init(jax.random.key(0)), jnp.ones((5, 3))).shape
      (5, 2)
    """
    if precision not in PRECISIONS:
        raise InputError(f"unknown precision {precision!r}; choose from {', '.join(PRECISIONS)}")
    if lora_rank and not isinstance(network, nn.Module):
        raise InputError("LoRA needs a Flax Linen module, because it finds linear layers by name")
    first, apply = _pure(network)

    @contextlib.contextmanager
    def arithmetic(convolution: str = convolution) -> Iterator[None]:
        products = "tensorfloat32" if precision == "tensorfloat32" else "float32"
        with (
            convolutions_as(convolution),
            jax.default_matmul_precision(products),
            jax.numpy_rank_promotion("allow"),  # networks add a bias `[f]` to `[n, f]`
        ):
            yield

    if not isinstance(network, nn.Module):
        with arithmetic():
            like = jax.eval_shape(lambda: first(jax.random.key(0), jnp.zeros((1, *input_shape))))
        first, apply = _as_dicts(first, apply, like)

    def init(key: Array) -> Params:
        with arithmetic():
            params = first(key, jnp.zeros((1, *input_shape)))
        return lora.with_factors(params, key, lora_rank, lora_targets) if lora_rank else params

    def logits(
        params: Params, inputs: Num[np.ndarray | Array, "n ..."], convolution: str = convolution
    ) -> Float[Array, "n ... classes"]:
        if precision == "bfloat16":
            params, inputs = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, inputs))
        with arithmetic(convolution):
            output = apply(params, jnp.asarray(inputs))
        if not isinstance(output, jax.Array):
            raise InputError(f"a network must return one array, not a {type(output).__name__}")
        return pytree.at_least_float32(output)

    def loss_of(
        params: Params, example: PyTree, convolution: str = convolution
    ) -> Float[Array, ""]:
        views, labels = logits(params, example["image"], convolution), jnp.asarray(example["label"])
        if "present" not in example:  # all views have the example's label
            labels = jnp.broadcast_to(labels, (len(views), *labels.shape))
        losses = jax.vmap(loss.of_output)(views, labels)
        return jnp.mean(losses, where=example.get("present"))

    try:
        jax.eval_shape(lambda: init(jax.random.key(0)))
    except ZeroDivisionError as error:  # raised by an initialiser if pooling leaves no position
        raise InputError(
            f"the network reduces inputs of shape {input_shape} to nothing: use larger images or "
            "fewer strides"
        ) from error
    return Model(functools.partial(interpret, init), logits, loss_of)


def _pure(network: Network) -> tuple[Init, Apply]:
    """Returns a network as `(init, apply)`.

    InputError for other objects, or state besides parameters.
    """
    if isinstance(network, nn.Module):
        return _linen(network)
    if any(x.__module__.startswith("flax.nnx") for x in type(network).__mro__):
        return _nnx(network)
    if isinstance(network, tuple) and len(network) == 2 and all(map(callable, network)):
        return network[0], network[1]
    raise InputError(
        "a network must be a Flax Linen or NNX module or a pair of functions (init, apply), not a "
        f"{type(network).__name__}"
    )


def _as_dicts(first: Init, apply: Apply, like: PyTree) -> tuple[Init, Apply]:
    """Returns the functions with parameters in nested dicts.

    A leaf in a list is "layers/0/kernel".
    """
    names, structure = [x or "params" for x in pytree.names(like)], jax.tree.structure(like)
    for name, following in itertools.pairwise(sorted(name + "/" for name in names)):
        if following.startswith(name):
            raise InputError(f"two of the network's parameters have one name: {following[:-1]}")

    def init(key: Array, inputs: Array) -> Params:
        leaves = jax.tree.leaves(first(key, inputs))
        return traverse_util.unflatten_dict(dict(zip(names, leaves, strict=True)), sep="/")

    def named_apply(params: Params, inputs: Array) -> Array:
        leaves = traverse_util.flatten_dict(params, sep="/")
        return apply(jax.tree.unflatten(structure, [leaves[name] for name in names]), inputs)

    return init, named_apply


def _only_parameters(extra: list[str]) -> None:
    """Raises InputError if a network keeps `extra` kinds of variables besides parameters."""
    if not extra:
        return
    if all("rng" in name.lower() for name in extra):
        raise _draws(extra)
    raise InputError(
        f"the model keeps state {extra} besides its parameters. BatchNorm mixes the examples of a "
        "batch, so no per-example gradient exists and clipping bounds nothing: use GroupNorm or "
        "LayerNorm"
    )


def _draws(streams: list[str]) -> InputError:
    """Returns the error for a network that needs random numbers."""
    return InputError(
        f"the model needs random numbers {streams}, as Dropout does, which bam does not supply: "
        "leave Dropout out, because the noise already regularises"
    )


def _linen(module: nn.Module) -> tuple[Init, Apply]:
    """Returns a Linen module as `(init, apply)`.

    `apply` adds the LoRA factors among the parameters.
    """

    @contextlib.contextmanager
    def without_random_numbers() -> Iterator[None]:
        try:
            yield
        except errors.InvalidRngError as error:  # Flax's message names the stream
            raise _draws(re.findall(r'PRNG for "(\w+)"', str(error))) from error

    def init(key: Array, inputs: Array) -> Params:
        with without_random_numbers():
            variables = module.init(key, inputs)
        _only_parameters(sorted(set(variables) - {"params"}))
        return variables["params"]

    def apply(params: Params, inputs: Array) -> Array:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_random_numbers())
            if lora.NAME in params:
                stack.enter_context(nn.intercept_methods(lora.add_factors(params[lora.NAME])))
            weights = {name: x for name, x in params.items() if name != lora.NAME}
            return module.apply({"params": weights}, inputs)  # type: ignore[return-value]

    return init, apply


def _nnx(module: object) -> tuple[Init, Apply]:
    """Returns an NNX module as `(init, apply)`.

    `init` returns the module's weights for any key.
    """
    from flax import nnx

    graph, parameters, *rest = nnx.split(module, nnx.Param, ...)
    _only_parameters(
        sorted({type(x).__name__ for state in rest for _, x in nnx.to_flat_state(state)})
    )
    initial = nnx.to_pure_dict(parameters)

    def init(key: Array, inputs: Array) -> Params:
        del key, inputs
        return initial

    def apply(params: Params, inputs: Array) -> Array:
        state = jax.tree.map(lambda x: x, parameters)  # a copy, because the next line changes it
        nnx.replace_by_pure_dict(state, params)
        network = nnx.merge(graph, state, *rest)
        return network(inputs)  # type: ignore[operator]

    return init, apply
