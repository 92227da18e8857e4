"""Starts llama-server in this process, from the `xllamacpp` wheel: run by the python of an environment that has it.

Standard input has one line of JSON: the attributes of `xllamacpp.CommonParams` to set, by dotted name. Standard output
gets one: where the server listens, and the wheel's version. It runs until standard input is closed.
"""

from __future__ import annotations

import importlib
import json
import sys


def main() -> None:
    xllamacpp = importlib.import_module("xllamacpp")
    params = xllamacpp.CommonParams()
    for name, value in json.loads(sys.stdin.readline()).items():
        *path, attribute = name.split(".")
        owner = params
        for part in path:
            owner = getattr(owner, part)
        getattr(owner, attribute)  # an unknown one is an error here
        setattr(owner, attribute, value)
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address, "version": xllamacpp.__version__}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
