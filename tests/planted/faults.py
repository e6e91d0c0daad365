"""Faults, each of one replaced text, with the tests that should find it: `python -m tests.planted`.

A fault's old text stands exactly once in its file; `tests/test_planted.py` sees to it.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """What is planted: `breaks` says in a sentence what then is wrong."""

    name: str
    breaks: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The file's text with the fault; ValueError unless the old text stands in it once."""
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its old text stands {count} times in {self.file}")
        return text.replace(self.old, self.new)


def _fault(name: str, breaks: str, file: str, old: str, new: str, *tests: str) -> Fault:
    return Fault(
        name, breaks, f"bam/{file}.py", old, new, tuple(f"tests/test_{x}.py" for x in tests)
    )


# fmt: off
FAULTS = (
    # Noise.
    _fault("noise_halved",
        "The noise on a sum has half of its deviation.",
        "core/noise", "std = noise_multiplier * sensitivity * ROUNDING",
        "std = noise_multiplier * sensitivity * ROUNDING / 2",
        "transforms", "train"),
    _fault("noise_without_sensitivity",
        "The noise has deviation σ, whatever S is.",
        "core/noise", "std = noise_multiplier * sensitivity * ROUNDING",
        "std = noise_multiplier * ROUNDING",
        "transforms", "train"),
    _fault("leaf_two_thirds",
        "The last of several leaves has two thirds of its noise.",
        "core/fixed_point", ".reshape(leaf.low.shape)",
        ".reshape(leaf.low.shape) * (2 if 0 < begin == sum(sizes) - leaf.low.size else 3) // 3",
        "transforms", "train", "devices"),
    _fault("leaf_without_noise",
        "The last of several leaves has no noise.",
        "core/fixed_point", ".reshape(leaf.low.shape)",
        ".reshape(leaf.low.shape) * (0 if 0 < begin == sum(sizes) - leaf.low.size else 1)",
        "transforms", "train", "devices"),
    _fault("noise_again",
        "The next step has the noise of this one: its number does not go on.",
        "core/noise", "std, state.step), state._replace(step=state.step + 1)",
        "std, state.step), state",
        "transforms", "train"),
    _fault("step_not_in_nonce",
        "Words depend on key and stream, not on the step.",
        "core/chacha", "return step, int(stream), attempt",
        "return 0 * step, int(stream), attempt",
        "chacha"),
    _fault("nine_double_rounds",
        "ChaCha20 has 9 double rounds on devices.",
        "core/chacha", "fori_loop(0, 10,", "fori_loop(0, 9,",
        "chacha"),
    # Sums.
    _fault("mask_ignored",
        "Rows that were not drawn are added.",
        "core/engine", "jnp.where(mask.reshape(size, *(1,) * (x.ndim - 1)), x, 0), terms",
        "x, terms",
        "engine"),
    _fault("padding_counts",
        "Rows that fill up a microbatch are real ones.",
        "core/engine", "jnp.zeros((num_rows, *x.shape[1:]), x.dtype)",
        "jnp.ones((num_rows, *x.shape[1:]), x.dtype)",
        "engine"),
    _fault("clip_too_long",
        "A clipped gradient is 1 % longer than C.",
        "core/clipping", "bound / norm, 1.0)", "1.01 * bound / norm, 1.0)",
        "transforms"),
    _fault("chain_of_the_first",
        "A chain has S of its first member, not of its last.",
        "core/clipping", "chained.update, last.sensitivity, finish_last)",
        "chained.update, getattr(transforms[0], 'sensitivity', last.sensitivity), finish_last)",
        "transforms"),
    _fault("own_clip_not_measured",
        "What a clip of one's own returns is not measured.",
        "core/clipping", "self.is_proved = False", "self.is_proved = True",
        "exact_sums"),
    _fault("not_finite_kept",
        "A gradient that is not finite stays, where a clip passes it.",
        "core/clipping", "keep = jnp.isfinite(norm) & (sensitivity > 0)",
        "keep = jnp.isfinite(norm) | (sensitivity > 0)",
        "engine"),
    _fault("cut_to_nearest",
        "Gradients are rounded to the nearest multiple, and so may grow.",
        "core/fixed_point", "return (x * (1 / spacing)).astype(jnp.int32)",
        "return jnp.round(x * (1 / spacing)).astype(jnp.int32)",
        "grid", "exact_sums"),
    _fault("places_not_drawn",
        "Rows stand in microbatches in the order of the batch.",
        "core/engine", "draw_places: bool = True,", "draw_places: bool = False,",
        "position"),
    _fault("mean_of_realised_rows",
        "The noised sum is divided by the number of rows drawn.",
        "core/privatize", "x / by.expected_batch_size, noised)",
        "x / jnp.maximum(1, jnp.sum(mask)), noised)",
        "private_training", "train"),
    # Batches.
    _fault("poisson_five_percent",
        "Examples are drawn with 1.05 q.",
        "core/sampling", "chosen = drawn < first", "chosen = drawn < 1.05 * first",
        "sampling"),
    _fault("second_row_elsewhere",
        "The second row of a user is drawn with another user.",
        "privacy/users", "rows = table[np.where(batch.mask, batch.indices, 0)]",
        "rows = np.hstack([table[:, :1], np.roll(table[:, 1:], 1, axis=0)])[\n"
        "        np.where(batch.mask, batch.indices, 0)\n    ]",
        "private_training"),
    _fault("rows_beyond_k",
        "One row more than k is used of a user.",
        "data/users", "rows = table(np.asarray(ids), size)",
        "rows = table(np.asarray(ids), size + 1)",
        "users"),
    # ε.
    _fault("noise_of_half_q",
        "σ and ε of Poisson batches are those of q/2.",
        "privacy/mechanisms",
        "event=lambda sigma, num_steps: poisson_event(sigma, prob, num_steps)",
        "event=lambda sigma, num_steps: poisson_event(sigma, prob / 2, num_steps)",
        "mechanisms", "accounting"),
    _fault("one_step_not_spent",
        "ε of a number of steps is that of one step less.",
        "privacy/plan", '"num_steps": num_steps}\n        steps["delta"]',
        '"num_steps": max(0, num_steps - 1)}\n        steps["delta"]',
        "accounting"),
    _fault("overflow_not_paid",
        "δ does not pay for draws that outgrow their rows.",
        "privacy/plan", 'steps["delta"] = self.delta - self.overflow',
        'steps["delta"] = self.delta',
        "position"),
    _fault("tables_from_below",
        "PLD's tables bound privacy losses from below.",
        "privacy/pld", "value_discretization_interval=spacing",
        "value_discretization_interval=spacing, pessimistic_estimate=False",
        "pld", "accounting"),
    _fault("delta_doubled",
        "ε by PLD is that of 2 δ.",
        "privacy/pld", "get_epsilon_for_delta(delta - error)",
        "get_epsilon_for_delta(2 * delta - error)",
        "pld", "accounting"),
    _fault("statement_without_s",
        "A statement does not say S.",
        "privacy/statement",
        '| S, sensitivity | how far one {unit} moves the sum, in L2 | {record["sensitivity"]} |\n',
        "",
        "private_training", "export"),
    _fault("seed_called_secret",
        "A statement says of a seed that it is secret and never saved.",
        "privacy/statement", '"secret and never saved" if record["seed"] is None else',
        '"secret and never saved" if record else',
        "private_training", "export"),
    # Runs.
    _fault("lost_steps_free",
        "Steps that a crash lost are not counted.",
        "privacy/ledger", "self.begun = min(written, plan.num_steps)", "self.begun = step",
        "ledger"),
    _fault("ledger_not_on_disk",
        "The ledger is not forced to the disk.",
        "privacy/ledger", "os.fsync(self._file.fileno())", "self._file.flush()",
        "ledger"),
    _fault("own_loop_not_on_disk",
        "An own loop's batch is given before its step is forced to the disk.",
        "privacy/private_training", "self._ledger.force()  # on the disk before", "pass  #",
        "resumed_training"),
    _fault("period_not_ended",
        "A run that goes on does not count the rest of a period.",
        "training/resume", "end_period(plan.mechanism.period)", "end_period(1)",
        "strategy"),
    _fault("own_loop_period_not_ended",
        "An own loop that goes on does not count the rest of a period.",
        "privacy/private_training", "end_period(self.plan.mechanism.period)", "end_period(1)",
        "resumed_training"),
    _fault("key_in_checkpoint",
        "A checkpoint has the secret key of the noise.",
        "training/step", "return with_noise_key(state, np.zeros(8, np.uint32))", "return state",
        "train"),
    _fault("key_in_save",
        "What an own loop saves has the secret key of the noise.",
        "privacy/private_training",
        "x.with_noise(renewed(x.privatize.noise, blank)) if _is_state(x) else x", "x",
        "resumed_training"),
    _fault("batch_used_twice",
        "A batch may be used at other weights with the same noise.",
        "privacy/private_training", "if batch.step <= self._used:", "if batch.step < 0:",
        "private_training"),
    _fault("init_twice",
        "A second state, with the noise of the first, can be made.",
        "privacy/private_training",
        "if self._initialised or self.steps_begun > self._first:",
        "if self.steps_begun > self._first:",
        "private_training"),
    # Methods.
    _fault("ascent_of_the_microbatch",
        "BAM ascends along the mean gradient of the microbatch.",
        "core/oracles",
        "ahead = gradient_ahead(pytree.shift(params, radius, pytree.unit(here)), example)",
        "mean = jax.custom_batching.custom_vmap(lambda g: g)\n"
        "            mean.def_vmap(lambda n, mapped, g: (\n"
        "                jax.tree.map(lambda x: 0 * x + x.mean(0), g), mapped[0]))\n"
        "            uphill = pytree.unit(mean(here))\n"
        "            ahead = gradient_ahead(pytree.shift(params, radius, uphill), example)",
        "oracles", "exact_sums"),
    _fault("sam_descends",
        "BAM goes down the example's gradient instead of up.",
        "core/oracles", "pytree.shift(params, radius, pytree.unit(here))",
        "pytree.shift(params, -radius, pytree.unit(here))",
        "oracles"),
    _fault("sat_not_private",
        "DP-SAT ascends along the batch's gradient, without noise.",
        "training/trainer",
        "oracle.ascend(state.params, state.private_grad),\n                rows,",
        "oracle.ascend(state.params, jax.grad(lambda p: jnp.mean(jax.vmap(\n"
        "                    lambda row: self.loss(p, example_at(row)))(rows)))(state.params)),\n"
        "                rows,",
        "train", "audit"),
    _fault("average_turned_round",
        "The moving average decays by 1 less its decay.",
        "training/step", "(params, averaged, 1 - decay_now)", "(params, averaged, decay_now)",
        "train"),
    _fault("clip_norm_of_private_data",
        "C may be measured on the private data.",
        "training/public_clip", "if same_name or same_path:", "if same_name and same_path:",
        "public_clip"),
    # Releases.
    _fault("weights_not_checked",
        "A release is loaded whatever the SHA-256 of its weights is.",
        "release/load", 'not in ("", hashlib.sha256(content).hexdigest())', "is None",
        "predict"),
    _fault("mean_and_std_exchanged",
        "A release normalises its inputs by the standard deviation, then the mean.",
        "release/load", 'for key in ("mean", "std"))', 'for key in ("std", "mean"))',
        "export", "predict"),
)
# fmt: on
