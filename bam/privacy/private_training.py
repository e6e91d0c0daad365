"""Private training as one object, which couples sampler, clip, noise and ε.

All are made from one plan, so they cannot disagree: the batches are those that the accountant
counts, the noise is scaled to the clip's sensitivity, and the mean is divided by the expected batch
size. `bam train` is a loop over a `PrivateTraining`, as yours is.
"""

import functools
import hmac
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Int32, PyTree, UInt32

from bam import files
from bam.core import pytree, scalars, tracing, user_table
from bam.core.clipping import Transform, as_declared, num_slots_of, sensitivity_of
from bam.core.gaussian import check_std
from bam.core.oracles import Method
from bam.core.privatize import NO_MULTI_STEPS, claim_key
from bam.core.program import compile_once
from bam.core.pytree import Grads, Params
from bam.core.sampling import PaddedBatch, rows_or_zeros
from bam.core.slots import GradientNorms
from bam.errors import InputError
from bam.files import JsonMapping, JsonObject
from bam.privacy import processes, statement
from bam.privacy.clip_words import in_words
from bam.privacy.gradient_norms import gradient_norms
from bam.privacy.plan import PrivacyPlan
from bam.privacy.private_gradient import (
    FIRST_PRIVATE,
    DrawnBatch,
    PrivateState,
    batch_of,
    first_state,
    gradient_of,
    is_next_batch,
    mean_of,
)
from bam.privacy.recorded_plan import PLAN, plan_for
from bam.privacy.run import PrivateRun
from bam.provenance import git_commit

# step -> the examples and the mask of its batch
Reader = Callable[[int], tuple[PyTree, Bool[np.ndarray, "rows ..."]]]


