"""What training asks of a model; `model.load_model` returns nothing that lacks it."""

from model.decoder.llama import LlamaForCausalLM
from model.decoder.transformers_model import TransformersModel

LanguageModel = LlamaForCausalLM | TransformersModel
