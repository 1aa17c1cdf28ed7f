"""Images as a prefix: a small GPT reads the patches of a handwritten digit and says which it is.

python examples/digits.py [FOLDER [STEPS [SEED]]]     needs: pip install scikit-learn

The features are the 2 × 2 patches of scikit-learn's 8 × 8 images; yours may be anything that has
vectors: the patches of photographs, the frames of a sound, the output of another network.
Half a minute of one core: 86 % of 397 other images (chance 10 %, a linear model of pixels 91 %).
"""

import sys
from pathlib import Path

import numpy as np

import malmoi

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TRAINED = 1400  # images to learn from, of 1,797


def digits() -> tuple[np.ndarray, list[str]]:
    """Patches [N, 16, 4] in 0 … 1, and a sentence about each image."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("This example needs scikit-learn: pip install scikit-learn")
    found = load_digits()
    grid = found.images.reshape(-1, 4, 2, 4, 2).swapaxes(2, 3)  # rows and columns of patches
    patches = grid.reshape(len(grid), 16, 4).astype(np.float32) / 16
    return patches, [f"the digit {WORDS[label]}" for label in found.target]


def linear_accuracy(patches: np.ndarray, texts: list[str]) -> float:
    """A logistic regression on the same numbers, for scale."""
    from sklearn.linear_model import LogisticRegression

    pixels = patches.reshape(len(patches), -1)
    model = LogisticRegression(max_iter=1000).fit(pixels[:TRAINED], texts[:TRAINED])
    return float(model.score(pixels[TRAINED:], texts[TRAINED:]))


def main(folder: Path, steps: int, seed: int) -> None:
    patches, texts = digits()
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "digits.npy", patches[:TRAINED])
    (folder / "digits.txt").write_text("\n".join(texts[:TRAINED]) + "\n")
    model = malmoi.pretrain(
        "caption-small",
        data=str(folder / "digits.txt"),
        out=folder / "model",
        features=str(folder / "digits.npy"),
        steps=steps,
        seed=seed,
    )
    said = model.describe(patches[TRAINED:])
    right = np.mean([one == other for one, other in zip(said, texts[TRAINED:], strict=True)])
    common = max(texts[:TRAINED].count(text) for text in set(texts)) / TRAINED
    print(f"{said[0]!r} for an image of {texts[TRAINED]!r}")
    print(
        f"accuracy {right:.3f} on {len(said)} other images; always the commonest: {common:.3f}; "
        f"a linear model of the pixels: {linear_accuracy(patches, texts):.3f}"
    )


if __name__ == "__main__":
    given = [*sys.argv[1:], *("runs/digits", "120", "0")[len(sys.argv) - 1 :]]
    main(Path(given[0]), int(given[1]), int(given[2]))
