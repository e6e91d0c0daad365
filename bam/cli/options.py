"""The flags of every command as tables, and its help; nothing here imports JAX, so help is at once.

A command's module defines nothing: `define` puts its flags into an `absl.flags.FlagValues` of one
call, so that no call leaves a value for the next.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from absl import flags

from bam.training import named_configs
from bam.training.keys import KEYS

WIDTH = 100  # columns of the help
HELP = {"help", "h", "helpshort", "helpfull"}

# Exit status -> what it means; docs/commands.md has it, too.
STATUSES = {
    0: "The command is done.",
    1: "A fault of bam, or of code of your own. The traceback says whose, and what to report.",
    2: "The input was wrong. One line on standard error says how.",
    3: "The run was stopped and saved. The same command continues it.",
    130: "Ctrl-C ended a command that keeps nothing to go on with.",
    141: "Nobody read what the command printed.",
}


class Flag(NamedTuple):
    """A flag of a command.

    Attributes:
      name: without its dashes.
      default: what it is if it is not given; its type is the flag's (a tuple: words with commas).
      help: what it means.
      kind: the type, where the default is None; `list`: a flag that may be given several times.
      least, most: bounds of a number.
      choices: the words that it can be.
      required: whether the command ends without it, before any work.
    """

    name: str
    default: Any
    help: str
    kind: type | None = None
    least: float | None = None
    most: float | None = None
    choices: Sequence[str] = ()
    required: bool = False

    def __str__(self) -> str:
        """Its name and default, as the help has them."""
        default = "" if self.default in (None, "", (), []) else self.default
        if isinstance(default, bool):
            default = str(default).lower()
        elif isinstance(default, tuple):
            default = ",".join(default)
        return f"--{self.name}={default}"


class Rule(NamedTuple):
    """What must hold of a command's flags; otherwise `message` is the error."""

    holds: Callable[[flags.FlagValues], Any]
    message: str


class Command(NamedTuple):
    """All that is known of a command before it runs.

    Attributes:
      does: one line of `bam --help`.
      about: what its own help says before the flags: examples first.
      flags: see `Flag`.
      rules: see `Rule`.
      positional: whether something may follow the flags.
    """

    does: str
    about: str
    flags: tuple[Flag, ...]
    rules: tuple[Rule, ...] = ()
    positional: bool = False


DEBUG = Flag("debug", False, "show the traceback of an error, too")
# Of commands and scripts that train many runs.
MANY_RUNS = (
    Flag("config", None, "configs/NAME.py, without a method; --config.KEY=VALUE is for all runs"),
    Flag("workdir", "", "folder for all runs and what is made of them"),
    Flag("num_seeds", 3, "runs of each kind, by seeds 0, 1, …", least=1),
    Flag("max_seconds", 0.0, "stop with a checkpoint after so long; 0: never", least=0),
)
# Flags of `bam privacy` that are not of plans.
ONE_MECHANISM = (
    *("noise_multiplier", "target_epsilon", "sampling_prob", "num_steps", "accountant", "plot"),
)
EXAMPLES = "v5e:1x1, v5e:2x4, v5e:16x16, v6e:2x2, v5p:2x2x1, h100, h100:8, h200, b200"


def _private_search_flags_alone(given: flags.FlagValues) -> bool:
    return given.private or not any(given[name].present for name in PRIVATE_SEARCH)


def _has_classes(given: flags.FlagValues) -> bool:
    """Whether each image that `bam data import` reads is of one class."""
    return not given.number and "," not in given.label_column


PRIVATE_SEARCH = ("trials_mean", "trials_shape", "score", "score_noise")

