"""A model of your own, trained from Python: no job file, no task, the same run and report.

Handwritten digits of 8 x 8 pixels (scikit-learn carries them); under half a minute on two cores.
expects: test accuracy >= 0.92
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import yunlu


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 10),
    )


def main() -> None:
    torch.manual_seed(0)  # the first weights are yours, so their seed is too
    pixels, labels = load_digits(return_X_y=True)

    run = yunlu.train(
        model=build_model(),
        data=(pixels / 16, labels),  # a tenth is held out to validate, another to test
        loss=nn.CrossEntropyLoss(),
        epochs=20,
        batch=64,
        lr=0.003,
        name="digits-from-python",
    )

    for name, value in run.metrics.items():
        print(f"{name:<14}{value:.4f}")
    print(f"model         {run.dir / 'model'}")
    print(f"report        {run.report()}")


if __name__ == "__main__":
    main()
