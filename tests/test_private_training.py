"""The object that couples sampler, clip, noise and ε: what cannot be done wrong with it."""

import collections
import copy
import dataclasses
import functools
import itertools
import math
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import bam
from bam.core import pytree
from bam.privacy import statement
from tests import cases
from tests.cases import assert_same_bits, mlp_batch, mlp_loss, mlp_params, recomputed, thoroughly

N, DATA = 60, np.linspace(-1, 1, 120, dtype=np.float32).reshape(60, 2)
ORACLE = bam.dp_sgd(lambda w, x: 0.5 * jnp.sum((w - x) ** 2))


def training(**changes):
    settings = {
        "num_examples": N, "expected_batch_size": 12, "num_epochs": 1, "epsilon": 3.0,
        "delta": 1e-3, "clip": bam.clip_by_l2_norm(1.0), "seed": 0, "accountant": "rdp",
    }  # fmt: skip
    return bam.PrivateTraining(**(settings | changes))


def begun(**changes):
    private = training(**changes)
    tx = private.gradient(ORACLE)
    return private, tx, tx.init(jnp.zeros(2)), private.batches(DATA)


def test_a_step_is_the_sum_that_the_library_makes_of_the_plans_batch():
    private, tx, state, batches = begun()
    batch, plan, clip = next(batches), private.plan, bam.clip_by_l2_norm(1.0)
    expected = plan.batch(0, 1)
    np.testing.assert_array_equal(batch.mask, expected.mask)
    np.testing.assert_array_equal(
        batch.examples[expected.mask], DATA[expected.indices[expected.mask]]
    )
    assert not batch.examples[~expected.mask].any()
    noise = bam.gaussian_noise(clip, plan.noise_multiplier, bam.seeded_key(0), 0)
    noised, _ = bam.clipped_sum(
        ORACLE.grad, clip, jnp.zeros(2), batch.examples, mask=jnp.asarray(batch.mask), noise=noise
    )
    found, _ = tx.update(batch, state, jnp.zeros(2))
    np.testing.assert_array_equal(found, noised / 12)


def test_rows_of_jax_and_of_numpy_are_the_same_and_epsilon_is_that_of_the_batches_drawn():
    private, other = training(), training()
    assert private.epsilon_spent == 0
    for ours, theirs in zip(private.batches(DATA), other.batches(jnp.asarray(DATA)), strict=True):
        np.testing.assert_array_equal(ours.examples, theirs.examples)
    assert private.steps_begun == private.plan.num_steps == 5
    assert private.epsilon_spent == private.plan.epsilon <= 3
    with pytest.warns(UserWarning, match="all 5 steps"):
        assert list(private.batches(DATA)) == [] and private.steps_begun == 5


def steps_of(private):
    """The private gradients of a training whose weights stay at zero."""
    tx = private.gradient(ORACLE)
    state, gradients = tx.init(jnp.zeros(2)), []
    for batch in private.batches(DATA):
        gradient, state = tx.update(batch, state, jnp.zeros(2))
        gradients.append(gradient)
    return gradients


def test_a_training_of_a_plan_has_the_bits_of_the_arguments_that_make_it():
    by_arguments = training()
    clip = bam.clip_by_l2_norm(1.0)
    by_plan = bam.PrivateTraining(plan=by_arguments.plan, clip=clip, seed=0)
    assert by_plan.plan == by_arguments.plan
    expected = steps_of(by_arguments)
    assert len(expected) == 5
    assert_same_bits(steps_of(by_plan), expected)
    other = bam.PrivateTraining(plan=by_arguments.plan, clip=clip, seed=1)  # the control
    assert not np.array_equal(steps_of(other)[0], expected[0])


def test_a_plan_with_an_argument_that_it_fixes_and_too_few_arguments_are_refused_by_name():
    given = {
        **{"num_examples": N, "expected_batch_size": 12, "num_epochs": 1, "epsilon": 3.0},
        **{"delta": 1e-3, "accountant": "rdp", "mechanism": "banded", "group_size": 2},
        "num_examples_given": True,
    }
    plan, clip = training().plan, bam.clip_by_l2_norm(1.0)
    for name, value in given.items():
        refuse = functools.partial(bam.PrivateTraining, plan=plan, clip=clip, **{name: value})
        cases.refused(f"^plan= fixes {name}: leave them out$", refuse)
    message = (
        "^a PrivateTraining needs num_examples, delta, num_steps or num_epochs, epsilon or "
        "noise_multiplier, or a plan$"
    )
    cases.refused(message, bam.PrivateTraining, clip=clip, expected_batch_size=12)


