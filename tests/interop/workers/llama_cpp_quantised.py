"""Quantise a GGUF file by llama.cpp, and widen it again."""

import json
import os
import sys
from pathlib import Path

os.environ["LLAMA_CPP_LIB_PATH"] = str(Path(sys.prefix) / "build/bin")
import llama_cpp
import numpy as np

here = Path(sys.argv[1])
request = json.loads((here / "request.json").read_text())


def write(source: Path, kind: str, out: Path) -> None:
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{kind}")
    options.allow_requantize = True
    options.nthread = 1
    code = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), options)
    assert code == 0, f"llama.cpp cannot write {kind}"


for kind in request["kinds"]:
    write(Path(request["source"]), f"MOSTLY_{kind}", here / f"{kind}.gguf")
    write(here / f"{kind}.gguf", "ALL_F32", here / f"{kind}-widened.gguf")
np.savez(here / "answer.npz")
(here / "answer.json").write_text(json.dumps({"version": llama_cpp.__version__}))
