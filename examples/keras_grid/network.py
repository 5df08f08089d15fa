"""The Keras network of both sides; on torch, which `KERAS_BACKEND=torch` or Yunlu chooses."""

import keras


def create_model(inputs: int = 64, outputs: int = 10) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(shape=(inputs,)),
            keras.layers.Dense(128, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(outputs, activation="softmax"),
        ]
    )
