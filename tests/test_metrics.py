"""Figures of test data: by hand, beside scikit-learn's, in a run, on its page and in a sweep."""

import dataclasses
import json
import re

import numpy as np
import pytest
from sklearn import metrics as sklearn_metrics

from bam.cli import run_lines
from bam.data import datasets
from bam.models import figures
from bam.part_table import LOSSES
from bam.release import records, report
from bam.sweep import comparison, runs, studies
from bam.training import loop, summary
from tests import runs as finished_runs
from tests.cases import grid
from tests.labels import NUMBERS, PIXELS, SEVERAL, config_of, data_of
from tests.run_folder import strict_json, write_records

NAN = float("nan")


def logits(*predicted, num_classes=2):
    """Outputs whose highest is that of these classes."""
    return 9 * np.eye(num_classes, dtype=np.float32)[list(predicted)]


def value(found, name):
    interval = found["figures"][name]
    return None if interval is None else interval[0]


def random_classes(num, num_classes, seed=0, signal=1.0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(num_classes, size=num).astype(np.int32)
    return rng.normal(size=(num, num_classes)) + signal * np.eye(num_classes)[labels], labels


@pytest.mark.parametrize(
    ("outputs", "labels", "expected"),
    [
        # 99 : 1, and all are said to be well.
        (logits(*[0] * 100), [0] * 99 + [1],
         {"accuracy": 0.99, "balanced_accuracy": 0.5, "recall/0": 1, "recall/1": 0, "auroc": 0.5}),
        # Three of class 0, of which two are right; of 1 the only one.
        (logits(0, 0, 1, 1), [0, 0, 0, 1],
         {"accuracy": 0.75, "balanced_accuracy": 5 / 6, "recall/0": 2 / 3, "auroc": 5 / 6}),
        # 1 is above 0.2 and 0.5, not above 2; the tie counts half: (1 + 1 + 0 + 0.5) / 4.
        ([[0, 0.2], [0, 0.5], [0, 2], [0, 1], [0, 1]], [0, 0, 0, 0, 1], {"auroc": 2.5 / 4}),
        # Large numbers that are finite.
        ([[3e38, -3e38], [-3e38, 3e38]], [0, 1], {"auroc": 1, "log_loss": 0, "accuracy": 1}),
        # Probabilities of ½, and half of them right, are calibrated; log loss is ln 2.
        (np.zeros((4, 2)), [0, 0, 1, 1], {"calibration_error": 0, "log_loss": np.log(2)}),
        # Certain, and wrong every other time.
        (99 * logits(0, 0), [0, 1], {"calibration_error": 0.5, "balanced_accuracy": 0.5}),
        # A class without test images has no recall and is in no mean.
        (logits(0, 1, 0, num_classes=3), [0, 1, 1],
         {"recall/2": None, "balanced_accuracy": 0.75, "accuracy": 2 / 3}),
        (logits(0), [0], {"accuracy": 1, "recall/0": 1, "recall/1": None, "auroc": None}),
        (logits(0, 1), [1, 1], {"accuracy": 0.5, "balanced_accuracy": 0.5, "auroc": None}),
    ],
)  # fmt: skip
def test_figures_of_classes_are_what_one_counts_by_hand(outputs, labels, expected):
    found = figures.classification(np.asarray(outputs, np.float32), np.array(labels), ())
    assert {name: value(found, name) for name in expected} == pytest.approx(expected, abs=1e-6)
    assert np.sum(found["confusion"]) == len(labels)
    for interval in filter(None, found["figures"].values()):
        assert interval[1] - 1e-9 <= interval[0] <= interval[2] + 1e-9 or len(labels) < 4


@pytest.mark.parametrize("num_classes", [2, 5])
def test_figures_of_classes_are_those_of_scikit_learn(num_classes):
    outputs, labels = random_classes(200, num_classes)
    found = figures.classification(outputs, labels, ())
    shares = np.exp(outputs) / np.exp(outputs).sum(1, keepdims=True)
    predicted = outputs.argmax(1)
    scores = shares if num_classes > 2 else shares[:, 1]
    expected = {
        "balanced_accuracy": sklearn_metrics.balanced_accuracy_score(labels, predicted),
        "auroc": sklearn_metrics.roc_auc_score(labels, scores, multi_class="ovr"),
        "log_loss": sklearn_metrics.log_loss(labels, shares),
        "recall/1": sklearn_metrics.recall_score(labels, predicted, average=None)[1],
    }
    assert {name: value(found, name) for name in expected} == pytest.approx(expected)
    theirs = sklearn_metrics.confusion_matrix(labels, predicted).tolist()
    assert found["confusion"] == theirs


def test_figures_of_labels_and_numbers_are_those_of_scikit_learn():
    rng = np.random.default_rng(0)
    outputs = rng.normal(size=(40, 3)) + SEVERAL
    found = figures.multilabel(outputs, SEVERAL, ("cough", "fever", "rash"))
    each = sklearn_metrics.roc_auc_score(SEVERAL, outputs, average=None)
    balanced = sklearn_metrics.balanced_accuracy_score(SEVERAL[:, 1], outputs[:, 1] > 0)
    assert value(found, "auroc/fever") == pytest.approx(each[1])
    assert value(found, "auroc") == pytest.approx(each.mean())
    assert value(found, "balanced_accuracy/fever") == pytest.approx(balanced)
    none = figures.multilabel(outputs, SEVERAL * [1, 1, 0], ())
    assert value(none, "auroc/2") is None and value(none, "auroc") == pytest.approx(each[:2].mean())
    targets = 1e6 + np.arange(40.0).reshape(20, 2)
    outputs = targets + rng.normal(size=(20, 2))
    found = figures.regression(outputs, targets, ())
    assert value(found, "r2") == pytest.approx(sklearn_metrics.r2_score(targets, outputs))
    assert value(found, "mean_absolute_error") == pytest.approx(np.abs(outputs - targets).mean())
    assert value(figures.regression(outputs, 0 * targets + 0.1, ()), "r2") is None


@pytest.mark.parametrize(("num_classes", "name"), [(2, "auroc"), (3, "recall/1")])
def test_intervals_are_those_of_resampled_images(num_classes, name):
    outputs, labels = random_classes(60, num_classes)
    own = figures.classification(outputs, labels, ())["figures"][name]
    rng, values = np.random.default_rng(7), []
    for _ in range(400):
        drawn = rng.integers(60, size=60)
        x, y = outputs[drawn], labels[drawn]
        if name == "auroc":
            values.append(sklearn_metrics.roc_auc_score(y, x[:, 1] - x[:, 0]))
        else:
            values.append(np.mean(x.argmax(1)[y == 1] == 1))
    np.testing.assert_allclose(own[1:], np.percentile(values, (2.5, 97.5)), atol=0.03)
    assert own[2] - own[1] > 0.1  # of no width they would not be so close


def test_an_interval_is_twice_as_narrow_of_four_times_as_many_images_and_the_same_again():
    few, many = (figures.classification(*random_classes(n, 4), ()) for n in (500, 2000))
    for name in ("accuracy", "balanced_accuracy", "auroc", "log_loss"):
        width = [x["figures"][name][2] - x["figures"][name][1] for x in (few, many)]
        assert 1.6 < width[0] / width[1] < 2.5
    assert figures.classification(*random_classes(500, 4), ()) == few


FIGURES = {
    figures.classification: random_classes(90, 3),
    figures.multilabel: (
        np.random.default_rng(1).normal(size=(90, 2)),
        np.arange(180).reshape(90, 2) % 3 > 0,
    ),
    figures.regression: (
        np.random.default_rng(2).normal(size=(90, 1)),
        np.arange(90.0)[:, None] % 7,
    ),
}


@pytest.mark.parametrize("judge", FIGURES, ids=lambda x: x.__name__)
def test_intervals_draw_users_where_they_are_named_and_one_image_each_changes_nothing(judge):
    outputs, labels = FIGURES[judge]
    images = judge(outputs, labels, ())
    alone = judge(outputs, labels, (), users=np.random.default_rng(3).permutation(90) + 7)
    assert alone["figures"] == images["figures"]
    assert alone["intervals_draw"] == {"unit": "user", "number": 90}
    assert images["intervals_draw"] == {"unit": "image", "number": 90}
    # Nine equal images of each of ten users are ten images: intervals are three times as wide.
    few, users = np.arange(90) % 10, np.arange(90) % 10
    same = judge(outputs[few], labels[few], ())
    by_user = judge(outputs[few], labels[few], (), users=users)
    ten = judge(outputs[:10], labels[:10], ())
    name = {"regression": "mean_absolute_error"}.get(judge.__name__, "accuracy")
    np.testing.assert_allclose(by_user["figures"][name], ten["figures"][name], rtol=1e-9)
    widths = [x["figures"][name][2] - x["figures"][name][1] for x in (same, by_user)]
    assert 2 < widths[1] / widths[0] < 4


def test_a_user_with_more_images_counts_as_often_as_one_with_few_and_for_all_of_them():
    right, users = np.array([1] * 30 + [0] * 3 + [1] * 3), np.repeat(np.arange(7), [30, *[1] * 6])
    found = figures.classification(logits(*right), np.ones(36, int), (), users=users)
    rng, shares = np.random.default_rng(5), []
    for _ in range(2000):
        drawn = rng.integers(7, size=7)
        rows = np.concatenate([np.flatnonzero(users == user) for user in drawn])
        shares.append(right[rows].mean())
    expected = np.percentile(shares, (2.5, 97.5))
    np.testing.assert_allclose(found["figures"]["accuracy"][1:], expected, atol=0.05)
    assert found["figures"]["accuracy"][0] == pytest.approx(33 / 36)


def test_many_classes_have_no_figures_of_their_own():
    named = figures.classification(*random_classes(300, 100), ())
    many = figures.classification(*random_classes(300, 101), ())
    assert "recall/99" in named["figures"] and len(named["confusion"]) == 100
    assert not any("/" in name for name in many["figures"]) and "confusion" not in many
    assert len(json.dumps(many)) < 1000


# In a run.

KINDS = {
    "cross_entropy": (SEVERAL[:, 0], 2), "binary": (SEVERAL, 3), "squared_error": (NUMBERS, 1),
    "per_pixel": (PIXELS, 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["cross_entropy", "binary", "squared_error"])
def test_a_run_ends_with_the_figures_of_the_weights_that_are_released(kind, tmp_path):
    data = data_of(*KINDS[kind])
    built = loop.build(config_of(kind, **{"checkpoint.every": 1}), data)
    result = loop.train(built, 0, tmp_path)
    outputs = np.asarray(built.score_images(loop.whole_model(result.state), *data.test)[2])
    judge = LOSSES[kind].make().figures
    expected = judge(outputs, data.test.labels, ())["figures"]
    assert result.summary["figures"] == expected
    names = {name.partition("/")[0] for name in expected}
    assert names == set(figures.NAMES[judge])
    if kind != "squared_error":
        assert expected["accuracy"][0] == pytest.approx(result.summary["test_accuracy"])
    # Of a run that is resumed after its last step they are the same.
    (tmp_path / "summary.json").unlink()
    assert loop.train(built, 0, tmp_path).summary["figures"] == expected
    # The control: of other weights they are others.
    start = np.asarray(built.score_images(built.init(0).params, *data.test)[2])
    assert judge(start, data.test.labels, ())["figures"] != expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [(("ill", "well"), {"ill", "well"}), (("ill", "ill"), {"0", "1"}), ((), {"0", "1"})],
)
def test_names_of_classes_are_those_of_the_data_set_if_they_tell_them_apart(names, expected):
    class Named(datasets.Dataset):
        classes = names

    split = data_of(np.array([0, 1] * 5), 2)
    built = loop.build(config_of("cross_entropy"), Named(*split))
    found = summary.loss_figures(built, logits(*[0, 1] * 5))["figures"]
    assert {name[7:] for name in found if name.startswith("recall/")} == expected


def test_outputs_that_are_no_numbers_have_no_figures(tmp_path, tmp_path_factory):
    run = finished_runs.copy(tmp_path_factory, "diverged", tmp_path / "run")
    summarized = strict_json((run / "summary.json").read_text())
    assert summarized["figures"] is None and "confusion" not in summarized


# On its page.


@pytest.fixture
def no_charts(monkeypatch):
    """Those of training are drawn slowly, and elsewhere."""
    monkeypatch.setitem(report._TEMPLATES.filters, "svg", lambda chart: "")


def shown(folder, public=False, **facts):
    run = records.read(write_records(folder, **facts))
    return report.page(run, public=public, made_by="bam")


@pytest.mark.usefixtures("no_charts")
def test_the_page_draws_recall_and_confusion_and_one_to_pass_on_does_not(tmp_path):
    found = figures.classification(*random_classes(90, 3), ("ill", "<b>well</b>", "$x^2$"))
    own, public = (shown(tmp_path / str(x), public=x, **found) for x in (False, True))
    low, high = (f"{100 * x:.0f}" for x in found["figures"]["recall/ill"][1:])
    texts = ("On test data", "Balanced accuracy", f"({low}–{high})", "Recall by class",
             "&lt;b&gt;well&lt;/b&gt;", "$x^2$", f">{found['confusion'][2][0]}</text>")  # fmt: skip
    for text in texts:
        assert text in own and text not in public, text
    assert own.count("<svg") == 2 and "<svg" not in public
    assert "On test data" not in shown(tmp_path / "none")


@pytest.mark.usefixtures("no_charts")
def test_the_page_says_what_intervals_draw_and_leaves_out_those_that_say_little(tmp_path):
    outputs, labels = random_classes(90, 3)

    def page(name, num_users, labels=labels):
        users = np.arange(90) % num_users if num_users else None
        judged = figures.classification(outputs, labels, ("a", "b", "c"), users=users)
        return judged["figures"], shown(tmp_path / name, **judged)

    of_users, many = page("users", 30)
    assert "draws of the 30 persons of the test set, with all images of each" in many
    low, high = (f"{100 * x:.1f} %" for x in of_users["accuracy"][1:])
    assert f"{low} to {high}" in many and "<td>says little</td>" not in many
    of_images, images = page("images", 0)
    assert "draws of the 90 test images" in images
    assert f"{100 * of_images['accuracy'][1]:.1f} % to" in images
    of_few, few = page("few", 9)
    assert (
        "draws of the 9 persons" in few
        and "says little</td>" in few
        and " to " not in few[few.index("<th>95 % interval") : few.index("Recall by class")]
    )
    assert f"({100 * of_few['recall/a'][1]:.0f}–" not in few
    assert "with 95 % intervals" in many and "with 95 % intervals" not in few
    # One value of all draws, in a class that is always right.
    wrong = outputs.argmax(axis=1) * (labels > 0)
    same, one_value = page("one_value", 30, np.where(labels == 0, outputs.argmax(axis=1), wrong))
    assert same["accuracy"] == [1, 1, 1] and "<td>100.0 %</td><td>says little</td>" in one_value
    # Of an earlier version, which recorded no units.
    old = figures.classification(outputs, labels, ())
    del old["intervals_draw"]
    assert "bootstrap draws of the test images." in shown(tmp_path / "old", **old)


@pytest.mark.usefixtures("no_charts")
def test_a_class_without_a_test_image_is_named_wherever_a_mean_leaves_it_out(tmp_path):
    outputs, labels = random_classes(90, 3)
    partial = figures.classification(outputs[labels > 0], labels[labels > 0], ("ill", "well", "x"))
    assert "(of 2 of 3 classes; no test image: ill)" in run_lines.test_figures(partial)[0]
    row = r">ill</text>[^ST]*– \(no test image\)"
    assert re.search(row, shown(tmp_path / "run", **partial))
    whole = figures.classification(outputs, labels, ("ill", "well", "x"))
    assert "classes" not in run_lines.test_figures(whole)[0]
    assert "no test image" not in shown(tmp_path / "whole", **whole)
    yes = np.stack([labels > 0, labels > -1], axis=1)
    several = figures.multilabel(outputs[:, :2], yes, ("cat", "dog"))
    assert "(of 1 of 2 labels; all or no test images: dog)" in run_lines.test_figures(several)[0]


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    ("num_classes", "num_rows", "has_matrix"), [(2, 2, True), (30, 30, True), (31, 30, False)]
)
def test_of_many_classes_the_page_shows_the_lowest(num_classes, num_rows, has_matrix, tmp_path):
    outputs, labels = random_classes(40 * num_classes, num_classes, signal=3.0)
    outputs[labels == 1] = logits(0, num_classes=num_classes)  # class 1 is the worst
    text = shown(tmp_path / "run", **figures.classification(outputs, labels, ()))
    assert text.count("<circle") == num_rows and "1: 0.0 %;" in text
    assert ("Confusion matrix" in text) == has_matrix
    assert ("the 30 lowest of 31" in text) == (num_classes == 31)


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    "forged",
    [
        {"figures": [1]}, {"figures": "x"}, {"figures": None},
        {"figures": {"accuracy": "abc", "auroc": 3, "log_loss": [1, 2], "r2": [[], 1, 2]}},
        {"figures": {"accuracy": [NAN] * 3, "recall/a": [1e9] * 3}, "confusion": [[NAN]]},
        {"figures": {"accuracy": [1] * 3, "recall/a": None, "recall/b": None},
         "confusion": [[-1, 1], [0, 0]]},
        {"figures": {"accuracy": [1] * 3}, "confusion": [[1, 2], [3]]},
        {"figures": {"accuracy": [1] * 3, "recall/<script>": [0, 0, 1]}, "confusion": "x"},
        {"figures": {"accuracy": [1, 0, 2]}, "intervals_draw": [1]},
        {"figures": {"accuracy": [1, 0, 2]}, "intervals_draw": {"unit": {}, "number": "<script>"}},
    ],
)  # fmt: skip
def test_figures_of_a_stranger_break_no_page(forged, tmp_path):
    text = shown(tmp_path / "run", **forged)
    assert text.endswith("</body></html>") and "<script" not in text