def plan_of(**changes):
    settings = {"num_examples": N, "expected_batch_size": 12, "num_steps": 5, "delta": 1e-3}
    return bam.make_plan(**settings | {"epsilon": 3.0, "accountant": "rdp"} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        *({"num_steps": 40}, {"noise_multiplier": 0.5}, {"epsilon": 0.001}, {"delta": 0.5}),
        *({"noise_multiplier": 0.0}, {"epsilon": math.inf}),
    ],
)
def test_a_plan_that_was_changed_until_its_epsilon_does_not_hold_is_refused(changes):
    plan, clip = plan_of(), bam.clip_by_l2_norm(1.0)
    changed = dataclasses.replace(plan, **changes)
    with pytest.raises(bam.InputError):
        bam.PrivateTraining(plan=changed, clip=clip)
    spare = dataclasses.replace(plan, spare_steps=1)  # the control: σ and ε stay right
    assert bam.PrivateTraining(plan=spare, clip=clip).plan == spare


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_a_plan_that_is_none_is_refused():
    plan, clip = plan_of().to_json(), bam.clip_by_l2_norm(1.0)
    cases.refused("plan must be a plan", bam.PrivateTraining, plan=plan, clip=clip)


def test_a_training_without_privacy_is_plain_and_never_has_a_statement(tmp_path):
    plan = plan_of(epsilon=math.inf)
    private = bam.PrivateTraining(plan=plan, clip=bam.clip_by_l2_norm(1e-3), seed=0)
    (gradient, *_), batch = steps_of(private), plan.batch(0, 1)
    rows = DATA[batch.indices[batch.mask]]
    np.testing.assert_allclose(gradient, -rows.sum(0) / 12, rtol=1e-5, atol=1e-6)
    cases.refused("has no PRIVACY.md", private.write_statement, tmp_path / "PRIVACY.md", "points")
    assert not (tmp_path / "PRIVACY.md").exists()
    other = bam.PrivateTraining(plan=plan, clip=bam.clip_by_l2_norm(1.0))
    sam = bam.bam_sam(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), radius=0.5)
    cases.refused("epsilon=inf needs private.gradient", other.gradient, sam)


def test_a_step_without_privacy_that_was_not_saved_is_taken_again(tmp_path):
    make = functools.partial(
        bam.PrivateTraining, plan=plan_of(epsilon=math.inf), clip=bam.clip_by_l2_norm(1.0),
        seed=0, folder=tmp_path,
    )  # fmt: skip
    private = make()
    tx = private.gradient(ORACLE)
    state, batches = private.restore(tx.init(jnp.zeros(2))), private.batches(DATA)
    _, state = tx.update(next(batches), state, jnp.zeros(2))
    next(batches)  # drawn, but not taken
    private.save(tmp_path, state)
    private.close()
    again = make()
    state = again.restore(again.gradient(ORACLE).init(jnp.zeros(2)))
    assert next(again.batches(DATA)).step == state.privatize.noise.step + 1 == 2


@pytest.mark.parametrize("begins_with", [True, False])
def test_users_stay_users_when_a_training_goes_on(tmp_path, begins_with):
    plan = plan_of(num_examples=100, group_size=3, num_examples_given=True)
    ids = np.arange(N) // 2

    def make(has_groups):
        groups = {"groups": ids} if has_groups else {}
        clip = bam.clip_by_l2_norm(1.0)
        return bam.PrivateTraining(plan=plan, clip=clip, folder=tmp_path, **groups)

    make(begins_with).close()
    cases.refused("has has_groups = ", make, not begins_with)
    make(begins_with).close()  # the control


def test_a_batch_and_a_state_of_another_training_are_refused_together():
    (_, _, state, batches), (_, tx, *_) = begun(seed=1), begun(seed=2)
    batch = next(batches)
    cases.refused("another training's", tx.update, batch, state, jnp.zeros(2))


