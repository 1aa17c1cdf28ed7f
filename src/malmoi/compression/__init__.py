"""Making models smaller: quantization, pruning, shared layers and distillation."""
