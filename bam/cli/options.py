"""The flags of every command as tables, without JAX, and what an exit status means.

No flag is defined when this module is imported: `define` puts a command's flags into a new
`absl.flags.FlagValues` for each call, so no value of one call reaches the next.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from absl import flags

FAULT = 1
BAD_INPUT = 2
STOPPED = 3
INTERRUPTED = 130  # 128 + SIGINT, as in shells
UNREAD = 141  # 128 + SIGPIPE, as in shells
# Exit status -> its meaning; `python -m scripts.reference` copies it to docs/commands.md.
STATUSES = {
    0: "The command succeeded.",
    FAULT: "A fault of bam, or of your own code. The traceback says which, and what to report.",
    BAD_INPUT: "The input was wrong. One line on standard error says how.",
    STOPPED: "The run was stopped and saved. The same command continues it.",
    INTERRUPTED: "Ctrl-C or SIGTERM ended the command at once.",
    UNREAD: "Nobody read the command's output.",
}


class Flag(NamedTuple):
    """A flag of a command.

    Attributes:
      name: without its dashes.
      default: its value if the command line does not set it; the flag has the type of its default
        (a tuple: words with commas between them).
      help: its meaning.
      kind: the type, if the default is None; `list`: a flag that can be repeated.
      least, most: bounds of a number.
      choices: the words that it accepts; (): any.
      required: whether the command refuses to start without it.
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
        """Its name and default, as the help prints them."""
        default = "" if self.default in (None, "", (), []) else self.default
        if isinstance(default, bool):
            default = str(default).lower()
        elif isinstance(default, tuple):
            default = ",".join(default)
        return f"--{self.name}={default}"


class Rule(NamedTuple):
    """A condition on a command's flags: if `holds` is false, the command ends with `message`."""

    holds: Callable[[flags.FlagValues], Any]
    message: str


class Command(NamedTuple):
    """A command as its help describes it, before its module is imported.

    Attributes:
      does: its line in `bam --help`, a verb first.
      about: the part of its own help above the flags, examples first.
      flags: see `Flag`.
      rules: see `Rule`.
      positional: whether it takes arguments that are not flags.
    """

    does: str
    about: str
    flags: tuple[Flag, ...]
    rules: tuple[Rule, ...] = ()
    positional: bool = False


DEBUG = Flag("debug", False, "print the traceback of an error above its line")
# Shared by `bam sweep` and the scripts that train many runs.
MANY_RUNS = (
    Flag("config", None, "configs/NAME.py, without a method; --config.KEY=VALUE is for all runs"),
    Flag("workdir", "", "folder for all runs and their tables and figures"),
    Flag("num_seeds", 3, "runs of each setting, with the seeds 0, 1, … (or --seeds)", least=1),
    Flag(
        "max_seconds", 0.0, "stop with a checkpoint after this many seconds; 0: no limit", least=0
    ),
)
# Flags of `bam privacy` that describe one mechanism; --plan brings these numbers for several.
ONE_MECHANISM = (
    *("noise_multiplier", "target_epsilon", "sampling_prob", "num_steps", "accountant", "plot"),
)


def _private_search_flags_alone(values: flags.FlagValues) -> bool:
    return values.private or not any(values[name].present for name in PRIVATE_SEARCH)


def _has_classes(values: flags.FlagValues) -> bool:
    """Whether `bam data import` gives each image one class, not a number or several labels."""
    return not values.number and "," not in values.label_column


PRIVATE_SEARCH = ("trials_mean", "trials_shape", "score", "score_noise")

