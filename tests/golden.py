"""Texts that `tests/golden` has word for word: statements of six trainings, and all messages.

python -m tests.golden

writes them again. After a change of PRIVACY.md, or of a message, they show what the change does.
The statements are made from records alone.
"""

import tempfile
from pathlib import Path
from unittest import mock

import bam
from bam import files, provenance
from bam.privacy import ledger, recorded_plan, statement
from bam.privacy.plan import Population, PrivacyPlan
from bam.release import notes
from bam.training import config as base
from tests import messages

FOLDER = Path(__file__).with_name("golden")
VERSIONS = {"python": "3.11.7", "bam": "0.2.0", "jax": "0.8.0", "dp-accounting": "0.6.0"}
DIGEST = "5e884898da28047151d0e56f8dc6292773603d0d6aabbd"
PROCESS = {
    "first_step": 1, "commit": "1d4e5a", "device": "cpu", "num_devices": 1, "num_processes": 1,
    "versions": VERSIONS,
}  # fmt: skip
LATER = PROCESS | {
    "first_step": 5, "commit": "2b7c9f (modified)", "device": "NVIDIA H100", "num_devices": 8,
    "num_processes": 2,
}  # fmt: skip
# What differs from a plan of Poisson batches of a data set whose examples were counted.
PLANS = {
    "example_poisson": {
        "num_examples": 1437, "expected_batch_size": 256, "num_steps": 4, "delta": 1.4e-5,
        "noise_multiplier": 4.55542494463676, "epsilon": 0.2999976765824805,
        "accountant": "pld",
    },
    "user_poisson": {
        "num_examples": 360, "expected_batch_size": 64, "num_steps": 2, "delta": 1e-4,
        "noise_multiplier": 3.97402486137696, "epsilon": 0.24999919785261446,
        "group_size": 4,
    },
    "banded": {
        "num_examples": 1000, "expected_batch_size": 40, "num_steps": 9,
        "noise_multiplier": 4.922367636960392, "epsilon": 0.19999899793124956, "accountant": "pld",
        "mechanism": "banded", "mechanism_options": {"bands": 3},
        "num_examples_given": True,
    },
    "own_loop": {
        "num_examples": 60, "expected_batch_size": 12, "num_steps": 5, "delta": 1e-3,
        "noise_multiplier": 4.148552467854344, "epsilon": 0.2999985428892165,
    },
    "private_search": {
        "num_examples": 1287, "expected_batch_size": 128, "num_steps": 3,
        "noise_multiplier": 2.4299613288919852, "epsilon": 1.0999945002527618,
        "mechanism": "best_of_trials",
        "mechanism_options": {
            "trials_mean": 3.0, "trials_shape": 1.0, "score_noise_multiplier": 8.0,
        },
    },
    "not_releasable": {
        "num_examples": 1437, "expected_batch_size": 256, "num_steps": 4,
        "noise_multiplier": 4.14225711102406, "epsilon": 0.399996913661926,
    },
}  # fmt: skip
# What differs, of each that `bam train` took, from the default config and from a plain summary.
CONFIGS = {
    "example_poisson": {"eval__every": 2, "features__name": "backbone"},
    "user_poisson": {"clip__name": "per_layer", "features__name": "prior"},
    "banded": {"clip__name": "normalize", "loss__weights": [0.5, 9.5]},
    "private_search": {"dataset__holdout": 150, "features__name": "scattering"},
    "not_releasable": {
        "method__name": "mine:sgd", "clip__name": "mine:clip", "loss__name": "mine:loss",
        "model__name": "mine:net", "features__name": "mine:map", "optimizer__name": "mine:opt",
        "dataset__name": "mine:data", "diagnostics__every": 20, "dataset__holdout": 50,
        "clip_norm_from": "0.5-quantile-on-mine:public-after-20-steps",
    },
}  # fmt: skip
SUMMARIES = {
    "example_poisson": {
        "features_digest": DIGEST, "clip_norm": 1.5, "sensitivity": 1.5,
        "classes": ["benign", "malignant"],
    },
    "user_poisson": {"init_digest": DIGEST, "num_frozen": 68, "num_params": 15},
    "banded": {
        "processes": [PROCESS | {"first_step": 2}, LATER],  # of step 1 none is recorded
        "preprocessing": {"target": [50.0, 12.5]},
    },
    "private_search": {  # of a version that recorded the last process alone
        "processes": None, "device": "cpu", "commit": "1d4e5a", "versions": VERSIONS,
    },
    "not_releasable": {
        "seed": 7, "noise_key": "seed", "clip_norm": 3.0, "sensitivity": 4.5,
        "processes": [PROCESS, LATER | {"first_step": 1}],  # it took all steps again
    },
}  # fmt: skip
# What the publisher of one of them answers; the first text tries to be more than an answer.
NOTES = {
    "user_poisson": dict.fromkeys(notes.QUESTIONS, "") | {
        "Choice of hyper-parameters": "From the defaults.\n\n## Facts\n\n| ε | 0.01 |\n</pre>",
        "Other runs on the same data": "Two, which failed.",
        "Other releases from the same data": "A model at ε = 1, so ε is at most 1.25 in total.",
        "Choice of ε and δ": "The review board, before training.",
        "Contact": "privacy@example.org",
    },
}  # fmt: skip