@pytest.mark.filterwarnings("ignore:all 40 steps")
def test_loops_that_share_a_training_get_each_step_with_its_own_batch():
    private = training(num_epochs=8)
    masks = {}
    for outer in private.batches(DATA):
        for inner in itertools.islice(private.batches(DATA), 2):
            masks[int(inner.step)] = inner.mask
        masks[int(outer.step)] = outer.mask
    assert sorted(masks) == list(range(1, 41))
    for step, mask in masks.items():
        np.testing.assert_array_equal(mask, private.plan.batch(0, step).mask)


def test_a_secret_training_is_never_the_same_twice():
    found = set()
    for _ in range(4):
        _, tx, state, batches = begun(seed=None)
        found.add(np.asarray(tx.update(next(batches), state, jnp.zeros(2))[0]).tobytes())
    assert len(found) == 4


def used_twice(tx, state, batches):
    batch = next(batches)
    return batch, tx.update(batch, state, jnp.zeros(2))[1]


def started_over(tx, state, batches):
    used_twice(tx, state, batches)
    return next(batches), state


def of_another_training(tx, state, batches):
    return next(training(seed=1).batches(DATA)), state


@pytest.mark.parametrize("wrong", [used_twice, started_over, of_another_training])
def test_what_would_repeat_noise_or_spend_elsewhere_is_an_error_and_nan_where_traced(wrong):
    _, tx, state, batches = begun()
    batch, state = wrong(tx, state, batches)
    with pytest.raises(ValueError, match="does not follow the state"):
        tx.update(batch, state, jnp.zeros(2))
    assert np.isnan(jax.jit(tx.update)(batch, state, jnp.zeros(2))[0]).all()


def test_what_is_in_order_is_finite_where_traced_and_equal():  # the control
    _, tx, state, batches = begun()
    step, other, params = jax.jit(tx.update), state, jnp.zeros(2)
    for batch in batches:
        gradient, state = step(batch, state, params)
        eager, other = tx.update(batch, other, params)
        np.testing.assert_array_equal(gradient, eager)
        assert np.isfinite(gradient).all()


def test_a_batch_is_used_once_whatever_the_state_and_a_state_is_made_once():
    private, tx, state, batches = begun()
    with pytest.raises(RuntimeError, match="init a second time, or after 0 steps"):
        tx.init(jnp.zeros(2))
    batch = next(batches)
    _, after = tx.update(batch, state, jnp.zeros(2))
    with pytest.raises(ValueError, match="the batch of step 1 was already used"):
        tx.update(batch, state, jnp.ones(2))  # at other weights: the difference has no noise
    tx.update(next(batches), after, jnp.zeros(2))  # the control
    assert private.steps_begun == 2


def test_noise_that_a_vmap_over_weights_would_add_twice_is_refused():
    _, tx, state, batches = begun()
    batch = next(batches)
    with pytest.raises(ValueError, match="the same noise would be added more than once"):
        jax.vmap(tx.update, (None, None, 0))(batch, state, jnp.ones((2, 2)))
    constant = jax.jit(lambda w: tx.update(batch, state, w)[0])
    with pytest.raises(ValueError, match="the same noise would be added more than once"):
        constant(jnp.zeros(2))