COMMANDS = {
    "train": Command(
        "trains one model privately, or resumes a run that was stopped",
        """\
bam train --config=digits:bam_sam --workdir=runs/digits

All devices of this machine share the work. To use several machines, start the
same command on each of them with --coordinator (docs/accelerators.md).
""",
        (
            Flag(
                "config", None, "NAME:METHOD of a shipped config, or FILE.py:METHOD", required=True
            ),
            Flag("workdir", "", "folder for the run's files; an unfinished run there is resumed"),
            MANY_RUNS[3],
            Flag("tune", False, "with --config.dry_run: time which microbatch size is fastest"),
            Flag(
                "coordinator",
                "",
                "HOST:PORT of process 0 of several; auto: as the cluster says",
            ),
            Flag("num_processes", None, "with --coordinator=HOST:PORT: number of processes", int),
            Flag("process_id", None, "with --coordinator=HOST:PORT: this process, from 0", int),
        ),
        (
            Rule(
                lambda values: values.workdir or values.config.get("dry_run"),
                "--workdir is required: the folder for the run's files",
            ),
            Rule(
                lambda values: values.config.get("dry_run") or not values.tune,
                "--tune needs --config.dry_run",
            ),
        ),
    ),
    "clip_norm": Command(
        "measures a clip norm on public data for a private run",
        """\
bam clip_norm --config=mnist:dp_sgd --public=digits
bam clip_norm --config=mnist:dp_sgd --public=folder --path=DATA \\
  --num_classes=10 --quantile=0.9
bam clip_norm --run=runs/private

The command trains the config's model from scratch on the public data, without
privacy, for a few steps. C is a quantile of the norms of its per-example
gradients there. The command prints the flags that set this C and record its
origin. It uses nothing of the private data but the size and the channels of its
images. Only you can know that the other data are public: they must not share an
example with the private data.

With --run it reads instead how many gradients a finished private run clipped,
which a run with --config.clip.slack=8 tells within its ε.
""",
        (
            Flag("config", None, "NAME:METHOD of a shipped config, or FILE.py:METHOD"),
            Flag("public", "", "the public data set, as --config.dataset.name"),
            Flag("run", "", "folder of a finished run with slots, in place of public data"),
            Flag("source", "", "its source, as --config.dataset.source"),
            Flag("path", "", "its path, as --config.dataset.path"),
            Flag(
                "num_classes", 0, "its number of classes, if the files do not name them", least=0
            ),
            Flag("quantile", 0.5, "quantile of the gradient norms, above 0 and at most 1"),
            Flag("steps", 20, "training steps before the norms are measured", least=0),
        ),
        (
            Rule(
                lambda values: bool(values.run) != bool(values.public),
                "give --config and --public, or --run",
            ),
            Rule(
                lambda values: bool(values.run) != bool(values.config),
                "--config belongs to --public: give both, or --run alone",
            ),
        ),
    ),
    "sweep": Command(
        "trains methods at many settings and seeds, and compares them",
        """\
bam sweep --config=digits --methods=dp_sgd,bam_sam:0.02 --num_seeds=5 \\
  --workdir=runs/sweep
bam sweep --config=digits --methods=dp_sgd,bam_sam:0.01,bam_sam:0.05 \\
  --holdout=200 --best=1 --set=optimizer.learning_rate=0.003,0.01,0.03 \\
  --num_seeds=5 --workdir=runs/search

The first method is the baseline. The sweep pairs each other method with it, by
seed and at equal settings. If the sweep was stopped, the same command continues
it.

--holdout=N compares settings on N training images that are set aside, so the
test split is not read. --best=K trains all seeds only for the K best settings
of each method, which the first seed chooses. --smaller=K makes batches and
noise K times smaller (TAN's rule): a cheap search for large batches, whose runs
have a far larger ε.

None of these choices is private: each ε covers its run alone (see
docs/choose.md). With --private the sweep draws a random number of trials
from the same settings and keeps the best; then ε pays for the choice, too.
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
            Flag("set", [], "KEY=VALUE,VALUE; may be repeated: all combinations are trained", list),
            *MANY_RUNS[2:],
            Flag("holdout", 0, "training images to compare on; 0: the test split", least=0),
            Flag("best", 0, "settings of each method that get all seeds; 0: all", least=0),
            Flag(
                "smaller", 1, "TAN's rule: batches and noise this many times smaller", least=1
            ),
            Flag(
                "metric",
                "",
                "figure of summary.json to compare; '': accuracy, or the loss",
            ),
            Flag("out", "", "path of the tables without .json and .md; '': WORKDIR/sweep"),
            Flag(
                "private", False, "let --config.epsilon pay for the choice, too (docs/choose.md)"
            ),
            Flag("trials_mean", 8.0, "with --private: mean number of trials"),
            Flag(
                "trials_shape", 1.0, "with --private: its shape η > -1; 1: geometric"
            ),
            Flag(
                "score",
                "training",
                "with --private: images that score a trial",
                choices=("training", "held_out"),
            ),
            Flag("score_noise", 10.0, "with --private: σ of the noise on a score, in images"),
        ),
        (
            Rule(
                _private_search_flags_alone,
                f"--{', --'.join(PRIVATE_SEARCH)} need --private: add it, or leave them out",
            ),
        ),
    ),
    "report": Command(
        "writes a page about a run: its privacy, accuracy and settings",
        """\
bam report --workdir=runs/digits
bam report --workdir=runs/digits --public --out=page.html

The page is one HTML file without scripts, and needs no network. You may pass it
on if --public made it.
""",
        (
            Flag("workdir", "", "folder of a run; only the page is written to it", required=True),
            Flag(
                "out", "", "HTML file; '': in WORKDIR report.html, with --public report_public.html"
            ),
            Flag("public", False, "leave out paths, the seed and all that ε does not cover"),
        ),
    ),
    "export": Command(
        "writes a run's release: weights, settings, a privacy statement",
        """\
bam export --workdir=runs/digits --out=release
bam export --workdir=runs/digits --out=release --notes=notes.md

With --notes, PRIVACY.md repeats your answers to what no program can know, such
as how you chose the settings and what else you released. If the file does not
exist, the command writes the empty form there, and no release.
""",
        (
            Flag("workdir", "", "folder of a finished run, trained without a seed", required=True),
            Flag("out", "", "folder to write, new or empty", required=True),
            Flag("nominal", False, "also accept a run with a seed, which promises nothing"),
            Flag("own_model", "", "MODULE:FUNCTION of a model of your own, which is imported"),
            Flag(
                "stablehlo", False, "also write model.stablehlo, the model as a jax.export program"
            ),
            Flag(
                "weights", "", "with --stablehlo: the backbone's weights; '': as in the run"
            ),
            Flag("notes", "", "your answers, a form to fill in; PRIVACY.md repeats them"),
        ),
    ),
    "predict": Command(
        "predicts the labels of images with a released model",
        """\
bam predict --release=release photograph.jpg
bam predict --release=release photographs --out=predictions.csv --top=3
find photographs -name '*.jpg' | \\
  bam predict --release=release --out=predictions.json -

Images are decoded and resized as in training. A folder stands for all images in
it; - alone reads file names from standard input, one a line.

The table is CSV: file, class and its probability, then the probability of each
class, or with --top=K the K likeliest classes. A name that a spreadsheet would
take for a formula gets an apostrophe in front. With --out=FILE.json the table
is a list of objects. If the subfolders have the names of classes, the accuracy
is printed, too.

If a file cannot be read, its row has no class and the exit status is 2.
""",
        (
            Flag("release", "", "folder that `bam export` wrote", required=True),
            Flag("out", "", "new file to write, .json or CSV; '': standard output"),
            Flag("format", "", "'': as --out ends, else CSV", choices=("", "csv", "json")),
            Flag("top", None, "likeliest classes to list; not set: a column for each", int, 1),
            Flag(
                "own_model", "", "MODULE:FUNCTION of a model of your own: code that you trust"
            ),
            Flag(
                "weights", "", "weights of the features' backbone; their SHA-256 is in model.json"
            ),
        ),
        positional=True,
    ),
    "audit": Command(
        "attacks runs and reports how much they leak at least",
        """\
bam audit --out=docs/audit.json --trials=4000
bam audit --one_run --config=configs/digits.py:dp_sgd

The first form attacks each method by thousands of short runs with and without a
canary. It also tests the proof's assumptions about noise and batches, on whole
runs that are stopped and resumed.

With --one_run a run of your own is trained once, with canaries among its
training data. That run is for the audit alone: release nothing of it.
""",
        (
            Flag("out", "", "JSON file for the results; settings that it has are not run again"),
            Flag("trials", 4000, "runs with the canary, and as many without it", least=100),
            Flag("methods", ("dp_sgd", "dp_sat", "bam_sam", "bam_exact"), "methods to audit"),
            Flag("epsilon", 4.0, "claimed ε, at δ = 1e-5"),
            Flag("steps", 4, "training steps per run", least=1),
            Flag("confidence", 0.95, "confidence of each lower bound"),
            Flag("one_run", False, "train --config once, with canaries; --out saves the result"),
            Flag(
                "config",
                None,
                "with --one_run: NAME:METHOD of a shipped config, or FILE.py:METHOD",
            ),
            Flag("canaries", 1000, "with --one_run: canaries, half of them in training", least=20),
        ),
        (
            Rule(
                lambda values: values.one_run == (values.config is not None),
                "--one_run and --config=configs/NAME.py:METHOD belong together",
            ),
            Rule(lambda values: values.one_run or values.out, "--out is required: the JSON file"),
        ),
    ),
    "data": Command(
        "makes a data set from a folder of images, or shows one",
        """\
bam data import photographs --out=data --size=32
bam data import scans --out=data --size=64 --channels=1 --labels=scans.csv \\
  --classes=ill,well --file_column=file --label_column=diagnosis \\
  --user_column=patient
bam data import set.zip --out=data --labels=metadata.jsonl --classes=ill,well
bam data show data --out=sheet.png

`import` reads a folder or an archive: FOLDER/CLASS/…, or FOLDER/train/CLASS/…
and FOLDER/test/CLASS/…, or the images in the table --labels. It reads PNG,
JPEG, TIFF, WebP, BMP, GIF, JPEG 2000, AVIF and .npy of any size; DICOM, HEIC
and NIfTI with the extras dicom, heic and nifti. Files of more than 8 bits may
need a --window. If it was stopped, the same command continues it.

Train on the data set with
  --config.dataset.name=folder --config.dataset.path=DATA
and protect users with --config.dataset.groups=user. The names of the classes
are public.
""",
        (
            Flag("out", "", "import: folder for the data set; show: PNG file of some images"),
            Flag("size", "32", "height and width in pixels; 16x24: height, then width"),
            Flag("channels", "3", "1: grey; 3: colour", choices=("1", "3")),
            Flag(
                "window", None, "LOW,HIGH: black and white in files of more than 8 bits", tuple
            ),
            Flag("background", "white", "colour behind transparent pixels",
                 choices=("white", "black")),
            Flag(
                "labels", "", "table with a row for each image (CSV, Parquet, JSON lines, COCO's "
                "JSON): a path, or its name in FOLDER",
            ),
            Flag("file_column", "file", "column of --labels: the image's path; else file_name"),
            Flag(
                "label_column", "label", "column of --labels: the class; a,b: columns of 0 or 1"
            ),
            Flag("user_column", "", "column of --labels: the image's user; PatientID: DICOM's, "
                 "if no column has it; '': no users"),
            Flag("split_column", "", "column of --labels: train or test; '': drawn by hash"),
            Flag("number", False, "labels are numbers, not names of classes"),
            Flag("target_offset", 0.0, "with --number: a public number near the labels' mean, "
                 "not computed from them"),
            Flag(
                "target_scale", 1.0, "with --number: a public number near their spread",
            ),
            Flag("map", (), "FROM:TO: replace labels, as yes:1,no:0, or blank ones, as :0"),
            Flag(
                "user_from",
                "",
                "folder: the folder between a class and an image names the user",
                choices=("", "folder"),
            ),
            Flag(
                "validation",
                "",
                "split of validation images; leave: none; '': train, or test if it is empty",
                choices=("", "train", "test", "leave"),
            ),
            Flag("masks", False, "also import masks, such as img_mask.png beside img.png"),
            Flag("all_dicom", False, "also import DICOM files that are no plain scans or may show "
                 "a name"),
            Flag("near_duplicates", False, "also count pictures that look alike"),
            Flag("classes", (), "public names of the classes; '': the folders' names"),
            Flag(
                "test", 0.2, "share of images (with users: of users) for the test split",
                least=0, most=1
            ),
            Flag(
                "stratify", 0, "test images (with users: test users) of each class; 0: a share",
                least=0,
            ),
            Flag("test_folder", "", "another folder of classes, with the test images"),
            Flag("strict", False, "stop at a file that cannot be read, do not leave it out"),
            Flag("workers", 0, "threads that decode; 0: one for each core", least=0),
        ),
        (
            Rule(
                lambda values: not (values.labels and values.user_from),
                "--user_from is for folders of classes: with --labels give --user_column",
            ),
            Rule(
                lambda values: values.labels or values.user_column in ("", "PatientID"),
                "--user_column names a column of a table: add --labels=TABLE",
            ),
            Rule(
                lambda values: values.labels or not values.split_column,
                "--split_column names a column of a table: add --labels=TABLE",
            ),
            Rule(
                lambda values: not (values.labels and values.test_folder),
                "--test_folder is for folders of classes: with --labels give --split_column",
            ),
            Rule(
                lambda values: values.classes or not (values.labels and _has_classes(values)),
                "--labels needs --classes=A,B,…: the names of the classes are public, so they do "
                "not come from the labels, which are private",
            ),
            Rule(
                lambda values: not (values.number and "," in values.label_column),
                "--number takes one label column, and --label_column names several",
            ),
            Rule(
                lambda values: (
                    values.number or (values.target_offset, values.target_scale) == (0, 1)
                ),
                "--target_offset and --target_scale are for numbers: add --number",
            ),
            Rule(
                lambda values: not values.stratify or _has_classes(values),
                "--stratify needs images of one class each: leave it out",
            ),
            Rule(
                lambda values: (
                    not (values.stratify and (values.test_folder or values.split_column))
                ),
                "--stratify chooses the test images: leave out --test_folder and --split_column, "
                "which name them",
            ),
        ),
        positional=True,
    ),
    "privacy": Command(
        "computes ε from the noise, or the noise from ε",
        """\
bam privacy --noise_multiplier=1.5 --sampling_prob=0.04 --num_steps=2250 \\
  --delta=1e-5
bam privacy --target_epsilon=2 --sampling_prob=0.08 --num_steps=900 \\
  --plot=privacy.png
bam privacy --plan=runs/first --plan=runs/second --delta=1e-5

The command prints ε of DP-SGD's noise by three accountants (or the σ for an ε),
μ, and an attacker's best rates. Neighbours are zero-out: one example is
replaced by nothing, its place is left empty, and the public q and T stay the
same. If N is a public constant, this means adding or removing one example.

With --plan it prints the joint ε of several runs on the same data, made by
`bam train` or by your own loops, or of their releases. Their privacy losses are
composed: at the sum of their δ this gives at most the sum of their ε, and
usually much less.
""",
        (
            Flag("noise_multiplier", None, "σ; give this or --target_epsilon", float),
            Flag("target_epsilon", None, "ε to find σ for", float),
            Flag("sampling_prob", None, "q, the probability of Poisson sampling", float),
            Flag("num_steps", None, "T, the number of steps", int, least=1),
            Flag("plan", None, "plan.json of a run or release, or its folder; repeated for each",
                 list),
            Flag("delta", 1e-5, "δ; with --plan the default is the largest δ of the runs"),
            Flag("accountant", "pld", "accountant that finds σ for --target_epsilon",
                 choices=("pld", "rdp")),
            Flag("json", "", "JSON file for the numbers; '': none"),
            Flag("plot", "", "PNG file for trade-off curves and ε over training; '': none"),
        ),
        (
            Rule(
                lambda values: (
                    not (values.plan and any(values[x].present for x in ONE_MECHANISM))
                ),
                "--plan has σ, q and T already: leave out "
                f"--{', --'.join(ONE_MECHANISM[:-1])} and --{ONE_MECHANISM[-1]}",
            ),
            Rule(
                lambda values: (
                    values.plan
                    or (values.noise_multiplier is None) != (values.target_epsilon is None)
                ),
                "give one of --noise_multiplier and --target_epsilon",
            ),
            Rule(
                lambda values: values.plan or values.sampling_prob is not None,
                "--sampling_prob is required: q, the probability of Poisson sampling",
            ),
            Rule(
                lambda values: values.plan or values.num_steps is not None,
                "--num_steps is required: T, the number of steps",
            ),
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
    """Defines flags in `values`, with `config` as a string that `command_line.parse` replaces."""
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
