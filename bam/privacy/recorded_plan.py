"""The plan that a run has recorded in its folder, which stays when the run goes on."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from bam import files, provenance
from bam.errors import InputError
from bam.files import JsonMapping
from bam.privacy import ledger
from bam.privacy.plan import Population, PrivacyPlan, make_plan

PLAN = "plan.json"


def plan_for(
    folder: Path | None,
    population: Population,
    target_epsilon: float,
    *,
    plan: PrivacyPlan | None = None,
    spare_steps: int = 0,
    mechanism: JsonMapping,
    **settings: Any,
) -> PrivacyPlan:
    """Returns the plan recorded in a folder, if it has these settings, or without one a new plan.

    The recorded σ and ε stay, because another version of the accountant may choose others.

    Args:
      folder: of the run to continue or begin; None for none.
      population: the examples or users.
      target_epsilon: the largest ε, `inf` without privacy.
      plan: a plan that is taken as it is, if it has these settings: none is read or made.
      spare_steps: the number of steps in `num_steps` that only replace lost ones.
      mechanism: name and options of the way to draw batches.
      **settings: the other arguments of `make_plan`.

    Raises:
      InputError: as `make_plan` and `recorded_plan`, and if another plan is recorded.
    """
    target = target_epsilon if target_epsilon < math.inf else None
    kept = plan or (folder and recorded_plan(folder, target))
    if not kept:
        plan = make_plan(
            num_examples=population,
            target_epsilon=target_epsilon,
            mechanism=mechanism,
            **settings,
        )
        return dataclasses.replace(plan, spare_steps=spare_steps)
    if target is None:
        settings |= {"noise_multiplier": 0.0, "epsilon": math.inf}
    else:
        kept.check_target(target)
    settings |= {"population": population, "spare_steps": spare_steps}
    expected = dataclasses.replace(kept, mechanism_config=mechanism, **settings)
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
    """InputError if the last process of an unfinished run had another version of bam."""
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
    """InputError if a recorded plan is not the expected one: its ε would not be this run's.

    `expected` has keys and values, for a plan those of `to_json`.
    """
    for key, value in expected.items():
        if recorded.get(key) != value:
            raise InputError(
                f"{location} has {key} = {recorded.get(key)!r}, but this run has {value!r}: choose "
                "another folder"
            )
