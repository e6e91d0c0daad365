"""Private training with a loop of one's own: sampler, clip, noise and ε in one object.

Each is made from the same plan, so they cannot disagree: the batches are those that the accountant
has counted, the noise is scaled to the clip's sensitivity, and the mean is divided by the expected
batch size. It is a `PrivateRun` with a transform, as `bam train` is one with a config.
"""

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import inspect
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int32, PyTree, UInt32

from bam import files, provenance
from bam.core import pytree, scalars, seeds, tracing, user_table
from bam.core.clipping import as_declared, sensitivity_of
from bam.core.closure import Closure
from bam.core.gaussian import check_std
from bam.core.noise import check_past, first_noise, fitting_size
from bam.core.oracles import LossFn, Oracle, as_pytree, mean_loss
from bam.core.privatize import (
    NoisedMean,
    PrivatizeState,
    check_not_accumulated,
    private_mean,
)
from bam.core.pytree import Grads, Params
from bam.core.sampling import PaddedBatch, rows_or_zeros
from bam.errors import InputError
from bam.files import JsonMapping, JsonObject
from bam.privacy import ledger, statement
from bam.privacy.plan import Population, PrivacyPlan, check_same, make_plan
from bam.privacy.run import PLAN, PrivateRun, recorded_plan
from bam.provenance import git_commit


class DrawnBatch(NamedTuple):
    """The examples of one step, drawn by a `PrivateTraining`; its fields are as secret as they are.

    A row may be given other values of the same shape, computed from itself alone; rows cannot be
    added, and mask, step and run stay as they are.

    Attributes:
      examples: pytree of `[M, ...]`, at random places; zeros in rows of no example. Of users
        `[M, k, ...]`, a row for each.
      mask: `[M]`, or `[M, k]`, True for what is an example.
      step: from 1.
      run: two words that say whose batch it is, and with which mask.
    """

    examples: PyTree
    mask: Bool[Array | np.ndarray, "rows ..."]
    step: Int32[Array | np.ndarray, ""]
    run: UInt32[Array | np.ndarray, "2"]


class PrivateState(NamedTuple):
    """State of `PrivateTraining.gradient`: of clip and noise, with the last private gradient.

    Never publish it, or save it beside what is published: it holds the key of the noise.
    """

    privatize: PrivatizeState
    previous: Grads
    run: UInt32[Array, "2"]


