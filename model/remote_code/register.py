"""Tell transformers in this process of the classes here: our own are used, never the copies in a model's folder."""


def register() -> None:
    """Let transformers' auto classes open folders of these model types; a second call changes nothing."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from model.remote_code import configuration_gpt_neox_gqa, configuration_t5_gqa
    from model.remote_code import modeling_gpt_neox_gqa as gpt_neox
    from model.remote_code import modeling_t5_gqa as t5

    gpt_neox_config, t5_config = configuration_gpt_neox_gqa.GPTNeoXGQAConfig, configuration_t5_gqa.T5GQAConfig
    for config in (gpt_neox_config, t5_config):
        AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(gpt_neox_config, gpt_neox.GPTNeoXGQAModel, exist_ok=True)
    AutoModelForCausalLM.register(gpt_neox_config, gpt_neox.GPTNeoXGQAForCausalLM, exist_ok=True)
    AutoModel.register(t5_config, t5.T5GQAModel, exist_ok=True)
    AutoModelForSeq2SeqLM.register(t5_config, t5.T5GQAForConditionalGeneration, exist_ok=True)
