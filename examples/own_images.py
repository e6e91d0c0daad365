"""A folder of images, of any sizes and formats, to a private model that may be published.

python -m examples.own_images

It generates such a folder, then does in Python what these commands do:

bam data import photographs --out=data --size=16
bam train --config=digits:dp_sgd --workdir=run --config.dataset.name=folder \
  --config.dataset.path=data
bam export --workdir=run --out=release
"""

import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

from bam.data import importing, listing
from bam.privacy.accounting import rounded_up
from bam.release import export
from bam.training import loop
from configs import digits


def write_photographs(folder: Path, num: int = 600) -> None:
    """Bright discs and squares on noise, in several sizes, formats and depths."""
    rng = np.random.default_rng(0)
    for number in range(num):
        name = ("disc", "square")[number % 2]
        side, radius = rng.integers(20, 60), rng.uniform(0.5, 0.7)
        y, x = np.mgrid[-1 : 1 : side * 1j, -1 : 1 : side * 1j]
        far = np.hypot(x, y) if name == "disc" else np.maximum(abs(x), abs(y))
        grey = np.where(far < radius, 200, 40) + rng.integers(0, 40, (side, side))
        (folder / name).mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(grey.astype(np.uint8))
        if number % 3 == 0:
            image = Image.fromarray((257 * grey).astype(np.uint16))
        image.save(folder / name / f"{number}.{'png' if number % 3 == 0 else 'jpg'}")


def main(num: int = 600, num_steps: int = 60) -> tuple[dict, str]:
    """The run's summary, and the statement of its release."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_photographs(folder / "photographs", num)
        examples = listing.in_class_folders(folder / "photographs")
        options = importing.Options(16, 1, ("disc", "square"), test_share=0.2, strict=False)
        importing.run(folder / "photographs", examples, folder / "data", options)
        config = digits.get_config("dp_sgd")
        config.dataset.update({"name": "folder", "path": str(folder / "data")})
        config.update({"num_steps": num_steps, "expected_batch_size": 64, "accountant": "rdp"})
        summary = loop.train(loop.build(config), None, folder / "run").summary
        export.export(folder / "run", folder / "release")
        return summary, (folder / "release" / "PRIVACY.md").read_text()


if __name__ == "__main__":
    summary, statement = main()
    print(
        f"ε = {rounded_up(summary['epsilon'], '.2f')}, test accuracy {summary['test_accuracy']:.1%}"
    )
    print(statement[:800])