def plan_of(name):
    """The plan of one of the six."""
    fields = {"delta": 1e-5, "accountant": "rdp", "mechanism": "poisson"} | PLANS[name]
    counted = ("num_examples", "group_size", "num_examples_given")
    population = Population(**{key: fields.pop(key) for key in counted if key in fields})
    mechanism = {"name": fields.pop("mechanism"), **fields.pop("mechanism_options", {})}
    return PrivacyPlan(population=population, mechanism_config=mechanism, **fields)


def config_of(**changes):
    """Returns the default config with changes, where `a__b` is the key `a.b`."""
    config = base.get_config("dp_sgd").to_dict()
    for key, value in changes.items():
        section, _, last = key.rpartition("__")
        (config[section] if section else config)[last] = value
    return config


def summary_of(plan, **changes):
    """Returns what a finished run of that plan records, with changes.

    A change to None takes a key away.
    """
    summary = {
        "seed": None, "noise_key": "operating system", "clip_norm": 1.0, "sensitivity": 1.0,
        "noise": plan.mechanism.noise, "sampling": plan.mechanism.sampling,
        "steps_begun": plan.num_steps,
        "steps_taken": plan.num_steps, "processes": [PROCESS],
    }  # fmt: skip
    taken_away = [key for key, value in changes.items() if value is None]
    return {k: v for k, v in (summary | changes).items() if k not in taken_away}


def fields_of(name):
    """The fields of one of those that `bam train` took."""
    plan = plan_of(name)
    config = config_of(**CONFIGS[name])
    return statement.fields_of_run(
        config,
        plan,
        summary_of(plan, **SUMMARIES[name]),
        data="the data set `digits`",
        diagnosed=False,
        exported_by="bam 0.2.0, commit 1d4e5a",
        released=released_of(name),
        notes=NOTES.get(name),
    )


def released_of(name):
    """What is released, in words: of one of them, not a folder."""
    return "the weights" if name == "banded" else statement.FOLDER


def own_loop(is_proved=False):
    """The statement that a loop of one's own writes, of here and now but for plan and versions."""
    clip = bam.clip_by_l2_norm(1.0)
    if not is_proved:
        clip = bam.BoundedTransformation(clip.init, clip.update, 1.0)
    plan = plan_of("own_loop")
    with (
        mock.patch.object(recorded_plan, "with_epsilon", lambda asked: plan),
        mock.patch.object(provenance, "git_commit", lambda: "1d4e5a"),
        mock.patch.object(provenance, "versions", lambda: VERSIONS),
        mock.patch.object(ledger, "this_process", lambda first, num: PROCESS),
        tempfile.TemporaryDirectory() as folder,
    ):
        private = bam.PrivateTraining(
            num_examples=plan.num_examples,
            expected_batch_size=plan.expected_batch_size,
            num_epochs=1,
            epsilon=1.0,
            delta=plan.delta,
            clip=clip,
        )
        private.write_statement(Path(folder, "PRIVACY.md"), "sixty points")
        return Path(folder, "PRIVACY.md").read_text(encoding="utf-8")


def of(name):
    """The statement of that name."""
    return own_loop() if name == "own_loop" else statement.text_of(fields_of(name))


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in PLANS:
        files.write_text(FOLDER / f"{each}.md", of(each))
    files.write_text(FOLDER / "messages.md", messages.table(messages.gathered()))