def test_a_state_cannot_be_made_again_or_traced_and_a_training_not_copied_or_transformed_twice():
    private, tx, _, batches = begun()
    with pytest.raises(RuntimeError, match="outside of jit"):
        jax.jit(tx.init)(jnp.zeros(2))
    next(batches)
    with pytest.raises(
        RuntimeError, match="init a second time, or after 1 steps, would repeat the noise"
    ):
        tx.init(jnp.zeros(2))
    with pytest.raises(RuntimeError, match="makes one transform"):
        private.gradient(ORACLE)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied"):
            copied(private)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_examples": 12, "expected_batch_size": 60},
            "exceeds the 12 training examples",
        ),  # l for N
        ({"epsilon": 0.0}, "epsilon must be positive, got 0"),
        ({"delta": 0.5}, "below 1/N"),
        ({"clip": optax.identity()}, "has no `sensitivity`"),
        ({"num_epochs": 0}, "num_epochs must be positive and finite, got 0"),
        ({"mechanism": "shuffle"}, "unknown mechanism"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_drawn(changes, message):
    with pytest.raises(ValueError, match=message):
        training(**changes)


def test_data_of_another_size_and_batches_of_ones_own_are_refused(without_the_tests_type_checks):
    private, tx, state, _ = begun()
    with pytest.raises(ValueError, match="plan is for 60 examples"):
        private.batches(DATA[:59])
    for batch in (DATA, bam.sampling.PaddedBatch(np.arange(3, dtype=np.int32), np.ones(3, bool))):
        with pytest.raises(TypeError, match=r"PrivateTraining\.batches"):
            tx.update(batch, state, jnp.zeros(2))
    assert private.steps_begun == 0


def test_sat_ascends_along_the_last_private_gradient():
    private = training()
    tx = private.gradient(bam.dp_sat(lambda w, x: 0.5 * jnp.sum((w - x) ** 2), radius=0.5))
    params = jnp.zeros(2)
    state = tx.init(params)
    batches = private.batches(DATA)
    first, state = tx.update(next(batches), state, params)
    np.testing.assert_array_equal(state.previous, first)
    second, _ = tx.update(next(batches), state, params)
    _, plain, other, drawn = begun()
    _, other = plain.update(next(drawn), other, params)
    assert not np.array_equal(second, plain.update(next(drawn), other, params)[0])


def test_the_statement_can_be_recomputed_and_says_of_a_seed_that_it_protects_nobody(tmp_path):
    private = training()
    private.write_statement(tmp_path / "PRIVACY.md", "sixty points")
    text = (tmp_path / "PRIVACY.md").read_text(encoding="utf-8")
    assert "trained on sixty points" in text and statement.FOLDER not in text
    assert statement.nominal_notice(private.plan.epsilon) in text
    assert f"{private.plan.noise_multiplier}" in text and "steps begun" in text
    assert recomputed(text) == pytest.approx(private.plan.epsilon, rel=1e-6)
    secret = training(seed=None)
    secret.write_statement(tmp_path / "secret.md", "sixty points")
    assert "nominal" not in (tmp_path / "secret.md").read_text(encoding="utf-8")


def test_a_huge_epsilon_has_a_statement_too(tmp_path):
    private = training(epsilon=None, noise_multiplier=0.05)
    assert 1000 < private.plan.epsilon < math.inf
    private.write_statement(tmp_path / "PRIVACY.md", "sixty points")
    text = (tmp_path / "PRIVACY.md").read_text(encoding="utf-8")
    assert f"*nominal* ({statement.round_claim(private.plan.epsilon)}, 0.001)-diff" in text


@pytest.mark.parametrize(
    ("seed", "source"),
    [(0, "**a seed** (see the top) | seed"), (None, "secret and never saved | operating system")],
)
def test_a_statement_calls_secret_what_comes_of_no_seed(seed, source, tmp_path):
    training(seed=seed).write_statement(tmp_path / "PRIVACY.md", "sixty points")
    text = (tmp_path / "PRIVACY.md").read_text(encoding="utf-8")
    assert f"\n| noise and batches come from | {source} |\n" in text


# Several devices, users, some of the parameters, and trees of any kind, of a network.

ROWS = jax.tree.map(np.asarray, mlp_batch(N))
IDS = np.repeat([9, 4, 7], 20) * 100 + np.arange(N) // 3  # 22 users of one to three rows
USERS = {
    "num_examples": len(set(IDS)), "expected_batch_size": 6, "groups": IDS, "group_size": 2,
}  # fmt: skip


def mesh(num, *names):
    devices = np.array(cases.several_devices(num))
    return jax.sharding.Mesh(devices.reshape(-1, *(1,) * (len(names) - 1)), names)


def gradients(params=None, oracle=None, data=None, num=2, compiled=False, **changes):
    """Private gradients of two steps."""
    private, params = training(**changes), mlp_params() if params is None else params
    tx = private.gradient(oracle or bam.dp_sgd(mlp_loss), microbatch_size=4)
    state, update, taken = tx.init(params), jax.jit(tx.update) if compiled else tx.update, []
    for _, batch in zip(range(num), private.batches(ROWS if data is None else data), strict=False):
        gradient, state = update(batch, state, params)
        params = optax.apply_updates(params, jax.tree.map(lambda g: -g, gradient))
        taken.append(gradient)
    return taken


KINDS_OF_STEP = {
    "dp_sgd": {},
    "jit": {"compiled": True},
    "users": USERS,
    "trainable": {"trainable": "b"},
    "sam": {"oracle": bam.bam_sam(mlp_loss, 0.1)},
}


@functools.cache
def on_one_device(kind):
    return jax.device_get(gradients(**KINDS_OF_STEP[kind]))


@pytest.mark.parametrize(
    ("kind", "num"),
    thoroughly([(kind, num) for kind in KINDS_OF_STEP for num in (2, 8, "explicit")],
               ("dp_sgd", 8), ("dp_sgd", "explicit"), ("users", 8)),
)  # fmt: skip
def test_gradients_are_equal_to_the_bit_on_any_number_of_devices(kind, num):
    cases.several_devices(8 if num == "explicit" else num)
    # Explicit axes are JAX's default.
    on = jax.make_mesh((8,), ("devices",)) if num == "explicit" else mesh(num, "devices")
    shared = gradients(**KINDS_OF_STEP[kind], mesh=on)
    assert_same_bits(jax.device_get(shared), on_one_device(kind))
    if num != "explicit":
        assert len(shared[0]["b1"].sharding.device_set) == num


def test_a_mesh_of_two_axes_is_refused_before_anything_else():
    with pytest.raises(ValueError, match="mesh must have one axis") as refused:
        training(mesh=mesh(8, "x", "y"))
    assert "\n" not in str(refused.value)


def test_a_user_is_drawn_and_counted_as_one_with_the_mean_of_its_gradients():
    clip, private = bam.clip_by_l2_norm(1.0), training(**USERS)
    plan = private.plan
    assert (plan.unit, plan.group_size, plan.num_examples) == ("user", 2, 22)
    batch = next(private.batches(ROWS))
    drawn = plan.batch(0, 1)
    rows_of = [np.flatnonzero(user == IDS) for user in sorted(set(IDS))]
    total = optax.tree.zeros_like(mlp_params())
    for place, user in enumerate(drawn.indices):
        rows = [] if not drawn.mask[place] else rows_of[user]
        rows = rows if len(rows) < 3 else rows[[0, 1]]  # k of them, evenly spaced
        assert batch.mask[place].sum() == len(rows)
        for row, example in zip(rows, np.asarray(batch.examples[0][place]), strict=False):
            np.testing.assert_array_equal(example, ROWS[0][row])
        if len(rows):
            of_each = [
                jax.grad(mlp_loss)(mlp_params(), jax.tree.map(lambda x, r=r: x[r], ROWS))
                for r in rows
            ]
            mean = jax.tree.map(lambda *g: sum(g) / len(g), *of_each)
            total = jax.tree.map(jnp.add, total, clip.update(mean, clip.init(mean))[0])
    noise = bam.gaussian_noise(clip, plan.noise_multiplier, bam.seeded_key(0), 0)
    pure, _ = bam.clipped_sum(
        lambda params, row: optax.tree.zeros_like(params), clip, mlp_params(), jnp.zeros((8, 1)),
        mask=jnp.zeros(8, bool), noise=noise,
    )  # fmt: skip
    expected = jax.tree.map(lambda t, n: (t + n) / 6, total, pure)
    (gradient,) = gradients(**USERS, num=1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, expected)


def moved_by_one_user(**changes):
    """Returns how far all rows of one user move the sum, over S.

    The user's gradients are huge.
    """
    data = np.zeros((N, 2), np.float32)
    huge = np.where((IDS[0] == IDS)[:, None], np.float32([1e4, 1.0]), data)
    settings = {"num_examples": N, "expected_batch_size": N, "mechanism": "full_batch"} | changes
    oracle = bam.dp_sgd(lambda w, x: jnp.sum(w * x))
    both = [gradients(jnp.zeros(2), oracle, rows, num=1, **settings)[0] for rows in (data, huge)]
    return float(jnp.linalg.norm(both[1] - both[0])) * settings["expected_batch_size"]


def test_all_rows_of_a_user_move_the_sum_by_its_sensitivity_at_most():
    as_users = {**USERS, "expected_batch_size": USERS["num_examples"], "group_size": 3}
    assert moved_by_one_user(**as_users) <= 1 + 1e-4
    assert moved_by_one_user() > 2.9  # the control: three rows, each clipped by itself


def test_users_of_one_row_each_are_examples_to_the_bit():
    assert_same_bits(gradients(groups=np.arange(N), group_size=1), gradients())


def test_a_users_places_without_a_row_count_for_nothing_whatever_their_gradient():
    inverse = bam.dp_sgd(lambda w, x: jnp.sum(w / x[0]))  # not finite where there is no row
    data = 1 + np.abs(DATA)
    assert all(np.isfinite(g).all() for g in gradients(jnp.zeros(2), inverse, data, **USERS))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups": IDS}, "belong together: pass both"),
        ({"group_size": 2}, "belong together: pass both"),
        (USERS | {"groups": IDS > 5}, r"groups must be \[rows\] integers or texts"),
        (USERS | {"groups": IDS[:, None]}, r"groups must be \[rows\] integers or texts"),
        (USERS | {"num_examples": 60}, "num_examples is 60, the users in groups are 22"),
        (USERS | {"num_examples": 21, "num_examples_given": True}, "num_examples is 21"),
        (USERS | {"group_size": -1}, "group_size must be of"),
        ({"trainable": "("}, "not a regular expression"),
    ],
)
def test_users_and_names_that_cannot_be_are_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as refused:
        training(**changes)
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("without_the_tests_type_checks")
def test_a_trainable_that_is_no_text_is_refused_in_one_line():
    cases.refused("trainable must be a regular expression, got None", training, trainable=None)


