"""The configuration of Malmoi's own model type, for transformers. No torch here."""

from transformers.configuration_utils import PreTrainedConfig

from malmoi.config import ModelConfig


class MalmoiConfig(PreTrainedConfig):  # type: ignore[misc]  # it has no types
    """config.json of a folder with the model type malmoi: our `ModelConfig` under "model"."""

    model_type = "malmoi"

    @property
    def ours(self) -> ModelConfig:
        return ModelConfig.from_dict(self.model)

    vocab_size = property(lambda self: self.ours.vocab)
    hidden_size = property(lambda self: self.ours.width)
    num_hidden_layers = property(lambda self: self.ours.depth)
    num_attention_heads = property(lambda self: self.ours.heads)
    max_position_embeddings = property(lambda self: self.ours.context)
