"""The configuration of Malmoi's own model type, for transformers. No torch here."""

from transformers.configuration_utils import PreTrainedConfig

from malmoi.config import ModelConfig


class MalmoiConfig(PreTrainedConfig):  # type: ignore[misc]  # it has no types
    """config.json of a folder with the model type malmoi: our `ModelConfig` under "model"."""

    model_type = "malmoi"

    @property
    def ours(self) -> ModelConfig:
        return ModelConfig.from_dict(self.model)

    @property
    def vocab_size(self) -> int:
        return self.ours.vocab

    @property
    def hidden_size(self) -> int:
        return self.ours.width

    @property
    def num_hidden_layers(self) -> int:
        return self.ours.depth

    @property
    def num_attention_heads(self) -> int:
        return self.ours.heads

    @property
    def max_position_embeddings(self) -> int:
        return self.ours.context
