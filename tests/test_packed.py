"""An unknown archive is read as its folder is, or refused in one line.

Nothing is left over.
"""

import bz2
import gzip
import io
import lzma
import os
import signal
import stat
import tarfile
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bam.data.common import DataError
from bam.images import packed
from tests.cases import refused, run_command, start
from tests.image_files import TWO, tree


def pack(path, top, prefix=""):
    """Packs what is below `top`, in an archive of the kind that the path's name says."""
    below = sorted(x for x in top.rglob("*"))
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            for one in below:
                archive.write(one, prefix + str(one.relative_to(top)))
    else:
        with tarfile.open(path, "w:" + path.name.partition(".tar")[2].lstrip(".")) as archive:
            archive.add(top, prefix or ".")
    return path


@pytest.mark.parametrize("prefix", ["", "photographs/", "a/b/"])
@pytest.mark.parametrize("name", ["x.zip", "x.tar", "x.tar.gz", "X.TAR.bz2", "x.tar.xz"])
def test_an_archive_gives_what_its_folder_gives(tmp_path, name, prefix):
    top = tree(tmp_path / "x", TWO + "A/\xc3\x9c.png notes.txt __MACOSX/A/._1.png")
    archive = pack(tmp_path / name.replace("TAR", "tar"), top, prefix)
    archive = archive.rename(tmp_path / name)
    with packed.unpack(archive, tmp_path / "out") as place:
        there = {x.relative_to(place): x.read_bytes() for x in place.rglob("*") if x.is_file()}
        assert there == {x.relative_to(top): x.read_bytes() for x in top.rglob("*") if x.is_file()}
        root = next(x for x in tmp_path.iterdir() if x.name.startswith(".out-"))
        assert root.stat().st_mode & 0o777 == 0o700  # for its owner alone
    assert not root.exists()


def test_an_archive_is_imported_with_the_bytes_and_lines_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tree(tmp_path / "x", " ".join(f"{c}/{i}.png" for c in "AB" for i in range(9)) + " A/7.gif")
    (tmp_path / "x" / "A" / "7.gif").write_bytes(b"damaged")
    pack(tmp_path / "x.zip", tmp_path / "x")
    folder = run_command("bam", "data", "import", "x", "--out=one", "--size=8")
    archive = run_command("bam", "data", "import", "x.zip", "--out=two", "--size=8")
    assert folder.returncode == archive.returncode == 0, archive.stderr
    first, *lines = archive.stdout.splitlines()
    assert first == "unpacking x.zip beside two; the copy is removed at the end"
    assert "\n".join(lines).replace("two", "one") == folder.stdout.rstrip()
    for file in (tmp_path / "one").glob("*.parquet"):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()
    # Where the copy was is said nowhere.
    facts = (tmp_path / "one" / "manifest.json").read_text()
    assert (tmp_path / "two" / "manifest.json").read_text() == facts
    # Again: nothing is made anew, unless the archive has changed.
    again = run_command("bam", "data", "import", "x.zip", "--out=two", "--size=8")
    assert again.returncode == 0, again.stderr
    os.utime("x.zip", ns=(1, 1))
    changed = run_command("bam", "data", "import", "x.zip", "--out=two", "--size=8")
    assert changed.returncode == 2 and "from other files" in changed.stderr
    assert sorted(x.name for x in tmp_path.iterdir()) == ["one", "two", "x", "x.zip"]
    tree(tmp_path / "y", "A/1.png B/1.png B/2.png")
    pack(tmp_path / "y.tar", tmp_path / "y")
    wrong = run_command("bam", "data", "import", "y.tar", "--out=three")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: y.tar: class A has one image")
    assert not (tmp_path / "three").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_copy_of_the_images(tmp_path, number):
    whole = zipped(*(f"{c}/{i}.png" for c in "AB" for i in range(5000)))
    (tmp_path / "x.zip").write_bytes(whole)
    with start("data", "import", "x.zip", "--out=out", cwd=tmp_path) as process:
        while not (there := list(tmp_path.glob(".out-*/A"))) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(number)
        assert process.communicate()[1] == "error: interrupted\n"
    assert there and process.returncode == 130
    assert [x.name for x in tmp_path.iterdir()] == ["x.zip"]