COMMANDS = {
    "train": Command(
        "trains one model privately, and goes on with one that was stopped",
        """\
bam train --config=digits:bam_sam --workdir=runs/digits

All devices of this machine share the work; those of several, too, if started on each of them with
--coordinator (docs/accelerators.md).
""",
        (
            Flag(
                "config", None, "NAME:METHOD of a shipped config, or FILE.py:METHOD", required=True
            ),
            Flag("workdir", "", "folder for the run's files; an unfinished run there goes on"),
            Flag("max_seconds", 0.0, "stop with a checkpoint after so long; 0: no limit", least=0),
            Flag(
                "tune",
                False,
                "with --config.dry_run: time how many examples at a time are fastest here",
            ),
            Flag(
                "coordinator",
                "",
                "HOST:PORT of process 0 of several; auto: as SLURM, Kubernetes, … say",
            ),
            Flag("num_processes", None, "with --coordinator=HOST:PORT", int),
            Flag("process_id", None, "likewise: 0 to num_processes - 1", int),
        ),
        (
            Rule(
                lambda given: given.workdir or given.config.get("dry_run"),
                "--workdir is required: the folder for the run's files",
            ),
            Rule(
                lambda given: given.config.get("dry_run") or not given.tune,
                "--tune belongs to --config.dry_run",
            ),
        ),
    ),
    "clip_norm": Command(
        "measures a clip norm on public data, and says how to use it",
        """\
bam clip_norm --config=mnist:dp_sgd --public=digits
bam clip_norm --config=mnist:dp_sgd --public=folder --path=DATA --num_classes=10 --quantile=0.9

C is a quantile of the gradients' norms of the config's model, trained from scratch on the public
data for some steps without privacy. It prints the flags that give a run this C and record where it
came from. It reads the private data's format alone. Nobody but you can say that the other data
are public: they must share no example with the private ones.
""",
        (
            Flag(
                "config", None, "NAME:METHOD of a shipped config, or FILE.py:METHOD", required=True
            ),
            Flag("public", "", "the public data set, as --config.dataset.name", required=True),
            Flag("source", "", "of the public data, as --config.dataset.source"),
            Flag("path", "", "of the public data, as --config.dataset.path"),
            Flag("num_classes", 0, "of public data whose files do not name the classes", least=0),
            Flag("quantile", 0.5, "of the norms: above 0 and at most 1"),
            Flag("steps", 20, "of training on the public data before norms are measured", least=0),
        ),
    ),
    "sweep": Command(
        "trains methods at many settings and seeds, and compares them",
        """\
bam sweep --config=digits --methods=dp_sgd,bam_sam:0.02 --num_seeds=5 --workdir=runs/sweep
bam sweep --config=digits --methods=dp_sgd,bam_sam:0.01,bam_sam:0.05 --holdout=200 --best=1 \\
  --set=optimizer.learning_rate=0.003,0.01,0.03 --num_seeds=5 --workdir=runs/search

The first method is the baseline: each other is paired with it, by seed and at equal settings. With
--holdout settings are judged on training images that are set aside, so that the test split is not
read; with --best=K only the K best settings of each method, by the first seed, get all seeds. With
--smaller=K batches and noise are K times smaller (TAN's rule): a cheap search for large batches,
whose runs have a far larger ε. None of that is private: ε is of each run alone (docs/selection.md).
With --private a random number of trials is drawn from the same settings and the best is chosen; ε
pays for the choice, too. The same command again goes on.
""",
        (
            MANY_RUNS[0]._replace(required=True),
            MANY_RUNS[1]._replace(required=True),
            Flag(
                "methods",
                ("dp_sgd", "bam_sam"),
                "METHOD or METHOD:STRENGTH, the baseline first",
                required=True,
            ),
            Flag("set", [], "KEY=VALUE,VALUE of the config, tried with all others", list),
            *MANY_RUNS[2:],
            Flag("holdout", 0, "training images to judge on; 0: the test split", least=0),
            Flag("best", 0, "settings of each method that get all seeds; 0: all", least=0),
            Flag(
                "smaller",
                1,
                "search by TAN's rule: batches and noise are so many times smaller",
                least=1,
            ),
            Flag(
                "metric",
                "",
                "to compare: a name of figures or test_… in summary.json; '': accuracy, or loss",
            ),
            Flag("out", "", "files to write, less .json and .md; '': WORKDIR/sweep"),
            Flag(
                "private",
                False,
                "--config.epsilon pays for the choice, too: docs/selection.md",
            ),
            Flag("trials_mean", 8.0, "of --private: trials on average"),
            Flag(
                "trials_shape",
                1.0,
                "of --private: shape η of their number; 0: logarithmic, 1: geometric",
            ),
            Flag(
                "score",
                "training",
                "of --private: images that a trial is judged on",
                choices=("training", "held_out"),
            ),
            Flag(
                "score_noise",
                10.0,
                "of --private: standard deviation of the noise on a score, in images",
            ),
        ),
        (
            Rule(
                _private_search_flags_alone,
                f"--{', --'.join(PRIVATE_SEARCH)} belong to --private",
            ),
        ),
    ),
    "report": Command(
        "writes a page about a run: its privacy, accuracy and settings",
        """\
bam report --workdir=runs/digits
bam report --workdir=runs/digits --public --out=page.html

The page is one file; it needs no network and runs nothing. With --public it can be passed on.
""",
        (
            Flag(
                "workdir", "", "folder of a run; it is only read, but for the page", required=True
            ),
            Flag("out", "", "HTML file to write; if empty, report.html in the run's folder"),
            Flag(
                "public",
                False,
                "leave out all that ε does not cover, paths and the seed, to pass the page on",
            ),
        ),
    ),
    "export": Command(
        "writes what may be released of a run, with a privacy statement",
        """\
bam export --workdir=runs/digits --out=release
""",
        (
            Flag("workdir", "", "folder of a finished run, trained without a seed", required=True),
            Flag("out", "", "folder to write, new or empty", required=True),
            Flag(
                "nominal",
                False,
                "also take a run with a seed; its PRIVACY.md begins by saying what that means",
            ),
            Flag(
                "own_model",
                "",
                "MODULE:FUNCTION of the run's model, if it is your own; it is imported",
            ),
            Flag(
                "stablehlo",
                False,
                "also write model.stablehlo: the network with its weights, for jax.export",
            ),
        ),
    ),
    "predict": Command(
        "says what a released model sees on images",
        """\
bam predict --release=release photograph.jpg
bam predict --release=release photographs --out=predictions.csv --top=3
find photographs -name '*.jpg' | bam predict --release=release --out=predictions.json -

Files become pixels as those of the training did; of a folder all images in it are read. The table
is CSV: file, class and its probability, then the probability of each class, or with --top=K the K
likeliest classes. A name that a spreadsheet would take for a formula has an apostrophe before it.
With --out=FILE.json it is a list of objects instead. - alone reads the files' names from standard
input, one a line.
If the folders in a folder have the names of classes, the accuracy is printed. A file that cannot be
read has a row without a class, and the exit status is 2.
""",
        (
            Flag("release", "", "folder that `bam export` wrote", required=True),
            Flag("out", "", "new file to write, .json or CSV; '': standard output"),
            Flag("format", "", "'': as --out ends, else CSV", choices=("", "csv", "json")),
            Flag("top", None, "likeliest classes to list; not set: a column for each", int, 1),
            Flag(
                "own_model",
                "",
                "MODULE:FUNCTION of its model, if that is none of bam's: code that you trust",
            ),
        ),
        positional=True,
    ),
    "audit": Command(
        "attacks runs and reports how much they leak at least",
        """\
bam audit --out=docs/audit.json --trials=4000

attacks every method by thousands of short runs with and without a canary, and tests what the proof
assumes of noise and batches, on whole runs, cut and resumed. Or one run of your own, trained once:

bam audit --one_run --config=configs/digits.py:dp_sgd

adds canaries to the training data. It is for the audit alone: nothing of it may be released.
""",
        (
            Flag("out", "", "JSON file; settings that are in it are not run again"),
            Flag("trials", 4000, "runs with, and as many without, the canary", least=100),
            Flag("methods", ("dp_sgd", "dp_sat", "bam_sam", "bam_exact"), "methods to audit"),
            Flag("epsilon", 4.0, "claimed ε, at δ = 1e-5"),
            Flag("steps", 4, "training steps per run", least=1),
            Flag("confidence", 0.95, "of every lower bound"),
            Flag("one_run", False, "train --config once, with canaries; --out keeps it"),
            Flag("config", None, "configs/NAME.py:METHOD, of --one_run"),
            Flag("canaries", 1000, "of --one_run, half of which take part", least=20),
        ),
        (
            Rule(
                lambda given: given.one_run == (given.config is not None),
                "--one_run and --config=configs/NAME.py:METHOD belong together",
            ),
            Rule(lambda given: given.one_run or given.out, "--out is required: the JSON file"),
        ),
    ),
    "data": Command(
        "makes a data set of a folder of images, and shows one",
        """\
bam data import photographs --out=data --size=32
bam data import scans --out=data --size=64 --channels=1 --labels=scans.csv --classes=ill,well \\
  --file_column=file --label_column=diagnosis --user_column=patient
bam data import set.zip --out=data --labels=metadata.jsonl --classes=ill,well
bam data show data --out=sheet.png

`import` reads FOLDER/CLASS/… or FOLDER/train/CLASS/… and FOLDER/test/CLASS/…, or the images that
--labels names: PNG, JPEG, TIFF, WebP, BMP, GIF, JPEG 2000, AVIF and .npy of any sizes, and with the
extras dicom, heic and nifti those. Files of more than 8 bits may need a --window. It goes on where
it was stopped. Train on it with --config.dataset.name=folder --config.dataset.path=DATA, and with
--config.dataset.groups=user to protect users. The names of the classes are public.
""",
        (
            Flag("out", "", "of import: folder for the data set; of show: a PNG file"),
            Flag("size", "32", "pixels of the height and the width; 16x24: of each"),
            Flag("channels", "3", "1: grey; 3: colour", choices=("1", "3")),
            Flag(
                "window",
                None,
                "LOW,HIGH: numbers that are black and white, in files of more than 8 bits",
                tuple,
            ),
            Flag("background", "white", "of transparent pixels", choices=("white", "black")),
            Flag(
                "labels", "", "CSV, Parquet, JSON lines or COCO's JSON with a row for each image; "
                "also of a name in FOLDER, or in its folders of splits",
            ),
            Flag("file_column", "file", "of --labels: path of the image in FOLDER, or file_name"),
            Flag(
                "label_column",
                "label",
                "of --labels: name of the class; several columns: zeros and ones",
            ),
            Flag("user_column", "", "of --labels: whose image it is; '': not known"),
            Flag("split_column", "", "of --labels: train or test; '': drawn by hash"),
            Flag("number", False, "labels are numbers, not names of classes"),
            Flag("target_offset", 0.0, "of numbers: a public number near their mean"),
            Flag(
                "target_scale", 1.0, "of numbers: a public number near their spread; "
                "(number - offset) / scale is learned, and undone in predictions",
            ),
            Flag("map", (), "FROM:TO: labels in the place of others, as yes:1,no:0"),
            Flag(
                "user_from",
                "",
                "folder: that between a class and an image names its user",
                choices=("", "folder"),
            ),
            Flag(
                "validation",
                "",
                "where validation images go; '': to training, or to the test where there is none",
                choices=("", "train", "test", "leave"),
            ),
            Flag("masks", False, "use img_mask.png and the like beside img.png as images, too"),
            Flag("near_duplicates", False, "count pictures that look alike, too"),
            Flag("classes", (), "public names of the classes; '': the folders' names"),
            Flag(
                "test", 0.2, "share of users, or of images, for the test split", least=0, most=1
            ),
            Flag(
                "stratify", 0, "instead of --test: images of each class (with users: users) for "
                "the test; 0: a share of all", least=0,
            ),
            Flag("test_folder", "", "a folder of classes of its own, with the test images"),
            Flag("strict", False, "refuse a file that cannot be read; else leave it out"),
            Flag("workers", 0, "threads that decode; 0: one for each core", least=0),
        ),
        (
            Rule(
                lambda given: not (given.labels and given.user_from),
                "--user_from is for folders of classes: give --user_column with --labels",
            ),
            Rule(
                lambda given: given.labels or given.user_column in ("", "PatientID"),
                "--user_column is a column of --labels, which is missing",
            ),
            Rule(
                lambda given: given.labels or not given.split_column,
                "--split_column is a column of --labels, which is missing",
            ),
            Rule(
                lambda given: not (given.labels and given.test_folder),
                "--test_folder is for folders of classes: with --labels give --split_column",
            ),
            Rule(
                lambda given: given.classes or not (given.labels and _has_classes(given)),
                "--labels needs --classes: their names are public, the labels are not",
            ),
            Rule(
                lambda given: not (given.number and "," in given.label_column),
                "--number is of one column of --label_column",
            ),
            Rule(
                lambda given: given.number or (given.target_offset, given.target_scale) == (0, 1),
                "--target_offset and --target_scale are for numbers: add --number",
            ),
            Rule(
                lambda given: not given.stratify or _has_classes(given),
                "--stratify is for images of one class each",
            ),
            Rule(
                lambda given: not (given.stratify and (given.test_folder or given.split_column)),
                "--stratify chooses the test images; --test_folder and --split_column give them",
            ),
        ),
        positional=True,
    ),
    "privacy": Command(
        "computes ε from the noise, or the noise from ε",
        """\
bam privacy --noise_multiplier=1.5 --sampling_prob=0.04 --num_steps=2250 --delta=1e-5
bam privacy --target_epsilon=2 --sampling_prob=0.08 --num_steps=900 --plot=privacy.png
bam privacy --plan=runs/first --plan=runs/second --delta=1e-5

ε of DP-SGD's noise by three accountants, or σ for an ε, μ, and what an attacker gains. It holds for
one example that is replaced by nothing, its place left empty (zero-out): q and T are public and the
same with and without it. That is adding or removing it if N is a public constant.

With --plan, ε of several runs on the same data together: of `bam train`, or of loops of your own.
Their privacy losses are composed, which gives less than the sum of their ε.
""",
        (
            Flag("noise_multiplier", None, "σ; this or --target_epsilon", float),
            Flag("target_epsilon", None, "ε, to find σ for", float),
            Flag("sampling_prob", None, "q, of Poisson sampling", float),
            Flag("num_steps", None, "T", int, least=1),
            Flag("plan", None, "plan.json of a run, or its folder; for several, several", list),
            Flag("delta", 1e-5, "δ; of --plan the largest of theirs, if it is not given"),
            Flag("accountant", "pld", "finds σ for an ε", choices=("pld", "rdp")),
            Flag("json", "", "file for the numbers; none if empty"),
            Flag("plot", "", "PNG file for trade-off curves and ε over training"),
        ),
        (
            Rule(
                lambda given: not (given.plan and any(given[x].present for x in ONE_MECHANISM)),
                "--plan has σ, q and T: give none of them beside it, no plot and no accountant",
            ),
            Rule(
                lambda given: (
                    given.plan
                    or (given.noise_multiplier is None) != (given.target_epsilon is None)
                ),
                "give one of --noise_multiplier and --target_epsilon",
            ),
            Rule(
                lambda given: given.plan or given.sampling_prob is not None,
                "--sampling_prob is required: q, of Poisson sampling",
            ),
            Rule(
                lambda given: given.plan or given.num_steps is not None,
                "--num_steps is required: T",
            ),
        ),
    ),
    "hardware": Command(
        "compiles a run for GPUs or TPUs that are not there, and says what fits",
        """\
bam hardware --config=configs/cifar10_medium.py:bam_sam --target=v5e:2x2 [--json=FILE]

TARGET is v5e, v5p or v6e with a topology, or h100, h200 or b200 alone or with a number of devices,
as h100:8. It needs the vendor's compiler, not the device: the extra `tpu` or `cuda`. The step is
the real one, for the real number of devices; images are blank, so no data is needed for the public
data sets. Nothing is run, and no time is estimated.
""",
        (
            Flag("config", None, "configs/NAME.py:METHOD", required=True),
            Flag("target", "", f"for example {EXAMPLES}", required=True),
            Flag("json", "", "file to write the answer to as well; '': none"),
            Flag("size", 0, "of a side of images that are streamed; 0: the data's", least=0),
        ),
    ),
}  # fmt: skip


