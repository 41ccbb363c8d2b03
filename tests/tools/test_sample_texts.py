"""Texts for a reader: all of them can be drawn, and the same ones again."""

from tools import sample_texts
from tools.sample_texts import Text, docstrings, draw, errors

SOURCE = '''"""Of the module."""

class Box:
    """Of the class."""

    def open(self, key):
        """Of the function."""
        if key is None:
            raise ValueError(f"key: expected one, got {key!r}" + "; try again")
        raise KeyError(key)
'''


def test_what_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sample_texts, "PACKAGE", tmp_path / "package")
    (tmp_path / "package").mkdir()
    file = tmp_path / "package" / "box.py"
    file.write_text(SOURCE)
    assert [text.text for text in docstrings(file)] == ["Of the module.", "Of the class.", "Of the function."]
    assert list(errors(file)) == [Text("package/box.py:9", "key: expected one, got {key}; try again")]


def test_a_draw_is_the_same_for_the_same_seed():
    texts = [Text("a", str(number)) for number in range(50)]
    assert draw(texts, 5, 1) == draw(texts, 5, 1) != draw(texts, 5, 2)
    assert len(draw(texts, 99, 1)) == 50


def test_the_package_has_more_than_are_drawn():
    files = list(sample_texts.PACKAGE.rglob("*.py"))
    assert sum(len(list(docstrings(file))) for file in files) > 500
    assert sum(len(list(errors(file))) for file in files) > 150
