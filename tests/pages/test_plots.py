"""The picture of speed is drawn from the files that are kept."""

from PIL import Image

from scripts.paper import plots


def test_the_picture_is_legible_on_a_phone_and_small(tmp_path):
    path = plots.draw(tmp_path)
    with Image.open(path) as image:
        assert image.width == 720 and image.height < 2 * image.width
        assert len(image.convert("L").getcolors()) > 10
    assert path.stat().st_size < 80_000
