"""What PRIVACY.md says: its words by goldens, its numbers as numbers, its choices as fields."""

import dataclasses
import itertools
import math
import re
import string

import pytest

import bam
from bam.part_table import CLIPS, FEATURES
from bam.privacy import statement
from tests import golden
from tests.cases import recomputed, without_mu

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def differing(text, other):
    """Lines of both that differ in a word, or in a number by more than late digits."""
    both = itertools.zip_longest(text.split("\n"), other.split("\n"), fillvalue="no line")
    return [pair for pair in both if not _same(*pair)]


def _same(line, other):
    numbers = zip(NUMBER.findall(line), NUMBER.findall(other), strict=False)
    close = all(math.isclose(float(a), float(b), rel_tol=1e-9) for a, b in numbers)
    return close and NUMBER.sub("0", line) == NUMBER.sub("0", other)


@pytest.fixture(scope="module", params=golden.PLANS)
def stated(request):
    """The name, the plan and the statement of one of six trainings."""
    return request.param, golden.plan_of(request.param), golden.of(request.param)


def test_a_statement_has_the_words_of_its_golden(stated):
    name, _, text = stated
    written = (golden.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert differing(text, written) == [], "python -m tests.golden writes them again"


def test_another_word_number_or_line_is_seen():
    text = (golden.FOLDER / "example_poisson.md").read_text(encoding="utf-8")
    assert differing(text, text) == []
    for old, new in (
        ("secret and never saved", "**a seed** (see the top)"),
        ("4.55542494463676", "4.555425"),
        ("| S, sensitivity |", "| sensitivity |"),
        ("\n- *Test examples,*", " *Test examples,*"),
        ("nothing else was released.\n", "nothing else was released.\n\n"),
    ):
        assert old in text and differing(text, text.replace(old, new))
    assert not differing(text, text.replace("4.55542494463676", "4.55542494463677"))


def test_the_lines_of_every_golden_compute_its_epsilon(stated):
    _, plan, text = stated
    plan.check_epsilon()
    assert recomputed(text) == pytest.approx(plan.epsilon, rel=1e-9)


def test_the_numbers_of_every_golden_are_those_of_its_plan(stated):
    name, plan, text = stated
    sensitivity = golden.SUMMARIES.get(name, {}).get("sensitivity", 1.0)
    q, std = plan.mechanism.sampling_prob, plan.noise_multiplier * sensitivity
    for row, exact in (
        ("N", plan.num_examples), ("T, steps that ε pays for", plan.num_steps),
        ("S, sensitivity", sensitivity), ("l, batch size", plan.expected_batch_size),
    ):  # fmt: skip
        assert float(cells(text, row)[-1]) == exact
    for row, exact, direction in (
        ("ε, rounded up", plan.epsilon, 1), ("δ, rounded up", plan.delta, 1), ("q = l/N", q, 1),
        ("σ, noise multiplier", plan.noise_multiplier, -1), ("σS, which", std, -1),
        ("μ of Gaussian DP", plan.mu, 1),
    ):  # fmt: skip
        if exact is None:
            assert f"| {row}" not in text and statement.is_searched(plan)
            continue
        shown, whole = map(float, cells(text, row)[-2:])
        assert whole == pytest.approx(exact, rel=1e-9)
        assert 0 <= direction * (shown - exact) <= 1.001e-3 * exact
    assert cells(text, "noise |")[1] == plan.mechanism.noise
    assert cells(text, "sampling")[1] == plan.mechanism.sampling
    assert f"They print {plan.epsilon}, but" in text
    for alarm in statement.FALSE_POSITIVE_RATES:  # that of ε and δ alone is the last
        alone = 100 * statement.most_power(plan.epsilon, plan.delta, alarm)
        composed, limit = (float(x) for x in cells(text, f"{100 * alarm:g} |")[-2:])
        assert alone <= limit <= alone * 1.001 and composed <= limit
        assert (composed == 100 * alarm) == statement.is_searched(
            plan
        )  # then no limit of its own is known


def cells(text, name):
    """Those of the row of that name."""
    line = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
    return [cell.strip() for cell in line.strip("|").split("|")]


# The template.


def parts_of(texts):
    """The names that stand in its words, and the fields that choose among them."""
    words = [x for text in texts.values() for x in text.choices.values()]
    names = {x for text in words for x in string.Template(text).get_identifiers()}
    return names, {text.field for text in texts.values() if text.field}


def golden_fields():
    """Facts of the six, one of them with a limit of its own, which takes its time."""
    yield golden.fields_of("example_poisson")
    for name in golden.CONFIGS:
        plan = quick(golden.plan_of(name))
        released = golden.released_of(name)
        changes = {"released": released, "notes": golden.NOTES.get(name)}
        yield fields(plan, golden.CONFIGS[name], **changes, **golden.SUMMARIES[name])
    yield loop_fields("own_loop", is_proved=False)


def other_fields():
    """Facts that make every choice that no golden shows."""
    yield fields(allocated())
    yield fields(quick(golden.plan_of("private_search"), accountant="pld"))
    yield fields(quick(golden.plan_of("own_loop")))
    yield fields(quick(golden.plan_of("own_loop")), {"clip_norm_from": None})
    yield loop_fields("user_poisson", is_proved=True)
    shares = {"share_clipped": [0.2, 0.1, 0.3], "share_above_0.866": [0.5, 0.4, 0.6]}
    yield fields(quick(golden.plan_of("own_loop")), gradient_norms=shares)
    yield fields(quick(golden.plan_of("own_loop")), num_slots=8)
    scaled = {"preprocessing": {"target": [50.0, 12.5]}}
    yield fields(quick(golden.plan_of("own_loop")), notes={"Contact": "me"}, **scaled)


def loop_fields(name, is_proved):
    """Facts of a loop of one's own."""
    plan = quick(golden.plan_of(name))
    words = {"is_proved": is_proved, "data": "points", "exported_by": "bam"}
    return statement.fields_of_own_loop(
        plan, golden.summary_of(plan) | {"clip_norm": None}, **words
    )


def quick(plan, **changes):
    """A plan like that with these changes, without μ."""
    return without_mu(dataclasses.replace(plan, **changes))


def fields(plan, config=None, diagnosed=False, released=statement.FOLDER, notes=None, **summary):
    """Those of a run of that plan, in a folder, with changes of its config and its summary."""
    config = golden.config_of(**(config or {}))
    return statement.fields_of_run(
        config,
        plan,
        golden.summary_of(plan, **summary),
        data="data",
        diagnosed=diagnosed,
        exported_by="bam",
        released=released,
        notes=notes,
    )


def allocated():
    """A plan of batches that divide the data."""
    record = golden.plan_of("example_poisson").to_json() | {"mechanism": "random_allocation"}
    return bam.PrivacyPlan.from_json(record)


def unused(texts, known):
    """What of a template or of the fields nothing uses, and what it lacks."""
    names, choosing = parts_of(texts)
    roots = {"statement", "nominal", "process", "part", "answer", "not_recorded"}
    return (texts.keys() | known) - names - choosing - roots, (
        names | choosing
    ) - texts.keys() - known


COMPUTED = ("accounted", "package", "rounding_note", "orders", "lines")
# What no golden shows; other tests here do, or those of random allocation.
UNSEEN = {
    ("not_recorded", None), ("batch_rows", "1/b"), ("bounded", "proved"),
    ("whose_gradients", "user"), ("clip_norm_from", "not told"), ("scale_row", "True"),
    ("not_said", "True"),
    *((name, x) for name in ("but_norms", "norms_row") for x in ("told", "covered")),
    *((name, "PLD_accounting") for name in COMPUTED),
    *((name, "profiles") for name in COMPUTED),
}  # fmt: skip


def test_every_text_and_every_field_is_used_and_every_choice_is_made(monkeypatch):
    pytest.importorskip("PLD_accounting")
    made, known, render = set(), set(), statement.render

    def seen(fields, name):
        field = statement.TEXTS[name].field
        made.add((name, str(fields[field]) if field else None))
        known.update(fields)
        return render(fields, name)

    monkeypatch.setattr(statement, "render", seen)
    for each in golden_fields():
        statement.text_of(each)
    texts = statement.TEXTS
    written = {(name, x) for name, text in texts.items() for x in text.choices}
    assert written - made == UNSEEN
    for each in other_fields():
        statement.text_of(each)
    assert written - made == {("not_recorded", None)}
    assert unused(texts, known) == (set(), set())
    more = texts | statement.texts_of("## [planted if chance = True]\n\n$unknown\n")  # the control
    assert unused(more, known | {"idle"}) == ({"planted", "idle"}, {"chance", "unknown"})


def test_a_text_has_one_field_no_choice_twice_and_no_heading_of_another():
    heads = re.findall(r"^## \[(\w+)(?: if (\w+) = .+)?\]$", statement.TEMPLATE.read_text(), re.M)
    assert len(set(heads)) == len(statement.TEXTS)
    assert len(heads) == sum(len(text.choices) for text in statement.TEXTS.values())
    assert not any("## [" in x for text in statement.TEXTS.values() for x in text.choices.values())


def test_a_field_that_is_not_there_or_has_no_words_is_an_error_and_none_is_read_again():
    known = {"seeded": False, "epsilon": "$delta ${x} $", "delta": 1e-5}
    assert statement.render(known, "claim") == "($delta ${x} $, 1e-05)"
    for changed in ({"seeded": True}, {"seeded": "maybe", "epsilon": 1, "delta": 1}):
        with pytest.raises(KeyError):
            statement.render(changed, "claim")
    assert statement.render(known, "nominal") == ""
    with pytest.raises(KeyError):  # no notice is left out because a field is misspelt
        statement.render(known | {"seeded": "no"}, "nominal")


def test_a_text_that_does_not_stand_leaves_no_line():
    texts = "## [a]\n\none\n\n$b\n\ntwo\n$b\nthree $b\n\n"
    texts += "## [b if field = True]\n\nwords\n\n## [b if field = False]\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statement, "TEXTS", statement.texts_of(texts))
        assert statement.render({"field": False}, "a") == "one\n\ntwo\nthree "
        assert statement.render({"field": True}, "a") == "one\n\nwords\n\ntwo\nwords\nthree words"


# Facts.


def told_of(name):
    """What a statement has of a map of bam's own."""
    return {"features": "in words", "features_words": FEATURES[name].words}


QUIET = {
    "seeded": False, "diagnosed": False, "holdout": "none", "tests": "at the end",
    "clip_norm_given": "by hand", "own_parts": "none", "weighted": "none", "init": "at random",
    "features": "none", "features_words": "",
    "features_weights_known": False, "frozen": False, "searched": False, "unit": "example",
    "bound": "in words", "num_examples_given": False, "q_is": "l/N", "is_folder": True,
    "trained_by": "bam train",
    "clip_words": CLIPS["l2"].words,
    "noise_is": "independent", "printed_by_bam": True, "num_codes": "one", "taken_by": "",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "summary", "chosen"),
    [
        ({}, {"seed": 7}, {"seeded": True}),
        ({}, {"diagnosed": True}, {"diagnosed": True}),
        ({"diagnostics__every": 20}, {}, {"diagnosed": True}),
        ({"dataset__holdout": 50}, {}, {"holdout": "not covered"}),
        ({"eval__every": 7}, {}, {"tests": "in training"}),
        ({"clip_norm_from": "mine"}, {}, {"clip_norm_given": "from elsewhere"}),
        ({"clip_norm_from": None}, {}, {"clip_norm_given": "not told"}),
        ({"loss__weights": [0.5, 9.5]}, {}, {"weighted": "by a setting"}),
        ({}, {"init_digest": "d"}, {"init": "in a file"}),
        ({}, {"num_frozen": 68, "num_params": 15}, {"frozen": True}),
        ({"features__name": "scattering"}, {}, told_of("scattering")),
        ({"features__name": "prior"}, {}, told_of("prior")),
        ({"features__name": "new"}, {}, {"features": "declared"}),  # in no row
        ({"features__name": "backbone"}, {}, {"features": "declared"}),
        (
            {"features__name": "backbone"}, {"features_digest": "d"},
            {"features": "declared", "features_weights_known": True},
        ),
        ({"clip__name": "normalize"}, {}, {"clip_words": CLIPS["normalize"].words}),
        ({"clip__name": "proved"}, {}, {"bound": "own", "clip_words": ""}),
        ({"method__name": "mine:sgd"}, {}, {"own_parts": "some"}),
        ({"clip__name": "mine:clip"}, {}, {"own_parts": "some", "bound": "own", "clip_words": ""}),
        ({"optimizer__name": "mine:opt"}, {}, {"own_parts": "some"}),
        ({"dataset__name": "mine:data"}, {}, {"own_parts": "some"}),
        ({"loss__name": "mine:f"}, {}, {"own_parts": "some", "weighted": "by its own loss"}),
        ({"model__name": "mine:net"}, {}, {"own_parts": "some", "init": "by its own model"}),
        ({"features__name": "mine:map"}, {}, {"own_parts": "some", "features": "declared"}),
        ({}, {"processes": [golden.PROCESS, golden.LATER]}, {"num_codes": "several"}),
    ],
)  # fmt: skip
def test_what_a_run_chose_is_a_field_and_nothing_else_changes(config, summary, chosen):
    plan = quick(golden.plan_of("own_loop"), num_steps=9)
    known = fields(plan, config, **summary) | {"taken_by": ""}
    assert {key: known[key] for key in QUIET} == QUIET | chosen


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("user_poisson", {"unit": "user", "group_size": 4, "num_examples": 360}),
        ("banded", {"noise_is": "correlated", "bands": 3, "event_steps": 3, "event_q": 0.12}),
        ("banded", {"num_examples_given": True, "adjacency": "add_or_remove_one"}),
        ("private_search", {"searched": True, "holdout": "covered", "tests": "none"}),
        ("private_search", {"trials_mean": "3", "printed_by_bam": False}),
        ("not_releasable", {"seeded": True, "sensitivity": 4.5, "clip_norm": 3.0}),
    ],
)
def test_what_a_plan_says_is_a_field(name, chosen):
    known = fields(quick(golden.plan_of(name)), golden.CONFIGS[name], **golden.SUMMARIES[name])
    assert {key: known[key] for key in chosen} == chosen


