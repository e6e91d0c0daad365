"""A mistake in a loop of one's own is one line, which says what to write instead."""

import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import bam
from tests.cases import ORACLES, refused

pytestmark = pytest.mark.usefixtures("without_the_tests_type_checks")
W, DATA = {"w": jnp.zeros(2)}, np.ones((20, 2), np.float32)
LISTS = ["cat"] * 20


def loss_fn(params, x):
    return 0.5 * jnp.sum((params["w"] - x) ** 2)


def new(**changes):
    settings = {
        "num_examples": 20, "expected_batch_size": 10, "num_epochs": 1, "epsilon": 3.0,
        "delta": 1e-3, "accountant": "rdp", "clip": bam.clip_by_l2_norm(1.0),
    }  # fmt: skip
    return bam.PrivateTraining(**settings | changes)


def step(oracle=None, data=DATA, params=W, before=(), around=lambda tx: tx, **changes):
    """Takes the first step."""
    private = new(**changes)
    inner = private.gradient(bam.dp_sgd(loss_fn) if oracle is None else oracle)
    tx = around(optax.chain(*before, inner, optax.sgd(0.1)))
    state = tx.init(params)
    return tx.update(next(iter(private.batches(data))), state, params)


def test_the_loop_without_a_mistake_takes_its_step():  # the control of all below
    updates, _ = step()
    assert np.isfinite(updates["w"]).all()


@pytest.mark.parametrize("given", [loss_fn, jax.grad(loss_fn), bam.dp_sgd])
def test_a_loss_in_place_of_a_method_is_told_of_dp_sgd(given):
    for groups in ({}, {"groups": np.arange(20), "group_size": 1}):
        refused(r"write private.gradient\(bam.dp_sgd\(loss_fn\)\)", new(**groups).gradient, given)


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (optax.clip_by_global_norm(1.0), r"optax.clip_by_global_norm\(C\): use bam.clip_by_l2_no"),
        (optax.chain(bam.clip_by_l2_norm(1.0)), "end a bam.chain"),
        (1.0, r"got 1.0: write bam.clip_by_l2_norm\(1.0\)"),
        (bam.clip_by_l2_norm, r"got clip_by_l2_norm: write bam.clip_by_l2_norm\(1.0\)"),
    ],
)
def test_a_clip_that_is_none_is_told_which_is(clip, message):
    refused(message, new, clip=clip)


def test_update_without_its_batch_state_or_parameters_is_told_of_all_three():
    private = new()
    tx = private.gradient(bam.dp_sgd(loss_fn))
    state, batch = tx.init(W), next(iter(private.batches(DATA)))
    for arguments, message in (
        ((batch, state), r"needs the parameters: write tx.update\(batch, state, params\)"),
        ((batch, W, state), r"state of tx.init\(params\), got dict: write tx.update\(batch, "),
        ((batch.examples, state, W), r"a batch of PrivateTraining.batches\(data\), got ndarray"),
    ):
        refused(message, tx.update, *arguments, kind=TypeError)
    tx.update(batch, state, W)  # the control: no mistake used the batch up


def test_a_batch_in_place_of_a_gradient_is_told_to_call_the_private_transform_first():
    private, network = new(), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    plain = TrainState.create(apply_fn=None, params=W, tx=optax.adam(0.1))
    chained = TrainState.create(
        apply_fn=None, params=W, tx=optax.chain(private.gradient(bam.dp_sgd(loss_fn)))
    )
    optimizer = nnx.Optimizer(network, new().gradient(bam.dp_sgd(loss_fn)), wrt=nnx.Param)
    batch = next(iter(private.batches(DATA)))
    first = "first call the private transform's update, then give its result to the optimizer"
    for state in (plain, chained):
        refused(first, state.apply_gradients, grads=batch, kind=TypeError)
    refused(first, optimizer.update, network, batch, kind=TypeError)


def test_a_transform_before_the_private_one_or_around_it_is_told_its_place():
    refused("optax transform before the private one", step, before=[optax.sgd(0.1)])
    around = lambda tx: optax.apply_if_finite(tx, 3)  # noqa: E731
    refused("optax.apply_if_finite goes around the optimizer after the noise", step, around=around)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda params, x: (params["w"] - x) ** 2, r"float32\[2\]"),
        (lambda params, x: (loss_fn(params, x), x), "a tuple"),
        (lambda params, x: jnp.argmax(x), r"int32\[\]"),
        (lambda params, x: None, "a NoneType"),
    ],
)
@pytest.mark.parametrize("method", ["dp_sgd", "bam_sam", "bam_exact", "bam_sam_masked"])
def test_a_loss_that_is_not_one_number_is_named_with_its_shape(loss, kind, method):
    message = rf"the loss returns {kind} for ONE example, float32\[2\]: return one float"
    refused(message, jax.eval_shape, ORACLES[method](loss).grad, W, jnp.ones(2))
    control = jax.eval_shape(ORACLES[method](loss_fn).grad, W, jnp.ones(2))
    assert control["w"].shape == (2,)


