"""Adapters on a frozen model: LoRA, soft prompts and prefixes, in PEFT's format."""
