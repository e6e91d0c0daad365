"""docs/paper.md and the README's table say what the files of results say."""

import json
import re
import shutil

import pytest

from bam.sweep import comparison
from configs import cifar10, cifar100, imagenet32
from scripts.lib import pages
from scripts.paper import numbers

ROOT = numbers.ROOT
CONFIGS = {"cifar10": cifar10, "cifar100": cifar100, "imagenet32": imagenet32}
PLACE = re.compile(r"<!-- (?!end).*?<!-- end -->", re.DOTALL)
COPIED = ("benchmarks", "docs/results/prior", "docs/results/cifar10_medium", "docs/figures")


def text_of(page):
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """A copy of the files of results that the tables are read from."""
    for folder in COPIED:
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setattr(numbers, "ROOT", tmp_path)
    return tmp_path


def edit(path, change):
    kept = json.loads(path.read_text(encoding="utf-8"))
    change(kept)
    path.write_text(json.dumps(kept), encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "docs/paper.md"])
def test_the_tables_are_those_of_the_files(page):
    found = numbers.page_tables()[page]
    assert pages.fill(text_of(page), found) == text_of(page), "run python -m scripts.paper.numbers"


def prior(table):
    table["rows"][0]["accuracies"][0] += 1


def h100(run):
    run["test_accuracy"] = 0.68


def faster(run):
    run["seconds"] = 900.0


def medium(table):
    table["rows"][1]["accuracies"][3] += 1


def committed(run):
    run["processes"][0]["commit"] = "0123456789"


@pytest.mark.parametrize(
    ("file", "change", "page"),
    [
        ("docs/results/prior/epsilon3.json", prior, "README.md"),
        ("docs/results/cifar10_medium/table1.json", medium, "README.md"),
        ("benchmarks/dp_sgd_h100_summary.json", h100, "README.md"),
        ("benchmarks/dp_sgd_h100_summary.json", faster, "README.md"),
        ("benchmarks/dp_sgd_h100_summary.json", committed, "README.md"),
        ("benchmarks/dp_sgd_h100_summary.json", h100, "docs/paper.md"),
    ],
)
def test_another_number_in_a_file_changes_the_page(copy, file, change, page):
    edit(copy / file, change)
    assert pages.fill(text_of(page), numbers.page_tables()[page]) != text_of(page)


@pytest.mark.parametrize("name", ["figure2_effects", "figure4", "figure5", "figure6", "figure7"])
def test_each_figure_is_read_from_its_own_file(copy, name):
    before = numbers.figures().splitlines()
    path = copy / f"docs/figures/{name}.csv"
    path.write_text(re.sub(r",0\.(\d)", r",0.9\1", path.read_text(encoding="utf-8")))
    changed = [
        row for row, old in zip(numbers.figures().splitlines(), before, strict=True) if row != old
    ]
    assert [row.split(" | ")[0] for row in changed] == [f"| {name[6]}"]


def test_figure_3_is_read_from_the_times_of_depths(copy):
    before = numbers.figures().splitlines()
    for device in ("cpu", "h100"):
        edit(copy / f"benchmarks/depth_{device}.json", slow_down)
        rows = zip(numbers.figures().splitlines(), before, strict=True)
        assert [row.split(" | ")[0] for row, old in rows if row != old] == ["| 3"]
        before = numbers.figures().splitlines()


def slow_down(table):
    for row in table["rows"]:
        row["median"] *= 2 if row["method"] == "bam_sam" else 1


def test_a_second_seed_brings_an_interval_and_another_cell_its_run(copy):
    [file] = (copy / "benchmarks").glob("*_summary.json")
    shutil.copy(file, copy / "benchmarks/dp_sgd_h100_1_summary.json")
    edit(copy / "benchmarks/dp_sgd_h100_1_summary.json", h100)
    shutil.copy(file, copy / "benchmarks/bam_sam_h100_summary.json")
    edit(copy / "benchmarks/bam_sam_h100_summary.json", lambda run: run.update(method="bam_sam"))
    pair = comparison.estimate([67.32, 68.0])
    cell = f"{pair.mean:.2f} ± {pair.half_width:.2f}"
    row = next(row for row in numbers.table_1().splitlines() if row.startswith("| CIFAR-10 | 2 |"))
    assert f"| {cell}, 2 seeds, H100 |" in row
    assert row.endswith("| 67.32, one seed, H100 |") and row.count("not run") == 1
    rows = numbers.accuracy().splitlines()
    assert f"{cell}; paper 67.1 ± 0.10 | not run | not run | 2 | 19 min | H100 |" in rows[3]


def test_what_was_not_run_says_so():
    cells = [row.split(" | ") for row in numbers.table_1().splitlines()[2:]]
    assert sum(cell.strip(" |") == "not run" for row in cells for cell in row[2:]) == 20
    assert [row[0].strip("| ") for row in cells] == ["CIFAR-10"] * 3 + ["CIFAR-100"] * 3 + [
        "ImageNet32"
    ]


def test_the_configs_have_the_hyper_parameters_of_table_2():
    for data, row in numbers.TABLE_2.items():
        config = CONFIGS[data].get_config("bam_sam")
        assert row.accumulation * row.physical == config.expected_batch_size
        assert (row.rate, row.views) == (config.optimizer.learning_rate, config.augment.views)
        assert row.bam == config.method.radius
        assert row.dp_sat == CONFIGS[data].get_config("dp_sat").method.radius
        network = {"resnet9": "ResNet-9", "wide_resnet": f"WRN-16-{config.model.width}"}
        assert row.network == network[config.model.name]


def strange(text, known):
    """The decimals, and accuracies with "±", in a page's own words that `known` lacks."""
    words = re.sub(
        r"```.*?```|\[arXiv [\d.]+\]|\(http\S+\)|\]\([^)]*\)",
        "",
        PLACE.sub("", text),
        flags=re.DOTALL,
    )
    return [x for x in re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", words) if x not in known]


# Settings and facts of the paper, which no file of ours measures.
FACTS = {"0.5", "0.1", "0.3", "7.5", "1.095"}


def test_the_words_of_the_page_name_no_number_that_its_tables_lack():
    text = text_of("docs/paper.md")
    known = FACTS.union(re.findall(r"\d+\.\d+", "".join(PLACE.findall(text))))
    assert strange(text, known) == []
    assert strange(text.replace("took [19 minutes]", "had 67.4 %, took [19 minutes]"), known) == [
        "67.4"
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/paper.md"])
def test_the_minutes_in_the_words_are_those_of_the_table(page):
    said = re.findall(r"(\d+) minutes", PLACE.sub("", text_of(page)))
    minutes = round(numbers.paper_runs()["cifar10", 2.0, "dp_sgd"].seconds[0] / 60)
    assert set(said) <= {str(minutes)}
