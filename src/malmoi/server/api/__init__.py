"""The HTTP API: OpenAI's endpoints, and ours for encoders and fine-tuned models."""
