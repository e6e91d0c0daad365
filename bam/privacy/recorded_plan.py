"""The plan that a run has recorded in its folder, which stays when the run goes on."""

import dataclasses
from pathlib import Path
from typing import Any

from bam import files, provenance
from bam.errors import InputError
from bam.files import JsonMapping
from bam.privacy import ledger
from bam.privacy.plan import PrivacyPlan, plan_without_epsilon, with_epsilon

PLAN = "plan.json"


def plan_for(
    folder: Path | None,
    *,
    plan: PrivacyPlan | None = None,
    spare_steps: int = 0,
    **arguments: Any,
) -> PrivacyPlan:
    """Returns the plan recorded in a folder, if it has these arguments, or without one a new plan.

    The recorded σ and ε stay, because another version of the accountant may choose others.

    Args:
      folder: of the run to continue or begin; None for none.
      plan: a plan that is taken as it is, if it has these arguments: none is read or made.
      spare_steps: the number of steps in `num_steps` that only replace lost ones.
      **arguments: those of `make_plan`.

    Raises:
      InputError: as `make_plan` and `recorded_plan`, and if another plan is recorded.
    """
    asked = plan_without_epsilon(**arguments)
    is_target = asked.private and not asked.noise_multiplier
    kept = plan or (folder and recorded_plan(folder, asked.epsilon if is_target else None))
    if not kept:
        return dataclasses.replace(with_epsilon(asked), spare_steps=spare_steps)
    if is_target:
        kept.check_target(asked.epsilon)
        asked = dataclasses.replace(asked, noise_multiplier=kept.noise_multiplier)
    epsilon = kept.epsilon if asked.private else asked.epsilon
    expected = dataclasses.replace(asked, epsilon=epsilon, spare_steps=spare_steps)
    where = folder / PLAN if folder else "the plan"
    check_same(where, kept.to_json(), expected.to_json())
    return kept


def recorded_plan(folder: Path, target_epsilon: float | None) -> PrivacyPlan | None:
    """Returns the recorded plan of the run in a folder, or None if no run was begun there.

    The plan is not made anew, because another version of the accountant may choose another σ. Its ε
    must hold when it is computed again, and be at most the target. Otherwise, and for a file that
    is not a plan, it is an InputError in one line. The target of a run without privacy is None.
    """
    path = folder / PLAN
    if not path.exists():
        return None
    check_version(folder)
    return read_plan(path, target_epsilon, "; choose another folder")


def check_version(folder: Path) -> None:
    """Raises InputError if the last process of an unfinished run had another version of bam."""
    joined, ours = ledger.read_processes(folder), provenance.versions()["bam"]
    theirs = str(joined[-1]["versions"].get("bam", ours)) if joined else ours
    # Patches of a version continue each other's runs.
    if theirs.split(".")[:2] != ours.split(".")[:2]:
        raise InputError(
            f"{folder} holds a training of bam {theirs}, which only that version continues: "
            "go on with that one, or choose another folder"
        )


def read_plan(path: Path, target_epsilon: float | None = None, advice: str = "") -> PrivacyPlan:
    """Returns the plan in a file, checked as in `recorded_plan`, with `advice` in each error."""
    record = files.read_json(path)
    try:
        plan = PrivacyPlan.from_json(record)
        if target_epsilon is not None:
            plan.check_target(target_epsilon)
        plan.check_epsilon()
    except ValueError as error:
        raise InputError(f"{path}: {error}{advice}") from None
    return plan


def check_same(location: object, recorded: JsonMapping, expected: JsonMapping) -> None:
    """Raises InputError if a recorded plan is not the expected one: its ε would not be this run's.

    `expected` has keys and values, for a plan those of `to_json`.
    """
    for key, value in expected.items():
        if recorded.get(key) != value:
            raise InputError(
                f"{location} has {key} = {recorded.get(key)!r}, but this run has {value!r}: choose "
                "another folder"
            )