class PrivateTraining:
    r"""A private training of T = num_epochs · ⌊N/l⌋ steps, by a loop of one's own.

    `gradient` is an optax transform from a drawn batch to the private gradient
    $\big(\sum_i \mathrm{clip}(g_i) + N(0, \sigma^2 S^2 I)\big) / l$, to be chained with any
    optimizer; `batches` draws the T batches. Its randomness is made by itself and lives in this
    process alone: a fork of the process cannot use it, and threads that share it get each step
    once. A training that a crash ends is spent, its ε counts and another adds its own,
    unless it has a `folder`: made again there, it goes on with the steps that are left.

    Attributes:
      plan: the `bam.PrivacyPlan`: N, l, q, T, σ, ε, δ.

    Args:
      num_examples: N, public: the number of examples, or users; with `num_examples_given` the most.
      expected_batch_size: l, from 1 to N; what is drawn varies.
      num_epochs: passes over the data, on average.
      epsilon: ε that T steps may spend.
      delta: δ, below 1/N.
      clip: a bounded per-example transform, such as `bam.clip_by_l2_norm(1.0)`.
      accountant: "pld" or "rdp".
      mechanism: how batches are drawn, a key of `bam.privacy.mechanisms.MECHANISMS`.
      mechanism_options: of it, by name.
      num_examples_given: whether N is a public constant, fixed without counting the data, which may
        then have fewer rows: ε is for adding or removing one. Otherwise it is for one example that
        is replaced by nothing, its place left empty.
      groups: `[rows]` on the host, the user that each row of the data is of: N counts users, they
        are drawn, and the oracle's gradient of a user's mean loss is clipped. None: a row is an
        example.
      group_size: k, public: the most rows used of a user, see `bam.core.user_table.table`.
      mesh: devices of this process along one axis, which share the examples of a step; None for
        where the data are. The gradient is the same.
      trainable: parameters in whose names, like "head/kernel", this regular expression is found are
        trained; of the others the gradient is zero, without noise. "": all.
      seed: None, for what is released: randomness of the operating system. An integer repeats a
        training, and whoever guesses it removes the noise; the statement says so.
      folder: of the training that is saved there, which goes on, or else of this one, which begins
        there. Each step is counted on the disk, before its batch is given; see `save` and
        `restore`. Another mesh will do; every other argument must be the same. Without a seed
        further batches and noise are of new secrets; with one, steps after the last `save` are
        taken again, to the same bits. None: nothing is kept.

    Raises:
      InputError: as `bam.make_plan`, if the clip declares no finite bound, the mesh has two axes,
        the users are not N, the folder's training was of other arguments, or a file of it is
        damaged.
      BlockingIOError: if a training is going on in the folder.

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
        num_examples: int,
        expected_batch_size: int,
        num_epochs: int,
        epsilon: float,
        delta: float,
        clip: optax.GradientTransformation,
        accountant: str = "pld",
        mechanism: str = "poisson",
        mechanism_options: JsonMapping | None = None,
        num_examples_given: bool = False,
        groups: np.ndarray | None = None,
        group_size: int = 0,
        mesh: Mesh | None = None,
        trainable: str = "",
        seed: int | None = None,
        folder: str | Path | None = None,
    ) -> None:
        """Plans the noise, or takes the plan of the folder; nothing is drawn yet."""
        epsilon, clip = scalars.real("epsilon", epsilon), as_declared(clip)
        self._sensitivity = sensitivity_of(clip)
        if self._sensitivity == 0:
            raise InputError("this clip makes every gradient zero (sensitivity 0)")
        seed = None if seed is None else scalars.whole("seed", seed)
        if not 0 < epsilon < float("inf"):
            raise InputError(f"epsilon must be positive and finite, got {epsilon}")
        if mesh is not None and (len(mesh.axis_names) != 1 or mesh.is_multi_process):
            raise InputError(f"mesh must have one axis, of devices of this process, got {mesh}")
        self._mesh = mesh and Mesh(mesh.devices, mesh.axis_names)  # of an axis of type Auto
        self._num_devices = self._mesh.size if self._mesh else 1
        self._clip = clip
        if not isinstance(trainable, str):
            raise InputError(f"trainable must be a regular expression, got {trainable!r}")
        self._trainable, chosen = trainable, pytree.matching(trainable)
        self._trained_of = functools.partial(_part, chosen)
        population = Population(num_examples, group_size, num_examples_given)
        self._groups = None if groups is None and not group_size else population.numbered(groups)
        path = None if folder is None else _resolved(folder)
        plan = _planned(
            path,
            population,
            epsilon,
            expected_batch_size=expected_batch_size,
            num_steps=num_epochs * (num_examples // max(1, expected_batch_size)),
            delta=delta,
            accountant=accountant,
            mechanism={**(mechanism_options or {}), "name": mechanism},
        )
        check_std(plan.noise_multiplier * self._sensitivity)
        # What defines this training, beside its plan.
        self._asked: JsonObject = {"target_epsilon": epsilon, "trainable": trainable, "seed": seed}
        self._asked |= {"sensitivity": self._sensitivity, "clip": in_words(clip.update)}
        self._ids = np.array(groups)
        self._row_shapes: list[tuple[int, ...]] | None = None
        git_commit()  # now: by the first step the files may be others
        self._run = PrivateRun(plan, seed, self._num_devices)
        if path is not None:
            self._run.open(path, self._record, self._digests)
        # No noise is drawn twice: a batch must be of this training and as it was drawn (`_words`),
        # and its step the next one of the state (`noise.step`); under `jit`, too. Outside of it a
        # batch is used once, with whatever state (`_used`, the last). A state is made once, before
        # the first draw (`_initialised`; `_first`, the steps taken before this object).
        self._words = self._run.key("whose batch")[:2].copy()
        self._first = self._used = self._run.step
        self._initialised = self._transformed = False
        self._claim: object = seeds.claimed(self._run.key("noise").copy())
        if path is not None and not self._run.is_resumed:
            self._run.save(None)

    @property
    def plan(self) -> PrivacyPlan:
        """N, l, q, T, σ, ε and δ: what batches and noise are made by, fixed from the start."""
        return self._run.plan

    @property
    def steps_begun(self) -> int:
        """Batches drawn so far, those that a crash lost included."""
        return self._run.steps_begun

    @property
    def epsilon_spent(self) -> float:
        """ε, at the plan's δ, of the batches drawn so far."""
        return self._run.epsilon_spent

    def batches(self, data: PyTree) -> Iterator[DrawnBatch]:
        """Draws the batches of the steps that are left; drawing one spends its share of ε.

        Every batch that is drawn is to be used, once and in order. A plan that is used up has none
        left.

        Args:
          data: pytree of arrays `[N, ...]`; with `num_examples_given` all may have fewer rows. They
            are taken where they are: on the host of NumPy's (or what is indexed like them, such as
            a memory map), on the device of JAX's. Of users an array has a row for each of `groups`.

        Raises:
          InputError: if an array has another number of rows, or another shape than before; after
            `close`. RuntimeError in a fork of this training's process.
        """
        leaves, num = jax.tree.leaves(data), self.plan.num_examples
        planned = f"{num} examples"
        if self._groups is not None:
            num = len(self._groups)
            planned = f"{num} rows of users"
        elif self.plan.num_examples_given and leaves and np.shape(leaves[0]):
            num = min(num, max(1, len(leaves[0])))
        for leaf in leaves:
            if not np.shape(leaf) or len(leaf) != num:
                raise InputError(
                    f"the plan is for {planned}; an array of data has shape {np.shape(leaf)}"
                )
        dtypes = [getattr(x, "dtype", "") for x in leaves]
        parts = zip(pytree.names(data), dtypes, leaves, strict=True)
        shapes = [f"{name} {dtype}{list(np.shape(x))}" for name, dtype, x in parts]
        before = self._run.more.setdefault("data", shapes)
        if before != shapes:
            raise InputError(f"the training began with data {before}, not {shapes}")
        self._row_shapes = [np.shape(x)[1:] for x in leaves]
        return self._drawn(data, num)

    def _drawn(self, data: PyTree, num: int) -> Iterator[DrawnBatch]:
        table = None
        if self._groups is not None:
            table = user_table.table(self._groups, self.plan.group_size)
            num = len(table)
        for step in self._run.steps():
            batch = self._run.batch(step).only(num)
            batch = batch if table is None else user_table.examples(batch, table)
            examples = jax.tree.map(lambda x, drawn=batch: self._rows(drawn, x), data)
            number, mask = np.array(step, np.int32), np.asarray(batch.mask)
            run = np.asarray(_words_of(self._words, number, mask))
            for fact in (number, mask, run):
                fact.setflags(write=False)
            yield DrawnBatch(examples, mask, number, run)

    def _rows(self, batch: PaddedBatch, values: Array | np.ndarray) -> Array | np.ndarray:
        """A batch's rows of one array on the devices, zeros where there is no example."""
        indices, mask = np.ravel(batch.indices), np.ravel(batch.mask)
        if isinstance(values, jax.Array):
            rows: Array | np.ndarray = PaddedBatch(indices, mask).take(values)
        else:
            rows = rows_or_zeros(values, indices, mask)
        rows = rows.reshape(*batch.mask.shape, *rows.shape[1:])
        axes = self._mesh.axis_names if self._mesh and len(rows) % self._mesh.size == 0 else ()
        return self._placed(rows, *axes)

    def _placed(self, tree: PyTree, *axes: str) -> PyTree:
        """The arrays on the mesh, if there is one: their rows shared along an axis, or copied."""
        if self._mesh is None:
            return tree
        return jax.device_put(tree, NamedSharding(self._mesh, PartitionSpec(*axes)))

    def gradient(
        self, oracle: Oracle, *, microbatch_size: int = 16
    ) -> optax.GradientTransformation:
        """The transform from a drawn batch to the private gradient; one for each training.

        Its `update(batch, state, params)` takes a `DrawnBatch` of `batches`. Per-example gradients
        are computed a microbatch at a time; an example whose gradient is not finite is dropped.

        Args:
          oracle: of one example as `data` has them in a row, for example `bam.dp_sgd(loss_fn)`. Of
            users its method is applied to their mean loss, see `Oracle.with_loss`.
          microbatch_size: per-example gradients that are in memory at once.

        `update` is compiled by itself, once, and takes each batch once. In a program of yours that
        contains it (`jax.jit(tx.update)`), one batch and one state that are used twice, at other
        weights, are not seen: the two results differ by what the noise was to hide.

        Raises:
          RuntimeError: if it was made before, or in a fork of this training's process; in `init`,
            if the state was made before or it is traced (under `jit`), where the noise's key would
            be a constant of the program.
          TypeError: in `update`, for anything else than a `DrawnBatch`.
          InputError: of users, or with `trainable`, if the oracle has no `with_loss`. In `update`,
            for a batch that was used before, one of another training, or one that is not the
            state's next or not as it was drawn: with more rows, rows of another shape, or another
            mask; under `jit` the gradient is NaN instead, but for shapes. Under `vmap` of anything
            that the gradient depends on, in `shard_map` and in `pmap`. After `close`; a program of
            yours that was compiled before cannot see that.
        """
        if oracle.with_loss is None and (self.plan.group_size or self._trainable):
            raise InputError(
                "this oracle has no gradient of a user, or of some of the parameters: make it by a "
                "method that is decorated with bam.core.oracles.method"
            )
        with self._run.in_use():
            if self._transformed:
                raise RuntimeError(
                    "a PrivateTraining makes one transform: a second one would spend its ε again"
                )
            self._transformed = True
        plan = self.plan
        by = NoisedMean(plan.noise_multiplier, plan.expected_batch_size, plan.mechanism.strategy)
        compiled = tracing.compiled_once(
            _private_gradient,
            as_pytree(oracle),
            self._clip,
            by,
            microbatch_size=self._fitting(microbatch_size),
            group_size=plan.group_size,
            trainable=self._trainable,
            mesh=self._mesh,
        )

        def update(
            batch: DrawnBatch, state: PrivateState, params: Params | None = None
        ) -> tuple[Grads, PrivateState]:
            if not isinstance(batch, DrawnBatch) or params is None:
                raise TypeError(
                    "a private gradient needs update(batch, state, params) with a batch of "
                    f"PrivateTraining.batches(data), got {type(batch).__name__}"
                )
            with self._run.in_use():
                self._check_rows(batch)
            tracing.check_one_program("a PrivateTraining")
            right, noise = _is_next(batch, state), state.privatize.noise
            tracing.check_keys(noise.key, noise.step)
            if isinstance(right, jax.core.Tracer):
                return compiled(batch, state, params)
            if not right:
                raise InputError(
                    f"the batch of step {batch.step} is of another training, or not the next one, "
                    f"or its mask is not that which was drawn: the state has seen {noise.step} "
                    "steps. A batch that is used twice, or a state that is started over, would "
                    "repeat noise"
                )
            step = int(batch.step)
            with self._run.in_use():
                if not self._used < step <= self._run.step:
                    raise InputError(
                        f"the batch of step {step} was used before: at other weights, or with "
                        "another state, it would repeat noise"
                    )
                used, self._used = self._used, step  # before another thread sees it as unused
            try:
                return compiled(batch, *self._placed((state, params)))
            except BaseException:
                with self._run.lock:  # no result was seen
                    self._used = used if self._used == step else self._used
                raise

        return optax.GradientTransformation(self._init, update)

    def _check_rows(self, batch: DrawnBatch) -> None:
        """InputError if rows were added to a drawn batch, or have another shape than the data's."""
        user_axis = (self.plan.group_size,) if self.plan.group_size else ()
        shape, dtype = np.shape(batch.mask), getattr(batch.mask, "dtype", None)
        words = [(np.shape(x), getattr(x, "dtype", None)) for x in (batch.step, batch.run)]
        if (
            len(shape) != 1 + len(user_axis)
            or dtype != np.bool_
            or words != [((), np.int32), ((2,), np.uint32)]
        ):
            raise InputError(
                "mask, step or run of this batch are not those that were drawn: a batch may get "
                "other values in its examples alone"
            )
        if self._row_shapes is None:
            return
        rows = [np.shape(x) for x in jax.tree.leaves(batch.examples)]
        expected = [(*shape[:1], *user_axis, *row) for row in self._row_shapes]
        if rows != expected:
            raise InputError(
                f"this batch was drawn with arrays {expected}, and now has {rows}: an example in "
                "more than one row would move the sum by more than S. Make views of an example "
                "inside the loss"
            )

    def _init(self, params: Params) -> PrivateState:
        with self._run.in_use():
            return self._first_state(params)

    def _first_state(self, params: Params) -> PrivateState:
        if tracing.being_traced():
            raise RuntimeError("init a private transform outside of jit: it holds a secret key")
        if self._initialised or self._run.step > self._first:
            raise RuntimeError(
                f"the state is started over after {self.steps_begun} steps: a second one has "
                "the same noise. Begin another PrivateTraining; its ε adds to this"
            )
        check_not_accumulated()
        pytree.check_has_arrays(params)
        pytree.check_real(params)
        trained = self._trained_of(params)
        if not jax.tree.leaves(trained):
            names = ", ".join(pytree.names(params)[:8])
            raise InputError(f"trainable is found in no parameter's name: {names}")
        self._initialised = True
        key, strategy = jnp.asarray(self._run.key("noise")), self.plan.mechanism.strategy
        noise = first_noise(key, self._clip, trained, strategy)
        check_past(noise, self.plan.noise_multiplier, strategy)
        noise = noise._replace(step=jnp.asarray(self._first, noise.step.dtype))
        wide = jax.tree.map(lambda x: pytree.at_least_float32(jnp.asarray(x)), trained)
        state = PrivatizeState(self._clip.init(trained), noise)
        return PrivateState(state, optax.tree.zeros_like(wide), jnp.asarray(self._words))

    def _fitting(self, microbatch_size: int) -> int:
        """As many rows as asked for, if 32 bits hold the sum of their integers."""
        size = scalars.count("microbatch_size", microbatch_size)
        size = max(1, size // self.plan.group_size) if self.plan.group_size else size
        plan = self.plan
        return fitting_size(size, plan.noise_multiplier, self._sensitivity, plan.capacity)

    def save(self, folder: str | Path, tree: PyTree = None) -> None:
        """Replaces what a training with this `folder` goes on from, all or nothing.

        It is for resuming, not for release. A training that was made without a folder has it from
        now on. `tree` is any pytree of arrays, such as parameters and the chain's state; of a
        training without a seed no key is written.

        Raises InputError if the folder is another training's, this one is closed, or a leaf is no
        number or a key; BlockingIOError if another process has the folder; OSError if it cannot be
        written; RuntimeError in a fork of this training's process.
        """
        with self._run.in_use():
            path = _resolved(folder)
            if self._run.folder not in (None, path):
                raise InputError(f"this training is saved in {self._run.folder}")
            if self._run.folder is None:
                self._run.check_savable(tree)  # before a folder is made
                self._run.open(path, self._record, self._digests, must_begin=True)
            self._run.save(tree)

    @property
    def _record(self) -> JsonObject:
        """What must be the same when the training goes on."""
        return self.plan.to_json() | self._asked

    @property
    def _digests(self) -> Callable[[bytes], JsonObject] | None:
        """A digest of the users' names, row by row."""
        if self._groups is None:
            return None
        content = repr(self._ids.tolist()).encode(errors="surrogatepass")
        digest = lambda key: hmac.new(key, content, "sha256").hexdigest()  # noqa: E731
        return lambda key: {"groups, or in another order": digest(key)}

    @classmethod
    def resume(cls, folder: str | Path, **settings: Any) -> "PrivateTraining":
        """The training in a folder, as with the argument `folder`; one must have been saved there.

        `settings` are its other arguments. Raises an InputError if there is none.
        """
        if not (_resolved(folder) / PLAN).exists():
            raise InputError(f"{_resolved(folder)} holds no training that was saved")
        return cls(**settings, folder=folder)

    def restore(self, like: PyTree) -> PyTree:
        """What was last saved, in a pytree like it; itself if no pytree was.

        Of its values the secrets alone are kept, in a state of `init`. Raises InputError if other
        arrays were saved, or the training has no folder.
        """
        if self._run.folder is None:
            raise InputError("nothing of this training was saved")
        words = jnp.asarray(self._words)
        return jax.tree.map(
            lambda x: x._replace(run=words) if _is_state(x) else x,
            self._run.restore(like),
            is_leaf=_is_state,
        )

    def close(self) -> None:
        """Ends this training, which takes no more steps, and lets others have the folder."""
        self._run.close()
        self._claim = None

    def write_statement(self, path: str | Path, data: str) -> None:
        """Writes `PRIVACY.md`: what the weights guarantee, with lines that compute ε again.

        Args:
          path: the file.
          data: the data set, in words that may be published.
        """
        mechanism, versions, commit = self.plan.mechanism, provenance.versions(), git_commit()
        record = {
            "seed": self._run.seed,
            "clip_norm": None,  # S alone is known
            "sensitivity": self._sensitivity,
            "sampling": mechanism.sampling,
            "noise": mechanism.noise,
            "noise_key": "operating system" if self._run.seed is None else "seed",
            "steps_begun": self.steps_begun,
            "processes": self._run.processes or [ledger.this_process(1, self._num_devices)],
        }
        facts = statement.facts_of_own_loop(
            self.plan,
            record,
            is_proved=getattr(self._clip, "is_proved", False),
            data=data,
            exported_by=f"bam {versions['bam']}, commit {commit}",
        )
        files.write_text(Path(path), statement.text_of(facts))

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles."""
        raise TypeError("a PrivateTraining cannot be copied: the copy would repeat its noise")


def _private_gradient(
    oracle: Oracle,
    clip: optax.GradientTransformation,
    by: NoisedMean,
    batch: DrawnBatch,
    state: PrivateState,
    params: Params,
    *,
    microbatch_size: int,
    group_size: int,
    trainable: str,
    mesh: Mesh | None,
) -> tuple[Grads, PrivateState]:
    """The private gradient; NaN of a batch that is not the state's next."""
    rows, mask = batch.examples, jnp.asarray(batch.mask)
    if group_size:
        rows, mask = (rows, mask), jnp.any(mask, axis=1)
    at = oracle.ascend(params, _merged(state.previous, optax.tree.zeros_like(params)))

    def loss_of(loss: LossFn) -> LossFn:
        """The loss of a row of `rows`, of the trained parameters alone."""
        loss = mean_loss(loss) if group_size else loss
        return lambda trained, row: loss(_merged(trained, at), row)

    if oracle.with_loss and (group_size or trainable):
        oracle = oracle.with_loss(loss_of)

    def gradient_of(trained: Params, row: PyTree) -> Grads:
        grads = oracle.grad(trained, row)
        shapes, expected = (list(map(jnp.shape, jax.tree.leaves(x))) for x in (grads, trained))
        if not pytree.same_structure(grads, trained) or shapes != expected:
            raise InputError("the oracle's gradient is no pytree like the parameters")
        return grads

    gradient, _, after = private_mean(
        gradient_of,
        clip,
        _part(pytree.matching(trainable), at),
        rows,
        state.privatize,
        by,
        mask=mask,
        microbatch_size=microbatch_size,
        mesh=mesh,
    )
    right = _is_next(batch, state)
    gradient = jax.tree.map(lambda x: jnp.where(right, x, jnp.nan), gradient)
    gradient = tracing.never_mapped(gradient)
    whole = _merged(gradient, optax.tree.zeros_like(params))
    return whole, PrivateState(after, gradient, state.run)


def _resolved(folder: str | Path) -> Path:
    return files.user_path(folder).resolve()


def _planned(
    folder: Path | None,
    population: Population,
    epsilon: float,
    mechanism: JsonMapping,
    **facts: Any,
) -> PrivacyPlan:
    """The plan that a folder has recorded, if it is of these arguments; without one, a new plan."""
    if folder and (recorded := recorded_plan(folder, epsilon)):
        facts |= {"population": population, "mechanism_config": mechanism}
        asked = dataclasses.replace(recorded, **facts)  # but σ and ε, whatever is installed now
        check_same(folder / PLAN, recorded.to_json(), asked.to_json())
        return recorded
    return make_plan(num_examples=population, target_epsilon=epsilon, mechanism=mechanism, **facts)


def _is_next(batch: DrawnBatch, state: PrivateState) -> bool | Bool[Array, ""]:
    facts: tuple[Any, ...] = (batch.step, batch.run, batch.mask)
    facts += (state.privatize.noise.step, state.run)
    if not any(isinstance(x, jax.core.Tracer) for x in facts):
        facts = tuple(map(np.asarray, facts))  # a few operations of NumPy's take less time
    number, words, mask, steps_taken, run = facts
    right = (number == steps_taken + 1) & (words == _words_of(run, number, mask)).all()
    return bool(right) if isinstance(right, np.bool_) else right


def _words_of(
    run: UInt32[Array | np.ndarray, "2"],
    step: Int32[Array | np.ndarray, ""],
    mask: Bool[Array | np.ndarray, "rows ..."],
) -> UInt32[Array | np.ndarray, "2"]:
    """The words of a run's batch: those of the run, changed by the step and a checksum of the mask.

    Each place has a word of its own, so that another mask has, but for one in 2^32, another sum.
    """
    xp: Any = np if isinstance(mask, np.ndarray) else jnp
    words = xp.arange(1, mask.size + 1, dtype=xp.uint32) * xp.uint32(0x9E3779B1)
    words = (words ^ (words >> 15)) * xp.uint32(0x85EBCA77)
    words = (words ^ (words >> 13)) * xp.uint32(0xC2B2AE3D)
    words = xp.where(mask.ravel(), words ^ (words >> 16), xp.uint32(mask.size))
    checksum = xp.sum(words, dtype=xp.uint32)
    return run ^ xp.stack([xp.asarray(step).astype(xp.uint32), checksum])


def _is_state(node: object) -> bool:
    return isinstance(node, PrivateState)


def _part(chosen: Callable[[PyTree], PyTree], tree: PyTree) -> PyTree:
    """The chosen leaves of a tree: None takes the place of the others."""
    return jax.tree.map(lambda x, keep: x if keep else None, tree, chosen(tree))


def _merged(trained: PyTree, others: PyTree) -> PyTree:
    """The whole of which `trained` has a part, and None in place of the rest."""
    return jax.tree.map(
        lambda x, other: other if x is None else x, trained, others, is_leaf=lambda x: x is None
    )


def in_words(value: Any, above: tuple[int, ...] = ()) -> str:
    """A function, by its name and the values that it keeps, in words that every process gives.

    For example "bam.core.clipping.normalize.<locals>.update(bound=1.0, floor=0.01)". Kept are the
    values that it closes over, defaults and, in objects, attributes that are plain. Arrays stand by
    a digest; the function's lines are not told.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | float | str | bytes | None):
        return repr(value)
    if id(value) in above or len(above) > 20:  # a function that calls itself, a list in itself
        return type(value).__qualname__
    describe = functools.partial(in_words, above=(*above, id(value)))
    if isinstance(value, np.ndarray | jax.Array):
        array = np.asarray(value)
        content = repr(array.tolist()).encode() if array.dtype == object else array.tobytes()
        return f"{array.dtype}{list(array.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(describe, value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(describe, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{describe(key)}: {describe(x)}' for key, x in value.items())}}}"
    if isinstance(value, Closure):
        return describe([value.fn, value.structure, value.numbers])
    if isinstance(value, functools.partial):
        return describe([value.func, value.args, value.keywords])
    if isinstance(value, type | types.ModuleType):
        return value.__name__
    plain = (bool, int, float, str, tuple, np.ndarray, np.generic, jax.Array)
    function = inspect.unwrap(value) if callable(value) else value
    kept = {}
    if isinstance(function, types.FunctionType):
        parameters = inspect.signature(function).parameters.values()
        kept = {x.name: x.default for x in parameters if x.default is not x.empty}
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # an empty cell
                kept[name] = cell.cell_contents
    elif isinstance(function, types.MethodType):
        kept = {"self": function.__self__}
    elif isinstance(vars(type(function)).get("__dict__"), types.GetSetDescriptorType):
        kept = {k: x for k, x in sorted(vars(function).items()) if isinstance(x, plain)}
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    words = ", ".join(f"{key}={describe(x)}" for key, x in kept.items())
    return f"{named.__module__}.{named.__qualname__}({words})"
