"""A part is a row with its words and options: what is added here is found wherever it is read."""

import json

import bam
from bam.core import clipping
from bam.core.clipping import Clip
from bam.privacy import statement
from bam.release import export
from bam.training import keys, loop, parts
from tests.cases import refused
from tests.runs import own_data, tiny

WORDS = "scaled down to an L2 norm of at most a share of C"


def shrunk(words=WORDS, public_options=("share",)):
    """A clip that nobody has named yet, as a row of the table."""
    make = lambda plan, clip_norm, share=0.5: bam.clip_by_l2_norm(share * clip_norm)  # noqa: E731
    return Clip(make, words, public_options)


def released(folder, monkeypatch, row):
    """Settings, statement and model facts of a run that names a row of the table of clips."""
    monkeypatch.setitem(clipping.CLIPS, "shrunk", row)
    config = tiny(num_steps=1)
    with config.unlocked():
        config.clip.update({"name": "shrunk", "share": 0.25})
    result = loop.train(loop.build(config, own_data()), None, folder / "run")
    assert result.summary["sensitivity"] == 0.25 and result.summary["clip_norm"] == 1.0
    export.export(folder / "run", folder / "out")
    settings = json.loads((folder / "out" / "config.json").read_text())
    return settings, (folder / "out" / "PRIVACY.md").read_text()


def test_a_clip_that_is_added_is_in_a_run_the_statement_and_a_release(tmp_path, monkeypatch):
    settings, text = released(tmp_path, monkeypatch, shrunk())
    assert settings["clip"] == {"name": "shrunk", "share": 0.25}
    assert f"| {WORDS} | `shrunk` |" in text
    assert "| S, sensitivity | how far one example moves the sum, in L2 | 0.25 |" in text


def test_a_clip_without_words_is_said_to_be_bounded_by_s_and_no_option_is_told(
    tmp_path, monkeypatch
):  # the control
    settings, text = released(tmp_path, monkeypatch, shrunk("", ()))
    assert settings["clip"] == {"name": "shrunk"}
    unknown = statement.render({"bound": "own"}, "bounded")
    assert f"| {unknown} | `shrunk` |" in text and WORDS not in text


def test_a_clip_that_is_in_no_table_is_refused():
    refused("unknown clip 'shrunk'; choose from l2, normalize", loop.build, tiny(
        **{"clip.name": "shrunk"}), own_data())  # fmt: skip


# The table of keys.


def test_what_several_tables_said_of_a_key_stands_in_its_row():
    looked_at = {f"{x}.every" for x in ("eval", "checkpoint", "diagnostics")}
    assert looked_at | {"diagnostics.num_examples", "dry_run"} == keys.CHANGEABLE
    assert keys.PATHS == ("init_from", "dataset.path", "dataset.groups", "features.cache")
    assert set(keys.in_section("dataset")) >= {"source", "path", "num_classes"}
    assert not [x.name for x in keys.KEYS if x.path and x.public]


def test_a_part_that_has_a_name_of_ours_is_in_the_help_of_its_key():
    for section, part in parts.SECTIONS.items():
        if part.rows:
            assert set(keys.BY_NAME[f"{section}.name"].names) == set(part.rows)
