"""A private search: the best of a random number of trials, by a noised score, within one ε.

Every trial runs one mechanism anew: it draws a setting from the grid, trains, and scores the
result, with the operating system's randomness. The number of trials is drawn before the first. The
theorem (`bam.privacy.selection`) covers the chosen trial if nobody learns that number or anything
about the other trials. So the search prints nothing about them, not even its progress.
"""

import contextlib
import dataclasses
import functools
import math
import re
import secrets
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path

from bam import files, tables
from bam.core.seeds import secret_key
from bam.data import datasets
from bam.errors import InputError
from bam.extras import needs
from bam.files import JsonObject
from bam.part_table import BEST_OF_TRIALS
from bam.privacy import accounting
from bam.privacy.plan import PrivacyPlan
from bam.privacy.rounding import round_down, round_up
from bam.privacy.selection import CHOSEN, Selection, composed_epsilon
from bam.privacy.selection import epsilon as epsilon_of_search
from bam.sweep import runs
from bam.training import loop, parts, rundir, score
from bam.training.keys import CHANGEABLE

with needs("train"):
    from ml_collections import ConfigDict

# Set in the config of every trial: no further figures, because nobody may look at them.
FIXED = {"eval.every": 0, "diagnostics.every": 0}
BITS = 128  # of the uniform number from which the number of trials follows
ANOTHER = "a new search is a second release: its ε adds to this one's"
TRIALS = "trials.json"  # the trials as drawn, with their settings and scores; secret
ACCOUNTANTS = ("rdp", "pld")
COSTS: tables.Columns = {
    "paid for": lambda row: row["what"],
    "ε by RDP": lambda row: _cell(row["rdp"]),
    "ε by PLD": lambda row: _cell(row["pld"]),
}


def as_trial(config: ConfigDict, selection: Selection, held_out: bool) -> ConfigDict:
    """Returns the config of a trial from that of its setting.

    The setting's ε becomes the ε of the whole search.
    """
    if held_out != bool(config.dataset.holdout):
        raise InputError("--score=held_out and --holdout=N belong together: give both or neither")
    if config.epsilon is None:
        raise InputError("--private shares out an ε: set --config.epsilon, not a noise_multiplier")
    if not config.checkpoint.every:
        raise InputError("--private releases a checkpoint: set --config.checkpoint.every above 0")
    if config.loss.name != "cross_entropy":
        raise InputError(
            f"--private counts images that are classified right, so loss {config.loss.name} has no "
            "score: use --config.loss.name=cross_entropy"
        )
    trial = config.copy_and_resolve_references()
    trial.update_from_flattened_dict(FIXED)
    if (options := parts.set_keys(trial.mechanism, "")) != {"name": "poisson"}:
        words = ", ".join(str(x) if key == "name" else f"{key}={x}" for key, x in options.items())
        raise InputError(
            f"--private is accounted for Poisson batches, not {words}: "
            "use --config.mechanism.name=poisson alone"
        )
    trial.mechanism = ConfigDict({"name": BEST_OF_TRIALS, **dataclasses.asdict(selection)})
    return trial


def search(
    grid: Mapping[str, ConfigDict],
    workdir: Path,
    should_stop: Callable[[], bool],
    log: Callable[[str], None],
    on_plan: Callable[[PrivacyPlan], None] = lambda plan: None,
) -> Path | None:
    """Trains and scores the missing trials, and links to the chosen one.

    Args:
      grid: name of a setting -> its config, as `as_trial` makes it. All are checked before the
        first draw.
      workdir: folder of the trials, readable by its owner alone. However often a search is stopped
        and resumed, the number of trials and their settings are drawn once.
      should_stop: called after every step; True stops the search.
      log: called with lines that may be public.
      on_plan: called before the first draw with the plan, which is the same for every trial.

    Returns:
      The link to the chosen trial, for `export`; None if the search was stopped before its end.

    Raises:
      InputError: if the workdir holds another search's trials. BlockingIOError: if another process
        searches in this workdir.
    """
    trainers = runs.build(grid, lambda: False)
    path = workdir / TRIALS
    if path.exists():
        recorded = _read(path, grid)
        trainers = {name: _with_recorded_noise(path, recorded, x) for name, x in trainers.items()}
    first = next(iter(trainers.values()))
    if any(trainer.plan != first.plan for trainer in trainers.values()):
        raise InputError(
            "all settings must have one plan: remove what changes N, q, T, σ, ε or δ from --set"
        )
    on_plan(first.plan)
    files.make_folder(workdir, mode=0o700)
    workdir.chmod(0o700)
    with files.lock(workdir):
        record = _drawn_once(path, grid, trainers)
        for number, trial in enumerate(record["trials"]):
            if trial["score"] is None:
                try:
                    if should_stop():
                        raise loop.StoppedError
                    folder = workdir / "trials" / str(number)
                    trial["score"] = _score(trainers[trial["setting"]], folder, should_stop, log)
                except loop.StoppedError:
                    log("stopped; the same command continues it")
                    return None
            _write(path, record)
        return _choose(workdir, record["trials"], first.plan, log)


