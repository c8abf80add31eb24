"""Define the type of models that can be trained: the classes that `load_model` returns."""

from model.decoder.llama import LlamaForCausalLM
from model.decoder.transformers_model import TransformersModel

LanguageModel = LlamaForCausalLM | TransformersModel
