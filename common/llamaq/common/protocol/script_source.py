"""The text of each Lua script. Each script is one atomic step in the life of a job.

Every script may run twice without harm, because redis-py sends a command again when its connection breaks. The opening
comment of each Lua file lists its keys, arguments and return values.

The scripts of jobs are in the folder `scripts` beside this module. Other packages may have such a folder too.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

# The files with the shared functions. Each file uses only functions of the files before it.
SHARED = ("_metrics", "_turns", "_lib", "_claim")
_DEFINITION = re.compile(
    r"^local (?:function (?P<name>\w+)\(.*?^end$|(?P<constant>\w+) = .*?(?=^local|^--|^$|\Z))", re.MULTILINE | re.DOTALL
)


@cache
def source(name: str, package: str = __package__) -> str:
    """Return the text of a script in a package, with the shared functions that it needs in front of it.

    Each call of a script creates all functions in its text, so functions that are not needed would cost time. A
    function uses only functions that stand before it.
    """
    folder = files(__package__) / "scripts"
    text = files(package).joinpath("scripts", f"{name}.lua").read_text()
    shared = "\n".join(folder.joinpath(f"{part}.lua").read_text() for part in SHARED)
    for found in reversed(list(_DEFINITION.finditer(shared))):
        if re.search(rf"\b{found['name'] or found['constant']}\b", text):
            text = f"{found[0].rstrip()}\n{text}"
    return text