def describe(plan: PrivacyPlan) -> str:
    """The guarantee and the settings of a search, in two lines of text."""
    selection = _selection(plan)
    epsilon, delta = round_up(plan.epsilon, ".4g"), round_up(plan.delta, ".3g")
    return (
        f"({epsilon}, {delta})-DP for the whole search: the best of a random number of trials is "
        f"released, {selection.trials_mean:g} on average, shape {selection.trials_shape:g}\n"
        f"each: {plan.training_steps} steps, q = {round_up(plan.sampling_prob, '.4g')}, noise "
        f"multiplier {round_down(plan.noise_multiplier, '.4g')}; noise on its score of "
        f"{round_down(selection.score_noise_multiplier, '.4g')} images\n"
    )


def costs(plan: PrivacyPlan) -> list[JsonObject]:
    """Rows of `COSTS`: ε of the search, and of more and fewer trials with the same noise."""
    selection = _selection(plan)
    mechanism: JsonObject = {
        key: getattr(plan, key)
        for key in ("noise_multiplier", "sampling_prob", "num_steps", "delta")
    }
    num, noise = math.ceil(selection.trials_mean), selection.score_noise_multiplier
    total = _by_accountant(functools.partial(epsilon_of_search, selection, **mechanism))
    total[plan.accountant] = plan.epsilon
    rows: list[JsonObject] = [{"what": "the search, its best trial released", **total}]
    for spending, num_trials in (
        (f"a grid of {num} such trials, by composition", num),
        ("one such trial, its score included", 1),
    ):
        composed = functools.partial(composed_epsilon, num_trials, noise, **mechanism)
        rows.append({"what": spending, **_by_accountant(composed)})
    alone = _by_accountant(functools.partial(accounting.epsilon, **mechanism))
    rows.append({"what": "its training alone: too little to claim after a search", **alone})
    return rows


def _by_accountant(epsilon: Callable[..., float]) -> JsonObject:
    """Maps each accountant to its ε.

    An ε is None if the accountant has no finite bound.
    """
    spent: JsonObject = dict.fromkeys(ACCOUNTANTS)
    for accountant in ACCOUNTANTS:
        with contextlib.suppress(InputError):
            value = epsilon(accountant=accountant)
            spent[accountant] = value if math.isfinite(value) else None
    return spent


def noised_score(trainer: loop.Trainer, seed: int, folder: Path, noise_multiplier: float) -> int:
    """Returns the noised score of a finished trial.

    The exact score does not leave this function.
    """
    state = runs.last_state(trainer, seed, folder)
    if state is None:
        raise InputError(f"{folder} has no checkpoint, so its trial cannot be scored")
    count = score.num_correct(trainer, loop.whole_model(state), _scored_split(trainer))
    return score.noised_count(count, noise_multiplier, secret_key())


def _cell(epsilon: float | None) -> str:
    return "–" if epsilon is None else round_up(epsilon, ".3f")


def _selection(plan: PrivacyPlan) -> Selection:
    return Selection(**plan.mechanism_options)


def _score(
    trainer: loop.Trainer, folder: Path, should_stop: Callable[[], bool], log: Callable[[str], None]
) -> int:
    """Trains a trial, or the rest of it, and returns its noised score.

    Error messages leave out the trial's number, because the number of trials is secret.
    """
    noise = _selection(trainer.plan).score_noise_multiplier
    try:
        with contextlib.suppress(rundir.FinishedError):
            # Held-out images are private and stand in for test data. ε covers their noised score
            # alone, so the run must not evaluate on them.
            evaluates = not trainer.config.dataset.holdout
            loop.train(trainer, None, folder, should_stop=should_stop, log=log, evaluates=evaluates)
        return noised_score(trainer, 0, folder, noise)
    except (OSError, InputError) as error:
        why = str(error).replace(str(folder), f"a trial of {folder.parents[1]}")
        raise InputError(f"{why} ({ANOTHER})") from None


