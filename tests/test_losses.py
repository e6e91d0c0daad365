"""Losses by hand, labels of every kind, and the figures that judge them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from PIL import Image
from sklearn import metrics as sklearn_metrics

import bam
from bam import models
from bam.cli.main import main
from bam.data import users
from bam.models import losses
from bam.release import export, records, report
from bam.training import loop, rundir
from configs import digits
from tests import runs
from tests.cases import refused, run_command
from tests.labels import NUMBERS, PIXELS, SEVERAL, config_of, data_of
from tests.run_folder import strict_json

OUTPUT = np.array([0.5, -1.0, 2.0], np.float32)


def softmax(x):
    return np.exp(x) / np.exp(x).sum()


@pytest.mark.parametrize(
    ("loss", "output", "label", "expected"),
    [
        (losses.cross_entropy(), OUTPUT, 1, -np.log(softmax(OUTPUT)[1])),
        (losses.cross_entropy((1, 5, 0)), OUTPUT, 1, -5 * np.log(softmax(OUTPUT)[1])),
        (losses.cross_entropy((1, 5, 0)), OUTPUT, 2, 0.0),
        (
            losses.binary(), OUTPUT, np.array([1, 0, 0]),
            -np.log(1 / (1 + np.exp(-0.5))) - np.log(1 / (1 + np.exp(-1.0)))
            - np.log(1 / (1 + np.exp(2.0))),
        ),
        (losses.squared_error(), OUTPUT[:1], np.float32(2.0), 2.25),
        (losses.squared_error(), OUTPUT, np.array([0.5, 0.0, 0.0]), 5 / 3),
        (
            losses.per_pixel(), np.tile(OUTPUT, (2, 2, 1)), np.array([[0, 1], [1, 2]]),
            -np.log(softmax(OUTPUT)[[0, 1, 1, 2]]).mean(),
        ),
    ],
)  # fmt: skip
def test_losses_are_what_one_computes_by_hand(loss, output, label, expected):
    found = loss.of_output(jnp.asarray(output), jnp.asarray(label))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def segmenter(num_classes):
    """A class for each pixel."""
    return nn.Conv(num_classes, (3, 3))


def test_several_labels_are_judged_by_accuracy_and_auroc():
    built = loop.build(config_of("binary"), data_of(SEVERAL, 3))
    result = loop.train(built, 0)
    outputs = built.score_images(loop.whole_model(result.state), *built.dataset.test)[2]
    auroc = sklearn_metrics.roc_auc_score(SEVERAL, outputs, average=None)
    assert result.summary["test_auroc"] == pytest.approx(auroc.mean())
    assert [result.summary[f"test_auroc/{k}"] for k in range(3)] == pytest.approx(list(auroc))
    right = np.mean((np.asarray(outputs) > 0) == SEVERAL)
    assert result.summary["test_accuracy"] == pytest.approx(right)
    one_sided = data_of(np.concatenate([SEVERAL[:, :2], np.zeros((40, 1), np.int32)], 1), 3)
    figures = loop.evaluate(loop.build(config_of("binary"), one_sided), result.state.params)
    assert "test_auroc/2" not in figures and "test_auroc" in figures


def test_numbers_have_no_accuracy_and_a_mean_absolute_error():
    built = loop.build(config_of("squared_error"), data_of(NUMBERS, 1))
    result = loop.train(built, 0)
    outputs = built.score_images(result.state.params, *built.dataset.test)[2][:, 0]
    assert result.summary["test_accuracy"] is None
    expected = np.abs(np.asarray(outputs) - NUMBERS).mean()
    assert result.summary["test_mean_absolute_error"] == pytest.approx(expected, rel=1e-5)


def test_pixels_are_judged_by_intersection_over_union():
    config = config_of("per_pixel")
    config.model = {"name": "tests.test_losses:segmenter"}
    built = loop.build(config, data_of(PIXELS, 2))
    result = loop.train(built, 0)
    outputs = built.score_images(result.state.params, *built.dataset.test)[2]
    found = np.asarray(outputs).argmax(-1)
    both = [(found == k) & (k == PIXELS) for k in range(2)]
    either = [(found == k) | (k == PIXELS) for k in range(2)]
    expected = np.mean([a.sum() / b.sum() for a, b in zip(both, either, strict=True)])
    assert result.summary["test_mean_iou"] == pytest.approx(expected)
    assert result.summary["test_accuracy"] == pytest.approx(np.mean(found == PIXELS))
    config.augment.flip = "horizontal"
    with pytest.raises(ValueError, match="does not move the labels with the pixels"):
        loop.build(config, data_of(PIXELS, 2))


@pytest.mark.parametrize("labels", [SEVERAL, NUMBERS])
def test_a_users_gradient_is_the_mean_over_its_examples_labels(labels):
    num = labels.shape[1] if labels.ndim == 2 else 1
    loss = "binary" if labels.ndim == 2 else "squared_error"
    data = data_of(labels, num)._replace(users=np.arange(40) // 3)
    config = config_of(loss, **{"dataset.group_size": 4})
    built = loop.build(config, data)
    assert built.dataset.train.labels.shape[:2] == (14, 4)
    params = built.init(0).params
    images, own = built.dataset.train
    for user in (0, 13):  # of three examples, and of one
        rows = 3 if user == 0 else 1
        views, label, present = users.in_one_row(jnp.asarray(images[user])[:, None], own[user])
        found = built.parts.model.loss(params, {"image": views, "label": label, "present": present})
        alone = [
            built.parts.model.loss(params, {"image": images[user][i][None], "label": own[user][i]})
            for i in range(rows)
        ]
        assert found == pytest.approx(np.mean(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "labels", "num_classes", "message"),
    [
        (
            "binary",
            SEVERAL,
            4,
            r"labels of shape \(40, 3\); loss binary needs zeros and ones \[N, 4\]",
        ),
        ("binary", 2 * SEVERAL, 3, "labels must be 0 or 1"),
        ("squared_error", NUMBERS * np.nan, 1, "labels must be finite"),
        ("squared_error", SEVERAL, 2, r"expected \[N, 2\] numbers"),
        ("per_pixel", PIXELS + 1, 2, "label 2 of row 0 is not from 0 to 1"),
        (
            "cross_entropy",
            NUMBERS,
            2,
            "labels of float32 .*; numbers need --config.loss.name=squared",
        ),
        ("cross_entropy", NUMBERS, 1, "got 1; numbers need --config.loss.name=squared_error"),
        ("cross_entropy", SEVERAL, 3, "; several labels of an image need --config.loss.name=bin"),
        ("per_pixel", PIXELS, 2, r"outputs of shape \(2,\) for pixels \(4, 4\)"),
        ("no_such", NUMBERS, 1, "unknown loss 'no_such'; choose from binary, cross_entropy"),
        ("optax:sigmoid_binary_cross_entropy", SEVERAL, 3, "does not take|without of_output"),
    ],
)
def test_labels_that_a_loss_cannot_take_are_one_line(loss, labels, num_classes, message):
    refused(message, loop.build, config_of(loss), data_of(labels, num_classes))


@pytest.mark.parametrize(
    "weights",
    [(), (1.0, -1.0), (0.0, 0.0), (1.0, np.inf), "balanced", "(1.0,nan)", ("1", "five"), {"a": 1}],
)
def test_weights_that_cannot_be_are_refused(weights):
    refused(r"loss\.weights=.* must be finite numbers from 0", losses.cross_entropy, weights)


@pytest.mark.parametrize("weights", ["balanced", "(1.0,nan)", "1,five", "{'a':1}"])
def test_a_flag_of_weights_that_cannot_be_is_one_line_that_names_it(weights, capsys):
    flags = ["--config=digits:dp_sgd", "--config.dry_run", f"--config.loss.weights={weights}"]
    assert main(["train", *flags]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: --config.loss.weights=")
    assert " must be finite numbers from 0, one a class, such as 1,2.5" in line


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--config.loss.name=squared_error", "use --config.loss.name=cross_entropy"),
        ("--metric=auroc", "--private scores trials by --score"),
    ],
)
def test_a_private_search_judges_by_what_is_classified_right_alone(flag, message, tmp_path):
    flags = ["--config=digits", "--methods=dp_sgd", f"--workdir={tmp_path}", "--private"]
    done = run_command("bam", "sweep", *flags, "--trials_mean=2", "--set=clip_norm=1,2", flag)
    assert done.returncode == 2 and message in done.stderr


def test_class_weights_scale_gradients_and_not_what_is_released():
    """The clip bounds whatever the loss: weights of a thousand change no sum by more than S."""
    model = models.as_functions(nn.Dense(2), (3,), loss=losses.cross_entropy((1.0, 1000.0)))
    params = model.init(jax.random.key(0))
    example = {"image": jnp.ones((2, 1, 3)), "label": jnp.array([1, 0])}
    clip = bam.clip_by_l2_norm(1.0)
    total, norms = bam.clipped_sum(
        bam.dp_sgd(model.loss).grad, clip, params, example, mask=jnp.array([True, False])
    )
    assert norms[0] > 100
    assert optax.tree.norm(total) == pytest.approx(1.0, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("flags", "loss", "figure"),
    [
        (["--label_column=a,b"], "binary", "test_auroc"),
        (["--label_column=age", "--number"], "squared_error", "test_mean_absolute_error"),
    ],
)
def test_several_labels_and_numbers_are_imported_shown_and_trained_on(
    flags, loss, figure, tmp_path
):
    rows = ["file,a,b,age"]
    for number in range(40):
        image = np.full((9, 9, 3), 5 * number, np.uint8)
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        rows.append(f"{number}.png,{number % 2},{int(number > 20)},{number / 7}")
    (tmp_path / "t.csv").write_text("\n".join(rows))
    out = tmp_path / "out"
    options = [f"--out={out}", "--size=8", f"--labels={tmp_path / 't.csv'}", *flags]
    done = run_command("bam", "data", "import", str(tmp_path), *options)
    assert f"--config.loss.name={loss}" in done.stdout, done.stderr
    shown = run_command("bam", "data", "show", str(out), f"--out={out}.png")
    assert shown.returncode == 0, shown.stderr
    data = {"dataset.name": "folder", "dataset.path": str(out), "expected_batch_size": 5}
    assert figure in loop.train(loop.build(config_of(loss, **data)), 0).summary


def diverging(config, data, number):
    """An experiment whose weights are `number` after every step."""
    return runs.diverging(loop.build(config, data), number)


def diverged(folder, loss, labels, num_classes, number, **changes):
    """A run in a folder whose weights are `number`, as built, and the rows that it showed."""
    config = config_of(loss, **{"eval.every": 1, "checkpoint.every": 1, **changes})
    config.model = {"name": "tests.test_losses:segmenter"} if loss == "per_pixel" else config.model
    built, shown = diverging(config, data_of(labels, num_classes), number), []
    loop.train(built, None, folder, shown.append)
    return built, shown


@pytest.mark.parametrize(
    ("loss", "labels", "num_classes", "number"),
    [
        ("cross_entropy", SEVERAL[:, 0], 2, np.inf),
        ("binary", SEVERAL, 3, np.nan),
        ("squared_error", NUMBERS, 1, np.inf),
        ("per_pixel", PIXELS, 2, np.nan),
    ],
)
def test_a_run_whose_loss_is_not_finite_ends_with_a_summary(
    loss, labels, num_classes, number, tmp_path
):
    built, _ = diverged(tmp_path, loss, labels, num_classes, number)
    summary = strict_json((tmp_path / "summary.json").read_text())
    rows = [strict_json(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert summary["test_loss"] is None and rows[-1]["test_loss"] is None and len(rows) == 3
    assert summary["test_accuracy"] == (None if loss == "squared_error" else 0.0)  # the worst
    own = {key: x for key, x in summary.items() if key.startswith("test_")}
    assert set(own) == {"test_accuracy", *loop.evaluate(built, built.init(0).params)}
    assert {x for key, x in own.items() if key != "test_accuracy"} == {None}


@pytest.mark.thorough
def test_a_run_whose_loss_is_not_finite_is_finished_and_released_and_its_page_says_so(tmp_path):
    run = tmp_path / "run"
    data = "cross_entropy", SEVERAL[:, 0], 2, np.nan
    built, shown = diverged(run, *data, **{"diagnostics.every": 1})
    assert rundir.divergence(shown[0]) == ""
    assert rundir.divergence(strict_json((run / "summary.json").read_text())) != ""
    with pytest.raises(FileExistsError, match="already holds a finished run"):
        loop.train(built, None, run)
    export.export(run, tmp_path / "out")
    own, public = (report.page(records.read(run), public=x, made_by="") for x in (False, True))
    assert "Training diverged" in own and "diverged" not in public


def test_an_image_whose_loss_is_not_a_number_is_wrong_and_no_other_is():
    data = data_of(SEVERAL[:, 0], 2)
    built = loop.build(config_of("cross_entropy"), data)
    params = built.init(0).params
    ones = [tuple(x[i : i + 1] for x in data.test) for i in range(40)]
    right = [int(built.score_images(params, *one)[0]) for one in ones]
    missing = right.index(1)
    images = data.test.images.copy()
    images[missing, 0, 0] = np.nan
    found = loop.evaluate(built, params) | {"test_loss": 0}
    assert found["test_accuracy"] * 40 == pytest.approx(sum(right))
    test = data.test._replace(images=images)
    changed = loop.build(config_of("cross_entropy"), data._replace(test=test))
    found = loop.evaluate(changed, params)
    assert found["test_accuracy"] * 40 == pytest.approx(sum(right) - 1)
    assert np.isnan(found["test_loss"])


def test_an_infinite_setting_is_written_as_the_word_that_sets_it_again(tmp_path):
    config = digits.get_config("non_private")
    config.update({"epsilon": np.inf, "num_steps": 1})
    config.model.name = "linear"
    loop.train(loop.build(config), 0, tmp_path)
    recorded = strict_json((tmp_path / "config.json").read_text())["epsilon"]
    assert float(recorded) == np.inf
    config.seed = 0
    with pytest.raises(FileExistsError, match="already holds a finished run"):
        rundir.check_resumable(tmp_path, config)


def test_a_data_set_whose_constants_would_make_every_input_not_a_number_is_refused():
    data = data_of(SEVERAL[:, 0], 2)
    for change in ({"mean": np.full(1, np.nan)}, {"std": np.zeros(1)}, {"std": np.full(1, np.inf)}):
        config, data_changed = config_of("cross_entropy"), data._replace(**change)
        refused("must be finite, and std above 0", loop.build, config, data_changed)
