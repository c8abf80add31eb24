"""Assemble the tensors of a Llama from the files in Meta's format, under their Hugging Face names.

Each model-parallel process held a part of every matrix and wrote one file (llama, `model.py`). The parts of
column-parallel layers are concatenated along the rows of the weight, those of row-parallel layers along its columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from model.checkpoint.formats.expected_shapes import expected_shapes
from model.checkpoint.formats.meta_llama.names import BUFFERS, FUSED, FUSED_PARTS, INTERLEAVED, LAYER, NAME, TOP
from model.checkpoint.formats.meta_llama.params import PARAMS, Params
from model.checkpoint.formats.tensor_blocks import TensorBlock, concatenation, extent
from model.checkpoint.formats.torch_file import PickledTensor
from model.checkpoint.tensor import Array, Span
from model.common.errors import CheckpointError


@dataclass(frozen=True)
class AssembledTensor:
    """A tensor assembled from the files' parts."""

    dtype: str
    blocks: tuple[TensorBlock, ...]
    copies: tuple[tuple[TensorBlock, ...], ...] = ()
    """Copies of the same tensor, if there are more files than K/V heads and several files hold the same head."""
    is_interleaved: bool = False
    """Whether the rows of each head are in Meta's rotary order."""
    span: Span | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return extent(self.blocks)


