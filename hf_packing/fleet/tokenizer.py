"""Keep a tokenizer in a store, so that workers on all machines use the same one."""

import hashlib
import io
import shutil
import tempfile
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from hf_packing.errors import PackingError
from hf_packing.fleet.store import Store


def _file(identity: str) -> str:
    return f".fleet/tokenizer-{identity}"


def save_tokenizer(store: Store, tokenizer: Any, trust_remote_code: bool = False) -> str:
    """Save a tokenizer in a store, and return its identity: a hash of the tokenizer and its chat template.

    Args:
        store: the store.
        tokenizer: a name on the hub, a folder, a tokenizer.json file, or a tokenizer of transformers.
        trust_remote_code: whether to run code that comes with a tokenizer.

    Raises:
        PackingError: there is no such tokenizer, or workers could not load it.
    """
    from hf_packing.text.tokenize import load_tokenizer, text_tokenizer  # imports datasets

    with tempfile.TemporaryDirectory() as folder:
        if isinstance(tokenizer, (str, Path)) and Path(tokenizer).is_file():
            shutil.copy(tokenizer, Path(folder, "tokenizer.json"))
            loaded = text_tokenizer(load_tokenizer(str(tokenizer)))
        else:
            if isinstance(tokenizer, (str, Path)):
                tokenizer = load_tokenizer(str(tokenizer), trust_remote_code)
                loaded = text_tokenizer(tokenizer)
            elif not hasattr(tokenizer, "save_pretrained") or not hasattr(tokenizer, "backend_tokenizer"):
                raise PackingError(
                    "tokenizer: expected a name on the hub, a folder, a tokenizer.json file or a fast tokenizer of "
                    f"transformers, got {type(tokenizer).__name__}"
                )
            else:
                loaded = text_tokenizer(tokenizer)
            tokenizer.save_pretrained(folder)
        identity = _identity_of(loaded)
        if not store.exists(_file(identity)):
            store.put(_file(identity), _zipped(Path(folder)))
    return identity


@lru_cache(maxsize=4)
def _loaded(content: bytes) -> Any:
    from hf_packing.text.tokenize import load_tokenizer, text_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            archive.extractall(folder)
        alone = [path.name for path in Path(folder).iterdir()] == ["tokenizer.json"]
        return text_tokenizer(load_tokenizer(f"{folder}/tokenizer.json" if alone else folder))


def load_saved(store: Store, identity: str) -> Any:
    """Return the TextTokenizer that `save_tokenizer` has saved with this identity.

    Raises:
        PackingError: the tokenizer that was saved differs from the one that a worker loads.
    """
    try:
        tokenizer = _loaded(store.read(_file(identity)))
    except (FileNotFoundError, zipfile.BadZipFile) as error:
        raise PackingError(
            f"output: expected the run's tokenizer in {store.path_of(_file(identity))!r}, got the error {error!r}; "
            "start the run again, which saves the tokenizer"
        ) from None
    if _identity_of(tokenizer) != identity:
        raise PackingError(
            "tokenizer: expected a tokenizer that is the same after save_pretrained and from_pretrained, but workers "
            "would load another one; save it to a folder, load it again, and pass that"
        )
    return tokenizer


def _identity_of(tokenizer: Any) -> str:
    parts = (tokenizer.backend.to_str(), str(tokenizer.template.source), str(tokenizer.end))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def _zipped(folder: Path) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.writestr(zipfile.ZipInfo(str(path.relative_to(folder))), path.read_bytes())
    return content.getvalue()