def test_no_place_of_the_copy_is_published_or_shown(tmp_path, monkeypatch):
    (tmp_path / "a  b").mkdir()  # an error in one line has one space
    monkeypatch.chdir(tmp_path / "a  b")
    tree(tmp_path / "x", " ".join(f"{c}/{i}.png" for c in "AB" for i in range(9)) + " A/7.gif")
    (tmp_path / "x" / "A" / "7.gif").write_bytes(b"damaged")
    pack(tmp_path / "a  b" / "x.zip", tmp_path / "x")
    for out in ("one", "two"):
        done = run_command("bam", "data", "import", "x.zip", f"--out={out}", "--size=8")
        assert done.returncode == 0, done.stderr
    for name in ("manifest.json", "import.json"):
        content = Path("one", name).read_bytes()
        assert content == Path("two", name).read_bytes() and b".one" not in content
    assert '"A/7.gif": "A/7.gif: Unidentified' in Path("one", "manifest.json").read_text()
    persons = tree(tmp_path / "p", " ".join(f"{k}/{i}.png" for k in range(12) for i in range(2)))
    pack(tmp_path / "a  b" / "p.zip", persons)
    done = run_command("bam", "data", "import", "p.zip", "--out=new/three")
    assert done.returncode == 2 and done.stderr.startswith("error: p.zip: 12 folders")
    assert not Path("new").exists()


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def zipped(*names, change=lambda info: None, **options):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", **options) as archive:
        for name in names:
            change(info := zipfile.ZipInfo(name))
            archive.writestr(info, b"x" * 100)
    return content.getvalue()


def tarred(*entries):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry) if isinstance(entry, str) else entry
            info.size = 3 * (info.type == tarfile.REGTYPE)
            archive.addfile(info, io.BytesIO(b"abc"))
    return content.getvalue()


def as_link(info):
    info.external_attr = (stat.S_IFLNK | 0o777) << 16


def as_bzip2(info):
    info.compress_type = zipfile.ZIP_BZIP2


def locked(content):
    """The archive with the bit that says "encrypted", of each of its files."""
    whole = bytearray(content)
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        whole[whole.index(mark) + place] |= 1
    return bytes(whole)


def long_name(num_bytes):
    info = tarfile.TarInfo("n" * num_bytes)
    info.type = tarfile.REGTYPE
    return info