def test_a_loss_that_is_not_one_number_is_refused_for_users_and_without_privacy_too():
    oracle = bam.dp_sgd(lambda params, x: (params["w"] - x) ** 2)
    refused("the loss returns float32", step, oracle, groups=np.arange(20), group_size=1)
    refused("the loss returns float32", bam.core.engine.plain_sum, oracle.loss_fn, W, DATA)


class Convolution(nn.Module):
    @nn.compact
    def __call__(self, images):
        images = nn.Conv(2, (3, 3))(images)
        return nn.Dense(3)(images.reshape((len(images), -1)))


def test_a_loss_over_a_batch_fails_with_a_note_that_names_its_one_example():
    images, labels = np.ones((20, 4, 4, 1), np.float32), np.zeros(20, np.int32)
    params = Convolution().init(jax.random.key(0), images)

    def loss_of_batch(params, batch):
        logits = Convolution().apply(params, batch["image"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.mean(losses)

    with pytest.raises(Exception, match="Dense_0") as raised:
        step(bam.dp_sgd(loss_of_batch), {"image": images, "label": labels}, params)
    notes = [x for x in raised.value.__notes__ if x.startswith("The loss was called with")]
    kinds = "image float32[4, 4, 1], label int32[]"
    assert notes == [
        f"The loss was called with ONE example, {kinds}, not with a batch: a network of batches "
        "takes x[None], and returns logits[0]."
    ]


@pytest.mark.parametrize("name", ["key", "step", "label"])
def test_a_loss_that_reads_a_key_that_was_not_drawn_is_told_of_keys(name):
    with pytest.raises(KeyError) as raised:
        step(bam.dp_sgd(lambda params, x: x[name] + loss_fn(params, x["image"])), {"image": DATA})
    told = "`private.batches(data, keys=True)` adds key and step." in raised.value.__notes__
    assert told == (name != "label")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (np.array(LISTS), "label is an array of texts or objects, which JAX does not take: give n"),
        (np.array(LISTS, object), "label is an array of texts or objects"),
        (LISTS, r"has shape \(\): give arrays with a row for each; np.asarray makes them of lists"),
    ],
)
def test_labels_in_words_are_named_and_refused(labels, message):
    oracle = bam.dp_sgd(lambda params, x: loss_fn(params, x["image"]))
    refused(message, step, oracle, {"image": DATA, "label": labels})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            DATA[:18],
            r"has shape \(18, 2\): set num_examples=18, or num_examples_given=True if 20 is a pub"
            "lic bound$",
        ),
        (np.ones((22, 2)), r"has shape \(22, 2\): set num_examples=22$"),
        # The control: no N fits arrays of two lengths.
        ({"image": DATA, "label": DATA[:18]}, r"\(18, 2\): give arrays with a row for each$"),
    ],
)
def test_arrays_with_another_number_of_rows_are_told_the_num_examples_that_fits(data, message):
    refused(message, new().batches, data)


def test_a_public_bound_is_not_to_be_raised_to_the_number_of_rows():
    bound = new(num_examples_given=True)
    refused("drop rows down to the public bound 20$", bound.batches, np.ones((22, 2)))


def test_a_folder_that_this_process_uses_is_not_said_to_be_another_ones(tmp_path):
    first = new(folder=tmp_path / "run")
    message = r"is in use in this process: close\(\) the PrivateTraining that uses it"
    refused(message, new, folder=tmp_path / "run", kind=BlockingIOError)
    first.close()
    # The control: of another process, it is said to be one.
    code = "import sys; from pathlib import Path; from bam import files; "
    code += "file = files.lock(Path(sys.argv[1])); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        message = "another process is writing in"
        refused(message, new, folder=tmp_path / "run", kind=BlockingIOError)
        other.stdin.close()
    new(folder=tmp_path / "run").close()


def test_a_sum_of_pairs_is_refused_instead_of_clipped_together():
    clip = bam.clip_by_l2_norm(1.0)
    for grad_fn in (
        jax.value_and_grad(loss_fn),
        jax.grad(lambda params, x: (loss_fn(params, x), x), has_aux=True),
    ):
        refused("grad_fn returns a pair with", bam.clipped_sum, grad_fn, clip, W, DATA, mask=None)
    message = "got a DPSGD: pass the `grad` of an oracle"
    refused(message, bam.clipped_sum, bam.dp_sgd(loss_fn), clip, W, DATA, mask=None)
    total, _ = bam.clipped_sum(bam.dp_sgd(loss_fn).grad, clip, W, DATA, mask=None)  # the control
    assert total["w"].shape == (2,)
