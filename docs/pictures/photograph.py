"""Photographs of a page that `hf-packing report` has written: as wide as a desk and as a phone, light and dark.

hf-packing report DATA --tokenizer T --output report.html
python docs/pictures/photograph.py report.html
"""

import shutil
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path

from PIL import Image, ImageChops

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
DARK = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")


def photograph(page: Path, file: Path, width: int, height: int, options: tuple[str, ...] = ()) -> None:
    """The top of the page in a frame so wide, since browsers have no window as narrow as a phone."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    with tempfile.TemporaryDirectory() as folder:
        frame = f'<iframe style="width:{width}px;height:{height}px;border:0" srcdoc="{escape(page.read_text())}">'
        around = Path(folder, "around.html")
        style = '<meta name="color-scheme" content="light dark"><style>body{margin:0}</style>'
        around.write_text(f"<!doctype html>{style}{frame}</iframe>")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *options]
        command += [f"--user-data-dir={folder}/profile", f"--screenshot={file}", f"--window-size={width},{height}"]
        subprocess.run([*command, around.as_uri()], check=True, capture_output=True)
    image = Image.open(file).convert("RGB").crop((0, 0, width, height))
    beyond = Image.new("RGB", image.size, image.getpixel((width - 1, height - 1)))
    bottom = (ImageChops.difference(image, beyond).getbbox() or (0, 0, 0, height))[3]
    kept = image.crop((0, 0, width, min(height, bottom + 16)))
    kept.quantize(256, Image.Quantize.MAXCOVERAGE).save(file, optimize=True)


if __name__ == "__main__":
    page = Path(sys.argv[1])
    photograph(page, HERE / "report-desk.png", 1200, 2050)
    photograph(page, HERE / "report-phone.png", 390, 1600)
    photograph(page, HERE / "report-desk-dark.png", 1200, 2050, DARK)
