"""The numbers of docs/results_prior.md are those of the files that commands wrote."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"
PAGE = DOCS / "results_prior.md"
PROTOCOL = {  # words of a row -> features of the protocol's file
    "the network, too": "prior_0.4",
    "**views and reduced variances, too**": "prior_views",
    "the network after half the steps, kinds and factors alone": "prior+net_factors",
    "the same, contrast of views alone": "prior+net_views",
    "network alone": "net1+3+4+5+7",
}
OWN_IMAGES = {"1,000 drawn ones": "data1000", "3,000 drawn ones": "data3000"}


def read(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def shown(mean: float, half_width: float, sign: str = "") -> str:
    """A number with its interval, as pages write it."""
    return f"{mean:{sign}.2f} ± {half_width:.2f}".replace("-", "−")


def estimate(numbers: Any, sign: str = "") -> str:
    return shown(numbers["mean"], numbers["half_width"], sign)


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split("|")]


def page_row(text: str, *words: str) -> list[str]:
    """The cells after the name in the one row of the page that begins with these words."""
    rows = [cells(x) for x in text.splitlines() if x.startswith("| ")]
    [row] = [x for x in rows if words[0] in x[0] and x[1 : len(words)] == list(words[1:])]
    return row[1:]


def sweep(name: str) -> dict[str, str]:
    """Label of a group -> accuracy."""
    return {row["label"]: estimate(row["accuracy"]) for row in read(name)["rows"]}


def scattering() -> dict[tuple[float, str], Any]:
    return {(row["epsilon"], row["method"]): row for row in read("scattering/table1.json")["rows"]}


def protocol() -> dict[tuple[str, str, str], tuple[str, str]]:
    """(features, ε, seeds) -> accuracy and difference, from the table that the protocol wrote."""
    table = (RESULTS / "prior/protocol.md").read_text(encoding="utf-8").replace("-", "−")
    rows = [cells(line) for line in table.splitlines()[2:]]
    return {(row[0].replace("−", "-"), row[1], row[3]): (row[4], row[5]) for row in rows}


def expected_rows(text: str) -> list[tuple[list[str], list[str]]]:
    """Pairs of a row on the page, and what the files say about it."""
    found = [
        (
            page_row(text, "**features of drawn images"),
            [*sweep("prior/epsilon1.json").values(), "–"]
            + [x for e in (3, 8) for x in sweep(f"prior/epsilon{e}.json").values()],
        )
    ]
    table = scattering()
    accuracies = [estimate(table[epsilon, "dp_sgd"]["accuracy"]) for epsilon in (1, 2, 3, 8)]
    found.append((page_row(text, "**scattering**"), accuracies))
    measured = protocol()
    [first] = [page_row(text, "filters and scattering")]
    accuracies = [measured[x][0] for x in (("prior", "1", "0 to 2"), ("prior", "3", "0 to 2"))]
    found.append((first[1:], [*accuracies, measured["prior@0.5", "inf", "0 to 0"][0]]))
    for words, features in PROTOCOL.items():
        row = page_row(text, words)[1:]
        gains = [measured.get((features, e, "0 to 2"), ("", "–"))[1] for e in ("1", "3")]
        ceiling = measured.get((f"{features}@1", "inf", "0 to 0"), ("–", ""))[0]
        found.append((row, [*gains, ceiling]))
    for words, name in (("MNIST", "mnist"), ("digits", "digits")):
        networks = (f"prior/{name}.json", f"prior/{name}_cnn.json")
        for epsilon in ("1", "3"):
            row = page_row(text, words, epsilon)[1:]
            found.append((row, [sweep(x)[f"dp_sgd epsilon={epsilon}"] for x in networks]))
    features, pixels = sweep("own_images/features.json"), sweep("own_images/pixels.json")
    for words, name in OWN_IMAGES.items():
        label = f"dp_sgd dataset.path=runs/{name}"
        both = [features[f"{label} features.name=prior"], pixels[label]]
        found.append((page_row(text, words)[1:], both))
    return found


def mistakes(text: str) -> list[Any]:
    """Rows that say something else than the files, and intervals that no file has."""
    wrong = [(row, expected) for row, expected in expected_rows(text) if row != expected]
    in_text = "\n".join(x for x in text.splitlines() if not x.startswith("|"))
    gains = [shown(*protocol_again()), *(shown(*x) for x in searches().values())]
    for epsilon in (1, 8):
        gain = estimate(scattering()[epsilon, "bam_sam"]["difference"], "+")
        wrong += [gain] * (f"{gain} points at ε = {epsilon}" not in text.replace("\n", " "))
        gains.append(gain)
    said = re.findall(r"[+−]?\d+\.\d+ ± \d+\.\d+", in_text)
    return wrong + [x for x in said if x not in gains]


def protocol_again() -> tuple[float, float]:
    """The difference of the same features with other seeds, at ε = 3."""
    mean, half_width = protocol()["prior", "3", "3 to 5"][1].split(" ± ")
    return float(mean), float(half_width)


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text(encoding="utf-8")


def test_the_page_says_what_was_measured(text):
    assert len(expected_rows(text)) == 14
    assert mistakes(text) == []


@pytest.mark.parametrize(
    ("number", "other"),
    [
        ("74.26 ± 0.30", "74.62 ± 0.30"),
        ("71.70 ± 0.82", "71.07 ± 0.82"),
        ("65.98 ± 0.20", "65.98 ± 0.21"),
        ("+2.10 ± 0.26", "+2.01 ± 0.26"),
        ("−3.10 ± 0.48", "+3.10 ± 0.48"),
        ("79.12 ± 0.51", "79.21 ± 0.51"),
        ("81.85 ± 0.80", "99.63 ± 0.80"),
        ("−0.52 ± 0.07", "+0.52 ± 0.07"),
        ("+0.10 ± 0.10 points at ε = 8", "+0.10 ± 0.10 points at ε = 3"),
        ("0.09 ± 0.18", "0.08 ± 0.18"),
    ],
)
def test_another_number_would_be_seen(text, number, other):
    assert number in text
    assert mistakes(text.replace(number, other))


def test_numbers_of_single_runs_and_rounded_ones_are_those_of_the_files(text):
    for epsilon in (1, 3, 8):
        [row] = read(f"prior/epsilon{epsilon}.json")["rows"]
        assert f"{row['accuracy']['mean']:.1f} % at ε = {epsilon}" in text
    found = [
        max(x["accuracy"] for x in read(f"scattering/search_eps1_{c}.json") if x["method"] == name)
        for name, c in (("dp_sgd", "C0.1"), ("bam_sam", "C50"))
    ]
    assert "({:.2f} and {:.2f} %)".format(*found) in text
    rates = [row["accuracy"]["mean"] for row in read("prior/search1.json")["rows"]]
    assert round(5000 * (max(rates) - min(rates)) / 100) == 10 and "differ by ten images" in text


def searches() -> dict[str, tuple[float, float]]:
    """Mean and half the 95 % interval of the searches by an accountant, and of the best rate."""
    file = read("prior/searches.json")
    by_rate = {rate: [x["accuracy"] for x in file["without_search"] if x["rate"] == rate]
               for rate in file["learning_rates"]}  # fmt: skip
    named = {
        name: [x["accuracy"] for x in file["searches"] if x["accountant"] == name]
        for name in ("pld", "rdp")
    }
    named["none"] = max(by_rate.values(), key=np.mean)
    return {
        name: (
            float(np.mean(x)),
            float(stats.t.ppf(0.975, len(x) - 1) * np.std(x, ddof=1) / len(x) ** 0.5),
        )
        for name, x in named.items()
    }


def test_a_search_costs_what_twenty_of_them_did(text):
    file, accuracies = read("prior/searches.json"), searches()
    accountants = [x["accountant"] for x in file["searches"]]
    assert {name: accountants.count(name) for name in set(accountants)} == {"pld": 20, "rdp": 20}
    for name in ("pld", "rdp", "none"):
        assert f"{shown(*accuracies[name])} %" in text
    [best] = read("prior/epsilon1.json")["rows"]
    costs = [best["accuracy"]["mean"] - accuracies[name][0] for name in ("pld", "rdp")]
    assert f"costs {costs[0]:.1f} points at ε = 1" in text and costs[0] < 3
    choose = (DOCS / "choose.md").read_text(encoding="utf-8")
    log = (DOCS / "log.md").read_text(encoding="utf-8").replace("\n ", "")
    assert f"[costs {costs[0]:.1f} points]" in choose
    assert f"RDP costs {costs[1]:.1f} points and profiles [cost {costs[0]:.1f}]" in log
    multipliers = {x["accountant"]: x["noise_multiplier"] for x in file["searches"]}
    multipliers["none"] = file["noise_multiplier_without_search"]
    on_page = re.search(r"multiplier of ([\d.]+), by RDP ([\d.]+),\s+and ([\d.]+) without", text)
    assert on_page and list(map(float, on_page.groups())) == [
        round(multipliers[name], 1) for name in ("pld", "rdp", "none")
    ]


def test_the_entries_for_the_leaderboard_claim_what_was_measured():
    entries = (RESULTS / "prior/leaderboard.md").read_text(encoding="utf-8")
    table = scattering()
    claims = [x for e in (1, 3, 8) for x in sweep(f"prior/epsilon{e}.json").values()]
    claims += [estimate(table[epsilon, "dp_sgd"]["accuracy"]) for epsilon in (1, 3, 8)]
    assert re.findall(r"\d+\.\d+ ± \d+\.\d+", entries) == claims