def test_data_with_another_number_of_rows_than_there_are_ids_are_refused():
    with pytest.raises(ValueError, match="the plan is for 60 rows of users"):
        training(**USERS).batches(DATA[:59])
    training(**USERS | {"num_examples": 30, "num_examples_given": True}).batches(DATA)


def test_parameters_that_are_not_trained_have_no_gradient_and_no_noise_and_cost_nothing():
    params = mlp_params()
    frozen, trained = pytree.name_mask("b")(params), {k: v for k, v in params.items() if "b" in k}
    part = lambda p, x: mlp_loss(params | p, x)  # noqa: E731
    methods = [bam.dp_sgd, lambda loss: bam.dp_sat(loss, 0.1)]
    methods += [lambda loss: bam.bam_sam(loss, 0.1), lambda loss: bam.bam_exact(loss, 0.1)]
    for oracle_of in methods:  # an ascent moves the trained parameters alone, too
        whole = gradients(oracle=oracle_of(mlp_loss), trainable="b")
        alone = gradients(trained, oracle_of(part))
        for ours, theirs in zip(whole, alone, strict=True):
            assert_same_bits({k: ours[k] for k in trained}, theirs)
            assert all(frozen[k] or not ours[k].any() for k in params)
    with pytest.raises(ValueError, match="matches no parameter; the names are b1, "):
        training(trainable="nothing").gradient(ORACLE).init(params)


