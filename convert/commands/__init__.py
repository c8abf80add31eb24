"""Hold the commands of `convert`, one file each. A command imports the packages it needs when it runs."""

COMMANDS = ("inspect", "mha_to_gqa", "mha_to_mqa", "mha_to_mla", "to_hf", "repeat_kv", "verify")
