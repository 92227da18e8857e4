"""Run llama-server from the `xllamacpp` wheel. The python of an environment with this wheel runs this file.

Standard input: one line of JSON with the attributes of `xllamacpp.CommonParams` to set, by dotted name.
Standard output: one line of JSON with the address of the server and the version of the wheel.
The server runs until standard input is closed.
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
        getattr(owner, attribute)  # raises AttributeError for an unknown name
        setattr(owner, attribute, value)
    server = xllamacpp.Server(params)
    print(json.dumps({"address": server.listening_address, "version": xllamacpp.__version__}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
