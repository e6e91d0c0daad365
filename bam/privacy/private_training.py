"""Private training with a loop of one's own: sampler, clip, noise and ε in one object.

Each is made from the same plan, so they cannot disagree: the batches are those that the accountant
has counted, the noise is scaled to the clip's sensitivity, and the mean is divided by the expected
batch size. `bam train` is the same for configs, with a run folder and a ledger that outlives a
crash.
"""

import dataclasses
import functools
import math
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Int32, PyTree, UInt32

from bam import files, provenance
from bam.core import chacha, tracing
from bam.core.clipping import sensitivity_of
from bam.core.noise import first_noise
from bam.core.oracles import Oracle
from bam.core.privatize import NoisedMean, PrivatizeState, private_mean
from bam.core.pytree import Grads, Params
from bam.core.sampling import PaddedBatch
from bam.files import JsonMapping
from bam.privacy import statement
from bam.privacy.plan import Population, make_plan
from bam.provenance import git_commit


class DrawnBatch(NamedTuple):
    """The examples of one step, drawn by a `PrivateTraining`; its fields are as secret as they are.

    Attributes:
      examples: pytree of `[M, ...]`, at random places; zeros in rows of no example.
      mask: `[M]`, True for rows that are examples.
      step: from 1.
      run: two words that say whose batch it is.
    """

    examples: PyTree
    mask: Bool[Array | np.ndarray, " rows"]
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
    process alone, so a training that a crash ends is spent: its ε counts, and another adds its own.

    Attributes:
      plan: the `bam.PrivacyPlan`: N, l, q, T, σ, ε, δ.

    Args:
      num_examples: N, public: the number of examples, or with `num_examples_given` the most.
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
      seed: None, for what is released: randomness of the operating system. An integer repeats a
        training, and whoever guesses it removes the noise; the statement says so.

    Raises:
      ValueError: as `bam.make_plan`, or if the clip declares no finite bound.

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
        seed: int | None = None,
    ) -> None:
        """Plans the noise; nothing is drawn yet."""
        if not 0 < epsilon < float("inf"):
            raise ValueError(f"epsilon must be positive and finite, got {epsilon}")
        self._clip, self._given_seed = clip, seed
        plan = make_plan(
            num_examples=Population(num_examples, num_examples_given=num_examples_given),
            expected_batch_size=expected_batch_size,
            num_steps=num_epochs * (num_examples // max(1, expected_batch_size)),
            target_epsilon=epsilon,
            delta=delta,
            clip_norm=sensitivity_of(clip),
            accountant=accountant,
            mechanism={**(mechanism_options or {}), "name": mechanism},
        )
        self.plan = dataclasses.replace(plan, clip_norm=math.inf)  # S alone is known
        self._begun = self._used = 0  # steps whose batches were drawn, and used
        self._initialised = self._transformed = False
        self._seed = secrets.randbits(256) if seed is None else seed
        self._run = chacha.host_key(self._seed, "whose batch")[:2].copy()

    @property
    def steps_begun(self) -> int:
        """Batches drawn so far."""
        return self._begun

    @property
    def epsilon_spent(self) -> float:
        """ε, at the plan's δ, of the batches drawn so far."""
        return self.plan.epsilon_after(self.steps_begun)

    def batches(self, data: PyTree) -> Iterator[DrawnBatch]:
        """Draws the batches of the steps that are left; drawing one spends its share of ε.

        Every batch that is drawn is to be used, once and in order.

        Args:
          data: pytree of arrays `[N, ...]`; with `num_examples_given` all may have fewer rows. They
            are taken where they are: on the host of NumPy's (or what is indexed like them, such as
            a memory map), on the device of JAX's.

        Raises:
          ValueError: if an array has another number of rows.
          BudgetExhaustedError: if all steps of the plan were taken before.
        """
        num = most = self.plan.num_examples
        leaves = jax.tree.leaves(data)
        if self.plan.num_examples_given and leaves and np.shape(leaves[0]):
            num = min(most, max(1, len(leaves[0])))
        for leaf in leaves:
            if not np.shape(leaf) or len(leaf) != num:
                raise ValueError(
                    f"the plan is for {most} examples; an array of data has shape {np.shape(leaf)}"
                )
        self.plan.check_steps(self.steps_begun + 1)
        return self._drawn(data, num)

    def _drawn(self, data: PyTree, num: int) -> Iterator[DrawnBatch]:
        while self._begun < self.plan.num_steps:
            self._begun += 1
            batch = self.plan.batch(self._seed, self._begun).only(num)
            examples = jax.tree.map(lambda x, drawn=batch: _rows(drawn, x), data)
            yield DrawnBatch(examples, batch.mask, np.array(self._begun, np.int32), self._run)

    def gradient(
        self, oracle: Oracle, *, microbatch_size: int = 16
    ) -> optax.GradientTransformation:
        """The transform from a drawn batch to the private gradient; one for each training.

        Its `update(batch, state, params)` takes a `DrawnBatch` of `batches`. Per-example gradients
        are computed a microbatch at a time; an example whose gradient is not finite is dropped.

        Args:
          oracle: of one example as `data` has them in a row, for example `bam.dp_sgd(loss_fn)`.
          microbatch_size: per-example gradients that are in memory at once.

        `update` is compiled by itself, once, and takes each batch once. In a program of yours that
        contains it (`jax.jit(tx.update)`), one batch and one state that are used twice, at other
        weights, are not seen: the two results differ by what the noise was to hide.

        Raises:
          RuntimeError: if it was made before; in `init`, if the state was made before or it is
            traced (under `jit`), where the noise's key would be a constant of the program.
          TypeError: in `update`, for anything else than a `DrawnBatch`.
          ValueError: in `update`, for a batch that was used before, one of another training, or one
            that is not the state's next; under `jit` the gradient of the last two is NaN instead.
            Under `vmap`, unless it maps over states.
        """
        if self._transformed:
            raise RuntimeError(
                "a PrivateTraining makes one transform: a second one would spend its ε again"
            )
        self._transformed = True
        compiled = jax.jit(functools.partial(self._mean, oracle, microbatch_size))

        def update(
            batch: DrawnBatch, state: PrivateState, params: Params | None = None
        ) -> tuple[Grads, PrivateState]:
            if not isinstance(batch, DrawnBatch) or params is None:
                raise TypeError(
                    "a private gradient needs update(batch, state, params) with a batch of "
                    f"PrivateTraining.batches(data), got {type(batch).__name__}"
                )
            right, noise = _is_next(batch, state), state.privatize.noise
            tracing.check_is_argument(noise.key)
            if isinstance(right, jax.core.Tracer):
                return compiled(batch, state, params)
            if not right:
                raise ValueError(
                    f"the batch of step {batch.step} is of another training, or not the next one: "
                    f"the state has seen {noise.step} steps. A batch that is used twice, or a "
                    "state that is started over, would repeat noise"
                )
            if batch.step <= self._used:
                raise ValueError(
                    f"the batch of step {batch.step} was used before: at other weights, or with "
                    "another state, it would repeat noise"
                )
            used, self._used = self._used, int(batch.step)  # before others can see it as unused
            try:
                return compiled(batch, state, params)
            except BaseException:
                self._used = used  # no result was seen
                raise

        return optax.GradientTransformation(self._init, update)

    def _init(self, params: Params) -> PrivateState:
        if tracing.being_traced():
            raise RuntimeError("init a private transform outside of jit: it holds a secret key")
        if self._initialised or self.steps_begun:
            raise RuntimeError(
                f"the state is started over after {self.steps_begun} steps: a second one has "
                "the same noise. Begin another PrivateTraining; its ε adds to this"
            )
        self._initialised = True
        key, strategy = chacha.seeded_key(self._seed), self.plan.mechanism.strategy
        noise = first_noise(key, self._clip, params, strategy)
        state = PrivatizeState(self._clip.init(params), noise)
        return PrivateState(state, optax.tree.zeros_like(params), jnp.asarray(self._run))

    def _mean(
        self,
        oracle: Oracle,
        microbatch_size: int,
        batch: DrawnBatch,
        state: PrivateState,
        params: Params,
    ) -> tuple[Grads, PrivateState]:
        """The private gradient; NaN of a batch that is not the state's next."""
        plan = self.plan
        gradient, _, after = private_mean(
            oracle.grad,
            self._clip,
            oracle.ascend(params, state.previous),
            batch.examples,
            state.privatize,
            NoisedMean(plan.noise_multiplier, plan.expected_batch_size, plan.mechanism.strategy),
            mask=jnp.asarray(batch.mask),
            microbatch_size=microbatch_size,
        )
        right = _is_next(batch, state)
        gradient = jax.tree.map(lambda x: jnp.where(right, x, jnp.nan), gradient)
        return gradient, PrivateState(after, gradient, state.run)

    def write_statement(self, path: str | Path, data: str) -> None:
        """Writes `PRIVACY.md`: what the weights guarantee, with lines that compute ε again.

        Args:
          path: the file.
          data: the data set, in words that may be published.
        """
        mechanism, versions, commit = self.plan.mechanism, provenance.versions(), git_commit()
        record = {
            "seed": self._given_seed,
            "sensitivity": self.plan.sensitivity,
            "sampling": mechanism.sampling,
            "noise": mechanism.noise,
            "noise_key": "operating system" if self._given_seed is None else "seed",
            "device": jax.devices()[0].device_kind,
            "versions": versions,
            "commit": commit,
            "steps_begun": self.steps_begun,
        }
        text = statement.of_training(
            self.plan,
            record,
            data=data,
            method="the caller's oracle",
            clip="the caller's clip",
            looked_at=LOOKED_AT,
            exported_by=f"bam {versions['bam']}, commit {commit}",
            released="the weights",
        )
        files.write_text(Path(path), text)

    def __reduce__(self) -> NoReturn:
        """Refuses copies and pickles."""
        raise TypeError("a PrivateTraining cannot be copied: the copy would repeat its noise")


LOOKED_AT = """\
The loop was the caller's own: the oracle was given one example at a time, and nothing of the data
was seen but through it, as far as this file knows. Weights before training, hyper-parameters chosen
by looking at the data, figures of training examples, and other releases are for whoever releases
the model to say: no ε here covers them."""


def _is_next(batch: DrawnBatch, state: PrivateState) -> Bool[Array, ""]:
    in_order = batch.step == state.privatize.noise.step + 1
    return in_order & jnp.all(batch.run == state.run)


def _rows(batch: PaddedBatch, values: Array | np.ndarray) -> Array | np.ndarray:
    """A batch's rows of one array, zeros where there is no example."""
    if isinstance(values, jax.Array):
        taken: Array = batch.take(values)
        return taken
    rows = np.asarray(values[np.where(batch.mask, batch.indices, 0)])
    rows[~np.asarray(batch.mask)] = 0
    return rows