def flipped(content, place):
    """Bytes of which one is another."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def checksum(content):
    """A gzip file of another checksum."""
    return flipped(content, len(content) - 6)


def less_than_nothing():
    info = tarfile.TarInfo("x")
    info.pax_headers = {"GNU.sparse.name": "a.png", "GNU.sparse.realsize": "-5"}
    info.pax_headers |= {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info.size = 512
        archive.addfile(info, io.BytesIO(b"0\n" + bytes(510)))
    return content.getvalue()


HOSTILE = {
    "less.tar": (less_than_nothing(), "a.png has -5 bytes"),
    "up.zip": (zipped("a/../../x.png"), "leaves the folder"),
    "root.zip": (zipped("//etc/x.png"), "leaves the folder"),
    "share.zip": (zipped("\\\\host\\x.png"), "leaves the folder"),
    "absolute.zip": (zipped("/etc/x.png"), "leaves the folder"),
    "backslash.zip": (zipped("a\\..\\..\\x.png"), "leaves the folder"),
    "drive.zip": (zipped("C:\\x.png"), "leaves the folder"),
    "link.zip": (zipped("a", change=as_link), "is a link; unpack it"),
    "password.zip": (locked(zipped("a.png")), "needs a password; unpack it"),
    "twice.zip": (zipped("a.png", "b/../b.png"), "leaves the folder"),
    "file and folder.zip": (zipped("a", "a/b.png"), "occurs twice in the archive"),
    "cut.zip": (zipped("a.png")[:80], "damaged, or of an unknown kind"),
    "no.zip": (b"<html>", "damaged, or of an unknown kind"),
    "empty.zip": (b"", "damaged, or of an unknown kind"),
    "flipped.zip": (zipped("a.png").replace(b"x" * 100, b"x" * 99 + b"y"), "damaged, or of an"),
    "root.tar": (tarred("//etc/x.png"), "leaves the folder"),
    "up.tar": (tarred("../x.png"), "leaves the folder"),
    "link.tar": (tarred("x", link("y", "/etc/passwd")), "y: is a link or a special file"),
    "hard.tar": (tarred("x", link("y", "x", tarfile.LNKTYPE)), "y: is a link or a special"),
    "device.tar": (tarred(link("y", "", tarfile.CHRTYPE)), "y: is a link or a special file"),
    "pipe.tar": (tarred(link("y", "", tarfile.FIFOTYPE)), "y: is a link or a special file"),
    "twice.tar": (tarred("x.png", "./x.png"), "occurs twice in the archive"),
    "cut.tar": (tarred("x.png")[:600], "damaged, or of an unknown kind"),
    # Of these tarfile reads what is before the fault, as if no more were there.
    "cut in a header.tar": (tarred("x.png", "y.png")[:1100], "truncated header; is it cut short?"),
    "cut between files.tar": (tarred("x.png", "y.png")[:1024], "empty header; is it cut short?"),
    "header.tar": (tarred("x", "y.png").replace(b"y.p", b"z.p"), "bad checksum; is it cut short?"),
    "name.tar": (tarred(long_name(2**22)), "more than 4,194,304 bytes before a file"),
    "checksum.tgz": (checksum(gzip.compress(tarred("x.png"))), "unknown kind: CRC check failed"),
    "bzip2.zip": (flipped(zipped("a.png", change=as_bzip2), 40), "Invalid data"),
    "long.zip": (zipped("n" * 300), "File name too long"),
    "deep.zip": (zipped(*("a/" * k for k in range(1, 1500))), "nested more than 100 deep"),
    "no.tgz": (b"\x1f\x8b" + bytes(50), "damaged, or of an unknown kind"),
    "no.txz": (b"\xfd7zXZ" + bytes(50), "damaged, or of an unknown kind"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(tmp_path, name):
    content, message = HOSTILE[name]
    (tmp_path / "in").mkdir()
    archive = tmp_path / "in" / name
    archive.write_bytes(content)

    def unpack():
        with packed.unpack(archive, tmp_path / "in" / "out"):
            raise AssertionError("was read")

    refused(message, unpack, kind=DataError)
    assert [x.name for x in tmp_path.rglob("*")] == ["in", name]


@pytest.mark.parametrize("kind", [gzip, bz2, lzma])
def test_an_archive_in_several_streams_is_read_to_its_end(tmp_path, kind):
    """As programs that compress with several cores write it."""
    whole = tarred("x.png", "y.png", "z.png")
    (tmp_path / "x.tar").write_bytes(kind.compress(whole[:1024]) + kind.compress(whole[1024:]))
    with packed.unpack(tmp_path / "x.tar", tmp_path / "out") as place:
        assert sorted(x.name for x in place.iterdir()) == ["x.png", "y.png", "z.png"]


def test_an_archive_that_fills_the_disk_is_refused_by_what_it_declares(tmp_path, monkeypatch):
    (tmp_path / "x.zip").write_bytes(zipped("a.png", "b.png", compression=zipfile.ZIP_DEFLATED))
    (tmp_path / "x.tar").write_bytes(tarred("a.png", "b.png"))
    for name, num_bytes in (("x.zip", 200), ("x.tar", 6)):
        usage = SimpleNamespace(free=2 * num_bytes)
        monkeypatch.setattr(packed.shutil, "disk_usage", lambda place, usage=usage: usage)
        with packed.unpack(tmp_path / name, tmp_path / "out") as place:
            assert len(list(place.iterdir())) == 2
        usage.free -= 1
        with pytest.raises(DataError, match="too much for the disk"):
            packed.unpack(tmp_path / name, tmp_path / "out").__enter__()
    assert len(list(tmp_path.iterdir())) == 2
