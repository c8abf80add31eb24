"""`--calibration self`: the model generates the text that it is calibrated on."""

import json
import lzma
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import tiny
from calibrated import TOKENS
from families_without_gqa import t5
from safetensors.torch import load_file, save_file
from tiny_tokenizers import make_tokenizer

from convert.calibration import generated_text
from convert.calibration.generated_text import TextGeneration
from convert.calibration_text.text import split_name
from model.checkpoint import open_checkpoint

OPTIONS = ("--groups", 2, "--method", "pca", "--calibration-tokens", 1024)
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def source(tmp_path):
    folder = tiny.save(tiny.build(vocab_size=300, bos_token_id=0, eos_token_id=1), tmp_path / "source", "bfloat16")
    (folder / "chat_template.jinja").unlink()
    return make_tokenizer(folder, 300)


def with_template(folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def tokenizer_of(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def kept(out):
    record = json.loads((out / "groupwise.json").read_text())["calibration"]
    ids = np.frombuffer(lzma.decompress((out / TOKENS).read_bytes()), "<u2")
    return ids.reshape(record["windows"], record["window"]).astype(int)


def written(folder, n_windows=6, first=(), seed=0, scratch="scratch"):
    with open_checkpoint(folder) as checkpoint:
        text = generated_text.TextGeneration(checkpoint, first, n_windows, 64, seed)
        return text.generate(folder.parent / scratch, lambda n: None)


def test_the_same_bytes_again_and_verified(convert, source, tmp_path):
    for name in ("one", "two"):
        convert("mha-to-gqa", source, tmp_path / name, *OPTIONS, "--calibration", "self").succeeded()
    assert tiny.snapshot(tmp_path / "one") == tiny.snapshot(tmp_path / "two")
    convert("verify", source, tmp_path / "one").succeeded()
    ids_NT = kept(tmp_path / "one")
    assert ids_NT.shape == (16, 64)
    assert (ids_NT[:, 0] == tokenizer_of(source).bos_token_id).all()
    assert len(np.unique(ids_NT[:, 1])) > 8, "texts begin with different tokens"
    assert "text that the model wrote itself" in (tmp_path / "one/README.md").read_text()


def test_another_seed_gives_another_text(convert, source, tmp_path):
    for seed in (0, 1):
        command = (*OPTIONS, "--calibration", "self", "--seed", seed)
        convert("mha-to-gqa", source, tmp_path / f"out{seed}", *command).succeeded()
    assert (kept(tmp_path / "out0") != kept(tmp_path / "out1")).any()


def test_the_text_is_the_models(tmp_path):
    """Its tokens are drawn from the model's distribution, as transformers gives it, and from no other."""
    import torch

    model = tiny.build(vocab_size=300, bos_token_id=0, eos_token_id=None)
    with torch.no_grad():
        model.lm_head.weight *= 60  # far from uniform, so that another distribution shows
    folder = tiny.save(model, tmp_path / "source")
    (folder / "chat_template.jinja").unlink()
    make_tokenizer(folder, 300, eos=False)
    ids_NT = torch.from_numpy(written(folder, 64))
    with torch.inference_mode():
        p_NTV = model(ids_NT).logits[:, 1:-1].softmax(-1)
    drawn = torch.nn.functional.one_hot(ids_NT[:, 2:], 300).float()

    def fits(p_NTV: torch.Tensor) -> bool:
        # The expected share of each token against the share drawn: a sum of variances tells how far chance may take it.
        apart = (drawn - p_NTV).sum((0, 1)).square().sum()
        return bool(apart < 2 * (p_NTV * (1 - p_NTV)).sum())

    assert fits(p_NTV)
    assert not fits(torch.full_like(p_NTV, 1 / 300))
    sharper_NTV = p_NTV.pow(1.5)
    assert not fits(sharper_NTV / sharper_NTV.sum(-1, keepdim=True))


def test_without_a_token_that_begins_texts(tmp_path):
    folder = tiny.save(tiny.build(vocab_size=300, bos_token_id=None, eos_token_id=None), tmp_path / "source")
    (folder / "chat_template.jinja").unlink()
    make_tokenizer(folder, 300, bos=False, eos=False)
    ids_NT = written(folder)
    assert len(np.unique(ids_NT[:, 0])) == 6


def test_texts_begin_with_the_end_token_where_it_alone_parts_texts(tmp_path):
    folder = tiny.save(tiny.build(vocab_size=300, bos_token_id=None, eos_token_id=5), tmp_path / "source")
    (folder / "chat_template.jinja").unlink()
    make_tokenizer(folder, 300, bos=False, eos=False)
    assert (written(folder)[:, 0] == 5).all()


def test_chats_begin_as_the_template_says(source, monkeypatch):
    """Every other text is a chat: the model generates what the user says, and after its end what the assistant does."""
    tokenizer = tokenizer_of(with_template(source))
    end, word = tokenizer.eos_token_id, tokenizer("x", add_special_tokens=False).input_ids[0]
    assert tokenizer.bos_token_id == 0 != end
    steps = iter(range(64))

    def choose(logits_BV, *rest):
        import torch

        return torch.full((len(logits_BV),), end if next(steps) % 32 == 31 else word)

    monkeypatch.setattr(generated_text, "sample", choose)
    text, chat = (tokenizer.decode(row) for row in written(source, 2)[:, :60])
    assert chat.startswith("[user]x")
    assert "x</s>[assistant]x" in chat
    assert text.startswith("<s>")
    assert "x</s><s>" in text, "the next text begins"


def test_a_template_may_have_nothing_before_the_user_s_message(source):
    """The chat then begins as a text does."""
    (source / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}</s>{% endfor %}")
    ids_NT = written(source, 2)
    assert (ids_NT[:, 0] == 0).all()


def test_long_documents_are_cut(source, monkeypatch):
    import torch

    monkeypatch.setattr(generated_text, "DOCUMENT_TOKENS", 16)
    monkeypatch.setattr(generated_text, "sample", lambda logits_BV, *rest: torch.full((len(logits_BV),), 9))
    ids_NT = written(source, 3)
    assert (np.flatnonzero(ids_NT[1] == 0) == [0, 16, 32, 48]).all()
    assert (np.delete(ids_NT, [0, 1, 16, 17, 32, 33, 48, 49], axis=1) == 9).all()


def test_failing_template_is_reported(source, capsys):
    with_template(source)
    (source / "chat_template.jinja").write_text("{{ raise_exception('no') }}" + TEMPLATE)
    ids_NT = written(source)
    assert "the chat template cannot be used (no)" in capsys.readouterr().err
    assert (ids_NT[:, 0] == 0).all()


@pytest.fixture
def check_continued(convert, tmp_path, monkeypatch):
    """Return a function that converts SOURCE to `whole`, and to `out` with a failure at the third of four batches."""

    def check(source, *options):
        monkeypatch.setattr(generated_text, "BATCH_ROWS", 5)
        command = (*options, "--calibration", "self")
        convert("mha-to-gqa", source, tmp_path / "whole", *command).succeeded()
        generate, batches = generated_text._Generator.generate, []

        def fail_at_third_batch(self, *given):
            if len(batches) == 2:
                raise OSError("no space left")
            batches.append(given)
            return generate(self, *given)

        monkeypatch.setattr(generated_text._Generator, "generate", fail_at_third_batch)
        assert convert("mha-to-gqa", source, tmp_path / "out", *command).code == 1
        batches.clear()
        convert("mha-to-gqa", source, tmp_path / "out", *command).succeeded()
        assert [n_rows for n_rows, *_ in batches] == [5, 1], "two of four batches were there"
        assert tiny.snapshot(tmp_path / "out") == tiny.snapshot(tmp_path / "whole")

    return check


def test_killed_and_continued(source, check_continued):
    check_continued(source, *OPTIONS)


def test_a_model_too_large_for_memory(convert, source, tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    for dry in ((), ("--dry-run",)):
        convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--calibration", "self", *dry).refused(
            "--calibration self holds the whole model in memory", "Calibrate on a text instead (--calibration shipped"
        )


def test_plan_says_memory_and_time(convert, source, tmp_path, monkeypatch):
    """Also those of writing the text, which here are far above those of reading it."""
    monkeypatch.setattr(TextGeneration, "memory", lambda self, n_embeddings: 10**9)
    monkeypatch.setattr(TextGeneration, "n_steps", 10**6)
    plans = {
        name: json.loads(
            convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--calibration", name, "--dry-run", "--json").out
        )
        for name in ("shipped", "self")
    }
    assert plans["self"]["calibration"]["sha256_of_ids"] is None
    assert plans["self"]["peak_memory_bytes"] > plans["shipped"]["peak_memory_bytes"]
    assert plans["self"]["estimated_calibration_seconds"] > plans["shipped"]["estimated_calibration_seconds"]


def test_memory_is_the_weights_the_cache_and_the_logits(source):
    with open_checkpoint(source) as checkpoint:
        config, n_bytes = checkpoint.config, sum(tensor.nbytes for tensor in checkpoint.tensors.values())
        text = generated_text.TextGeneration(checkpoint, (), 16, 64, 0)
    layers, heads, size = (config[k] for k in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
    cache = 2 * 2 * layers * heads * size * 64 * 16
    assert n_bytes + cache < text.memory(300) < n_bytes + cache + 16 * 300 * 16


def test_tokens_that_the_model_does_not_know(convert, source, tmp_path):
    tiny.edit_config(source, bos_token_id=9999)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["post_processor"] = None
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--calibration", "self").refused("name the id 9999")
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_of_special_tokens_alone(convert, source, tmp_path):
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["added_tokens"] = [
        {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for token, i in sorted(vocabulary.items(), key=lambda entry: entry[1])
    ]  # fmt: skip
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--calibration", "self").refused(
        "has no ordinary token that the model's embedding holds", "--calibration shipped"
    )


def test_texts_begin_with_tokens_that_the_tokenizer_knows(tmp_path):
    """Embeddings often have more rows than there are tokens."""
    folder = tiny.save(tiny.build(vocab_size=1000, bos_token_id=0, eos_token_id=1), tmp_path / "source")
    (folder / "chat_template.jinja").unlink()
    make_tokenizer(folder, 300)
    assert (written(folder, 16)[:, 1] < 300).all()


def test_any_seed(source):
    assert (written(source, 4, seed=10**30)[:, 0] == 0).all()


@pytest.mark.parametrize(
    "family",
    ["phi", "llava", *(pytest.param(name, marks=pytest.mark.slow) for name in ("falcon", "gemma2", "qwen3_moe"))],
)
def test_families_that_transformers_runs(convert, tmp_path, check_continued, family):
    """Their text is the class's own, the same again after a kill, and `verify` repeats it."""
    model = tiny.build(family, vocab_size=300, bos_token_id=0, eos_token_id=1)
    source = make_tokenizer(tiny.save(model, tmp_path / "source", "bfloat16"), 300)
    check_continued(source, "--groups", tiny.few(family), *OPTIONS[2:])
    assert len(np.unique(kept(tmp_path / "whole")[:, 1])) > 8
    convert("verify", source, tmp_path / "out").succeeded()


def test_encoder_decoders_are_refused(convert, tmp_path):
    source = make_tokenizer(tiny.save(t5(vocab_size=300), tmp_path / "source"), 300)
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS[:2], "--calibration", "self").refused(
        "'t5' is an encoder-decoder", "--calibration shipped"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("self", ["self"]),
        ("self+shipped", ["self", "shipped"]),
        ("shipped+self+a+b.txt", ["shipped", "self", "a+b.txt"]),
        ("a+self", ["a+self"]),
        ("self+self+self+a", ["self", "self", "self+a"]),
        ("self+hub:org/name:train", ["self", "hub:org/name:train"]),
    ],
)
def test_names_are_split_before_a_path_begins(name, parts):
    assert split_name(name) == parts


@pytest.mark.parametrize("name", ["self+self", "self+", "shipped+self+shipped"])
def test_parts_are_given_once(convert, source, tmp_path, name):
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--calibration", name).refused("give each of self and")


def test_parts_take_turns_and_each_is_held_out(convert, source, tmp_path):
    """Every fourth window is held out, so each fourth must not be of the same part."""
    (tmp_path / "text.txt").write_text("words and words " * 500)
    given = f"self+{tmp_path / 'text.txt'}"
    convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--calibration", given).succeeded()
    convert("verify", source, tmp_path / "out").succeeded()
    decoded = [tokenizer_of(source).decode(row, skip_special_tokens=True) for row in kept(tmp_path / "out")]
    from_text = ["words and words" in text for text in decoded]  # the model may write one of the words too
    assert from_text == [bool((n + n // 4) % 2) for n in range(16)]
    assert set(from_text[3::4]) == {True, False}


def test_users_are_told_that_out_keeps_their_text(convert, source, tmp_path):
    (tmp_path / "text.txt").write_text("words and words " * 500)
    result = convert("mha-to-gqa", source, tmp_path / "out", *OPTIONS, "--calibration", tmp_path / "text.txt")
    assert f"{TOKENS} holds the tokens of text.txt" in result.out
    result = convert("mha-to-gqa", source, tmp_path / "other", *OPTIONS, "--calibration", "self")
    assert f"{TOKENS} holds the tokens" not in result.out


def test_the_text_that_was_written_is_that_of_the_tokenizer(source):
    """A conversion that goes on must not mix the texts of two chat templates."""

    def inputs():
        with open_checkpoint(source) as checkpoint:
            return TextGeneration(checkpoint, (0,), 4, 64, 0).inputs_sha256

    before = inputs()
    (source / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    changed = inputs()
    (source / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert len({before, changed, inputs()}) == 3


def test_the_plan_of_a_text_of_its_own_sees_missing_tensors(convert, tmp_path):
    folder = make_tokenizer(tiny.save(tiny.build(vocab_size=300), tmp_path / "source"), 300)
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    options = ("--groups", 2, "--calibration-tokens", 1024, "--calibration", "self", "--dry-run")
    convert("mha-to-gqa", folder, tmp_path / "out", *options).refused("lacks the tensor lm_head.weight")