Named = collections.namedtuple("Named", mlp_params())
KINDS = {  # a tree of the network's parameters, and back
    "list": (lambda p: list(p.values()), lambda t: dict(zip(mlp_params(), t, strict=True))),
    "named tuple": (lambda p: Named(**p), lambda t: t._asdict()),
    "empty parts": (
        lambda p: {"p": p, "none": None, "empty": [], "zero": jnp.ones((0, 2))},
        lambda t: t["p"],
    ),
    "bfloat16": (lambda p: jax.tree.map(lambda x: x.astype(jnp.bfloat16), p), lambda t: t),
    "scalars": (lambda p: {"p": p, "array": jnp.float32(2.0), "number": 0.5}, lambda t: t["p"]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_trees_of_any_kind(kind, without_the_tests_type_checks):
    make, back = KINDS[kind]
    params = make(mlp_params())
    loss = lambda tree, x: mlp_loss(back(tree), x).astype(jnp.float32)  # noqa: E731
    for gradient in gradients(params, bam.dp_sat(loss, 0.1)):
        assert jax.tree.structure(gradient) == jax.tree.structure(params)
        assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype(jnp.float32)}
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jnp.zeros((), jnp.int32), "other is of int32"),
        (jnp.zeros((), jnp.complex64), "other is of complex64"),
        ("text", "other is of <class 'str'>"),
        (jax.random.key(0), "other is of key"),
    ],
)
def test_parameters_that_are_no_real_numbers_are_refused_by_name(
    leaf, message, without_the_tests_type_checks
):
    tx = training().gradient(ORACLE)
    with pytest.raises(TypeError, match=message):
        tx.init({"w": jnp.zeros(2), "other": leaf})
    tx.init({"w": jnp.zeros(2)})  # the control: nothing was begun


def test_with_64_bits_a_training_trains():
    with jax.enable_x64(True):
        (gradient,) = gradients(jnp.zeros(2, jnp.float64), ORACLE, DATA, num=1)
        assert gradient.dtype == np.float64 and np.isfinite(gradient).all()


