"""Make GGUF files with llama.cpp's own converter; answer with the logits of its engine, and what it says next."""

import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np

LLAMA_CPP = Path(sys.prefix) / "llama.cpp"
os.environ["LLAMA_CPP_LIB_PATH"] = str(Path(sys.prefix) / "build/bin")
import llama_cpp  # noqa: E402

here = Path(sys.argv[1])
request = json.loads((here / "request.json").read_text())
sys.path.insert(0, str(LLAMA_CPP))
F32 = 0
if pre := request.get("pre"):
    # The converter knows tokenizers by a hash, and not that of the test, whose ids come without it.
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda *_: pre
arrays, answer = {}, {"version": llama_cpp.__version__, "greedy": {}, "metadata": {}}
for name, folder in request["folders"].items():
    file = here / f"{name}.gguf"
    outtype = request.get("outtype", {}).get(name, "f32")
    sys.argv = ["convert_hf_to_gguf.py", folder, "--outtype", outtype, "--outfile", str(file)]
    runpy.run_path(str(LLAMA_CPP / "convert_hf_to_gguf.py"), run_name="__main__")
    llm = llama_cpp.Llama(
        str(file), n_ctx=64, logits_all=True, type_k=F32, type_v=F32, n_threads=1, flash_attn=False,
        verbose=request.get("verbose", False), kv_overrides=request.get("overrides"),
    )  # fmt: skip
    answer["metadata"][name] = llm.metadata
    rows = []
    for ids in request["ids"]:
        llm.reset()
        llm.eval(ids)
        rows.append(llm.scores[: len(ids)].copy())
    arrays[name] = np.stack(rows)
    llm.reset()
    llm.eval(request["ids"][0])
    said = []
    for _ in range(request["n_new"]):
        said.append(int(llm.scores[llm.n_tokens - 1].argmax()))
        llm.eval(said[-1:])
    answer["greedy"][name] = said
    llm.close()
(here / "answer.json").write_text(json.dumps(answer))
np.savez(here / "answer.npz", **arrays)
