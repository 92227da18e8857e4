"""The text of each Lua script. Each script is one atomic step in the life of a job.

Every script may run twice without harm, because redis-py sends a command again when its connection breaks. The opening
comment of each Lua file lists its keys, arguments and return values.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

SHARED = ("_metrics", "_turns", "_lib", "_claim")
"""The files of this package with the shared functions. Each file uses only functions of the files before it."""
OF_PACKAGE = "_shared"
"""The file with the functions that the scripts of another package share. It comes after those of this package."""
_DEFINITION = re.compile(
    r"^local (?:function (?P<name>\w+)\(.*?^end$|(?P<constant>\w+) = .*?(?=^local|^--|^$|\Z))", re.MULTILINE | re.DOTALL
)


@cache
def source(name: str, package: str = __package__) -> str:
    """Return the text of a script, with the shared functions that it needs in front of it.

    Each call of a script creates all functions in its text, so functions that are not needed would cost time. A
    function uses only functions that stand before it.

    Args:
        name: Name of the script's file, without `.lua`.
        package: The package whose folder `scripts` has the file.
    """
    folder, own_folder = files(__package__) / "scripts", files(package) / "scripts"
    text = (own_folder / f"{name}.lua").read_text()
    parts = [folder / f"{part}.lua" for part in SHARED]
    if package != __package__:
        parts.append(own_folder / f"{OF_PACKAGE}.lua")
    shared = "\n".join(part.read_text() for part in parts)
    for found in reversed(list(_DEFINITION.finditer(shared))):
        if re.search(rf"\b{found['name'] or found['constant']}\b", text):
            text = f"{found[0].rstrip()}\n{text}"
    return text
