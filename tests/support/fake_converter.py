"""Stands in for llama.cpp's converter: writes the names of a folder's files instead of weights, and fails on request.

$RECORD is the file for its arguments; $FAILS is "partial", after half of the file, or "nothing", without any file.
"""

import json
import os
import sys
from pathlib import Path

folder, _, outtype, _, outfile = sys.argv[1:]
record = {
    "python": sys.executable, "script": sys.argv[0], "folder": folder, "outtype": outtype, "outfile": outfile,
    "files": sorted(path.name for path in Path(folder).iterdir()),
    "quantization": json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")).get("quantization_config"),
}  # fmt: skip
Path(os.environ["RECORD"]).write_text(json.dumps(record), encoding="utf-8")
fails = os.environ.get("FAILS")
if fails == "partial":
    Path(outfile).write_text("half", encoding="utf-8")
    print("INFO: on the standard output")
    raise NotImplementedError("no such architecture")
if fails is None:
    Path(outfile).write_text(f"GGUF {outtype}", encoding="utf-8")
