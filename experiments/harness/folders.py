"""Folders of runs: one that no other run has, a sweep's that one process works in at a time, and none where nothing came out.

Takes: paths, and errors of writing to them. Gives: paths, words. Does not know about: Hydra, records' contents.
"""

import contextlib
import errno
from pathlib import Path

from filelock import FileLock, Timeout

from qkv.errors import ConfigError

_NO_PLACE = {errno.EACCES, errno.EDQUOT, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
_OWN = ("record.json", "metrics.jsonl", "samples.jsonl", "run.log", "multirun.yaml", ".lock")


class Claims:
    """What this process has taken for its runs."""

    def __init__(self) -> None:
        self._folder: str | None = None
        self._sweep: str | None = None
        self._locks: list[FileLock] = []

    def folder(self, wanted: str) -> str:
        """`wanted`, made now; with _2, _3 … behind it where another run of the same second was first. Always the same one. A
        folder that cannot be made is returned as it is: whoever writes there says why."""
        number, name = 1, wanted
        while self._folder is None:
            try:
                Path(name).mkdir(parents=True)
                self._folder = name
            except FileExistsError:
                number += 1
                name = f"{wanted}_{number}"
            except OSError:
                return wanted
        return self._folder

    def sweep(self, name: str) -> str:
        """The folder of a sweep, which the same sweep has every time; jobs that ask again get the same one."""
        self._sweep = self._sweep or f"outputs/{name}"
        return self._sweep

    def discard(self) -> None:
        """Remove the folder of a sweep that was never begun: Hydra makes it, and writes to it, before it looks at the jobs."""
        if self._sweep is not None:
            discard(Path(self._sweep))

    def lock(self, sweep: Path) -> None:
        """Take the folder of a sweep until release(). Raises ConfigError if another process works in it."""
        lock = FileLock(sweep / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"another process is running this very sweep, in '{sweep}'; wait for it, or stop it") from None
        self._locks.append(lock)

    def release(self) -> None:
        for lock in self._locks:
            lock.release()
        self._locks.clear()


def discard(folder: Path) -> None:
    """Remove what a run that came to nothing has left: its own files, then the folders, where nothing else is in them."""
    for name in (*_OWN, "record.json.tmp"):
        with contextlib.suppress(OSError):
            (folder / name).unlink()
    remove_if_empty(folder)


def remove_if_empty(folder: Path) -> None:
    """A refused run leaves no folder behind, nor those of outputs/ above it; a folder with anything in it stays."""
    outputs = Path("outputs").resolve()
    above = [parent for parent in folder.resolve().parents if parent == outputs or outputs in parent.parents]
    for candidate in (folder, *above):
        with contextlib.suppress(OSError):
            candidate.rmdir()


def no_place(error: OSError, folder: str) -> str | None:
    """In words, where an error says that there is no place to write; None for other errors. folder: the setting of where to."""
    if error.errno not in _NO_PLACE:
        return None
    where = f" '{error.filename}'" if error.filename else ""
    cure = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"choose another place with {folder}=..."
    return f"cannot write{where}: {error.strerror}; {cure}"