def test_a_gradient_unlike_the_parameters_is_one_line():
    for grads in (lambda p, x: [p], lambda p, x: p[:1]):
        with pytest.raises(ValueError, match="other shapes than the parameters"):
            gradients(jnp.zeros(2), bam.Oracle(lambda p, _: p, grads), DATA)


# The length, the noise, and what a loop can see.


def test_the_length_is_given_in_steps_or_in_epochs_and_parts_of_them():
    assert training().plan.num_steps == training().steps_per_epoch == N // 12
    assert training(num_epochs=0.6).plan.num_steps == 3
    assert training(num_epochs=2.5).plan.num_steps == 12  # 12.5 to the nearest even number
    assert training(num_epochs=1e-9).plan.num_steps == 1
    assert training(num_epochs=None, num_steps=7).plan.num_steps == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_steps": 3}, "^num_steps and num_epochs both set the length"),
        ({"noise_multiplier": 1.0}, "^epsilon and noise_multiplier both set the noise"),
        ({"num_epochs": math.inf}, "^num_epochs must be positive and finite, got inf"),
        ({"num_epochs": -1}, "^num_epochs must be positive and finite, got -1"),
        ({"epsilon": None, "noise_multiplier": 0.0}, "above 0 and at most 1e6, got 0.0: without"),
        ({"epsilon": None, "noise_multiplier": math.nan}, "above 0 and at most 1e6, got nan"),
        ({"epsilon": None, "noise_multiplier": math.inf}, "above 0 and at most 1e6, got inf"),
    ],
)
def test_two_lengths_two_noises_and_numbers_out_of_range_are_refused(changes, message):
    cases.refused(message, training, **changes)


def test_a_training_of_a_given_noise_tells_its_epsilon_and_continues(tmp_path):
    settings = {"epsilon": None, "noise_multiplier": 1.5, "folder": tmp_path / "run"}
    private = training(**settings)
    plan = private.plan
    by_epsilon = training(epsilon=plan.epsilon).plan
    assert plan.noise_multiplier == pytest.approx(by_epsilon.noise_multiplier, rel=1e-4) == 1.5
    steps = {"sampling_prob": plan.sampling_prob, "num_steps": plan.num_steps}
    told = bam.epsilon(
        noise_multiplier=1.5, delta=plan.delta - plan.overflow, accountant="rdp", **steps
    )
    assert plan.epsilon == told
    for _ in private.batches(DATA):
        pass
    assert private.epsilon_spent == plan.epsilon
    private.write_statement(tmp_path / "PRIVACY.md", "points")
    private.close()
    training(**settings).close()  # the control
    other = settings | {"noise_multiplier": 1.4}
    cases.refused("has noise_multiplier = 1.5, but this run has 1.4", training, **other)
    cases.refused("is above the target", training, folder=tmp_path / "run", epsilon=1e-3)


def test_an_infinite_epsilon_trains_without_privacy_and_has_no_statement(tmp_path):
    private = training(epsilon=math.inf)
    assert not private.plan.private and private.plan.noise_multiplier == 0
    assert private.plan == plan_of(epsilon=math.inf)
    cases.refused("has no PRIVACY.md", private.write_statement, tmp_path / "PRIVACY.md", "points")


def test_a_second_pass_over_the_batches_says_that_the_plan_is_used_up(tmp_path):
    private = training(folder=tmp_path)
    tx = private.gradient(ORACLE)
    state = private.restore(tx.init(jnp.zeros(2)))
    for batch in private.batches(DATA):
        _, state = tx.update(batch, state, jnp.zeros(2))
    private.save(tmp_path, state)
    with pytest.warns(UserWarning, match="all 5 steps of the plan were drawn"):
        assert list(private.batches(DATA)) == []
    private.close()
    # A training that is complete when it is made again has no step left, without a word.
    assert list(training(folder=tmp_path).batches(DATA)) == []


def loss_of(w, example):
    return 0.5 * jnp.sum((w - example["x"]) ** 2)


def length_of(w, example):
    return jnp.linalg.norm(example["x"])