def _drawn_once(
    path: Path, grid: Mapping[str, ConfigDict], trainers: Mapping[str, loop.Trainer]
) -> JsonObject:
    """The record of the trials: the one in the file, or a new draw, which is written.

    The theorem assumes that all trials run one mechanism on one data set. So the record also holds
    the configs, the plan, and a fingerprint of the images for training and scoring; a resumed
    search must agree with them. The fingerprint's key is deleted once all trials are scored.
    """
    recorded, plan = _read(path, grid) if path.exists() else {}, trainers[min(trainers)].plan
    data_key = recorded.get("data_key") or secrets.token_hex(32)
    datasets_of = {id(x.dataset): x for _, x in sorted(trainers.items())}.values()
    configs = {name: rundir.flat(rundir.as_json(config)) for name, config in sorted(grid.items())}
    identity: JsonObject = {
        "data_key": data_key,
        "data": ",".join(sorted({_fingerprint(data_key, x) for x in datasets_of})),
        "settings": list(configs),
        "configs": {
            name: {key: value for key, value in config.items() if key not in CHANGEABLE}
            for name, config in configs.items()
        },
        "plan": plan.to_json(),
    }
    if recorded:
        # Without its key, which is gone after the last score, the fingerprint cannot be compared.
        compared = identity.keys() - ({"data_key", "data"} if _is_scored(recorded) else set())
        if any(recorded.get(key) != identity[key] for key in compared):
            raise InputError(f"{path} is of another search; choose another --workdir")
        return recorded
    # Before the first trial, because the theorem fails if the number depends on scores.
    system = secrets.SystemRandom()
    num_trials = _selection(plan).num_trials(Fraction(secrets.randbits(BITS), 2**BITS))
    trials = [
        {"setting": system.choice(identity["settings"]), "score": None} for _ in range(num_trials)
    ]
    record = identity | {"trials": trials}
    files.write_json(path, record)
    return record


def _read(path: Path, grid: Mapping[str, ConfigDict]) -> JsonObject:
    """Reads the record of a search's trials.

    InputError if it is damaged or of another grid.
    """
    record = files.read_json(path)
    trials, key = record.get("trials"), record.get("data_key", "0" * 64)
    has_trials = isinstance(trials, list) and trials and all(_is_trial(x) for x in trials)
    has_key = isinstance(key, str) and re.fullmatch("[0-9a-f]{64}", key)
    if not (has_trials and has_key and isinstance(record.get("plan"), dict)):
        raise InputError(f"{path} is damaged: restore it, because {ANOTHER}")
    if any(x["setting"] not in grid for x in record["trials"]):
        raise InputError(f"{path} is of another search; choose another --workdir")
    return record


def _is_trial(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"setting", "score"}
        and isinstance(value["setting"], str)
        and (value["score"] is None or type(value["score"]) is int)
    )


def _fingerprint(key: str, trainer: loop.Trainer) -> str:
    """A keyed digest of the images that a trial is trained and scored on."""
    data = (trainer.dataset.train, _scored_split(trainer))
    return datasets.fingerprint(bytes.fromhex(key), *data)


def _is_scored(record: JsonObject) -> bool:
    return all(trial["score"] is not None for trial in record["trials"])


def _write(path: Path, record: JsonObject) -> None:
    """Writes the record of a search's trials.

    With the last score it also deletes the fingerprint's key.
    """
    if _is_scored(record):
        record.pop("data_key", None)
    files.write_json(path, record)


def _with_recorded_noise(path: Path, record: JsonObject, trainer: loop.Trainer) -> loop.Trainer:
    """The trainer with the recorded noise, where today's accountant may choose another."""
    config = trainer.config
    noise = {key: record["plan"].get(key) for key in ("noise_multiplier", "epsilon")}
    try:
        plan = dataclasses.replace(trainer.plan, **noise)
        plan.check_target(config.epsilon)
        plan.check_epsilon()
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path} is of another search; choose another --workdir ({error})"
        ) from None
    return trainer if plan == trainer.plan else loop.build(config, plan=plan)


def _scored_split(trainer: loop.Trainer) -> datasets.Split:
    # With a holdout, the held-out images are the trainer's test split.
    return trainer.dataset.test if trainer.config.dataset.holdout else trainer.dataset.train


def _choose(
    workdir: Path, trials: list[JsonObject], plan: PrivacyPlan, log: Callable[[str], None]
) -> Path:
    """Marks the trial with the best score, and links to it.

    A tie goes to the first trial. The proof assumes a random one, which is the same: trials are
    exchangeable, whatever their number.
    """
    best = max(range(len(trials)), key=lambda number: trials[number]["score"])
    unit = score.unit_of(_selection(plan).score_noise_multiplier)
    num_correct = trials[best]["score"] / unit
    chosen = {"setting": trials[best]["setting"], "num_correct_noised": num_correct}
    files.write_json(workdir / "trials" / str(best) / CHOSEN, chosen)
    link = workdir / "chosen"
    if not link.is_symlink():
        link.symlink_to(Path("trials") / str(best))
    log(
        f"chosen: {chosen['setting']}, with about {num_correct:.0f} images right\n"
        f"release this trial alone, and nothing else in {workdir}: "
        f"bam export --workdir={link} --out=FOLDER"
    )
    return link
