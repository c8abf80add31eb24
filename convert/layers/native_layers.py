"""Run the layers of the project's own decoder: Llama, Mistral, Qwen 2. The letters are those of `runnable_layer`."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from convert.layers.runnable_layer import HeadObserver, HeadStates, HeadWeights, ModelLayers, RunnableLayer
from model.checkpoint import Checkpoint
from model.decoder.attention import Mask, attend
from model.decoder.config import LlamaConfig, read_llama_config
from model.decoder.devices import find_device
from model.decoder.llama import Attention, Block, Rotation
from model.decoder.loading import check_runnable, embedding_name, load_block, read_tensor
from model.decoder.masks import text_mask
from model.decoder.rope import rotate, rotations


class NativeModelLayers(ModelLayers):
    """The layers of a model of NATIVE_FAMILIES. Raises CheckpointError for one that the decoder cannot run."""

    def __init__(self, checkpoint: Checkpoint, length: int, device: str = "cpu") -> None:
        self.checkpoint, self._length, self.device = checkpoint, length, find_device(device)
        self.config = read_llama_config(checkpoint.config)
        check_runnable(checkpoint)
        self.n_layers = self.config.n_layers
        self.embedding_name = embedding_name(checkpoint)

    @cached_property
    def _rotation(self) -> Rotation:
        positions_1T = torch.arange(self._length, device=self.device)[None]
        lengths_11 = torch.full((1, 1), self._length, device=self.device)
        return rotations(self.config.rope, positions_1T, lengths_11, torch.float32)

    @cached_property
    def _embedding_VM(self) -> Tensor:
        return read_tensor(self.checkpoint, self.embedding_name, None)

    def embed(self, ids_BT: Tensor) -> Tensor:
        return self._embedding_VM[ids_BT].float()

    def check(self) -> None:
        pass  # the constructor has checked the config and all tensors

    def load(self, index: int) -> "NativeLayer":
        self.__dict__.pop("_embedding_VM", None)  # its memory is the layers' now
        block = load_block(self.checkpoint, self.config, index, str(self.device))
        return NativeLayer(self.config, index, block, self._rotation)


class NativeLayer(RunnableLayer):
    """One block of the decoder."""

    def __init__(self, config: LlamaConfig, index: int, block: Block, rotation: Rotation) -> None:
        self.index, self.block = index, block
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self._rotation, self._window = rotation, config.windows[index]
        cos_TD, sin_TD = (x[0, :, 0] for x in rotation)
        self.device = cos_TD.device
        self.rotation = cos_TD, sin_TD
        assert isinstance(block.self_attn, Attention), "sources have no latent attention"
        self.attention = block.self_attn
        self.output_bias = self.attention.o_proj.bias

    def inputs(self, states_BTM: Tensor) -> Tensor:
        x_BTM: Tensor = self.block.input_layernorm(states_BTM)
        return x_BTM

    def run(self, states_BTM: Tensor, observer: HeadObserver) -> tuple[Tensor, Tensor]:
        attention, block = self.attention, self.block
        x_BTM = self.inputs(states_BTM)
        q_BTHD, k_BTKD, v_BTKD = (
            projection(x_BTM).view(*x_BTM.shape[:2], -1, attention.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        self.check_finite(q_BTHD, k_BTKD, v_BTKD)
        heads = HeadStates(q_BTHD, rotate(q_BTHD, *self._rotation), rotate(k_BTKD, *self._rotation), v_BTKD)
        observer(heads)
        out_BTHD = attend(heads.rotated_q_BTHD, heads.rotated_k_BTKD, v_BTKD, self._mask(*x_BTM.shape[:2]))
        attended_BTM: Tensor = attention.o_proj(out_BTHD.flatten(2))
        middle_BTM = states_BTM + attended_BTM
        next_BTM = block.mlp(block.post_attention_layernorm(middle_BTM)).add_(middle_BTM)
        self.check_finite(next_BTM)
        return attended_BTM, next_BTM

    def attention_weights(self, q_HSD: Tensor, k_KTD: Tensor, at_S: Tensor) -> Tensor:
        length = k_KTD.shape[1]
        q_KND = q_HSD.reshape(len(k_KTD), -1, self.head_dim)
        logits_HST: Tensor = (q_KND @ k_KTD.mT).view(self.n_heads, -1, length) * self.head_dim**-0.5
        distance_ST = at_S[:, None] - torch.arange(length, device=self.device)
        seen_ST = distance_ST >= 0
        if self._window is not None:
            seen_ST &= distance_ST < self._window
        return logits_HST.masked_fill(~seen_ST, float("-inf")).softmax(dim=-1)

    def heads_out(self, weights: HeadWeights, x_BTM: Tensor) -> Tensor:
        rows = (weights.q_CX, weights.k_CX, weights.v_CX)
        q_BTHD, k_BTKD, v_BTKD = (_project(x_BTM, rows_CX, self.head_dim) for rows_CX in rows)
        q_BTHD, k_BTKD = (rotate(heads, *self._rotation) for heads in (q_BTHD, k_BTKD))
        return attend(q_BTHD, k_BTKD, v_BTKD, self._mask(*x_BTM.shape[:2])).flatten(2)

    def _mask(self, n_rows: int, length: int) -> Mask:
        return text_mask(n_rows, 0, length, self._window, None, self.device)


def _project(x_BTM: Tensor, rows_CX: Tensor, head_dim: int) -> Tensor:
    weight_CM, bias_C = rows_CX[:, : x_BTM.shape[2]], rows_CX[:, x_BTM.shape[2] :].flatten()
    heads_BTC: Tensor = F.linear(x_BTM, weight_CM, bias_C if len(bias_C) else None)
    return heads_BTC.view(*x_BTM.shape[:2], -1, head_dim)
