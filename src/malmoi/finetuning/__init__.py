"""Fine-tuning: a pre-trained network, a task, one new layer, and its evaluation."""