class PrivateTraining:
    r"""A private training: the steps of a plan.

    `gradient` makes an optax transform from a drawn batch to the private gradient
    $\big(\sum_i \mathrm{clip}(g_i) + N(0, \sigma^2 S^2 I)\big) / l$; chain any optimizer after it.
    `batches` draws the T batches. The randomness lives in this process alone: a fork of the process
    cannot use it, and threads that share the object get each step once. If a crash ends a training,
    its ε is spent, and another training adds its own. With a `folder`, the training continues with
    the remaining steps when it is made again there.

    Attributes:
      plan: the `bam.PrivacyPlan`: N, l, q, T, σ, ε, δ.
      run: the `bam.privacy.run.PrivateRun`, which counts, draws and saves the steps.

    Args:
      clip: a bounded per-example transform, such as `bam.clip_by_l2_norm(1.0)`.
      plan: a plan of `bam.make_plan`, in place of its arguments, which are the next ones. With a
        plan for users and no `groups`, each row of the data is a user.
      num_examples: N, public: the number of examples, or of users; with `num_examples_given` the
        largest possible number.
      expected_batch_size: l, from 1 to N; the drawn number varies.
      delta: δ, below 1/N.
      num_steps: T.
      num_epochs: passes over the data, on average, in place of `num_steps`.
      epsilon: ε that T steps may spend; `math.inf` trains without privacy, for comparison.
      noise_multiplier: σ, in place of `epsilon`; ε follows from it.
      accountant: "pld" or "rdp".
      mechanism: the way to draw batches: a key of `bam.privacy.mechanisms.MECHANISMS`, or a mapping
        with its name and options.
      num_examples_given: whether N is a public constant, fixed without counting the data. Then the
        data may have fewer rows, and ε is for adding or removing one example (with `groups`, one
        user). Otherwise ε is for replacing one example or user by nothing, its place left empty.
      group_size: k, public: the largest number of rows used of a user, see
        `bam.core.user_table.table`.
      groups: `[rows]` on the host, the user of each row of the data: integers or texts, equal for
        one person as `bam.privacy.user_ids.user_id` says. Then N counts users, users are drawn, and
        the oracle's gradient of a user's mean loss is clipped. None: each row is an example.
      mesh: devices along one axis, of all processes, which share the examples of a step. None uses
        the data's device. The gradient is the same.
      trainable: a regular expression. Parameters with a matching name, such as "head/kernel", are
        trained; the gradient of the others is zero, without noise. "" trains all.
      seed: None, for a release, uses randomness of the operating system. An integer repeats a
        training; anyone who guesses it can remove the noise, and the statement says so.
      folder: where the training is saved. If one is saved there it continues, otherwise it begins
        there. Each step is counted on the disk before its batch is yielded; see `save` and
        `restore`. All arguments must be the same as before, except `mesh`. Without a seed, further
        batches and noise come from new secrets; with one, steps after the last `save` are repeated
        to the same bits. None keeps nothing.

    Raises:
      InputError: as `bam.make_plan`; if the clip declares no finite bound, the mesh has two axes,
        the number of users is not N, the folder's training had other arguments, or one of its files
        is damaged.
      BlockingIOError: if another training uses the folder.

    Examples:
      >>> import bam, jax.numpy as jnp, optax
      >>> private = bam.PrivateTraining(num_examples=100, expected_batch_size=20, num_epochs=1,
      ...                               epsilon=2.0, delta=1e-3, clip=bam.clip_by_l2_norm(1.0))
      >>> oracle = bam.dp_sgd(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))
      >>> tx = optax.chain(private.gradient(oracle), optax.sgd(0.1))
      >>> w, data = jnp.zeros(2), jnp.ones((100, 2))
      >>> state = tx.init(w)
      >>> for batch in private.batches(data):
      ...     updates, state = tx.update(batch, state, w)
      ...     w = optax.apply_updates(w, updates)
      >>> private.steps_begun, private.epsilon_spent <= 2.0
      (5, True)
    """

    def __init__(
        self,
        *,
        clip: Transform,
        plan: PrivacyPlan | None = None,
        num_examples: int | None = None,
        expected_batch_size: int | None = None,
        delta: float | None = None,
        num_steps: int | None = None,
        num_epochs: float | None = None,
        epsilon: float | None = None,
        noise_multiplier: float | None = None,
        accountant: str = "pld",
        mechanism: str | JsonMapping = "poisson",
        num_examples_given: bool = False,
        group_size: int = 0,
        groups: np.ndarray | Sequence[object] | None = None,
        mesh: Mesh | None = None,
        trainable: str = "",
        seed: int | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Makes a plan, or takes the folder's plan, and draws nothing yet."""
        arguments = _non_defaults(
            num_examples=(num_examples, None), expected_batch_size=(expected_batch_size, None),
            delta=(delta, None), num_steps=(num_steps, None), num_epochs=(num_epochs, None),
            epsilon=(epsilon, None), noise_multiplier=(noise_multiplier, None),
            accountant=(accountant, "pld"), mechanism=(mechanism, "poisson"),
            num_examples_given=(num_examples_given, False), group_size=(group_size, 0),
        )  # fmt: skip
        path = None if folder is None else _resolve(folder)
        seed = None if seed is None else scalars.whole("seed", seed)
        if mesh is not None and len(mesh.axis_names) != 1:
            raise InputError(f"mesh must have one axis, got {mesh}")
        owners = {device.process_index for device in mesh.devices.flat} if mesh else {0}
        if len(owners) < jax.process_count():
            # Each process would add the same noise to a sum of its own.
            raise InputError("several processes take part: pass a mesh with the devices of all")
        if not isinstance(trainable, str):
            raise InputError(f"trainable must be a regular expression, got {trainable!r}")
        pytree.name_mask(trainable)
        self._clip = as_declared(clip)
        if plan is None:
            needed = ("num_examples", "expected_batch_size", "delta")
            missing = [name for name in needed if name not in arguments]
            for pair in (("num_steps", "num_epochs"), ("epsilon", "noise_multiplier")):
                missing += [] if arguments.keys() & pair else [" or ".join(pair)]
            if missing:
                raise InputError(f"a PrivateTraining needs {', '.join(missing)}, or a plan")
            plan = plan_for(path, **arguments)
        else:
            if arguments:
                raise InputError(f"plan= fixes {', '.join(arguments)}: leave them out")
            if not isinstance(plan, PrivacyPlan):
                raise InputError(f"plan must be a plan of bam.make_plan, got {plan!r}")
            plan.check()
        self._sensitivity = float(sensitivity_of(self._clip)) if plan.private else 0.0
        # Noise would be 0, too, and the training would learn nothing.
        if plan.private and self._sensitivity == 0:
            raise InputError(
                "this clip has sensitivity 0, so every gradient would be zero: use a clip norm "
                "above 0"
            )
        check_std(plan.noise_multiplier * self._sensitivity)
        # The same devices, with an axis of type Auto.
        self._mesh = mesh and Mesh(mesh.devices, mesh.axis_names)
        num_devices = self._mesh.size if self._mesh else 1
        self._trainable = trainable
        has_groups = groups is not None or group_size
        self._groups = plan.population.number_users(groups) if has_groups else None
        # The arguments that define this training, besides its plan.
        target = plan.epsilon if epsilon is None else scalars.real("epsilon", epsilon)
        self._asked: JsonObject = {"target_epsilon": target if target < math.inf else None}
        self._asked |= {"trainable": trainable, "seed": seed}
        self._asked |= {"sensitivity": self._sensitivity, "clip": in_words(self._clip)}
        self._asked |= {"has_groups": self._groups is not None}
        self._row_shapes: list[tuple[int, ...]] | None = None
        git_commit()  # read now, because the files may have changed by the first step
        self.run = PrivateRun(plan, seed, num_devices)
        if path is not None:
            self.run.open(path, self._record, self._digests)
        # No noise is used twice. A batch must belong to this training, unchanged (`batch_of`), and
        # its step must be the state's next one (`noise.step`); both are checked under `jit`, too.
        # Outside `jit`, a batch is used once whatever the state (`_used` is the last one). A state
        # is made once, before the first draw (`_initialised`).
        self.tag = self.run.key("whose batch")[:2].copy()
        self._used, self._initialised, self._transformed = 0, False, False
        # Held so that another transform with this key is noticed. A copy, because another training
        # of this seed has the same array.
        self._claim: object = claim_key(self.run.key("noise").copy())
        if path is not None and not self.run.is_resumed:
            self.run.save(None)

    @property
    def plan(self) -> PrivacyPlan:
        """N, l, q, T, σ, ε and δ, fixed from the start."""
        return self.run.plan

    @property
    def steps_per_epoch(self) -> int:
        """⌊N/l⌋, the steps of one pass over the data, on average."""
        return max(1, self.plan.num_examples // self.plan.expected_batch_size)

    @property
    def steps_begun(self) -> int:
        """Number of steps counted: drawn, lost in a crash, or missing from a period."""
        return self.run.steps_begun

    @property
    def epsilon_spent(self) -> float:
        """ε of `steps_begun` steps, at the plan's δ."""
        return self.run.epsilon_spent

    def batches(self, data: PyTree, *, keys: bool = False) -> Iterator[DrawnBatch]:
        """Draws the batches of the remaining steps.

        Drawing a batch spends its share of ε. Use each drawn batch once, in order. One pass over
        them is the whole training, of all its epochs: a plan that is used up has no batch left, and
        a second pass warns of that.

        Args:
          data: pytree of arrays `[N, ...]`; with `num_examples_given` all may have fewer rows. Rows
            are read where they are: on the host from NumPy arrays (or objects indexed like them,
            such as memory maps), on the device from JAX arrays. With users, an array has one row
            for each entry of `groups`.
          keys: whether each example gets a random `key` of its own in each step, for dropout or
            random crops, and the number of the `step` from 0, as the examples of `bam train` have
            them. Then `data` is a dict.

        Raises:
          InputError: if an array has another number of rows, or another shape than before, or after
            `close`.
          RuntimeError: in a fork of this training's process.
        """
        leaves, num = jax.tree.leaves(data), self.plan.num_examples
        expected = f"{num} examples"
        if self._groups is not None:
            num = len(self._groups)
            expected = f"{num} rows of users"
        elif self.plan.num_examples_given and leaves and np.shape(leaves[0]):
            num = min(num, max(1, len(leaves[0])))  # an empty array fails the check below
        for leaf in leaves:
            if not np.shape(leaf) or len(leaf) != num:
                raise InputError(
                    f"the plan is for {expected}, but an array of the data has shape "
                    f"{np.shape(leaf)}: {self._remedy_for_rows(leaves)}"
                )
        dtypes = [getattr(x, "dtype", "") for x in leaves]
        parts = zip(pytree.names(data), dtypes, leaves, strict=True)
        shapes = [f"{name} {dtype}{list(np.shape(x))}" for name, dtype, x in parts]
        before = self.run.more.setdefault("data", shapes)
        if before != shapes:
            raise InputError(f"the training began with data {before}, not {shapes}")
        if keys and not (isinstance(data, dict) and not {"key", "step"} & data.keys()):
            raise InputError('keys=True needs data that are a dict without "key" and "step"')
        like = dict(data, key=np.zeros(1), step=np.zeros(1)) if keys else data
        self._row_shapes = [np.shape(x)[1:] for x in jax.tree.leaves(like)]
        # Rows of users come from one table, made once for the training.
        table = None
        if self._groups is not None:
            table = user_table.table(self._groups, self.plan.group_size)
            num = len(table)

        def read(step: int) -> tuple[PyTree, Bool[np.ndarray, "rows ..."]]:
            batch = self.run.batch(step).within(num)
            batch = batch if table is None else user_table.examples(batch, table)
            mask = np.asarray(batch.mask)
            examples = jax.tree.map(lambda x: self._rows(batch, x), data)
            if keys:
                more = _keys_of(self.run.key("views"), np.int32(step - 1), mask.shape)
                examples |= _place(more, processes.of_rows(len(mask), self._mesh))
            return examples, mask

        return self.draw(read)

    def _remedy_for_rows(self, leaves: Sequence[Any]) -> str:
        """Returns what to do with data whose arrays have another number of rows than the plan."""
        if not all(map(np.shape, leaves)):
            return "give arrays with a row for each; np.asarray makes them of lists"
        lengths, num_examples = set(map(len, leaves)), self.plan.num_examples
        num_rows = max(lengths)
        # Another N helps neither arrays that disagree nor rows of users.
        if len(lengths) > 1 or num_rows == 0 or self._groups is not None:
            return "give arrays with a row for each"
        if self.plan.num_examples_given:  # a bound that is raised to the data counts them
            return f"drop rows down to the public bound {num_examples}"
        is_bound = f", or num_examples_given=True if {num_examples} is a public bound"
        return f"set num_examples={num_rows}{is_bound * (num_rows < num_examples)}"

    def draw(self, read: Reader) -> Iterator[DrawnBatch]:
        """Draws the batches of the remaining steps, as `batches`, with the examples of `read`.

        `read(step)` returns the examples of the batch `run.batch(step)`, and its mask. It is called
        after the step is counted.
        """
        if self.run.resumed_after < self.run.step >= self.run.end:
            warnings.warn(
                f"all {self.run.end} steps of the plan were drawn, and no batch is left: one pass "
                "over private.batches is the whole training; private.steps_per_epoch counts its "
                "epochs",
                stacklevel=2,
            )
        for step in self.run.steps():
            yield batch_of(*read(step), step, self.tag)

    def _rows(self, batch: PaddedBatch, values: Array | np.ndarray) -> Array | np.ndarray:
        """Returns a batch's rows of one array on the devices, zeros where there is no example."""
        indices, mask = np.ravel(batch.indices), np.ravel(batch.mask)
        if isinstance(values, jax.Array):
            rows: Array | np.ndarray = PaddedBatch(indices, mask).take(values)
        else:
            rows = rows_or_zeros(values, indices, mask)
        rows = rows.reshape(*batch.mask.shape, *rows.shape[1:])
        return _place(rows, processes.of_rows(len(rows), self._mesh))

    def gradient(
        self,
        oracle: Method,
        *,
        microbatch_size: int = 16,
        not_private: Mapping[str, Callable[[Params, PyTree], Array]] | None = None,
    ) -> optax.GradientTransformation:
        """Returns the transform from a drawn batch to the private gradient.

        Each training makes one such transform. Its `update(batch, state, params)` takes a
        `DrawnBatch` of `batches`. Per-example gradients are computed a microbatch at a time; an
        example whose gradient is not finite is dropped.

        Args:
          oracle: for one example, a row of `data`, for example `bam.dp_sgd(loss_fn)`. With users,
            its method is applied to a user's mean loss, see `bam.core.oracles.Method`.
          microbatch_size: number of per-example gradients in memory at once.
          not_private: name -> `(params, example) -> number`, such as `{"loss": loss_fn}`: figures
            of each drawn example at the step's parameters, for the owner of the data alone. The
            state's `not_private` holds them, and the `norm` of each gradient before clipping; `{}`
            asks for the norms alone. Each function costs its own evaluation.

        `update` is compiled once, and takes each batch once. `optax.MultiSteps` cannot wrap it,
        because noise is added once for each batch: lower `microbatch_size` to save memory. If you
        put `update` in your own program (`jax.jit(tx.update)`), it cannot notice that one batch and
        one state are used twice at different weights. The difference of the two results has no
        noise.

        Raises:
          RuntimeError: if the transform was made before, or in a fork of this training's process;
            in `init`, if the state was made before, or under `jit`, where the noise key would be a
            constant of the program.
          TypeError: in `update`, for anything but a `DrawnBatch`.
          InputError: with users, or with `trainable`, if the oracle has no `with_loss`. In
            `update`, for a batch that was used before, that belongs to another training, that is
            not the state's next one, or that was changed (more rows, rows of another shape, another
            mask); under `jit` the gradient is NaN instead, except for wrong shapes, and for a batch
            and a state that are both of one other training, which nothing notices. Also under
            `vmap` of anything that the gradient depends on, in `shard_map` and `pmap`, and after
            `close`, which a program that you compiled before cannot notice.
        """
        if not isinstance(oracle, Method):
            raise InputError(
                "private.gradient takes a method, not a loss or its gradient: write "
                f"private.gradient(bam.dp_sgd(loss_fn)), got a {type(oracle).__name__}"
            )
        with_loss = getattr(oracle, "with_loss", None)
        if with_loss is None and (self._groups is not None or self._trainable):
            raise InputError(
                "this oracle cannot use group_size or trainable: make it by bam.dp_sgd or another "
                "method of bam, or decorate yours with bam.core.oracles.method"
            )
        if "norm" in (not_private or {}):
            raise InputError("not_private has the norm of each gradient already: take another name")
        size, group_size = scalars.count("microbatch_size", microbatch_size), 0
        if self._groups is not None:
            group_size = self.plan.group_size
            size = max(1, size // group_size)  # a row is a user
        gradient = gradient_of(
            self.plan,
            oracle,
            self._clip,
            microbatch_size=size,
            mesh=self._mesh,
            group_size=group_size,
            trainable=self._trainable,
            figures=tuple(sorted((not_private or {}).items())),
        )
        users = (group_size,) if group_size else ()
        shape: tuple[int, ...] = (self.plan.capacity, *users)
        figures = dict.fromkeys(not_private or (), shape)
        if not_private is not None and self.plan.private:
            figures["norm"] = shape[:1]
        with self.run.in_use():
            if self._transformed:
                raise RuntimeError(
                    "a PrivateTraining makes one transform: a second one would spend its ε again"
                )
            self._transformed = True
        compiled = compile_once(type(gradient).update, gradient)

        def update(
            batch: DrawnBatch, state: PrivateState, params: Params | None = None
        ) -> tuple[Grads, PrivateState]:
            _check_arguments(batch, state, params)
            with self.run.in_use():
                self._check_rows(batch)
            tracing.check_one_program("a PrivateTraining")
            # Under `jit` these are tracers: then the result is NaN where an error is raised here.
            is_next, noise = is_next_batch(batch, state), state.privatize.noise
            tracing.check_keys(noise.key, noise.step)
            if isinstance(is_next, jax.core.Tracer):
                return compiled(batch, state, params)
            if not (is_next and np.array_equal(state.tag, self.tag)):
                raise InputError(
                    f"the batch of step {batch.step} does not follow the state, which has seen "
                    f"{noise.step} steps, or one of them is another training's, or its mask was "
                    "changed. A repeated batch or a restarted state would repeat noise"
                )
            step = int(batch.step)
            with self.run.in_use():
                if not self._used < step <= self.run.step:
                    raise InputError(
                        f"the batch of step {step} was already used, and a second gradient would "
                        "repeat its noise: take the next batch"
                    )
                used, self._used = self._used, step  # before another thread sees it as unused
            try:
                everywhere = processes.everywhere(self._mesh)
                return compiled(batch, *_place((state, params), everywhere))
            except BaseException:
                with self.run.lock:  # no result was seen, so the batch may be used again
                    self._used = used if self._used == step else self._used
                raise

        return optax.GradientTransformation(functools.partial(self._init, figures=figures), update)

    def _check_rows(self, batch: DrawnBatch) -> None:
        """Checks the rows of a drawn batch.

        InputError if rows were added, or have another shape than the data's.
        """
        user_axis = () if self._groups is None else (self.plan.group_size,)
        shape, dtype = np.shape(batch.mask), getattr(batch.mask, "dtype", None)
        facts = [(np.shape(x), getattr(x, "dtype", None)) for x in (batch.step, batch.tag)]
        if (
            len(shape) != 1 + len(user_axis)
            or dtype != np.bool_
            or facts != [((), np.int32), ((2,), np.uint32)]
        ):
            raise InputError(
                "mask, step or tag of this batch were changed, as by an optax transform before the "
                "private one, which must come first: only the batch's examples may be changed"
            )
        for name, x in zip(
            pytree.names(batch.examples), jax.tree.leaves(batch.examples), strict=True
        ):
            # The dtype of a typed key has no kind.
            kind = getattr(getattr(x, "dtype", None), "kind", None)
            if kind in ("O", "S", "U", "T") or isinstance(x, str):
                raise InputError(
                    f"{name or 'the data'} is an array of texts or objects, which JAX does not "
                    "take: give numbers, such as labels by names.index(label), names a public list"
                )
        if self._row_shapes is None:
            return
        rows = [np.shape(x) for x in jax.tree.leaves(batch.examples)]
        expected = [(*shape[:1], *user_axis, *row) for row in self._row_shapes]
        if rows != expected:
            raise InputError(
                f"the batch was drawn with shapes {expected} and now has {rows}. An example in two "
                "rows would exceed the sensitivity: make views of an example inside the loss"
            )

    def _init(self, params: Params, figures: dict[str, tuple[int, ...]]) -> PrivateState:
        if pytree.is_placeholder(params):
            no_key = jnp.zeros(0, jnp.uint32)
            return first_state(self._clip, mean_of(self.plan), params, no_key, no_key, figures)
        with self.run.in_use():
            return self._first_state(params, figures)

    def _first_state(self, params: Params, figures: dict[str, tuple[int, ...]]) -> PrivateState:
        if tracing.is_tracing():
            raise RuntimeError("init a private transform outside of jit: it holds a secret key")
        if self._initialised or self.run.step > self.run.resumed_after:
            raise RuntimeError(
                f"init a second time, or after {self.steps_begun} steps, would repeat the noise: "
                "make another PrivateTraining (its ε adds to this one's)"
            )
        pytree.check_has_arrays(params)
        pytree.check_real(params)
        trained = pytree.choose(params, self._trainable)
        if not jax.tree.leaves(trained):
            names = ", ".join(pytree.names(params)[:8])
            raise InputError(
                f"trainable={self._trainable} matches no parameter; the names are {names}"
            )
        self._initialised = True
        key = self.run.key("noise")
        state = first_state(self._clip, mean_of(self.plan), trained, key, self.tag, figures)
        # The first step after a resume is step `resumed_after` + 1, as in its batch.
        noise = state.privatize.noise
        noise = noise._replace(step=jnp.asarray(self.run.resumed_after, noise.step.dtype))
        return state._replace(privatize=state.privatize._replace(noise=noise))

    def gradient_norms(self, tree: PyTree, *, of_all_steps: bool = False) -> GradientNorms:
        """Returns the share of gradients clipped, and the norms of the others, with 95 % intervals.

        They are computed from noised sums, so ε covers them and they may be published. The clip
        must have slots: `bam.clip_by_l2_norm(C, slack=8)`.

        Args:
          tree: the state of the transform, or anything that holds it, such as a chain's state.
          of_all_steps: False for the last step; True for the average over all steps so far, whose
            interval is shorter.

        Raises:
          InputError: if the clip has no slots, no step was taken, or `tree` lacks the state.
        """
        is_state = lambda node: isinstance(node, PrivateState)  # noqa: E731
        states = [x for x in jax.tree.leaves(tree, is_leaf=is_state) if is_state(x)]
        for state in states:
            norms = gradient_norms(self.plan, state, of_all_steps=of_all_steps)
            if norms:
                return norms
        raise InputError(
            "there are no noised slots: give the state of this training's transform after a step, "
            "with a clip such as bam.clip_by_l2_norm(C, slack=8)"
        )

    def save(self, folder: str | Path, tree: PyTree = None) -> None:
        """Saves a checkpoint from which a training with this `folder` continues, all or nothing.

        It is for resuming, not for release. A training without a folder has this one from now on.
        `tree` is any pytree of arrays, such as parameters and the chain's state. Without a seed, no
        key is written.

        Raises:
          InputError: if the folder is another training's, this training is closed, or a leaf is not
            a number or is a key.
          BlockingIOError: if another process uses the folder.
          OSError: if the checkpoint cannot be written.
          RuntimeError: in a fork of this training's process.
        """
        with self.run.in_use():
            path = _resolve(folder)
            if self.run.folder not in (None, path):
                raise InputError(
                    f"this training is already saved in {self.run.folder}: save it there"
                )
            if self.run.folder is None:
                self.run.check_savable(tree)  # before a folder is made
                self.run.open(path, self._record, self._digests, must_begin=True)
            self.run.save(tree)

    @property
    def _record(self) -> JsonObject:
        """The record that must be the same when the training continues."""
        return self.plan.to_json() | self._asked

    @property
    def _digests(self) -> Callable[[bytes], JsonObject] | None:
        """Returns a function from the folder's key to the digest of the rows' users, in order.

        None without users.
        """
        if self._groups is None:
            return None
        # Not of the ids as given: NumPy would make floats of large ones, which merge persons.
        content = repr(self._groups.tolist()).encode()
        digest = lambda key: hmac.new(key, content, "sha256").hexdigest()  # noqa: E731
        return lambda key: {"groups, or in another order": digest(key)}

    @classmethod
    def resume(cls, folder: str | Path, **settings: Any) -> "PrivateTraining":
        """Continues the training in a folder, as the argument `folder` does.

        `settings` are the other arguments. InputError if no training was saved there.
        """
        if not (_resolve(folder) / PLAN).exists():
            raise InputError(f"{_resolve(folder)} has no saved training")
        return cls(**settings, folder=folder)

    def restore(self, like: PyTree) -> PyTree:
        """Returns the last saved pytree, with the structure of `like`.

        If none was saved, it returns `like` itself. A state of `init` gets this training's own key
        and tag. InputError if other arrays were saved, or the training has no folder.
        """
        if self.run.folder is None:
            raise InputError("this training was not saved: pass folder=…, or call save first")
        return self.adopt(like)

    def adopt(self, like: PyTree) -> PyTree:
        """Returns the last saved pytree, or else `like`, with this training's own key and tag."""

        def with_tag(node: Any) -> Any:
            if not isinstance(node, PrivateState):
                return node
            return node._replace(tag=processes.put(self.tag, node.tag.sharding))

        is_state = lambda node: isinstance(node, PrivateState)  # noqa: E731
        return jax.tree.map(with_tag, self.run.restore(like), is_leaf=is_state)

    def close(self) -> None:
        """Ends this training, which takes no more steps, and frees the folder."""
        self.run.close()
        self._claim = None

    def write_statement(self, path: str | Path, data: str) -> None:
        """Writes `PRIVACY.md`: the guarantee of the weights, with code that computes ε again.

        Args:
          path: the file.
          data: a description of the data set that may be published.

        Raises:
          InputError: for a plan without privacy.
        """
        is_proved = getattr(self._clip, "is_proved", False)
        num_slots = num_slots_of(self._clip)
        text = statement.of_own_loop(self.run, self._sensitivity, is_proved, num_slots, data)
        files.write_text(Path(path), text)

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles."""
        raise TypeError("a PrivateTraining cannot be copied: the copy would repeat its noise")


def _non_defaults(**arguments: tuple[Any, Any]) -> dict[str, Any]:
    """Returns the arguments, each with its default, that are not at their default."""
    return {name: value for name, (value, default) in arguments.items() if value != default}


def _check_arguments(batch: Any, state: Any, params: Any) -> None:
    """Raises TypeError if these are not arguments of a private gradient's `update`."""
    if not isinstance(batch, DrawnBatch):
        # `optax.MultiSteps` gives arrays of the parameters' shapes, while JAX traces.
        raise TypeError(
            "a private gradient needs update(batch, state, params) with a batch of "
            f"PrivateTraining.batches(data), got {type(batch).__name__}. "
            + (NO_MULTI_STEPS if tracing.is_tracing() else FIRST_PRIVATE)
        )
    if params is None:
        raise TypeError(
            "a private gradient needs the parameters: write tx.update(batch, state, params)"
        )
    if not isinstance(state, PrivateState):
        raise TypeError(
            "a private gradient needs the state of tx.init(params), got "
            f"{type(state).__name__}: write tx.update(batch, state, params)"
        )


def _place(tree: PyTree, sharding: NamedSharding | None) -> PyTree:
    """Returns the arrays with a sharding, or as they are without one."""
    return processes.put(tree, sharding) if sharding else tree


@functools.partial(jax.jit, static_argnums=2)
def _keys_of(
    key_of_views: UInt32[Array, "2"], step: Int32[Array, ""], shape: tuple[int, ...]
) -> dict[str, Array]:
    """Returns a `key` and the `step` for each place of a batch, `[M]` or `[M, k]` for users."""
    key = jax.random.wrap_key_data(key_of_views, impl="threefry2x32")
    key = jax.random.fold_in(key, step)

    # The second half, as in `bam train`: the first is the key of the random views.
    def key_at(place: Array) -> Array:
        return jax.random.split(jax.random.fold_in(key, place))[1]

    keys = jax.vmap(key_at)(jnp.arange(shape[0]))
    if len(shape) == 2:
        keys = jax.vmap(lambda key: jax.random.split(key, shape[1]))(keys)
    return {"key": keys, "step": jnp.full(shape, step, jnp.int32)}


def _resolve(folder: str | Path) -> Path:
    return files.user_path(folder).resolve()