def test_names_of_classes_are_listed_up_to_twenty_and_are_code():
    def row(num):
        names = [f"[x](https://evil.example) {i}" for i in range(num)]
        text = statement.text_of(fields(quick(golden.plan_of("own_loop")), classes=names))
        [line] = [x for x in text.splitlines() if x.startswith("| names of the classes")]
        return line, [f"`{x}`" for x in names]

    line, names = row(20)
    assert f"| names of the classes ({', '.join(names)}), and their number |" in line
    line, names = row(23)
    assert f"{names[19]} and 3 more in `model.json`)" in line and names[20] not in line
    assert row(0)[0].startswith("| names of the classes, and their number |")


def test_a_classifier_has_no_offset_and_scale_of_labels_among_what_is_public():
    def text(**summary):
        return statement.text_of(fields(quick(golden.plan_of("own_loop")), **summary))

    words = ("inputs, the offset and scale of the labels, and all", "| `target` in `preprocessing`")
    assert not any(x in text() for x in words)
    scaled = text(preprocessing={"target": [50.0, 12.5]})  # the control
    assert all(x in " ".join(scaled.split()) for x in words)


def test_what_a_publisher_left_open_stands_above_the_answers():
    notes = {"A": "yes", "B": "", "C": ""}
    text = statement.text_of(fields(quick(golden.plan_of("own_loop")), notes=notes))
    above, _, below = text.partition("## What the publisher says")[2].partition("\n### A\n")
    assert "The publisher has not said: B; C.\n" in above and "    yes\n" in below
    assert "### B" not in text
    text = statement.text_of(fields(quick(golden.plan_of("own_loop")), notes={"A": "yes"}))
    assert "has not said" not in text  # the control


