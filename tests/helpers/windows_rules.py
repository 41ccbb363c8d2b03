"""Windows' rules for files, on Linux: what is open or mapped can be neither renamed nor replaced nor removed."""

import errno
import os
from pathlib import Path


def open_files():
    """The files that this process has open or mapped."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:  # the descriptor with which the folder was listed
            continue
    lines = Path("/proc/self/maps").read_text().splitlines()
    return found | {line.split(maxsplit=5)[5] for line in lines if len(line.split(maxsplit=5)) == 6}


def follow_windows_rules(monkeypatch):
    """Make os.rename, os.replace and os.unlink raise the errors of Windows, until monkeypatch is undone."""
    rename, replace, unlink = os.rename, os.replace, os.unlink

    def check(*paths, dir_fd=None):
        used = open_files()
        for path in paths:
            folder = "" if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            whole = os.path.realpath(os.path.join(folder, path))
            if any(file == whole or file.startswith(f"{whole}{os.sep}") for file in used):
                raise PermissionError(errno.EACCES, "Access is denied", str(path))

    def renamed(source, target, **options):
        check(source)
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, "Cannot create a file when that file already exists", str(target))
        rename(source, target, **options)

    def replaced(source, target, **options):
        check(source, target)
        replace(source, target, **options)

    def unlinked(path, *, dir_fd=None):
        check(path, dir_fd=dir_fd)
        unlink(path, dir_fd=dir_fd)

    for name, function in (("rename", renamed), ("replace", replaced), ("unlink", unlinked), ("remove", unlinked)):
        monkeypatch.setattr(os, name, function)