DEFINE: dict[type, Callable[..., Any]] = {
    bool: flags.DEFINE_bool,
    int: flags.DEFINE_integer,
    float: flags.DEFINE_float,
    str: flags.DEFINE_string,
    tuple: flags.DEFINE_list,
    list: flags.DEFINE_multi_string,
}


def define(values: flags.FlagValues, rows: Sequence[Flag]) -> None:
    """Defines flags; `config` as a text, of which parsing makes a config."""
    for row in rows:
        kind = row.kind or (str if row.default is None else type(row.default))
        default: Any = list(row.default) if isinstance(row.default, tuple) else row.default
        more: dict[str, Any] = {"flag_values": values}
        if kind in (int, float):
            more |= {"lower_bound": row.least, "upper_bound": row.most}
        if row.choices:
            flags.DEFINE_enum(row.name, default, row.choices, row.help, **more)
        else:
            DEFINE[kind](row.name, default, row.help, **more)
    if any(row.name == "num_seeds" for row in rows):
        flags.DEFINE_alias("seeds", "num_seeds", flag_values=values)


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether the arguments have one of the flags that show the help."""
    return any(x.lstrip("-") in HELP and x.startswith("-") for x in argv)


def help_of_all(version: str) -> str:
    """The help of `bam`."""
    return "\n".join(
        [
            f"bam {version}: differentially private image classifiers, and a statement that anyone "
            "can check",
            "",
            "  bam train --config=digits:bam_sam --workdir=runs/digits",
            "",
            *_rows((name, command.does) for name, command in COMMANDS.items()),
            "",
            "`bam COMMAND --help` shows the flags of a command. --debug shows the traceback of an "
            "error.",
            "",
            *_statuses(),
        ]
    )


def help_of(name: str) -> str:
    """The help of a command."""
    command = COMMANDS[name]
    lines = [f"bam {name} {command.does}.", "", *command.about.splitlines(), "", "flags:"]
    lines += flag_lines((*command.flags, DEBUG))
    if any(flag.name == "config" for flag in command.flags):
        lines += ["", "--config is one of these, or a Python file of your own:"]
        lines += _wrapped(", ".join(sorted(named_configs.shipped())), "  ")
        if name == "train":
            lines += ["", "keys of a config, with their defaults, for --config.KEY=VALUE:"]
            for key in KEYS:
                lines += _wrapped(str(key), "  ", "    ")
                if key.names:
                    lines += _wrapped(f"ours: {', '.join(key.names)}", "    ", "      ")
        else:
            lines += ["", "names that keys can have (`bam train --help` lists all keys):"]
            lines += _rows((key.name, ", ".join(key.names)) for key in KEYS if key.names)
    return "\n".join([*lines, "", *_statuses()])


def flag_lines(rows: Iterable[Flag]) -> list[str]:
    """Flags as the help shows them."""
    lines = []
    for row in rows:
        choices = f"{' or '.join(map(repr, row.choices))}; " if row.choices else ""
        required = " (required)" if row.required and not row.default else ""
        lines += _wrapped(f"{row}  {choices}{row.help}{required}", "  ", "      ")
    return lines


def _statuses() -> list[str]:
    return ["exit status:", *_rows((str(status), text) for status, text in STATUSES.items())]


def _rows(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns, the second wrapped."""
    pairs = list(pairs)
    width = max(len(first) for first, _ in pairs) + 2
    lines = []
    for first, second in pairs:
        lines += _wrapped(f"{first:{width}}{second}", "  ", " " * (width + 2))
    return lines


def _wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=first if rest is None else rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
