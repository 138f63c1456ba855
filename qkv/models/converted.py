"""Converted copies of models that are slow to read, under the user's cache folder.

Takes: a key, the hash of the source, and a function that writes a folder. Gives: a verified folder, or None.
Does not know about: GGUF, transformers.

A copy is a folder with a manifest (`qkv.json`): format version, hash of the source file, hash of every file in the folder.
It is written beside its final place and renamed, so that no process ever sees half a copy.
"""

import json
import logging
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import xxhash

from qkv_kernels.folders import cache_root

log = logging.getLogger(__name__)

FORMAT = 1  # raise it when the conversion changes: older copies are then rebuilt
MANIFEST = "qkv.json"
_ABANDONED_S = 3600.0  # age after which another process's unfinished folder is taken for dead


def hash_file(path: Path) -> str:
    """xxh3_128 of a file's bytes, in hex."""
    digest = xxhash.xxh3_128()
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while n := file.readinto(buffer):
            digest.update(memoryview(buffer)[:n])
    return digest.hexdigest()


def find(key: str, source_hash: str) -> Path | None:
    """The verified copy called `key` of the source with `source_hash`. None, with the reason logged, if there is none."""
    folder = cache_root() / "models" / key
    if not folder.is_dir():
        return None
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT or manifest["source"] != source_hash:
            log.warning("the converted copy in %s is of another file or version; rebuilding it", folder)
            return None
        damaged = [name for name, digest in manifest["files"].items() if hash_file(folder / name) != digest]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        damaged = [f"{MANIFEST} ({error})"]
    if damaged:
        log.warning("the converted copy in %s is damaged (%s); rebuilding it", folder, ", ".join(damaged))
        return None
    return folder


def store(key: str, source_hash: str, write: Callable[[Path], None]) -> None:
    """Make or replace the copy called `key`; `write(folder)` fills it. A failure (full disk, no permission) is one
    warning and leaves nothing behind: the caller goes on without a copy."""
    final = cache_root() / "models" / key
    partial = final.with_name(f"{key}.tmp-{uuid.uuid4().hex}")
    try:
        partial.mkdir(parents=True)
        _remove_abandoned(final)
        write(partial)
        files = {p.name: hash_file(p) for p in sorted(partial.iterdir())}
        (partial / MANIFEST).write_text(json.dumps({"format": FORMAT, "source": source_hash, "files": files}, indent=1))
        _swap_in(partial, final)
    except Exception as error:  # safetensors and tokenizers raise classes of their own for a full disk
        log.warning(
            "could not cache the converted model in %s (%s); continuing without, so the next start converts again. "
            "Free some space or point QKV_CACHE elsewhere",
            final.parent,
            str(error).splitlines()[0] if str(error) else type(error).__name__,
        )
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _swap_in(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`, moving an older copy out of the way. If another process puts its copy there in
    between, that one stays: it was made from the same source."""
    if final.exists():
        old = final.with_name(f"{final.name}.tmp-{uuid.uuid4().hex}")
        try:
            final.rename(old)
            shutil.rmtree(old, ignore_errors=True)
        except FileNotFoundError:
            pass
    try:
        partial.rename(final)
    except OSError:
        if not final.is_dir():
            raise


def _remove_abandoned(final: Path) -> None:
    for folder in final.parent.glob(f"{final.name}.tmp-*"):
        if time.time() - folder.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(folder, ignore_errors=True)