def test_the_share_recognised_is_the_best_limit_at_one_in_a_hundred():
    for name in ("example_poisson", "private_search"):
        text = " ".join(golden.of(name).split())
        best = cells(golden.of(name), "1 |")[1]
        assert f"not in the data recognises at most {best} in 100 examples that were" in text


def test_batches_that_divide_the_data_are_a_fact():
    pytest.importorskip("PLD_accounting")
    known = fields(allocated())
    assert (known["q_is"], known["batch_size"]) == ("1/b", 256)
    assert (known["exact_q"], known["average_batch_size"]) == (1 / 5, 1437 * (1 / 5))
    assert known["computed_by"] == "PLD_accounting" and not known["printed_by_bam"]
    assert not known["own_limit"] and not known["mu_known"]  # no Poisson steps are known
    rows = statement.render(known, "batch_rows").splitlines()
    assert rows == [
        "| l, what a step's sum is divided by | | 256 |",
        f"| N/b, batch size on average | | {1437 * 0.2} |",
        "| q = 1/b, rounded up | 0.2 | 0.2 |",
    ]
    check = statement.render(known, "check").splitlines()
    assert check[1:4] == [
        f"PLD_accounting (`pip install` it). They print {known['exact_epsilon']}, but for late "
        "digits.",
        "Their δ is less by 1.4e-08, for draws that outgrow their rows.",
        "",
    ]
    assert check[-1] == "```"  # no command of bam's


def test_a_loop_of_ones_own_says_whose_oracle_and_clip_and_gradient_it_is():
    unproved, proved = golden.own_loop(), golden.own_loop(is_proved=True)
    bound = "| the oracle's gradient of each example is | given a norm of at most S"
    assert f"{bound} | `chosen in the caller's code` |" in unproved
    assert f"{bound} by one of bam's own clips, whose bound is proved | `chosen in the" in proved
    assert statement.render({"part_of": "clip", "named": ""}, "part") in unproved
    lines = differing(unproved, proved)
    assert [line.split("|")[1] for line, _ in lines] == [
        " the oracle's gradient of each example is ",
        " code by others than bam that the guarantee rests on ",
    ]
    mean = statement.render({"trained_by": "own loop", "unit": "user"}, "gradient")
    assert mean == "the oracle's gradient of each user's mean loss"


def test_the_clips_that_have_words_are_bam_s():
    for name, clip in CLIPS.items():
        assert f"| {clip.words} | `{name}` |" in statement.text_of(
            fields(quick(golden.plan_of("own_loop")), {"clip__name": name})
        )
