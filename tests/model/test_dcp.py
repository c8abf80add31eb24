"""torch.distributed.checkpoint folders read as the Hugging Face folder of the same model."""

import enum
import json
import pickle
import shutil

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from accelerate import Accelerator
from limits import few_files
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch_files import assert_same_conversion, cast, write_dcp
from transformers import AutoModelForCausalLM

from model import load_model
from model.checkpoint import open_checkpoint
from uptrain.checkpoints.store import CheckpointStore
from uptrain.training.loss_module import LossModule


def prefixed(tensors, prefix):
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def test_more_files_than_a_process_may_open(tmp_path):
    """Thousands of processes write as many files, and each stays open."""
    folder = tiny.save(model := tiny.build(), tmp_path / "folder")
    other = write_dcp(tmp_path / "dcp", prefixed(cast(model, "float32"), "model."), 60)
    shutil.copy(folder / "config.json", other)
    with few_files(20), open_checkpoint(other) as checkpoint:
        assert checkpoint.tensors.keys() == tiny.tensors(folder).keys()


def adam(tensors, prefix):
    return {
        f"optimizer.state.{prefix}{n}.{m}": torch.ones_like(t) for n, t in tensors.items() for m in ("exp_avg", "step")
    }


@pytest.mark.parametrize(("n_pieces", "axis"), [(1, 0), (2, 0), (3, 1), (7, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_converts_as_the_hugging_face_folder_does(convert, tmp_path, dtype, n_pieces, axis):
    model = tiny.build(attention_bias=True)
    folder = tiny.save(model, tmp_path / "folder", dtype)
    tensors = cast(model, dtype)
    other = write_dcp(tmp_path / "dcp", prefixed(tensors, "model.") | adam(tensors, "model."), n_pieces, axis)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(folder / name, other)
    for groups in (8, 2):
        assert_same_conversion(convert, folder, other, tmp_path, groups)
    summary = json.loads(convert("inspect", other, "--json").out)
    assert summary["files"] == [".metadata", *(f"__{i}_0.distcp" for i in range(n_pieces))]
    assert (summary["format"], summary["side_files"], summary["skipped_files"]) == ("dcp", ["tokenizer.json"], [])


def test_the_config_names_the_dtype_of_the_tensors(convert, tmp_path):
    """Training keeps the weights of a bfloat16 model in float32; its config comes from another folder."""
    folder = tiny.save(tiny.build(), tmp_path / "folder", "bfloat16")
    other = write_dcp(tmp_path / "dcp", cast(tiny.build(), "float32"), 2)
    shutil.copy(folder / "config.json", other)
    convert("to-hf", other, tmp_path / "out").succeeded()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert {config.get(key, "float32") for key in ("dtype", "torch_dtype")} == {"float32"}
    convert("verify", other, tmp_path / "out").succeeded()


class PicklerOfPython_3_11_0(pickle.Pickler):
    """Names a member of an enum by `getattr`, as Python did until 3.11.3."""

    def reducer_override(self, thing):
        return (getattr, (type(thing), thing.name)) if isinstance(thing, enum.Enum) else NotImplemented


def test_metadata_of_python_3_11_0(tmp_path):
    model = tiny.build()
    folder = write_dcp(tmp_path / "dcp", model.state_dict(), 2)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    with (folder / ".metadata").open("wb") as file:
        PicklerOfPython_3_11_0(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    with open_checkpoint(folder) as checkpoint:
        for name, tensor in model.state_dict().items():
            assert np.array_equal(checkpoint.rows(name, 0, len(tensor)), tensor.numpy())


@pytest.mark.parametrize("prefix", ["", "model.", "model.student.", "app.model.module."])
def test_any_prefix(tmp_path, prefix):
    model = tiny.build()
    tensors = model.state_dict()
    folder = write_dcp(tmp_path / "dcp", prefixed(tensors, prefix) | adam(tensors, prefix), 2)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.tensors.keys() == tensors.keys()
        for name, tensor in tensors.items():
            for start, stop in ((0, len(tensor)), (3, 21), (len(tensor) - 1, len(tensor))):
                assert np.array_equal(checkpoint.rows(name, start, stop), tensor.numpy()[start:stop]), name


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_lm_head_is_written_once(convert, tmp_path, tied):
    model = tiny.build(tie_word_embeddings=True)
    folder = write_dcp(tmp_path / "dcp", prefixed(model.state_dict(), "model."), 2)
    (folder / "config.json").write_text(json.dumps({**model.config.to_dict(), "tie_word_embeddings": tied}))
    convert("mha-to-mqa", "--method", "mean", folder, tmp_path / "out").succeeded()
    assert ("lm_head.weight" in tiny.tensors(tmp_path / "out")) is not tied


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
def test_what_torch_itself_writes(convert, tmp_path):
    """A transposed parameter keeps its strides in the file."""
    model = tiny.build()
    folder = tiny.save(model, tmp_path / "folder")
    tensors = model.state_dict()
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"):
        tensors[name] = tensors[name].T.contiguous().T
    tensors["model.empty.weight"] = torch.empty(0, 3)
    state = {"model": tensors, "optimizer": {"state": {"exp_avg": torch.ones(3)}, "lr": 0.1}, "step": 7}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    shutil.copy(folder / "config.json", tmp_path / "dcp")
    with open_checkpoint(tmp_path / "dcp") as checkpoint:
        assert checkpoint.span("model.layers.1.mlp.up_proj.weight") is None
        assert checkpoint.span("model.layers.0.mlp.up_proj.weight") is not None
        assert checkpoint.tensors["model.empty.weight"].shape == (0, 3)
    del tensors["model.empty.weight"]
    shutil.rmtree(tmp_path / "dcp")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"))
    shutil.copy(folder / "config.json", tmp_path / "dcp")
    for groups in (8, 2):
        assert_same_conversion(convert, folder, tmp_path / "dcp", tmp_path, groups)


def save_sharded(rank, place, port):
    """Save the model of `tiny.build()` from one of two processes, cut along rows, columns or not at all."""
    dist.init_process_group("gloo", init_method=f"file://{place}/{port}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    ways = [Shard(0), Shard(1), Replicate()]
    tensors = {}
    for i, (name, tensor) in enumerate(tiny.build().state_dict().items()):
        way = ways[i % 3] if tensor.dim() == 2 else ways[2 * (i % 2)]
        tensors[name] = distribute_tensor(tensor, mesh, [way])
    dcp.save({"model": tensors}, storage_writer=dcp.FileSystemWriter(f"{place}/dcp"))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_saved_by_two_processes(convert, tmp_path):
    folder = tiny.save(tiny.build(), tmp_path / "folder")
    mp.spawn(save_sharded, (str(tmp_path), "meet"), nprocs=2)
    assert {p.name for p in (tmp_path / "dcp").iterdir()} >= {".metadata", "__0_0.distcp", "__1_0.distcp"}
    shutil.copy(folder / "config.json", tmp_path / "dcp")
    for groups in (8, 1):
        assert_same_conversion(convert, folder, tmp_path / "dcp", tmp_path, groups)


@pytest.mark.parametrize("tied", [False, True])
def test_what_our_own_training_writes(convert, tmp_path, tied):
    """The tensors of a run's checkpoint, copied out of it: beside a config.json, they are a checkpoint like others."""
    source = tiny.save(tiny.build(tie_word_embeddings=tied), tmp_path / "source")
    loss_module = LossModule(load_model(source, dtype=torch.float32), "next-token", None)
    optimizer = torch.optim.AdamW(loss_module.parameters())
    ids, documents = torch.arange(24).view(2, 12), torch.zeros(2, 12, dtype=torch.long)
    loss_module(ids, ids, documents).backward()
    optimizer.step()
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    CheckpointStore(checkpoints, Accelerator(cpu=True), keep_last=1, save_every=1, check_lock=lambda: None).save(
        loss_module, optimizer, {"step": 1}
    )
    tensors = checkpoints / "step-00000001/tensors"
    shutil.copy(source / "config.json", tensors)
    trained = AutoModelForCausalLM.from_pretrained(source)
    trained.load_state_dict(loss_module.student.state_dict(), strict=not tied)
    assert not torch.equal(trained.lm_head.weight, tiny.build(tie_word_embeddings=tied).lm_head.weight)
    folder = tiny.save(trained, tmp_path / "folder")
    for groups in (8, 2):
        assert_same_conversion(convert, folder, tensors, tmp_path, groups)


@pytest.mark.parametrize("where", ["here", "above"])
def test_where_config_is_found(convert, tmp_path, where):
    model = tiny.build()
    path = write_dcp(tmp_path / "project/step-12", prefixed(model.state_dict(), "model."))
    home = {"here": path, "above": path.parent}[where]
    convert("inspect", path).refused("needs the model's config.json", f"neither there nor in {path.parent}: copy it")
    tiny.save(model, tmp_path / "whole")
    (tmp_path / "whole/model.safetensors").unlink()
    shutil.copytree(tmp_path / "whole", home, dirs_exist_ok=True)
    source = {"name": "before", "revision": None, "files": []}
    (home / "groupwise.json").write_text(
        json.dumps(
            {"schema": 1, "method": "mean", "seed": 0, "groups": 8, "source": source, "merge_report": [], "sha256": {}}
        )
    )
    summary = json.loads(convert("inspect", path, "--json").out)
    files = tiny.SIDE_FILES.keys() | {"generation_config.json"}
    if where == "above":  # whose folders are other checkpoints
        files = {name for name in files if "/" not in name}
    assert set(summary["side_files"]) == files
    elsewhere = ["config.json, and the files beside it, are those of the folder above, since the checkpoint has none."]
    assert summary["notes"] == ([] if where == "here" else elsewhere)
    convert("mha-to-gqa", "--method", "mean", path, tmp_path / "out", "--groups", 2).succeeded()
    convert("verify", path, tmp_path / "out").succeeded()
    assert json.loads((tmp_path / "out/groupwise.json").read_text())["source"]["groupwise"]["groups"] == 8
    (tmp_path / "project").rename(tmp_path / "moved")  # what was written does not depend on where SOURCE lies
    convert("verify", tmp_path / "moved/step-12", tmp_path / "out").succeeded()


@pytest.mark.parametrize("given", ["step-00000120", "step-00000120/tensors"])
def test_a_checkpoint_of_a_run_is_refused(convert, tmp_path, given):
    """It would be taken for the model that the run began with, whose card and records are those of the run's folder."""
    run = tmp_path / "my run"
    path = write_dcp(run / "checkpoints/step-00000120/tensors", prefixed(tiny.build().state_dict(), "model.student."))
    tiny.save(tiny.build(), run / "model")
    (run / "run.json").write_text("{}")
    convert("inspect", path.parent.parent / given).refused(f"uptrain export '{run}' OUT --step 120")
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    (run / "checkpoints").symlink_to(tmp_path / "elsewhere")
    convert("inspect", run / "checkpoints" / given).refused(f"uptrain export '{run}' OUT --step 120")
    copied = tmp_path / "elsewhere/step-00000120"  # out of the run, it is a checkpoint like others
    convert("inspect", copied).refused(f"name the folder of its tensors: {copied}/tensors")
    convert("inspect", copied / "tensors").refused("needs the model's config.json")


def test_a_project_around_the_checkpoint_is_not_copied(convert, tmp_path):
    """config.json lies in the folder above, among files that are nobody's business."""
    model = tiny.build()
    folder = tiny.save(model, tmp_path / "project")
    (folder / "model.safetensors").unlink()
    for name in (".env", "train.py", "nohup.out", "vocab.json"):
        (folder / name).write_text("x")
    (folder / "latest").symlink_to("step-900")
    path = write_dcp(folder / "step-7", prefixed(model.state_dict(), ""), 2)
    result = json.loads(convert("to-hf", path, tmp_path / "out", "--json").out)
    assert set(result["skipped_files"]) >= {".env", "train.py", "nohup.out", "latest"}
    copied = {file.name for file in (tmp_path / "out").iterdir()}
    assert "vocab.json" in copied
    assert not copied & {".env", "train.py", "nohup.out", "latest"}