# In a sweep.


def run_of(accuracy=0.5, loss=1.0, **more):
    return runs.FinishedRun({}, [], {"test_accuracy": accuracy, "test_loss": loss, "figures": more})


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", 50.0), ("balanced_accuracy", 25.0), ("auroc", 0.75), ("loss", 1.0),
        ("recall/ill", 10.0),
    ],
)  # fmt: skip
def test_a_metric_is_a_figure_or_what_is_called_test(metric, expected):
    more = {"balanced_accuracy": [0.25, 0, 1], "auroc": [0.75, 0, 1], "recall/ill": [0.1, 0, 1]}
    assert comparison.metric_by_seed({3: run_of(**more)}, metric) == {3: pytest.approx(expected)}


def test_a_metric_that_a_run_does_not_have_is_said_with_those_that_it_has():
    with pytest.raises(
        ValueError, match=r"no metric 'r2'; choose --metric from accuracy, auroc, loss$"
    ):
        comparison.metric_by_seed({0: run_of(auroc=[0.75, 0, 1], r2=None)}, "r2")
    diverged = {0: run_of(loss=None)}
    assert comparison.metric_by_seed(diverged, "auroc") == {}


@pytest.mark.parametrize(
    ("kind", "metric", "expected"),
    [
        ("cross_entropy", "", "accuracy"), ("squared_error", "", "loss"),
        ("squared_error", "test_mean_absolute_error", "mean_absolute_error"),
        ("cross_entropy", "recall/ill", "recall/ill"), ("per_pixel", "mean_iou", "mean_iou"),
        ("cross_entropy", "aurok", "the loss cross_entropy has no metric 'aurok'; choose"),
        ("squared_error", "accuracy", "the loss squared_error has no metric 'accuracy'"),
    ],
)  # fmt: skip
def test_a_metric_is_checked_before_any_run(kind, metric, expected):
    groups = {"dp_sgd": config_of(kind)}
    if not expected.startswith("the loss"):
        assert comparison.metric_of(groups, metric) == expected
        return
    with pytest.raises(ValueError, match=expected):
        comparison.metric_of(groups, metric)