class ParallelLayout:
    """The files' tensors and their division. Raises CheckpointError if they and `params.json` disagree."""

    def __init__(self, files: Sequence[Path], parts: Sequence[Mapping[str, PickledTensor]], params: Params) -> None:
        self._files, self._parts, self._params = files, parts, params
        self._folder = files[0].parent
        for file, part in zip(files[1:], parts[1:], strict=True):
            self._refuse_other_tensors(file, part)
        self._refuse_missing_files()

    def _refuse_other_tensors(self, file: Path, part: Mapping[str, PickledTensor]) -> None:
        """Raise CheckpointError unless a file has the same tensors as the first one, and equal vectors."""
        first, both = self._parts[0], f"{self._files[0]} and {file.name}"
        for name in sorted(first.keys() ^ part.keys()):
            raise CheckpointError(f"of {both}, only one holds {name}; they do not match.")
        for name, stored in part.items():
            reference = first[name]
            same = (stored.dtype, stored.shape) == (reference.dtype, reference.shape)
            if not same or (len(stored.shape) == 1 and stored.array.tobytes() != reference.array.tobytes()):
                raise CheckpointError(f"{both} do not agree on {name}; they do not match.")

    def _refuse_missing_files(self) -> None:
        columns, dim = self._matrix("layers.0.attention.wo.weight").shape[1], self._params.dim
        if columns * len(self._parts) != dim:
            raise CheckpointError(
                f"{self._folder} has {len(self._parts)} file(s) consolidated.*.pth, but their tensors are split for "
                f"{dim / max(columns, 1):g} ({PARAMS} says dim = {dim}, and wo has {columns} columns in each); the "
                "files are of several models, or some are missing."
            )

    def _matrix(self, name: str) -> PickledTensor:
        """Return the first file's part of a matrix that every Llama has."""
        stored = self._parts[0].get(name)
        if stored is None or len(stored.shape) != 2:
            raise CheckpointError(f"{self._files[0]} holds no matrix {name}; it is incomplete, or not a Llama.")
        return stored

    def tensors(self) -> dict[str, AssembledTensor]:
        """Return every tensor by its Hugging Face name, in Hugging Face's order."""
        tensors: dict[str, AssembledTensor] = {}
        for name, stored in self._parts[0].items():
            if not BUFFERS.fullmatch(name):
                tensors |= self._assemble(name, stored)
        expected = self._expected_shapes()
        for name in expected:
            if name not in tensors:
                raise CheckpointError(
                    f"{self._folder} lacks the tensor for {name}; fetch it again, or correct {PARAMS}."
                )
        for name, tensor in tensors.items():
            if tensor.shape != expected.get(name):
                raise CheckpointError(
                    f"{self._folder}: {name} would have shape {tensor.shape}, where {PARAMS} and the other tensors "
                    f"mean {expected.get(name, 'none')}; they do not match."
                )
        return {name: tensors[name] for name in expected}

    def _assemble(self, name: str, stored: PickledTensor) -> dict[str, AssembledTensor]:
        """Return the tensor, by its Hugging Face name, that one of Meta's names stands for; three if it is fused."""
        match = NAME.fullmatch(name)
        layer, part = match.group("layer", "part") if match else (None, "")
        arrays = [tensors[name].array for tensors in self._parts]
        if len(stored.shape) != (1 if part.endswith("norm") else 2):
            part = ""
        if layer is None and part in TOP:
            return {f"{TOP[part]}.weight": self._concatenated(stored, arrays, self._top_axis(part, stored))}
        if layer is not None and part == FUSED:
            rows = self._fused_rows(name, stored)
            parts = [(one, [array[r] for array in arrays]) for one, r in zip(FUSED_PARTS, rows, strict=True)]
            return {k: v for one, rows_of in parts for k, v in self._in_layer(layer, one, stored, rows_of).items()}
        if layer is not None and part in LAYER:
            return self._in_layer(layer, part, stored, arrays)
        raise CheckpointError(
            f"{self._files[0]} holds the tensor {name} of shape {stored.shape}, which no Llama has; refused."
        )

    def _top_axis(self, part: str, stored: PickledTensor) -> int | None:
        """Return the axis along which a tensor outside the layers is divided.

        Llama 1 and 2 divide the embedding by columns, Llama 3 by rows.
        """
        if part == "norm":
            return None
        return int(part == "tok_embeddings" and stored.shape[1] != self._params.dim)

    def _fused_rows(self, name: str, stored: PickledTensor) -> tuple[slice, slice, slice]:
        """Return the rows of Q, K and V in each file's part of a fused matrix, which holds all of Q, then K, then V."""
        n_q = self._params.dim // len(self._parts)
        n_kv, odd = divmod(stored.shape[0] - n_q, 2)
        if odd or n_kv < 1:
            raise CheckpointError(
                f"{self._files[0]}: {name} has {stored.shape[0]} rows, which cannot be split into Q, K and V."
            )
        return slice(0, n_q), slice(n_q, n_q + n_kv), slice(n_q + n_kv, None)

    def _in_layer(
        self, layer: str, part: str, stored: PickledTensor, arrays: Sequence[Array]
    ) -> dict[str, AssembledTensor]:
        hf_part, axis = LAYER[part]
        name = f"model.layers.{layer}.{hf_part}.weight"
        if part in ("attention.wk", "attention.wv"):
            return {name: self._assemble_kv(name, stored, arrays, part in INTERLEAVED)}
        return {name: self._concatenated(stored, arrays, axis, part in INTERLEAVED)}

    def _assemble_kv(
        self, name: str, stored: PickledTensor, arrays: Sequence[Array], is_interleaved: bool
    ) -> AssembledTensor:
        """Assemble K or V. If there are more files than heads, consecutive files hold copies of the same head."""
        head_dim, n_kv_heads = self._params.head_dim, self._params.n_kv_heads
        n_copies, rest = divmod(len(arrays) * len(arrays[0]), n_kv_heads * head_dim)
        if rest or not n_copies or (n_copies > 1 and len(arrays[0]) != head_dim):
            raise CheckpointError(
                f"{self._folder}: {name} has {len(arrays[0])} rows in each of {len(arrays)} file(s), which are not "
                f"n_kv_heads = {n_kv_heads} heads of {head_dim} rows; correct {PARAMS}."
            )
        one = self._concatenated(stored, arrays[::n_copies], 0, is_interleaved)
        copies = tuple(concatenation(arrays[i::n_copies], 0) for i in range(1, n_copies))
        return AssembledTensor(one.dtype, one.blocks, copies, is_interleaved, None if copies else one.span)

    def _concatenated(
        self, stored: PickledTensor, arrays: Sequence[Array], axis: int | None, is_interleaved: bool = False
    ) -> AssembledTensor:
        if axis is None or len(arrays) == 1:
            span = stored.span if arrays[0].shape == stored.shape and not is_interleaved else None
            return AssembledTensor(stored.dtype, concatenation(arrays[:1], 0), (), is_interleaved, span)
        return AssembledTensor(stored.dtype, concatenation(arrays, axis), (), is_interleaved)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor of such a model, in Hugging Face's order."""
        params, dim, n_files = self._params, self._params.dim, len(self._parts)
        if params.n_layers > len(self._parts[0]):
            raise CheckpointError(
                f"{PARAMS} says n_layers = {params.n_layers}, but {self._files[0]} holds fewer tensors."
            )
        n_mlp = self._matrix("layers.0.feed_forward.w1.weight").shape[0] * n_files
        embedding = self._matrix("tok_embeddings.weight")
        n_rows = embedding.shape[0] * (1 if self._top_axis("tok_embeddings", embedding) else n_files)
        vocab_size = params.vocab_size(n_rows)
        n_kv, norms = params.n_kv_heads * params.head_dim, {hf: (dim,) for hf, axis in LAYER.values() if axis is None}
        return expected_shapes(params.n_layers, vocab_size, dim, n_mlp, dim, n_kv, norms)
