"""Label a folder of Parquet files with Ray Data: every worker loads the model once.

pip install "ray[data]"
python examples/ray_predict.py MODEL FOLDER COLUMN OUT [WORKERS] [GPUS-PER-WORKER]
"""

import sys
from typing import Any

import malmoi


class Labels:
    """A worker: adds the label of each text of a batch, and its probability."""

    def __init__(self, model: str, column: str) -> None:
        self.model = malmoi.load(model)
        self.column = column

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        found = self.model.predict(list(batch[self.column]), malmoi.Prediction)
        labels = [one.label for one in found]
        return {**batch, "prediction": labels, "score": [one.scores[one.label] for one in found]}


if __name__ == "__main__":
    import ray

    model, folder, column, out = sys.argv[1:5]
    workers = int(sys.argv[5]) if len(sys.argv) > 5 else 2
    gpus = float(sys.argv[6]) if len(sys.argv) > 6 else 0
    rows = ray.data.read_parquet(folder).map_batches(
        Labels,
        fn_constructor_args=(model, column),
        concurrency=workers,
        num_gpus=gpus,
        batch_size=1000,
    )
    rows.write_parquet(out)