@pytest.mark.parametrize("epsilon", [3.0, math.inf])
@pytest.mark.parametrize("num_devices", [0, 4])
def test_a_loop_sees_the_loss_and_norm_of_each_example_and_its_gradient_is_the_same(
    epsilon, num_devices
):
    w, results = jnp.array([0.3, -0.4]), []
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("devices",)) if num_devices else None
    for asked in ({"loss": loss_of, "length": length_of}, {}, None):
        private = training(epsilon=epsilon, mesh=mesh)
        tx = private.gradient(bam.dp_sgd(loss_of), microbatch_size=3, not_private=asked)
        state = tx.init(w)
        structure = jax.tree.map(jnp.shape, state)
        for batch, _ in zip(private.batches({"x": DATA}), range(2), strict=False):
            gradient, state = tx.update(batch, state, w)
            assert jax.tree.map(jnp.shape, state) == structure
        results.append((batch, gradient, state.not_private))
    (batch, first, figures), (_, second, norms), (_, third, none) = results
    assert_same_bits(first, second)
    assert_same_bits(first, third)
    rows, mask = np.asarray(batch.examples["x"]), batch.mask
    expected = {
        "loss": np.where(mask, 0.5 * ((np.asarray(w) - rows) ** 2).sum(1), 0),
        "length": np.where(mask, np.linalg.norm(rows, axis=1), 0),
    }
    if math.isfinite(epsilon):
        expected["norm"] = np.where(mask, np.linalg.norm(np.asarray(w) - rows, axis=1), 0)
        np.testing.assert_allclose(norms["norm"], expected["norm"], rtol=1e-6)
    assert figures.keys() == expected.keys() and none == {}
    for name, values in expected.items():
        np.testing.assert_allclose(figures[name], values, rtol=1e-6)


def test_a_figure_that_is_no_number_or_is_named_norm_is_refused():
    private = training()
    cases.refused("has the norm", private.gradient, ORACLE, not_private={"norm": loss_of})
    tx = private.gradient(ORACLE, not_private={"rows": lambda w, x: x})
    state, batch = tx.init(jnp.zeros(2)), next(private.batches(DATA))
    cases.refused("must be one number for an example", tx.update, batch, state, jnp.zeros(2))


def test_figures_and_keys_of_users_are_those_of_each_row():
    private = training(num_examples=N // 2, group_size=2, groups=np.arange(N) // 2)
    tx = private.gradient(bam.dp_sgd(loss_of), not_private={"length": length_of})
    state = tx.init(jnp.zeros(2))
    batch = next(private.batches({"x": DATA}, keys=True))
    _, state = tx.update(batch, state, jnp.zeros(2))
    figures, mask = state.not_private, batch.mask
    lengths = np.linalg.norm(np.asarray(batch.examples["x"]), axis=2)
    np.testing.assert_allclose(figures["length"], np.where(mask, lengths, 0), rtol=1e-6)
    assert figures["norm"].shape == mask.shape[:1]
    data = jax.random.key_data(batch.examples["key"]).reshape(-1, 2)
    assert batch.examples["key"].shape == mask.shape and len(np.unique(data, axis=0)) == mask.size


def noisy_loss(w, example):
    kept = jax.random.bernoulli(example["key"], 0.5, w.shape)
    return 0.5 * jnp.sum(kept * (w - example["x"]) ** 2) * (1 + example["step"])


@pytest.mark.parametrize("num_devices", [0, 2])
def test_each_example_has_a_key_of_its_own_in_each_step_that_a_seed_repeats(num_devices):
    mesh = jax.sharding.Mesh(jax.devices()[:num_devices], ("devices",)) if num_devices else None
    runs = []
    for _ in range(2):
        private = training(mesh=mesh)
        tx = private.gradient(bam.dp_sgd(noisy_loss))
        state, w, keys = tx.init(jnp.zeros(2)), jnp.ones(2), []
        for batch in private.batches({"x": DATA}, keys=True):
            assert batch.examples["step"].tolist() == [batch.step - 1] * len(batch.mask)
            keys += jax.random.key_data(batch.examples["key"]).tolist()
            updates, state = tx.update(batch, state, w)
            w = w - updates
        runs.append((keys, w.tolist()))
    assert runs[0] == runs[1] and np.isfinite(runs[0][1]).all()
    assert len(set(map(tuple, runs[0][0]))) == len(runs[0][0])
    cases.refused("keys=True needs data that are a dict", training().batches, DATA, keys=True)
    data = {"x": DATA, "key": DATA}
    cases.refused("keys=True needs data that", training().batches, data, keys=True)