def row(metric, runs_of, label="new"):
    study = grid("dp_sgd").groups["dp_sgd"]
    compared = comparison.Study({"old": study, "new": study}, lambda _: "old", metric=metric)
    facts = dict.fromkeys(comparison.SUMMARY, 1) | {"seconds": 1.0}
    named = {
        name: {seed: one._replace(config={"method": {}}, summary=one.summary | facts)
               for seed, one in enumerate(each)}
        for name, each in runs_of.items()
    }  # fmt: skip
    return comparison.summary_row(compared, label, named)


def test_a_gain_is_above_0_where_a_run_is_better_whichever_way_its_metric_goes():
    two = {"old": [run_of(0.5, 2.0)], "new": [run_of(0.6, 1.5)]}
    assert row("accuracy", two)["gain"]["mean"] == pytest.approx(10)
    lower = row("loss", two)
    assert lower["gain"]["mean"] == pytest.approx(0.5) and lower["values"] == [1.5]
    assert row("loss", {"old": two["new"], "new": two["old"]})["gain"]["mean"] < 0
    table = studies.columns({}, [lower])
    assert table["loss (lower is better)"](lower) == "1.5"
    assert table["paired gain"](lower) == "+0.5"


def test_a_group_whose_runs_diverged_says_so_in_place_of_a_number():
    both = {"old": [run_of(0.5, 2.0)], "new": [run_of(0.0, None)]}
    bad = row("loss", both)
    table = studies.columns({}, [row("loss", both, "old"), bad])
    assert table["loss (lower is better)"](bad) == "diverged" and table["paired gain"](bad) == "–"
    assert row("accuracy", both)["accuracy"]["mean"] == 0.0  # the worst, and a number


