"""The wheel brings what `import bam` needs, and the error for a missing package names its extra."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bam import extras
from tests.cases import made_once

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

CHECKS = """
from pathlib import Path
assert "(2, 1e-05)-differential" in Path("PRIVACY.md").read_text(encoding="utf-8")
assert jnp.all(jnp.isfinite(params["w"])) and not jnp.all(params["w"] == 0)
print(bam.__file__)
"""

# Each prints what it is told when it needs what is not there.
MISSING = """
from bam.data import common
from bam.data.sources import builtin
for attempt in (
    lambda: __import__("bam.models"),
    lambda: __import__("bam.training.rundir"),
    builtin.digits,
    lambda: common.decode_images([b""], "a.parquet", (8, 8, 1)),
):
    try:
        attempt()
    except ModuleNotFoundError as error:
        print(error)
"""


def run(python, *arguments, cwd):
    """Runs a Python of its own, which sees what is installed beside it and `cwd` alone."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, *arguments], cwd=cwd, env=environ, capture_output=True, text=True, timeout=600
    )


def installed(requirements):
    """The distributions here that `requirements` ask for, with all that those need in turn."""
    distributions = {}
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            distribution = importlib.metadata.distribution(name)
            distributions[name] = distribution
            distributions |= installed(distribution.requires or [])
    return distributions


