"""The notebook runs from its first cell to its last, and its prose states what it computes."""

import base64
import contextlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot as plt

from scripts.lib import site

STORED = json.loads(Path("docs/clipping_bias.ipynb").read_text(encoding="utf-8"))
CELLS = STORED["cells"]
CODE = [cell for cell in CELLS if cell["cell_type"] == "code"]


@pytest.fixture(scope="module")
def run():
    """What each cell prints, how many figures it draws, and the names that all defined."""
    plt.switch_backend("Agg")
    names, outputs = {"__name__": "__main__"}, []
    for cell in CODE:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), f"<cell {cell['id']}>", "exec"), names)
        outputs.append((printed.getvalue(), len(plt.get_fignums())))
        plt.close("all")
    return outputs, names


@pytest.mark.slow
def test_the_stored_outputs_are_what_the_cells_print_and_draw(run):
    pictures = []
    for cell, (printed, num_figures) in zip(CODE, run[0], strict=True):
        assert "".join("".join(x.get("text", ())) for x in cell["outputs"]) == printed, cell["id"]
        drawn = [x["data"]["image/png"] for x in cell["outputs"] if "data" in x]
        assert len(drawn) == num_figures and (cell["metadata"].get("alt") or not drawn)
        pictures += map(base64.b64decode, drawn)
    assert len(pictures) == 4
    assert all(png.startswith(b"\x89PNG") and len(png) < 60_000 for png in pictures)


@pytest.mark.slow
def test_the_prose_states_what_the_cells_compute(run):
    names = run[1]
    markdown = (c for c in CELLS if c["cell_type"] == "markdown")
    prose = re.sub(r"\s+", " ", " ".join("".join(c["source"]) for c in markdown))
    point = lambda v: f"({v[0]:g}, {v[1]:g})".replace("-", "−")  # noqa: E731
    shown = {name: names["shown"](names[name]) for name in ("mean", "clipped_mean", "bias", "c")}
    plain, ours = (names["found"][20, name] for name in ("DP-SGD", "BAM"))
    late, late_ours = (names["found"][2000, name] for name in ("DP-SGD", "BAM"))
    lengths, with_bam, clipped = names["ours"], names["theirs"], names["is_clipped"]
    shorter, longer = (with_bam < lengths)[~clipped].sum(), (with_bam > lengths)[clipped].sum()
    along, bias_norm = names["shown"](names["along"]) + 0.0, np.linalg.norm(shown["bias"])
    deviation = names["noised"].std(axis=0).mean()
    for fact in [
        f"(3, 4) becomes {point(np.asarray(names['clipped'])[0])}",
        f"The mean of the five gradients is ĝ = {point(shown['mean'])}.",
        f"The mean of the clipped ones is {point(shown['clipped_mean'])}.",
        f"**turned by {names['turn']:.1f}°**",
        f"The difference {point(shown['bias'])} is the clipping bias.",
        f"Its length is {bias_norm:.2f}.",
        "that is {:g}, {:g}, {:g}, {:g} and {:g}.".format(*along).replace("-", "−"),
        f"= **{names['a']:.3f}**.",
        f"= {point(shown['c'])}, of length **{np.linalg.norm(shown['c']):.3f}**",
        f"standard deviation is 1 in each coordinate of the sum, and {deviation:.1f}",
        f"{len(names['noised']):,} noised means",
        f"lies {names['from_clipped']:.3f} from the clipped mean",
        f"and {names['from_mean']:.2f} from ĝ.",
        f"has length {ours[0]:.3f} with BAM, and {plain[0]:.3f} with DP-SGD",
        f"**The bias is nevertheless larger**, {ours[2]:.4f} against {plain[2]:.4f}.",
        f"{ours[1]:.2f} against {plain[1]:.2f}.",
        f"BAM's loss is then higher, {late_ours[3]:.3f} against {late[3]:.3f}",
        f"{clipped.sum()} of the {len(lengths)} gradients are clipped",
        f"and {(clipped & names['is_wrong']).sum()} of those belong",
        f"BAM shortens {shorter} of the other {(~clipped).sum()} gradients",
        f"it lengthens {longer} of the {clipped.sum()}",
        f"grows from {lengths[clipped].mean():.2f} to {with_bam[clipped].mean():.2f}",
        f"between {min(names['averaged']):.4f} and {max(names['averaged']):.4f}",
        f"from {names['noise'][0]:.3f} at l = 8 to {names['noise'][-1]:.4f} at l = 256",
    ]:
        assert fact in prose, fact
    assert late_ours[0] < late[0] and late_ours[1] > late[1] and late_ours[2] > late[2]
    is_larger = np.array(names["averaged"]) > names["noise"]
    assert list(is_larger[2:]) == [True] * 4 and not is_larger[0]
    a, c = float(names["a"]), np.asarray(names["c"])
    assert (1 - a) ** 2 + c @ c == pytest.approx(0.64)
    np.testing.assert_allclose(a * names["mean"] + c, names["total"] / 5, atol=1e-6)
    assert c @ np.asarray(names["mean"]) == pytest.approx(0, abs=1e-6)


def test_the_site_shows_text_code_and_outputs_in_their_order():
    page, place = site.as_markdown(STORED), 0
    for cell in CELLS:
        for text in (cell["source"], *(x["text"] for x in cell.get("outputs", ()) if "text" in x)):
            place = page.index("".join(text).rstrip(), place)
    assert page.count("](data:image/png;base64,iVBOR") == 4
    assert "$" not in json.dumps([c["source"] for c in CELLS])  # TeX would fetch MathJax