def test_the_best_setting_is_the_one_of_the_best_metric():
    study = grid("dp_sgd", ["clip_norm=1,2,3"])
    found = {"1": run_of(0.9, 2.0), "2": run_of(0.1, 1.0), "3": run_of(0.5, None)}
    first = {f"dp_sgd clip_norm={key}": {0: one} for key, one in found.items()}
    for metric, best in (("accuracy", "1"), ("loss", "2")):
        kept = comparison.keep_best(dataclasses.replace(study, metric=metric), first, 1)
        assert list(kept.groups) == [f"dp_sgd clip_norm={best}"]


def test_a_sweep_of_numbers_compares_losses(tmp_path, monkeypatch):
    built = loop.build(config_of("squared_error"), data_of(*KINDS["squared_error"]))
    config, events = built.config, []
    monkeypatch.setattr(loop, "build", lambda config, **options: built)
    wanted = {"a": comparison.with_seeds("a", config, 1)}
    runs.train(runs.in_turn(wanted), tmp_path, lambda: False, lambda *event: events.append(event))
    [one] = runs.by_seed({"a": runs.in_turn(wanted)}, tmp_path)["a"].values()
    assert events[0][1].startswith("trained in ")
    assert comparison.metric_by_seed({0: one}, "r2")[0] == pytest.approx(
        one.summary["figures"]["r2"][0]
    )