def snippet():
    """The README's code for the library, and what it says that the code prints."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Use it as a library")[2]
    return re.search(r"```python\n(.*?)```\s*```text\n(.*?)\n```", text, re.DOTALL).groups()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from a copy, since building writes beside the sources."""

    def make(source):
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        for name in ("bam", "configs", "scripts", "examples"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        build = "import setuptools.build_meta as b; b.build_wheel('.')"
        built = run(sys.executable, "-c", build, cwd=source)
        assert built.returncode == 0, built.stderr

    (path,) = made_once(tmp_path_factory, "wheel", make).glob("bam_dp-*.whl")
    return path


@pytest.fixture(scope="module")
def core(wheel, tmp_path_factory):
    """The Python of an environment with the wheel and links to what its dependencies bring."""

    def make(folder):
        venv.create(folder, symlinks=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        for distribution in installed(PROJECT["dependencies"]).values():
            for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
                (packages / name).symlink_to(distribution.locate_file(name))
        python = folder / "bin" / "python"
        pip = ("-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
        answer = run(sys.executable, *pip, cwd=folder)
        assert answer.returncode == 0, answer.stderr

    return made_once(tmp_path_factory, "core", make) / "bin" / "python"


def test_the_readmes_library_snippet_runs_with_the_wheel_and_what_it_requires_alone(core, tmp_path):
    assert len(PROJECT["dependencies"]) <= 7
    code, printed = snippet()
    assert len([x for x in code.splitlines() if x.strip()]) <= 15
    answer = run(core, "-W", "error", "-c", code + CHECKS + MISSING, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    said, place, *lines = answer.stdout.splitlines()
    assert said == printed
    assert Path(place).is_relative_to(core.parents[1])
    assert lines == [
        "flax is not installed: pip install '.[train]' in a clone of bam",
        "ml_collections is not installed: pip install '.[train]' in a clone of bam",
        "sklearn is not installed: pip install '.[train]' in a clone of bam",
        "PIL is not installed: pip install '.[data]' in a clone of bam",
    ]


def test_the_wheels_commands_and_configs_work_away_from_any_clone(core, tmp_path):
    (packages,) = core.parents[1].glob("lib/python*/site-packages")
    environ = os.environ | {"PYTHONPATH": str(packages)}  # before what the extras bring

    def bam(*arguments):
        command = [sys.executable, "-m", "bam", *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600
        )

    # Neither a folder of a config's name nor another package called configs is taken for it.
    (tmp_path / "digits").mkdir()
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/__init__.py").touch()
    (tmp_path / "configs/cifar10.py").write_text("raise SystemExit('a stranger')")
    planned = bam("train", "--config=cifar10_small:bam_sam", "--config.dry_run=true")
    assert planned.returncode == 2 and "cifar10" in planned.stderr  # its data are not there
    settings = ("--config=digits:bam_sam", "--config.num_steps=2", "--config.model.name=linear")
    trained = bam("train", *settings, "--workdir=run", "--config.accountant=rdp")
    assert trained.returncode == 0, trained.stderr
    for command in (("report", "--workdir=run"), ("export", "--workdir=run", "--out=release")):
        done = bam(*command)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "run/report.html").exists() and (tmp_path / "release/PRIVACY.md").exists()


def test_the_wheel_has_bam_alone_and_no_script_that_stands_beside_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"bam", "bam_dp"}
    assert "bam/_shipped/configs/digits.py" in names and "bam/text.py" in names
    assert (wheel.parent / "scripts/benchmarks/hardware.py").exists()  # the control


PRIVACY = ("privacy", "--target_epsilon=2", "--sampling_prob=1", "--num_steps=2")
TRAIN = ("train", "--config=configs/digits.py", "--config.dry_run=true")


def test_bam_privacy_needs_no_extra_and_what_misses_one_is_one_line_and_exit_status_2(core):
    bam = core.with_name("bam")
    answer = run(bam, *PRIVACY, cwd=ROOT)
    assert answer.returncode == 0, answer.stderr
    assert "ε =   2.0" in answer.stdout or "ε =   1.9" in answer.stdout
    assert "| false positives | composed (PLD) |" in answer.stdout
    later = "import sys; sys.modules['sklearn'] = None; from bam.cli.main import main; main()"
    for command, missing in (
        ((bam, *PRIVACY, "--plot=a.png"), "flax"),
        ((bam, *TRAIN), "ml_collections"),
        ((sys.executable, "-c", later, *TRAIN), "sklearn"),
    ):
        answer = run(*command, cwd=ROOT)
        told = f"error: {missing} is not installed: pip install '.[train]' in a clone of bam\n"
        assert (answer.returncode, answer.stderr) == (2, told)


def test_import_bam_imports_nothing_that_an_extra_brings():
    optional = {
        canonicalize_name(Requirement(requirement).name)
        for extra in ("train", "data", "plots")
        for requirement in PROJECT["optional-dependencies"][extra]
    }
    modules = {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if optional & set(map(canonicalize_name, names))
    }
    assert modules >= {"flax", "matplotlib", "ml_collections", "pyarrow", "sklearn"}
    listing = (
        "import sys; import bam; [getattr(bam, x) for x in bam.__all__]; print(*sys.modules); "
        "import bam.training.rundir; "
        "print(*sys.modules)"
    )
    answer = run(sys.executable, "-c", listing, cwd=ROOT)
    core, report = (
        {name.partition(".")[0] for name in x.split()} for x in answer.stdout.split("\n", 1)
    )
    assert not modules & core
    assert modules & report >= {"ml_collections", "tensorboardX"}  # they would have been seen


def test_import_bam_waits_for_nothing_and_guards_the_compiler_all_the_same():
    """What `bam` exports is imported when it is asked for, by whatever way."""
    program = (
        "import sys; import bam; assert not {'jax', 'numpy', 'scipy'} & {*sys.modules}\n"
        "from bam import compiler\n"
        "import jaxlib, os\n"
        "assert (compiler.FLAG in os.environ.get('XLA_FLAGS', '')) == "
        "(jaxlib.__version__ in compiler.FAULTY)\n"
        "assert {*bam.__all__} <= {*dir(bam)} and 'as_functions' in dir(bam)\n"
        "from bam import clipped_sum, sampling\n"
        "assert sampling is sys.modules['bam.core.sampling'] and bam.clipped_sum is clipped_sum\n"
        "import pickle; assert pickle.loads(pickle.dumps(bam.InputError('a'))).args == ('a',)\n"
        "assert 'jax' in sys.modules and bam.privacy.__name__ == 'bam.privacy'\n"
        "try:\n    bam.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    environ = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    command = [sys.executable, "-c", program]
    answer = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout == "module 'bam' has no attribute 'nothing'\n"


def test_pictures_name_their_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    spec = importlib.util.find_spec("bam.sweep.plot")
    with pytest.raises(extras.MissingExtraError) as caught:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert (
        str(caught.value) == "matplotlib is not installed: pip install '.[plots]' in a clone of bam"
    )


FROM_AN_INDEX = re.compile(r"\b(?:install|add)(?: +-\S+)* +['\"]?bam\b(?!/)", re.IGNORECASE)


def test_nothing_tells_anyone_to_install_bam_from_an_index_where_it_is_not():
    """A package that a stranger registers under the name would be installed."""
    for told in ("pip install 'bam[train,tpu]'", "pip install -U bam-dp", "uv add bam"):
        assert FROM_AN_INDEX.search(told)  # the control
    folders = ("bam", "configs", "docs", "examples", "scripts")
    files = [ROOT / name for name in ("README.md", "Makefile", "pyproject.toml")]
    for name in folders:
        files += [f for f in (ROOT / name).rglob("*") if f.suffix in (".md", ".py", ".txt")]
    assert len(files) > 100
    assert [f for f in files if FROM_AN_INDEX.search(f.read_text(encoding="utf-8"))] == []


# It makes a `.venv` whose programs only write down how they are called.
STAND_IN = """#!/bin/sh
mkdir -p .venv/bin .venv/lib/python3/site-packages
for name in python pip bam; do
  printf '#!/bin/sh\\necho %s "$@" >> calls\\n' $name > .venv/bin/$name
  chmod +x .venv/bin/$name
done
"""


def make(folder, *targets):
    """What `make` prints, and the programs of `.venv` that it calls."""
    (folder / "calls").write_text("")
    python = folder / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    # Without what a `make` that runs the tests hands on: it would make this one name its folder.
    env = {k: v for k, v in os.environ.items() if k not in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")}
    command = ["make", f"PYTHON={python}", *targets]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, (folder / "calls").read_text().splitlines()


def test_make_says_how_large_an_installation_is_and_compiles_it_but_for_the_demo(tmp_path):
    compilation = "python -m compileall -qq -j 0 .venv/lib/python3/site-packages"
    for name in ("alone", "after"):
        (tmp_path / name).mkdir()
        for file in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / file, tmp_path / name)
    printed, calls = make(tmp_path / "alone", "install")
    assert printed.startswith("Installing bam and its 120 packages, 1.6 GB in all, in .venv …\n")
    assert [call.split()[0] for call in calls] == ["pip", "python"] and calls[1] == compilation
    printed, calls = make(tmp_path / "after", "demo")
    assert printed.startswith("Installing bam and its 56 packages, 0.8 GB in all, in .venv …\n")
    assert "--no-compile" in calls[0] and calls[1].startswith("python -m scripts.demo")
    assert compilation not in calls
    printed, calls = make(tmp_path / "after", "install")
    assert "Compiling the packages …" in printed and calls[1:] == [compilation]
    _, calls = make(tmp_path / "after", "install", "demo")
    assert [call.split()[0] for call in calls] == ["python", "bam"]  # all is there


def required(extras):
    """The distributions of bam with some extras."""
    optional, names, needed = PROJECT["optional-dependencies"], [*extras], []
    for name in names:  # an extra may name others
        for requirement in map(Requirement, optional[name]):
            if requirement.name == PROJECT["name"]:
                names += sorted(requirement.extras)
            else:
                needed.append(str(requirement))
    return installed([*PROJECT["dependencies"], *needed])


@pytest.mark.skipif(sys.platform != "linux", reason="sizes are those of packages for Linux")
@pytest.mark.parametrize(
    ("target", "extras"), [("installed", ["dev"]), ("demo", ["train", "plots"])]
)
def test_the_makefile_tells_the_size_of_what_is_installed(target, extras):
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    said = re.search(rf"^.venv/{target}: SIZE := (\d+) packages, ([\d.]+) GB", text, re.MULTILINE)
    distributions = required(extras).values()
    paths = {Path(x.locate_file(file)) for x in distributions for file in x.files}
    # pip lists no bytecode that `make install` compiles after it, and the demo has none.
    files = {x for x in paths if x.suffix != ".pyc"}
    if target == "installed":
        sources = [x for x in files if x.suffix == ".py"]
        files |= {Path(importlib.util.cache_from_source(str(x))) for x in sources}
    size = sum(x.stat().st_size for x in files if x.exists()) / 1e9
    assert len(distributions) == pytest.approx(int(said[1]), rel=0.1)
    assert size == pytest.approx(float(said[2]), rel=0.15)


@pytest.mark.slow
def test_pip_installs_the_wheel_alone_and_the_snippet_runs(wheel, tmp_path):
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    pip = ("-m", "pip", "install", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    answer = run(python, *pip, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    answer = run(python, "-c", snippet()[0] + CHECKS, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
