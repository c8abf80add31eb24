"""What training asks of a model; `model.load_model` returns nothing that lacks it."""

from model.foreign import ForeignModel
from model.llama import LlamaForCausalLM

LanguageModel = LlamaForCausalLM | ForeignModel
