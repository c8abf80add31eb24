"""Convert folders with CTranslate2's own converter, and answer with the logits of its engine."""

import json
import sys
from pathlib import Path

import ctranslate2
import numpy as np
from ctranslate2.converters import TransformersConverter

here = Path(sys.argv[1])
request = json.loads((here / "request.json").read_text())
arrays, answer = {}, {"version": ctranslate2.__version__, "greedy": {}}
for name, folder in request["folders"].items():
    converted = here / name
    TransformersConverter(folder).convert(str(converted))
    generator = ctranslate2.Generator(str(converted), device="cpu", compute_type="float32", intra_threads=1)
    logits = generator.forward_batch(request["ids"])
    arrays[name] = np.array(logits)
    words = json.loads((converted / "vocabulary.json").read_text())
    prompt = request["ids"][0]
    (result,) = generator.generate_batch(
        [[words[i] for i in prompt]], max_length=request["n_new"], include_prompt_in_result=False, end_token=[],
        sampling_topk=1, disable_unk=False,
    )  # fmt: skip
    answer["greedy"][name] = result.sequences_ids[0]
(here / "answer.json").write_text(json.dumps(answer))
np.savez(here / "answer.npz", **arrays)
