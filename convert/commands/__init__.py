"""The commands of `convert`, one file each. They parse, call and print, and import what they need when they run."""

COMMANDS = ("inspect", "mha_to_gqa", "mha_to_mqa", "to_hf", "repeat_kv", "verify")
