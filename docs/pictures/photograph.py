"""A photograph of a page that `hf-packing report` has written, as wide as a desk.

hf-packing report DATA --tokenizer T --output report.html
python docs/pictures/photograph.py report.html
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageChops

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def photograph(page: Path, file: Path, width: int, height: int) -> None:
    """The top of the page, without what is empty below it."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={profile}", f"--screenshot={file}", f"--window-size={width},{height}"]
        subprocess.run([*command, page.absolute().as_uri()], check=True, capture_output=True)
    image = Image.open(file).convert("RGB").crop((0, 0, width, height))
    beyond = Image.new("RGB", image.size, image.getpixel((width - 1, height - 1)))
    bottom = (ImageChops.difference(image, beyond).getbbox() or (0, 0, 0, height))[3]
    kept = image.crop((0, 0, width, min(height, bottom + 16)))
    kept.quantize(256, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


if __name__ == "__main__":
    photograph(Path(sys.argv[1]), HERE / "report-desk.png", 1200, 2050)
